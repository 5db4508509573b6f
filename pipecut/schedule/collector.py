"""The garbage collector out of the way while a plan is made or read.

Actions hold no reference cycles, but there are many of them: left on, the collector looks through all of them again and
again, and takes as long as the work itself.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def collector_paused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, run with the garbage collector off if it was on."""

    @functools.wraps(function)
    def paused(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return paused
