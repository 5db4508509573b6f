"""Plans searched for given costs, within a memory limit.

Read search.py first: fixed schedules (candidate.py), patterns with counts made for the costs (pattern.py), greedy
scheduling (greedy.py), local search and the placement of weight gradients (local_search.py), all on the numbered passes
of a problem (problem.py), timed by timing.py, which has a lower bound too.
"""

from .candidate import FoundPlan, Tried
from .problem import problem_for
from .search import auto_schedule, search_schedule
from .timing import lower_bound

__all__ = ["FoundPlan", "Tried", "auto_schedule", "lower_bound", "problem_for", "search_schedule"]
