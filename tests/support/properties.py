"""Hypothesis profiles: `quick` is the same in every run; `thorough` draws more, from `--hypothesis-seed`.

HYPOTHESIS_PROFILE chooses one, PIPECUT_EXAMPLES multiplies the number of examples of either.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
FACTOR = float(os.environ.get("PIPECUT_EXAMPLES", {"thorough": 5}.get(PROFILE, 1)))


def load_profile() -> None:
    """Register both profiles, and make the chosen one that of all tests."""
    # How fast examples are drawn says how busy the machine is.
    common: dict[str, Any] = {
        "deadline": None,
        "database": None,
        "print_blob": True,
        "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    }
    settings.register_profile("quick", derandomize=True, max_examples=examples(50), **common)
    settings.register_profile("thorough", max_examples=examples(50), **common)
    settings.load_profile(PROFILE)


def examples(quick: int) -> int:
    """The number of examples of the chosen profile, for a test that has this many in the quick one."""
    return max(1, round(quick * FACTOR))
