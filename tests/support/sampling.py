"""Long lists of parameters, of which `make test` runs some and `make test-all` the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[Any]:
    """Mark as slow the parameters that the quick run leaves out; a tuple stands for several parameters."""
    return [
        value
        if is_quick(value)
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
