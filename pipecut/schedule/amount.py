"""One number that a user gives: what it may be."""

from __future__ import annotations

import math
from numbers import Real

from ..errors import PlanError


def amount(what: str, value: object, *, signed: bool = False, endless: bool = False) -> float:
    """The value as a float, if it is a number: finite unless `endless`, not negative unless `signed`.

    `what` names it in errors.

    >>> amount("forward", 18), amount("memory_limit", float("inf"), endless=True)
    (18.0, inf)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise PlanError(f"{what}={value!r} is no number: give one such as 18.5.")
    try:
        number = float(value)
    except OverflowError:
        number = -math.inf if value < 0 else math.inf
    if math.isnan(number) or (math.isinf(number) and not endless):
        remedy = "give a finite number, or inf for no limit" if endless else "give a finite number"
        raise PlanError(f"{what}={number} is not finite: {remedy}.")
    if number < 0 and not signed:
        raise PlanError(f"{what}={value} is negative: give 0 or more.")
    return number
