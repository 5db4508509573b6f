"""Long lists of parameters, of which `make test` runs some, CI more, and `make test-all` the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(
    values: Iterable[Any], is_quick: Callable[[Any], bool], is_long: Callable[[Any], bool] = lambda value: False
) -> list[Any]:
    """Mark as slow the parameters that the quick run leaves out, and as long those that CI leaves out too.

    A tuple stands for several parameters.
    """

    def marked(value: Any) -> Any:
        if is_quick(value):
            return value
        marks = [pytest.mark.slow, *([pytest.mark.long] if is_long(value) else ())]
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)

    return [marked(value) for value in values]
