"""Files of others: whatever is in them, reading gives their content or a PipeError, and runs nothing of it."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import pipecut
from pipecut import CheckpointError, PipeError
from pipecut.errors import InputError, PlanError
from pipecut.files import read_json, write_text, write_whole
from pipecut.schedule import Plan, plan_for
from pipecut.split import machine_of
from pipecut.stage.materialize.checkpoint import SafetensorsFile, write_safetensors
from pipecut.stage.materialize.load import open_checkpoint
from tests.support.sampling import sampled

# A way to write a good file into a folder, which returns the one to damage, and a way to read it.
Kind = tuple[Callable[[Path], Path], Callable[[Path], object]]
EXAMPLE = torch.ones(4, 8)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def read_all(path: Path) -> None:
    """Read every tensor and object of a checkpoint."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names:
        entry = checkpoint.entry(name)
        if entry is None or entry.nbytes < 1 << 20:
            checkpoint.load_object(name)


def good_safetensors(folder: Path) -> Path:
    write_safetensors(folder / "model.safetensors", model().state_dict())
    return folder / "model.safetensors"


def good_index(folder: Path) -> Path:
    names = {name: good_safetensors(folder).name for name in model().state_dict()}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 3}, "weight_map": names}))
    return index


def good_torch_file(folder: Path) -> Path:
    torch.save(model().state_dict(), folder / "model.pt")
    return folder / "model.pt"


def good_distributed(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**model().state_dict(), "object": {"epoch": 3}}, checkpoint_id=folder, no_dist=True)
    return folder / ".metadata"


def good_distributed_data(folder: Path) -> Path:
    good_distributed(folder)
    return folder / "__0_0.distcp"


def good_job(folder: Path) -> Path:
    pipe = pipecut.pipeline(model(), (EXAMPLE,), num_stages=1)
    stages = [pipe.build_stage(0, "cpu")]
    schedule = pipecut.Schedule1F1B(stages, n_microbatches=1, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(schedule.parameters(), lr=0.1)
    return Path(pipecut.save_checkpoint(folder, schedule, optimizer, step=1).path) / "checkpoint.json"


@functools.cache
def job_to_load() -> tuple[Any, torch.optim.Optimizer]:
    pipe = pipecut.pipeline(model(), (EXAMPLE,), num_stages=1)
    schedule = pipecut.Schedule1F1B([pipe.build_stage(0, "cpu")], n_microbatches=1, loss_fn=nn.functional.mse_loss)
    return schedule, torch.optim.SGD(schedule.parameters(), lr=0.1)


def read_job(path: Path) -> None:
    """Look for a job in the folder, and load it."""
    try:
        pipecut.latest_checkpoint(path.parent.parent)
    finally:
        pipecut.load_checkpoint(path.parent, *job_to_load())


def good_csv(folder: Path) -> Path:
    plan_for("1F1B", ranks=2, microbatches=3).save_csv(folder / "plan.csv")
    return folder / "plan.csv"


def good_plan(folder: Path) -> Path:
    plan = pipecut.plan(model(), EXAMPLE, ranks=2, batch=8, time_budget=0.01)
    plan.save(folder / "plan.json")
    return folder / "plan.json"


def good_machines(folder: Path) -> Path:
    entry = {"peak_tflops": {"float32": 20, "bfloat16": 300}, "memory_gb_per_s": 2000, "link_gb_per_s": 50}
    (folder / "machines.json").write_text(json.dumps({"mine": entry}))
    return folder / "machines.json"


KINDS: dict[str, Kind] = {
    "safetensors": (good_safetensors, read_all),
    "index": (good_index, read_all),
    "torch.save": (good_torch_file, read_all),
    "distributed": (good_distributed, lambda path: read_all(path.parent)),
    "distributed data": (good_distributed_data, lambda path: read_all(path.parent)),
    "training job": (good_job, read_job),
    "csv": (good_csv, lambda path: Plan.load_csv(path).validate()),
    "training plan": (good_plan, lambda path: pipecut.TrainingPlan.load(path, model(), EXAMPLE)),
    "machines": (good_machines, lambda path: machine_of(path)),
}


@functools.cache
def good_files(kind: str) -> dict[str, bytes]:
    """The files of a good one by their relative paths, the one to damage first: made once per process."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        damaged = KINDS[kind][0](Path(folder))
        others = [path for path in Path(folder).rglob("*") if path.is_file() and path != damaged]
        return {str(path.relative_to(folder)): path.read_bytes() for path in [damaged, *others]}


def laid_out(kind: str, folder: Path) -> Path:
    for name, content in good_files(kind).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / next(iter(good_files(kind)))


# Damage.


def flipped(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :]


def torn(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def moved(content: bytes, draw: random.Random) -> bytes:
    begin, end, place = sorted(draw.randrange(len(content) + 1) for _ in range(3))
    return content[:place] + content[begin:end] + content[place:]


STRANGE = [
    "-1",
    "0",
    "9" * 30,
    "1e308",
    "null",
    "true",
    '"x"',
    "[]",
    "{}",
    "[" * 2000 + "]" * 2000,
    '"../../x"',
    '"\\u0000"',
]


def renumbered(content: bytes, draw: random.Random) -> bytes:
    """Replace one number or text, as JSON and CSV have them, by something strange."""
    text = content.decode("latin-1")
    found = list(re.finditer(r'-?\d+|"[^"]*"', text))
    if not found:
        return flipped(content, draw)
    match = draw.choice(found)
    return (text[: match.start()] + draw.choice(STRANGE) + text[match.end() :]).encode("latin-1")


def with_header(content: bytes, draw: random.Random) -> bytes:
    """Damage the header of a safetensors file and mend its length, so that what is inside is looked at."""
    (length,) = struct.unpack("<Q", content[:8])
    header = renumbered(content[8 : 8 + length], draw)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


DAMAGES = [flipped, torn, moved, renumbered, renumbered]
CASES = 300  # of one kind and one seed: 9 kinds, 8 seeds


@pytest.mark.parametrize(
    ("kind", "seed"),
    sampled([(kind, seed) for kind in KINDS for seed in range(8)], lambda value: False),
)
def test_damaged_files_are_read_or_raise_a_pipe_error(kind: str, seed: int, tmp_path: Path) -> None:
    _try_damages(kind, seed, tmp_path, CASES)


@pytest.mark.parametrize("kind", KINDS)
def test_some_damaged_files_are_read_or_raise_a_pipe_error(kind: str, tmp_path: Path) -> None:
    _try_damages(kind, 1000, tmp_path, 8)


def _try_damages(kind: str, seed: int, folder: Path, cases: int) -> None:
    path = laid_out(kind, folder)
    draw = random.Random(f"{kind} {seed}")
    content = path.read_bytes()
    read = KINDS[kind][1]
    read(path)
    damages = [*DAMAGES, with_header] if kind == "safetensors" else DAMAGES
    for case in range(cases):
        damage = draw.choice(damages)
        path.write_bytes(damage(content, draw))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(path)
        except PipeError:
            pass
        except BaseException as error:
            raise AssertionError(f"case {case} ({damage.__name__}) of {kind}, seed {seed}: {error!r}") from error


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"serial": "abc"}, "'serial' is 'abc', and not of the type int; copy it anew, or remove "),
        ({"files": [1]}, r"'files' is \[1\], and not of the type dict"),
        ({"format": None}, "'format' is None, and not of the type int"),
        ({"places": []}, "it has no ranks"),
        ({"places": [{"pipeline": 0, "rank": 0, "file": "../x", "digests": {}}]}, "'../x' of a rank is not among"),
        ({"format": 2}, "has the format 2, and this version of pipecut reads format 1: .* update pipecut"),
    ],
)
def test_fields_of_a_manifest_are_checked(changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    """A file of a rank was read wherever it led; others were an AttributeError or a ValueError."""
    path = laid_out("training job", tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(CheckpointError, match=told):
        read_job(path)


# Hostile files.


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"distributed data", "training job"}))
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = laid_out(kind, tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PipeError, match="is not a regular file, but a named pipe: pass the path of a file"):
        KINDS[kind][1](path)


def test_a_pipe_in_the_place_of_a_shard_is_not_waited_for(tmp_path: Path) -> None:
    index = laid_out("index", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a regular file, but a named pipe"):
        read_all(index)


def test_a_pipe_in_the_place_of_distributed_data_is_not_waited_for(tmp_path: Path) -> None:
    data = laid_out("distributed data", tmp_path)
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is not a regular file, but a named pipe"):
        read_all(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b", "..\\b", "C:\\b", "", 3, None])
def test_an_index_names_files_beside_it_alone(name: object, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    good_safetensors(tmp_path).rename(tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"0.weight": name}}))
    with pytest.raises(CheckpointError, match="index.json names .*beside it"):
        open_checkpoint(folder)


def test_an_index_may_name_files_of_a_folder_beside_it_and_links(tmp_path: Path) -> None:
    """Caches of downloads have links for files, which lead to where the content is kept."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot" / "parts").mkdir(parents=True)
    blob = good_safetensors(tmp_path / "blobs").rename(tmp_path / "blobs" / "8f31")
    (tmp_path / "snapshot" / "parts" / "one.safetensors").symlink_to(blob)
    index = tmp_path / "snapshot" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(model().state_dict(), "parts/one.safetensors")}))
    read_all(index)


def header_of(tensors: dict[str, tuple[int, int]]) -> bytes:
    entries = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in tensors.items()
    }
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "offsets",
    [{"a": (-8, 0), "b": (0, 8)}, {"a": (0, 8), "b": (0, 8)}, {"a": (0, 6), "b": (4, 8)}, {"a": (0, 4)}, {"a": (4, 8)}],
    ids=["negative", "twice", "overlapping", "too few", "a hole"],
)
def test_offsets_that_would_read_other_bytes_raise(offsets: dict[str, tuple[int, int]], tmp_path: Path) -> None:
    """Once a negative offset loaded the bytes of the header as weights."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_of(offsets) + bytes(8))
    with pytest.raises(CheckpointError, match="is neither a safetensors file nor one that torch.save has written: "):
        SafetensorsFile(path)


def test_a_header_larger_than_the_file_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(CheckpointError, match="is neither a safetensors file"):
        SafetensorsFile(path)


def test_parts_of_a_tensor_that_are_missing_raise(tmp_path: Path) -> None:
    """A description with a part left out would leave memory as it came in a weight."""
    import pickle

    path = laid_out("distributed", tmp_path)
    metadata = pickle.loads(path.read_bytes())  # our own
    saved = metadata.state_dict_metadata["0.weight"]
    for chunks in ([], [saved.chunks[0], saved.chunks[0]]):
        metadata.state_dict_metadata["0.weight"].chunks = chunks
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(
            CheckpointError, match=r"the parts of 0\.weight do not make up a tensor of the size \(8, 8\)"
        ):
            read_all(tmp_path)


def test_a_description_names_files_beside_it_alone(tmp_path: Path) -> None:
    import dataclasses
    import pickle

    path = laid_out("distributed", tmp_path)
    metadata = pickle.loads(path.read_bytes())  # our own
    index, info = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = dataclasses.replace(info, relative_path="../other.distcp")
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names the file '\.\./other\.distcp', which is not in its folder"):
        open_checkpoint(tmp_path)


def test_a_directory_that_is_not_opened_leaves_no_descriptor(tmp_path: Path) -> None:
    first = os.open(tmp_path, os.O_RDONLY)
    os.close(first)
    with pytest.raises(PipeError, match="is not a regular file, but a directory"):
        read_json(tmp_path, PipeError, "a plan")
    after = os.open(tmp_path, os.O_RDONLY)
    os.close(after)
    assert after == first


def test_a_link_is_written_through(tmp_path: Path) -> None:
    """It became a file of its own, and what it led to kept the old text."""
    (tmp_path / "far").mkdir()
    note, link = tmp_path / "far" / "note", tmp_path / "link"
    note.write_text("old")
    link.symlink_to(note)
    write_text(link, "new", PipeError)
    assert link.is_symlink()
    assert note.read_text() == "new"
    assert [each.name for each in note.parent.iterdir()] == ["note"]


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    """A named pipe or a device was replaced by a file."""
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (Path("/dev/null"), "a device"), (tmp_path, "a directory")):
        with pytest.raises(PipeError, match=f"is not a regular file, but {kind}: pass the path of a file"):
            write_text(path, "new", PipeError)
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(InputError, match=r"plan\.json has 1100 GB, and at most 268\.4 MB are read of such a file"):
        read_json(path, InputError, "a plan")


@pytest.mark.parametrize("path", ["no/such/file.csv", "with\0null.csv"])
def test_a_path_that_leads_nowhere_is_named(path: str) -> None:
    with pytest.raises(PlanError, match="cannot be read: "):
        Plan.load_csv(path)


def test_a_write_that_fails_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_text("before")

    def write(file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="note cannot be written: No space left on device. What was there before"):
        write_whole(path, write, CheckpointError)
    assert [each.name for each in tmp_path.iterdir()] == ["note"]
    assert path.read_text() == "before"
