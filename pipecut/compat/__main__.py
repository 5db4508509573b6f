"""Command line: `python -m pipecut.compat script.py args...` runs a script, or -m module, with pipecut for upstream."""

from __future__ import annotations

import os
import runpy
import sys

from .installing import install, run_script, run_with_plain_errors

USAGE = "usage: python -m pipecut.compat [-m module | script.py] [arguments...]"


def main(arguments: list[str]) -> None:
    """Run what the arguments name, as Python would."""
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        raise SystemExit(USAGE)
    install()
    if arguments[0] == "-m":
        module = arguments[1]
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        run_with_plain_errors(lambda: _run_module(module), __file__)
        return
    script = arguments[0]
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    run_with_plain_errors(lambda: run_script(script), __file__)


def _run_module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
