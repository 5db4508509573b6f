"""verify(): compare one training step of the stages with one of the uncut model.

verify.py, the file to read first, runs both (runs.py), compares them and collects the differences of all ranks into a
report (report.py). stages.py finds the stages of this process and the plan by which they run. In one process
isolated.py runs them with every stage in memory of its own.
"""

from .report import Verification as Verification
from .report import VerificationError as VerificationError
from .verify import verify as verify
