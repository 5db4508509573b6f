"""Exchange of facts between ranks, and the handshake of a schedule before its first step.

Ranks that are about to do different things would wait for each other forever. So they first exchange, through
the store of their process group, what they have: each fact is a name and a short text. A difference is an error that
names the fact and the ranks. Long facts are compared by their `digest`.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import DisagreementError, InputError, PipeError
from ..pipe_ir import PipeInfo, flatten
from ..schedule import Plan
from ..stage import PipelineStage, describe_tensor, local_part
from ..text import numbered, structure_text, tensor_text
from .failure import incarnations
from .ties import Stages, Tie

_CHUNK = 1 << 20  # bytes of a tensor that are summed at a time
_TIMEOUT = timedelta(minutes=30)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25  # seconds between two looks at the store


class Exchange:
    """One exchange of facts between all ranks of a process group.

    Every rank makes its exchanges of a group in the same order: they are numbered by it. `late` says what to check
    if a rank does not take part. `while_waiting` is called now and then, and may raise: a rank that has failed does not
    come any more.
    """

    _made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: timedelta = _TIMEOUT,
        late: str = "",
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        world = group if group is not None else dist.group.WORLD
        assert world is not None  # torch.distributed is initialised
        self.store = world.get_group_store()
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.timeout = timeout
        self._while_waiting = while_waiting
        self.late = late or "did not take part in an exchange of facts within {seconds:g} s"
        self.number = self._made[world] = self._made.get(world, 0) + 1
        self._prefix = f"pipecut/exchange/{incarnations.of(world)}.{self.number}"

    def run(self, facts: Mapping[str, str], part: str = "") -> list[dict[str, str]]:
        """Give this rank's facts, and return those of every rank, in the order of the ranks.

        An exchange may have further parts, each under a name of its own.
        """
        self.store.set(self._key(self.rank, part), json.dumps(dict(facts)))
        return [self._facts(rank, part) for rank in range(self.ranks)]

    def _facts(self, rank: int, part: str) -> dict[str, str]:
        key, late = self._key(rank, part), self.late.format(seconds=self.timeout.total_seconds())
        try:
            is_here = self._wait_for(key)
        except PipeError:
            raise
        except (RuntimeError, OSError) as error:
            raise DisagreementError(f"rank {rank} {late}") from error
        if not is_here:
            raise DisagreementError(f"rank {rank} {late}")
        facts: dict[str, str] = json.loads(self.store.get(key))
        return facts

    def _wait_for(self, key: str) -> bool:
        """Return True when a key is there, False if it does not come in time."""
        end, pause = time.monotonic() + self.timeout.total_seconds(), _FIRST_PAUSE
        while not self.store.check([key]):
            if time.monotonic() > end:
                return False
            self._while_waiting()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _key(self, rank: int, part: str) -> str:
        return f"{self._prefix}/{rank}" + (f"/{part}" if part else "")


def exchange(
    facts: Mapping[str, str], group: dist.ProcessGroup | None, timeout: timedelta = _TIMEOUT
) -> list[dict[str, str]]:
    """Return the facts of every rank of a group, in the order of the ranks. All of its ranks have to call this."""
    return Exchange(group, timeout).run(facts)


def differences(facts: Sequence[Mapping[str, str]], absent: str | None = "nothing") -> list[str]:
    """Return a line for each fact that is not the same on all ranks.

    A rank without a fact counts as one that has `absent`; with None it is left out of the comparison.

    >>> differences([{"model": "GPT", "ranks": "2"}, {"model": "BERT", "ranks": "2"}, {"model": "GPT", "ranks": "2"}])
    ['model: GPT on ranks 0, 2; BERT on rank 1']
    """
    lines = []
    for name in dict.fromkeys(name for known in facts for name in known):
        ranks_of: dict[str, list[int]] = {}
        for rank, known in enumerate(facts):
            value = known.get(name, absent)
            if value is not None:
                ranks_of.setdefault(value, []).append(rank)
        if len(ranks_of) > 1:
            texts = [f"{value} on {numbered('rank', ranks)}" for value, ranks in ranks_of.items()]
            lines.append(f"{name}: {'; '.join(texts)}")
    return lines


def digest(value: Any) -> str:
    """Return a short text that is the same for equal values, on any rank.

    In nested values, tensors count by dtype, shape and bits, numbers and strings by their value, and other objects by
    their type. Tensors without memory of their own here (on the meta device, or a subclass) count by dtype and shape.

    >>> digest({"x": torch.ones(2)}) == digest({"x": torch.ones(2)}), digest(torch.ones(2)) == digest(torch.zeros(2))
    (True, False)
    """
    leaves, structure = flatten(value)
    paths = ("".join(path) for path in structure.paths())  # the structure's own text has addresses in memory
    parts = [structure.kind, *paths, *map(_leaf_text, leaves)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{tensor_text(leaf)} {_bits(leaf)}"
    plain = leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes)
    return repr(leaf) if plain else type(leaf).__name__


def _bits(tensor: Tensor) -> str:
    """Return a weighted sum of the bytes of a tensor, computed where the tensor is."""
    if tensor.device.type == "meta" or type(tensor) not in (Tensor, nn.Parameter):
        return "not compared"
    numbers = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, numbers.numel(), _CHUNK):
        part = numbers[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(1, part.numel() + 1, device=part.device) % 65521
        total = (total * 31 + int((part * weights).sum())) % (1 << 61)
    return f"{total:x}"


# Before the first step.

_ALIKE = "make it alike in all its stages: shape, dtype, and what parallelize_module and fully_shard do with it"
_SEED = "seed the model, or load a checkpoint, alike on all ranks"
_SOME_RANKS = "some ranks: "  # begins the name of a fact that not all ranks have


class Handshake:
    """The comparison of facts before the first step: within the pipeline, and with each group of copies."""

    late = (
        "did not come to its first step within {seconds:g} s. Does every rank make the same schedules, in the same "
        "order, and call step() or eval()?"
    )

    def __init__(self, pipeline: Exchange | None, copies: Iterable[Exchange]) -> None:
        self._pipeline = pipeline
        self._copies = list(copies)
        self.reported: dict[str, str] = {}  # the facts that only some ranks have

    def run(
        self,
        plan: Plan,
        info: PipeInfo | None,
        ties: Sequence[Tie],
        stages: Sequence[PipelineStage],
        options: Mapping[str, object],
        own: Mapping[str, str],
    ) -> None:
        """Compare what the ranks are about to do. Facts in `own` are those that not every rank has."""
        held = {stage.stage_index: stage for stage in stages}
        facts = _facts_of(plan, info, ties, {**options, "version of torch": torch.__version__})
        self.reported = dict(own)
        if self._pipeline is not None:
            self.reported = _compare(self._pipeline, facts, {**own, **_facts_of_ties(ties, held)})
            self._pipeline = None
        _check_same_values(ties, held)
        same_stages = {"stages of a rank and its copies": str([stage.stage_index for stage in stages])}
        # Of a stage that was cut by hand only its copies know what it holds.
        same_stages |= {f"stage {index} and its copies": structure_text(stage.submod) for index, stage in held.items()}
        while self._copies:
            _compare(self._copies.pop(0), {**facts, **own, **same_stages}, {})


def _compare(way: Exchange, facts: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Raise if facts differ between ranks; return those that only some ranks have."""
    every = way.run({**facts, **{_SOME_RANKS + name: value for name, value in own.items()}})
    partial = [
        {name.removeprefix(_SOME_RANKS): known.pop(name) for name in list(known) if name.startswith(_SOME_RANKS)}
        for known in every
    ]
    lines = differences(every) + differences(partial, absent=None)
    if lines:
        raise DisagreementError(
            "the ranks disagree:\n"
            + "".join(f"  {line}\n" for line in lines)
            + "Make the pipe and the schedule in the same way on every rank."
        )
    return {name: value for known in partial for name, value in known.items()}


def _facts_of(plan: Plan, info: PipeInfo | None, ties: Sequence[Tie], options: Mapping[str, object]) -> dict[str, str]:
    """Return what has to be the same on all ranks."""
    facts = {
        "schedule": plan.name,
        "ranks": str(plan.ranks),
        "stages": str(plan.stages),
        "microbatches": str(plan.microbatches),
        "placement of stages": str(list(plan.placement.rank_of)),
        "actions of the plan": digest(str(plan.actions)),
        "kind of stages": "cut by hand" if info is None else "traced",
    }
    if info is not None:
        facts |= facts_of_pipe(info)
    for tie in ties:
        holders = ", ".join(f"{tie.names[stage][0]} of stage {stage}" for stage in tie.stages)
        facts[f"holders of the tied parameter {tie.title}"] = holders
    return facts | {name: str(value) for name, value in options.items()}


def facts_of_pipe(info: PipeInfo) -> dict[str, str]:
    """Return what has to be the same of a traced model: its layers, and the values that are sent."""
    return {
        "model": info.call.model_name,
        **{f"stage {stage.index}": stage.structure for stage in info.stages},
        **{f"value {edge.name} from stage {edge.source} to stage {edge.target}": str(edge.spec) for edge in info.edges},
        **{f"output {each.name} of stage {each.stage}, not sent in training": str(each.spec) for each in info.unsent},
    }


def _facts_of_ties(ties: Sequence[Tie], stages: Stages) -> dict[str, str]:
    """Return the values of tied parameters: all holders have to begin with the same ones."""
    facts = {}
    for tie in ties:
        for _, parameter in tie.held(stages)[:1]:
            facts[f"tied parameter {tie.title} ({_ALIKE})"] = describe_tensor(parameter)
            facts[f"values of the tied parameter {tie.title} ({_SEED})"] = _bits(local_part(parameter))
    return facts


def _check_same_values(ties: Sequence[Tie], stages: Stages) -> None:
    """Raise if holders of a tied parameter in this process are different objects with different values or layouts."""
    for tie in ties:
        held = tie.held(stages)
        for stage, other in held[1:]:
            first, one = held[0]
            if describe_tensor(other) != describe_tensor(one):
                raise InputError(
                    f"the tied parameter {tie.title} is {describe_tensor(one)} in stage {first}, and "
                    f"{describe_tensor(other)} in stage {stage}: {_ALIKE}"
                )
            if other is not one and _bits(local_part(other)) != _bits(local_part(one)):
                raise InputError(
                    f"the tied parameter {tie.title} has other values in stage {stage} than in stage {first}: let both "
                    "hold the same nn.Parameter, or copy its values before the first step"
                )
