"""Save a training job: all ranks write their parts into one checkpoint, which is complete or not there."""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...errors import CheckpointError, InputError
from ...run import PATIENCE, PipelineSchedule
from ...text import counted, listed
from .contents import Contents, Facts, by_number, check_agreement, collect
from .folder import Draft, Manifest, Place, begin, commit, discard, prune
from .objects import Stateful, serialized
from .optimizers import as_list, merged
from .ranks import Ranks, places_of, ranks_of

JOB_FILE = "job.pt"
_VISIBLE_WAIT = 20.0 * PATIENCE  # seconds until a network file system shows the first rank what others wrote
_executor = ThreadPoolExecutor(1, thread_name_prefix="pipecut checkpoint")
_pending: list[CheckpointSave] = []  # asynchronous saves, until they have ended and what went wrong was raised


class CheckpointSave:
    """A checkpoint that is being saved, or was: `path` is where it is once it is complete."""

    def __init__(self, path: Path, step: int, future: Future[None] | None = None) -> None:
        self.path = path
        self.step = step
        self._future = future
        self.is_reported = future is None  # True once its outcome was raised or returned

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {'complete' if self.done() else 'being written'})"

    def done(self) -> bool:
        """Return True if nothing more is written."""
        return self._future is None or self._future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete, and return its path; raise if it could not be written."""
        if self._future is not None:
            try:
                error = self._future.exception(timeout)
            except TimeoutError:
                raise CheckpointError(f"the save of step {self.step} is not complete after {timeout:g} s") from None
            self.is_reported = True
            if error is not None:
                raise CheckpointError(f"the asynchronous save of step {self.step} failed: {error}") from error
        return self.path


def save_checkpoint(
    folder: str | os.PathLike[str],
    schedule: PipelineSchedule,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    scheduler: Stateful | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = 3,
    asynchronous: bool = False,
    group: dist.ProcessGroup | None = None,
) -> CheckpointSave:
    """Save a training job into a folder of checkpoints, from which it can go on under any other cut.

    All ranks of the job call this together, between two steps. Parameters, buffers and the state of optimizers are
    saved by torch.distributed.checkpoint under the model's own names; with them the learning-rate scheduler, all random
    streams, and `extra`: plain values, generators of torch, and objects with `state_dict()` and `load_state_dict()`, as
    each rank has them.
    A checkpoint is complete or not there, whenever the job is killed. The last `keep` complete ones stay; with None,
    all.

    With `asynchronous` the values are copied, and written beside the next steps. An error is then raised by `wait()` of
    the result, or by the next save. `group` has the ranks that train this model, if those are not all ranks. A rank
    waits for others to come here as long as the schedule's `timeout`, and for their files half an hour, or that long.

    >>> import tempfile
    >>> from torch import nn
    >>> from pipecut import Schedule1F1B, load_checkpoint, pipeline
    >>> x, y, folder = torch.ones(4, 2), torch.zeros(4, 2), tempfile.mkdtemp()
    >>> def job(stages):
    ...     pipe = pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), (x,), num_stages=stages)
    ...     built = [pipe.build_stage(index, "cpu") for index in range(stages)]
    ...     schedule = Schedule1F1B(built, 2, nn.functional.mse_loss)
    ...     return schedule, torch.optim.AdamW(schedule.parameters())
    >>> schedule, optimizer = job(stages=3)
    >>> _ = schedule.step(x, target=y)
    >>> optimizer.step()
    >>> save_checkpoint(folder, schedule, optimizer, step=1, extra={"epoch": 0}).path.name
    'step-00000001'
    >>> other, its_optimizer = job(stages=2)
    >>> loaded = load_checkpoint(folder, other, its_optimizer)
    >>> loaded.step, loaded.extra, torch.equal(dict(other.named_parameters())["0.weight"], next(schedule.parameters()))
    (1, {'epoch': 0}, True)
    """
    ranks = ranks_of(schedule, group, "save_checkpoint")
    ranks.agree(finish_pending)
    given: list[Contents] = []
    options = {"keep": keep, "asynchronous": asynchronous}

    def collected() -> Facts:
        _check_arguments(step, keep, extra)
        optimizers = as_list(optimizer)
        given.append(collect(Path(folder), schedule, optimizers, step, scheduler, extra or {}, options))
        return given[0].facts

    facts = ranks.agree(collected)
    check_agreement(facts)
    if asynchronous:
        ranks.agree(lambda: given.append(given.pop().copied()))
    draft = ranks.first(lambda: _begin(Path(folder), step))
    if not asynchronous:
        _write(ranks.writing, draft, given.pop(), facts, keep)
        return CheckpointSave(draft.path, step)
    future = _executor.submit(_write, ranks.writing, draft, given.pop(), facts, keep)
    save = CheckpointSave(draft.path, step, future)
    _pending.append(save)
    return save


def finish_pending() -> None:
    """Wait for asynchronous saves, and raise the error of one unless that was raised before.

    All of them, for their threads use the same groups as whatever comes next.
    """
    while _pending:
        save = _pending.pop(0)
        if not save.is_reported:
            save.wait()


@atexit.register
def _report_at_exit() -> None:
    for save in _pending:
        if not save.is_reported:
            try:
                save.wait()
            except CheckpointError as error:
                print(f"pipecut: {error}", file=sys.stderr)


def _check_arguments(step: int, keep: int | None, extra: Mapping[str, Any] | None) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InputError(f"step is the number of steps done so far, got {step!r}")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise InputError(f"keep is the number of checkpoints that stay, from 1 on, or None for all; got {keep!r}")
    if extra is not None and not (isinstance(extra, Mapping) and all(isinstance(name, str) for name in extra)):
        raise InputError(f"extra is a dict from names to values, got {extra!r}")


def _begin(folder: Path, step: int) -> Draft:
    try:
        return begin(folder, step)
    except OSError as error:
        raise cannot_write(folder, error) from error


def cannot_write(folder: Path, error: BaseException) -> CheckpointError:
    """Return the error for a folder that cannot be written to; older checkpoints are as they were."""
    reason = _os_error(error)
    number = None if reason is None else reason.errno
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or (number is None and _is_full(folder)):
        what = f"the disk of {folder} is full ({_free(folder)} bytes are free): make room, or pass a lower keep="
    elif number in (errno.EROFS, errno.EACCES, errno.EPERM):
        what = f"{folder} is read-only here ({reason}): pass a folder that this process may write to"
    else:
        what = f"{folder} cannot be written to: {type(error).__name__}: {reason or error}"
    return CheckpointError(f"the checkpoint was not saved: {what}. Checkpoints that were complete before still are")


def _os_error(error: BaseException | None) -> OSError | None:
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _is_full(folder: Path) -> bool:
    return _free(folder) < 1 << 16


# What each rank does once all agree; in another thread if the save is asynchronous.


def _write(ranks: Ranks, draft: Draft, contents: Contents, facts: Sequence[Facts], keep: int | None) -> None:
    try:
        names = ranks.agree(lambda: _write_objects(draft, ranks.rank, contents))
        metadata = _save_tensors(ranks, draft, contents.tensors)
        ranks.first(lambda: _complete(draft, names, metadata, facts, keep))
    except BaseException:
        if ranks.rank == 0:
            discard(draft)
        raise


def _write_objects(draft: Draft, rank: int, contents: Contents) -> str:
    name = f"rank-{rank:05}.pt"
    _write_file(draft.directory / name, contents.objects)
    return name


def _write_file(path: Path, content: bytes) -> None:
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path.parent.parent, error) from error


def _save_tensors(ranks: Ranks, draft: Draft, tensors: Mapping[str, Tensor]) -> Any:
    """Let torch.distributed.checkpoint write the tensors, and return its description of the whole."""
    from torch.distributed.checkpoint.api import CheckpointException  # slow to import
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = draft.path.parent
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*single process")  # which is intended where it is so
            return save(
                dict(tensors),
                storage_writer=FileSystemWriter(draft.directory, sync_files=True),
                planner=DefaultSavePlanner(flatten_state_dict=False),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as error:
        failed = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
        lines = [
            f"{f'on rank {rank}: ' * (ranks.size > 1)}{cannot_write(folder, each)}" for rank, each in failed.items()
        ]
        raise CheckpointError("\n".join(lines)) from error
    except RuntimeError as error:  # of the process group
        raise CheckpointError(
            f"another rank has ended while the checkpoint was written: {error}. Checkpoints that were complete before "
            "still are"
        ) from error


def _complete(draft: Draft, names: Sequence[str], metadata: Any, facts: Sequence[Facts], keep: int | None) -> None:
    """Write what the first rank writes for all, check that all files are there, and let the checkpoint be."""
    job: dict[str, Any] = {
        "optimizers": [merged(each) for each in by_number([fact.optimizers for fact in facts])],
        "objects": {name: value for fact in facts for name, value in fact.objects.items()},
    }
    _write_file(draft.directory / JOB_FILE, serialized("the job", job))
    _check_visible(draft, names, metadata)
    places = places_of([fact.position for fact in facts])
    try:
        manifest = Manifest(
            draft.step,
            draft.serial,
            facts[0].common["model"],
            tuple(each["kind"] for each in job["optimizers"]),
            facts[0].common["scheduler"],
            tuple(
                Place(pipeline, rank, name, fact.digests)
                for (pipeline, rank), name, fact in zip(places, names, facts, strict=True)
            ),
            {file.name: file.stat().st_size for file in sorted(draft.directory.iterdir())},
            versions={"pipecut": _version(), "torch": torch.__version__},
        )
        commit(draft, manifest)
    except OSError as error:
        raise cannot_write(draft.path.parent, error) from error
    prune(draft, keep)


def _check_visible(draft: Draft, names: Sequence[str], metadata: Any) -> None:
    """Raise if the first rank does not see the files of the others: their folder is another one."""
    expected = dict.fromkeys(names, 1)
    for info in metadata.storage_data.values():
        expected[info.relative_path] = max(expected.get(info.relative_path, 0), info.offset + info.length)
    end = time.monotonic() + _VISIBLE_WAIT
    while missing := [name for name, size in expected.items() if not _has(draft.directory / name, size)]:
        if time.monotonic() > end:
            raise CheckpointError(
                f"{counted(len(missing), 'file')} that other ranks wrote cannot be seen on the first rank, such as "
                f"{listed(sorted(missing), at_most=3)}: the folder has to be on a file system that all ranks share"
            )
        time.sleep(0.1)


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size >= size


def _version() -> str:
    try:
        return version("pipecut")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
