"""Where and how to cut a traced model."""

from .cut import cut_model
from .points import SplitPlan, SplitPoint, check_split_spec, cuts_by_marks, cuts_by_spec
from .policy import SplitPolicy
from .unflatten import check_is_uncut

__all__ = [
    "SplitPlan",
    "SplitPoint",
    "SplitPolicy",
    "check_is_uncut",
    "check_split_spec",
    "cut_model",
    "cuts_by_marks",
    "cuts_by_spec",
]
