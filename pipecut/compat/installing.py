"""Installation of pipecut in the place of torch.distributed.pipelining, in this process and those that it starts.

A new Python process imports `sitecustomize` from its path, if there is one. The directory `startup` beside this file
has one that runs the `sitecustomize` that would have been found without it and, if the environment variable
PIPECUT_COMPAT is set, installs as soon as something imports upstream. `install()` sets the variable and puts the
directory first in PYTHONPATH; nothing is written to any disk.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType

NAME = "pipelining"
UPSTREAM = f"torch.distributed.{NAME}"
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

    Modules that were imported before stay upstream's: install before the imports of a script.

    >>> install(children=False)
    >>> import torch.distributed.pipelining as pipelining
    >>> pipelining.Schedule1F1B.__module__
    'pipecut.compat.schedules'
    >>> uninstall()
    """
    import torch.distributed

    package = importlib.import_module("pipecut.compat")
    if not _before:
        found = [name for name in sys.modules if name == UPSTREAM or name.startswith(f"{UPSTREAM}.")]
        _before.update({name: sys.modules.pop(name) for name in found})
        _before.setdefault(UPSTREAM, None)
        _attribute[:] = [getattr(torch.distributed, NAME)] if hasattr(torch.distributed, NAME) else []
    sys.modules[UPSTREAM] = package
    for name in MODULES:
        sys.modules[f"{UPSTREAM}.{name}"] = importlib.import_module(f"pipecut.compat.{name}")
    setattr(torch.distributed, NAME, package)
    _remove_finder()
    if children:
        os.environ[VARIABLE] = "1"
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != STARTUP]
        os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *paths, *_home_of_package(paths)])


def uninstall() -> None:
    """Give upstream its place back, in this process and for those to come."""
    import torch.distributed

    _remove_finder()
    os.environ.pop(VARIABLE, None)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != STARTUP]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not paths:
        del os.environ["PYTHONPATH"]
    if not _before:
        return
    for name in [name for name in sys.modules if name == UPSTREAM or name.startswith(f"{UPSTREAM}.")]:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in _before.items() if module is not None})
    if _attribute:
        setattr(torch.distributed, NAME, _attribute[0])
    else:
        delattr(torch.distributed, NAME)
    _before.clear()


def _home_of_package(paths: Sequence[str]) -> list[str]:
    """Return the directory that pipecut is in, for a child that would not find it otherwise."""
    home = str(Path(__file__).parents[2])
    installed = any(Path(path).resolve() == Path(home) for path in paths)
    return [] if installed or home.endswith("site-packages") else [home]


def _remove_finder() -> None:
    """Stop waiting for the first import of upstream, as a new process does that has not come to it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "InstallPipecutWhenImported"]


# A script, run as `python script.py` runs it.


def run_script(script: str) -> None:
    """Run a file as the main module; a directory or archive by its `__main__`."""
    if pkgutil.get_importer(script) is not None or script.endswith(".pyc"):
        runpy.run_path(script, run_name="__main__")
        return
    path = os.path.abspath(script)  # the script may change the directory before it looks for its neighbours
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__builtins__=sys.modules["builtins"], __cached__=None)
    sys.modules["__main__"] = main  # also after the end, for functions that run at exit
    exec(code, vars(main))


def run_with_plain_errors(run: Callable[[], None], runner: str) -> None:
    """Run something; an uncaught error is shown without the frames of `runner`, a file, and of runpy before its own.

    The error itself keeps them until it is shown. Exits, interrupts and a hook that the script has set are left alone.
    """
    try:
        run()
    except Exception:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _without_frames_of({__file__, runner, runpy.run_path.__code__.co_filename})
        raise


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


def _without_frames_of(files: set[str]) -> _Hook:
    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in files:
            trace = trace.tb_next
        sys.__excepthook__(kind, error.with_traceback(trace), trace)

    return show
