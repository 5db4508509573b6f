"""The schedules: each a function that lists the actions of every rank, registered under its name by `@schedule`.

Every file here is imported, in alphabetical order, so that a new schedule is one new file: see gpipe.py for the
shortest example. building.py has the phrases that they are written in.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
