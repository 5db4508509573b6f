"""Writes what was drawn or planned to a file."""

from __future__ import annotations

from os import PathLike
from os.path import isdir
from pathlib import Path

from ..errors import PlanError

FilePath = str | PathLike[str]


def saved(text: str, path: FilePath | None) -> str:
    """The text itself, also written to a file if a path is given."""
    if path is None:
        return text
    file = Path(path)
    try:
        file.write_text(text, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"Cannot write '{path}' ({reason}): {_remedy(file)}") from error
    return text


def _remedy(file: Path) -> str:
    if "\0" in str(file):
        return "a path has no null character; give another one."
    if isdir(file):  # unlike the method of Path, it takes a name that is too long
        return f"that is a directory; give a file in it, such as '{file / 'plan'}'."
    if not isdir(file.parent):
        return f"there is no directory '{file.parent}'; create it first, or give another path."
    return "give a path that you may write to."
