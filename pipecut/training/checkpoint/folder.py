"""A folder of checkpoints: which are complete, which were interrupted, and how a new one takes its place.

A checkpoint is written into a directory with a name that begins with a dot, beside the others. When all of its files
are on the disk, its manifest is written as the last of them, and the directory gets its name in one step. So what is
called `step-...` and has a manifest is complete, and what a crash has left is not mistaken for that.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, warn
from ...files import inside, read_json, sync_directory, sync_file
from ...stage import TRAINING_MANIFEST
from ...text import counted, listed

_FORMAT = 1  # of the files; a higher one is from a later version of pipecut
_NAME = re.compile(r"step-(\d+)(?:\.\d+)?")
_UNFINISHED, _REMOVED = ".unfinished-", ".removed-"

_warned: set[Path] = set()  # interrupted checkpoints are reported once


@dataclass(frozen=True)
class Place:
    """The files of one rank in a checkpoint: the pipeline that it belonged to, and its rank there."""

    pipeline: int
    rank: int
    file: str
    digests: Mapping[str, str]  # of its objects by name, to see which were the same on all ranks


@dataclass(frozen=True)
class Manifest:
    """Description of a complete checkpoint; `serial` counts the saves into one folder."""

    step: int
    serial: int
    model: str
    optimizers: tuple[str, ...]  # their classes
    scheduler: str
    places: tuple[Place, ...]
    files: Mapping[str, int]  # sizes
    format: int = _FORMAT
    versions: Mapping[str, str] = field(default_factory=dict)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in a folder that was saved last; None if there is none.

    Interrupted ones are left alone, and named in a warning.

    >>> import tempfile
    >>> latest_checkpoint(tempfile.mkdtemp()) is None
    True
    """
    path = Path(folder)
    _warn_of_interrupted(path)
    return max(_complete(path).items(), key=lambda item: item[1], default=(None, 0))[0]


def _complete(folder: Path) -> dict[Path, int]:
    """Return the serial number of each complete checkpoint in a folder."""
    found = {}
    for path in _directories(folder):
        if _NAME.fullmatch(path.name) and (path / TRAINING_MANIFEST).is_file():
            content = _read_json(path)
            _check_types(path, content, {"serial": int})
            found[path] = content["serial"]
    return found


def interrupted(folder: Path) -> list[Path]:
    """Return what saves that did not come to their end have left in a folder."""
    return sorted(
        path
        for path in _directories(folder)
        if (path.name.startswith(".step-") and _REMOVED not in path.name)
        or (_NAME.fullmatch(path.name) and not (path / TRAINING_MANIFEST).is_file())
    )


def _directories(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if path.is_dir())


def _warn_of_interrupted(folder: Path) -> None:
    """Warn once of each interrupted checkpoint."""
    found = [path for path in interrupted(folder) if path not in _warned]
    _warned.update(found)
    if found:
        warn(
            f"{counted(len(found), 'save')} into {folder} did not come to the end: "
            f"{listed((path.name for path in found), at_most=4)}. They are not loaded, and left alone: remove them if "
            "no process is writing there"
        )


def read_manifest(path: Path) -> Manifest:
    """Return the description of a checkpoint; raise if it is interrupted, of a newer format, or has lost files."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}: no such directory")
    if not (path / TRAINING_MANIFEST).is_file():
        raise CheckpointError(_not_complete(path))
    content = _read_json(path)
    _check_types(path, content, {"format": int})
    if content["format"] > _FORMAT:
        raise CheckpointError(
            f"{path} has the format {content.get('format')}, and this version of pipecut reads format {_FORMAT}: it "
            f"was written by a newer one ({_versions(content)}); update pipecut"
        )
    _check_types(path, content, _FIELDS)
    _check_types(path, content["files"], dict.fromkeys(content["files"], int))
    places = []
    for place in content["places"]:
        _check_types(path, place, _FIELDS_OF_PLACE)
        _check_types(path, place["digests"], dict.fromkeys(place["digests"], str))
        if place["file"] not in content["files"]:
            raise CheckpointError(_not_a_manifest(path, f"{place['file']!r} of a rank is not among its files"))
        places.append(Place(**{name: place[name] for name in _FIELDS_OF_PLACE}))
    if not places:
        raise CheckpointError(_not_a_manifest(path, "it has no ranks"))
    content["places"], content["optimizers"] = tuple(places), tuple(content["optimizers"])
    manifest = Manifest(**{name: content[name] for name in _FIELDS})
    _check_files(path, manifest)
    return manifest


_FIELDS = {"step": int, "serial": int, "model": str, "optimizers": list, "scheduler": str, "places": list}
_FIELDS |= {"files": dict, "format": int, "versions": dict}
_FIELDS_OF_PLACE = {"pipeline": int, "rank": int, "file": str, "digests": dict}


def _check_types(path: Path, content: object, fields: Mapping[str, type]) -> None:
    """Raise on fields of a manifest, or of a part of it, that are missing or of another type."""
    if not isinstance(content, dict):
        raise CheckpointError(_not_a_manifest(path, f"{content!r:.40} is no object with fields"))
    for name, kind in fields.items():
        if type(content.get(name)) is not kind:
            fault = f"{name!r} is {content[name]!r:.40}" if name in content else f"it has no {name!r}"
            raise CheckpointError(_not_a_manifest(path, f"{fault}, and not of the type {kind.__name__}"))


def _not_a_manifest(path: Path, fault: str) -> str:
    return f"{path / TRAINING_MANIFEST} is not a manifest of a checkpoint: {fault}; copy it anew, or remove {path}"


def _versions(content: Mapping[str, Any]) -> str:
    return listed(f"{name} {version}" for name, version in dict(content.get("versions") or {}).items()) or "unknown"


def _not_complete(path: Path) -> str:
    complete = _complete(path)
    if complete:
        names = listed(sorted(each.name for each in complete), at_most=4)
        return f"{path} is a folder of checkpoints and not one: pass one of {names}, or the result of latest_checkpoint"
    if _NAME.fullmatch(path.name) or path.name.startswith(".step-"):
        return (
            f"{path} was not written to the end: it has no {TRAINING_MANIFEST}. Load another one: "
            "pipecut.latest_checkpoint(folder) returns the last that is complete"
        )
    what = listed(sorted(each.name for each in path.iterdir()), at_most=6) or "nothing"
    return f"{path} is no checkpoint of pipecut.save_checkpoint: it has no {TRAINING_MANIFEST}. It has {what}"


def _check_files(path: Path, manifest: Manifest) -> None:
    faults = []
    for name, size in manifest.files.items():
        file = inside(path, name, CheckpointError, str(path / TRAINING_MANIFEST))
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif file.stat().st_size != size:
            faults.append(f"{name} has {file.stat().st_size} of {size} bytes")
    if faults:
        raise CheckpointError(
            f"{path} is damaged: {listed(faults, at_most=6)}. Nothing was loaded; copy it anew, or load an older one"
        )


def _read_json(path: Path) -> dict[str, Any]:
    content = read_json(
        path / TRAINING_MANIFEST, CheckpointError, f"a manifest, so that {path} is damaged; copy it anew, or remove it"
    )
    return content if isinstance(content, dict) else {}


# The way of a new checkpoint.


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written: its directory until it is complete, and the one that it becomes."""

    directory: Path
    path: Path
    serial: int
    step: int


def begin(folder: Path, step: int) -> Draft:
    """Make the directory of a new checkpoint. The first rank calls this, for all."""
    folder.mkdir(parents=True, exist_ok=True)
    _warn_of_interrupted(folder)
    name, number = f"step-{step:08}", 1
    while (folder / name).exists():  # replaced when the new one is complete, and not before
        number += 1
        name = f"step-{step:08}.{number}"
    directory = folder / f".{name}{_UNFINISHED}{uuid.uuid4().hex[:8]}"
    directory.mkdir()
    return Draft(directory, folder / name, 1 + max(_complete(folder).values(), default=0), step)


def commit(draft: Draft, manifest: Manifest) -> None:
    """Make a checkpoint complete, once all ranks have written their files and synced them to the disk."""
    marker = draft.directory / TRAINING_MANIFEST
    marker.write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    sync_file(marker)
    sync_directory(draft.directory)
    draft.directory.rename(draft.path)
    sync_directory(draft.path.parent)


def replace_directory(written: Path, path: Path) -> None:
    """Give a directory of files its place, once all of them are on the disk; one that is there goes.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("old", "new"):
    ...     (folder / name).mkdir()
    ...     _ = (folder / name / name).write_text(name)
    >>> replace_directory(folder / "new", folder / "old")
    >>> [each.name for each in folder.iterdir()], [each.name for each in (folder / "old").iterdir()]
    (['old'], ['new'])
    """
    for each in written.rglob("*"):
        sync_directory(each) if each.is_dir() else sync_file(each)
    sync_directory(written)
    if path.exists():
        path.rename(doomed := path.with_name(f".{path.name}{_REMOVED}{uuid.uuid4().hex[:8]}"))
        written.rename(path)
        shutil.rmtree(doomed)
    else:
        written.rename(path)
    sync_directory(path.parent)


def discard(draft: Draft) -> None:
    """Remove what a save that failed has written: of a full disk it is the larger part."""
    shutil.rmtree(draft.directory, ignore_errors=True)


def prune(draft: Draft, keep: int | None) -> None:
    """Remove the oldest checkpoints beyond `keep`, and others of the step that was saved anew."""
    known = _complete(draft.path.parent)
    ordered = sorted(known, key=lambda path: known[path])
    same = [path for path in ordered if path != draft.path and _step_of(path) == draft.step]
    rest = [path for path in ordered if path not in same]
    for path in [*same, *(rest[:-keep] if keep is not None else ())]:
        _remove(path)
    for path in [path for path in _directories(draft.path.parent) if _REMOVED in path.name]:
        shutil.rmtree(path, ignore_errors=True)  # a removal that was interrupted


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None  # it is complete
    return int(match[1])


def _remove(path: Path) -> None:
    """Remove a checkpoint: under another name first, for one that is half removed must not look complete."""
    doomed = path.with_name(f".{path.name}{_REMOVED}{uuid.uuid4().hex[:8]}")
    try:
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        warn(f"the old checkpoint {path} could not be removed: {error}. Remove it by hand")
