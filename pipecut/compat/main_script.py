"""Runs a script as `python script.py` does, and shows its uncaught errors as Python does: from its own lines on."""

from __future__ import annotations

import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType


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
