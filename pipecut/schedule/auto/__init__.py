"""Plans searched for given costs, within a memory limit.

Read `search` first: fixed schedules (`candidate`), greedy scheduling (`greedy`), weight gradients moved
(`weight_placement`) and local search (`local_search`), all on the numbered passes of a `problem`, timed by `timing`.
"""

from .candidate import FoundPlan, Tried
from .problem import problem_for
from .search import auto_schedule, search_schedule
from .timing import lower_bound

__all__ = ["FoundPlan", "Tried", "auto_schedule", "lower_bound", "problem_for", "search_schedule"]
