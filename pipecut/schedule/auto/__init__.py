"""Plans searched for given costs, within a memory limit."""

from .candidate import FoundPlan, Tried
from .search import auto_schedule, search_schedule

__all__ = ["FoundPlan", "Tried", "auto_schedule", "search_schedule"]
