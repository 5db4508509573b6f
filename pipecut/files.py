"""Files that others may have made, read with care; and files that are written whole or not at all.

Only regular files are read: a pipe or a device in the place of a file would be waited for without end. Their size is
compared with a limit before memory is taken. What goes wrong is one exception of the caller's choice, with the path.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

from .errors import MissingFileError, PipeError
from .text import format_bytes

_LARGEST_JSON = 256 << 20


def open_regular(path: Path, error: type[PipeError], at_most: int | None = None) -> BinaryIO:
    """Open a file for reading; raise `error` if it is not a regular one, is larger than `at_most`, or cannot be opened.

    >>> open_regular(Path("/dev/zero"), PipeError)
    Traceback (most recent call last):
    pipecut.errors.PipeError: /dev/zero is not a regular file, but a device: pass the path of a file
    """
    try:
        # Without waiting: to open a named pipe waits for one who writes into it.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as missing:
        kind = MissingFileError if issubclass(MissingFileError, error) else error
        raise kind(f"{path} cannot be read: there is no such file") from missing
    except (OSError, ValueError) as failure:  # a ValueError: a null character in the path
        raise error(f"{path} cannot be read: {getattr(failure, 'strerror', None) or failure}") from failure
    try:
        _check_status(path, os.fstat(number), error, at_most)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def check_regular(path: Path, error: type[PipeError]) -> None:
    """Raise `error` unless a path leads to a regular file, for a library that opens it by itself.

    >>> check_regular(Path("/dev"), PipeError)
    Traceback (most recent call last):
    pipecut.errors.PipeError: /dev is not a regular file, but a directory: pass the path of a file
    """
    open_regular(path, error).close()


_KINDS: dict[Callable[[int], bool], str] = {
    stat.S_ISDIR: "a directory",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


def _check_status(path: Path, status: os.stat_result, error: type[PipeError], at_most: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS.items() if is_kind(status.st_mode)), "something else")
        raise error(f"{path} is not a regular file, but {kind}: pass the path of a file")
    if at_most is not None and status.st_size > at_most:
        raise error(
            f"{path} has {format_bytes(status.st_size)}, and at most {format_bytes(at_most)} are read of such a file: "
            "it is probably another one than was meant"
        )


def read_bytes(path: Path, error: type[PipeError], at_most: int) -> bytes:
    """Return the content of a regular file of at most so many bytes."""
    with open_regular(path, error, at_most) as file:
        try:
            return file.read()
        except OSError as failure:
            raise error(f"{path} cannot be read: {failure.strerror or failure}") from failure


def read_json(path: Path, error: type[PipeError], what: str) -> Any:
    """Return the content of a JSON file; raise `error`, which says that it is not `what`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "plan.json"
    >>> _ = path.write_text("[" * 100_000)
    >>> read_json(path, PipeError, "a plan")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    pipecut.errors.PipeError: /.../plan.json is not a plan: it is nested too deeply
    """
    content = read_bytes(path, error, _LARGEST_JSON)
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        # Not raised from it: its traceback is a thousand equal lines.
        raise error(f"{path} is not {what}: it is nested too deeply") from None
    except ValueError as failure:  # of decode() too
        raise error(f"{path} is not {what}: {failure}") from failure


def inside(folder: Path, name: object, error: type[PipeError], where: str) -> Path:
    """Return the path of a file that a text of others names, in a folder; raise `error` if it leads out of it.

    A link in the folder may lead anywhere: caches of downloads consist of links.

    >>> inside(Path("model"), "a/b.safetensors", PipeError, "index.json").as_posix()
    'model/a/b.safetensors'
    >>> inside(Path("model"), "../b", PipeError, "index.json")
    Traceback (most recent call last):
    pipecut.errors.PipeError: index.json names the file '../b', which is not in its folder: it names files beside it
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise error(f"{where} names {name!r} as a file: it should be the name of one beside it")
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.is_absolute() or path.drive or ".." in path.parts:
            raise error(f"{where} names the file {name!r}, which is not in its folder: it names files beside it")
    return folder / name


def write_whole(path: Path, write: Callable[[BinaryIO], None], error: type[PipeError]) -> None:
    """Let `write` fill a file beside `path`, which takes its place when it is on the disk; otherwise nothing stays.

    A link stays one, and leads to the new content. What is there and no regular file, such as a device, is an error.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note"
    >>> write_whole(path, lambda file: print(file.write(b"whole")), PipeError)
    5
    >>> path.read_text()
    'whole'
    """
    try:
        if path.exists():
            _check_status(path, path.stat(), error, None)
        place = Path(os.path.realpath(path))
        unfinished = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}")
        try:
            with unfinished.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(place)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
    except OSError as failure:
        raise error(
            f"{path} cannot be written: {failure.strerror or failure}. What was there before is as it was"
        ) from failure
    sync_directory(place.parent)


def write_text(path: Path, text: str, error: type[PipeError]) -> None:
    """Write a text file whole or not at all."""

    def write(file: BinaryIO) -> None:
        file.write(text.encode())

    write_whole(path, write, error)


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk; not every file system can."""
    number = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)
