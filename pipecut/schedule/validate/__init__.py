"""The proof that a plan can run: complete, in order, every message met, no deadlock. Every fault at once.

proof.py has `validate`, and checks all ranks together; order.py checks each rank by itself.
"""

from .order import Fault
from .proof import find_faults, validate

__all__ = ["Fault", "find_faults", "validate"]
