"""Puts pipecut in the place of torch.distributed.pipelining: in this process, and in those that it starts.

A new Python process imports `sitecustomize` from its path, if there is one. The directory `startup` beside this file
has one that runs the `sitecustomize` that would have been found without it and, if the environment variable
PIPECUT_COMPAT is set, installs as soon as something imports the peer. `install()` sets the variable and puts the
directory first in PYTHONPATH; nothing is written to any disk.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

NAME = "pipelining"
PEER = f"torch.distributed.{NAME}"
VARIABLE = "PIPECUT_COMPAT"
STARTUP = str(Path(__file__).with_name("startup"))
MODULES = (
    "schedules",
    "stage",
    "microbatch",
    "_IR",
    "_utils",
    "_backward",
    "_unflatten",
    "_schedule_visualizer",
    "_debug",
)

_before: dict[str, ModuleType | None] = {}
_attribute: list[object] = []  # that of torch.distributed, if it had one


def install(*, children: bool = True) -> None:
    """Let `import torch.distributed.pipelining` give pipecut.compat; with `children` in new processes too.

    What was imported from the peer before stays the peer's: install before the imports of a script.

    >>> install(children=False)
    >>> import torch.distributed.pipelining as pipelining
    >>> pipelining.Schedule1F1B.__module__
    'pipecut.schedule.run.schedules'
    >>> uninstall()
    """
    import torch.distributed

    package = importlib.import_module("pipecut.compat")
    if not _before:
        found = [name for name in sys.modules if name == PEER or name.startswith(f"{PEER}.")]
        _before.update({name: sys.modules.pop(name) for name in found})
        _before.setdefault(PEER, None)
        _attribute[:] = [getattr(torch.distributed, NAME)] if hasattr(torch.distributed, NAME) else []
    sys.modules[PEER] = package
    for name in MODULES:
        sys.modules[f"{PEER}.{name}"] = importlib.import_module(f"pipecut.compat.{name}")
    setattr(torch.distributed, NAME, package)
    _remove_finder()
    if children:
        os.environ[VARIABLE] = "1"
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != STARTUP]
        os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *paths, *_home_of_package(paths)])


def uninstall() -> None:
    """Give the peer its place back, in this process and for those to come."""
    import torch.distributed

    _remove_finder()
    os.environ.pop(VARIABLE, None)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != STARTUP]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not paths:
        del os.environ["PYTHONPATH"]
    if not _before:
        return
    for name in [name for name in sys.modules if name == PEER or name.startswith(f"{PEER}.")]:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in _before.items() if module is not None})
    if _attribute:
        setattr(torch.distributed, NAME, _attribute[0])
    else:
        delattr(torch.distributed, NAME)
    _before.clear()


def _home_of_package(paths: Sequence[str]) -> list[str]:
    """The directory that pipecut is in, for a child that would not find it otherwise."""
    home = str(Path(__file__).parents[2])
    installed = any(Path(path).resolve() == Path(home) for path in paths)
    return [] if installed or home.endswith("site-packages") else [home]


def _remove_finder() -> None:
    """Stop waiting for the first import of the peer, as a new process does that has not come to it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "InstallPipecutWhenImported"]
