"""Learning-rate schedulers under another cut: their states have lists with an entry for each parameter group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def regrouped(now: Any, saved: Any, origins: Sequence[tuple[Any, int]]) -> Any:
    """Return a scheduler's state in which lists with an entry for each group have those of other groups.

    `now` is the state of the scheduler that goes on, which shows what such lists are; `origins` has for each of its
    groups a saved state and the number of the group there.

    >>> now, saved = {"base_lrs": [0.0], "last_epoch": 0}, {"base_lrs": [0.1, 0.2], "last_epoch": 7}
    >>> regrouped(now, saved, [(saved, 1)])
    {'base_lrs': [0.2], 'last_epoch': 7}
    """
    made = {}
    for key, value in saved.items():
        own = now.get(key)
        if isinstance(value, dict) and isinstance(own, dict):
            value = regrouped(own, value, [(state[key], number) for state, number in origins])
        elif (
            isinstance(value, list) and isinstance(own, list) and all(isinstance(each, dict) for each in (*value, *own))
        ):
            value = [
                regrouped(here, there, [(state[key][place], number) for state, number in origins])
                for place, (here, there) in enumerate(zip(own, value, strict=False))
            ]
        elif isinstance(value, list) and isinstance(own, list) and _is_by_group(key, own, origins):
            value = [state[key][number] for state, number in origins]
        made[key] = value
    return made


def _is_by_group(key: str, own: Sequence[Any], origins: Sequence[tuple[Any, int]]) -> bool:
    return len(own) == len(origins) and all(number < len(state[key]) for state, number in origins)
