"""Cuts the PyTorch model you already have into pipeline stages.

The public names are those that the stub beside this file imports. Each is imported when it is first used, so that
`pipecut.schedule`, which plans with integers alone, does not wait for torch.
"""

from __future__ import annotations

import ast
import contextlib
import pkgutil
from importlib import import_module


def _read_stub() -> dict[str, str]:
    """Return the module of each public name; "" if it is a module itself."""
    text = pkgutil.get_data(__name__, "__init__.pyi")
    assert text is not None
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


_HOMES = _read_stub()

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        home = import_module(f".{_HOMES[name] or name}", __name__)
        value: object = getattr(home, name) if _HOMES[name] else home
    else:
        value = _registered_schedule(name)
    globals()[name] = value
    return value


def _registered_schedule(name: str) -> object:
    """Return the class of a schedule family that is registered and not in the stub."""
    if name.startswith("Schedule"):
        run, errors = import_module(".run", __name__), import_module(".errors", __name__)
        with contextlib.suppress(errors.PipeError):
            made = run.get_schedule_class(name.removeprefix("Schedule"))
            if made.__name__ == name:
                return made
    raise AttributeError(f"module 'pipecut' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
