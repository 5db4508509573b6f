"""One number that a user gives: what it may be."""

from __future__ import annotations

import math
from numbers import Real

from ..errors import PlanError


def amount(what: str, value: object, *, signed: bool = False) -> float:
    """The value as a float, if it is a finite number and, unless `signed`, not negative. `what` names it in errors.

    >>> amount("forward", 18)
    18.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise PlanError(f"{what}={value!r} is no number: give one such as 18.5.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise PlanError(f"{what}={number} is not finite: give a finite number.")
    if number < 0 and not signed:
        raise PlanError(f"{what}={value} is negative: give 0 or more.")
    return number
