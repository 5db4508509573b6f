"""Cut and uncut side by side: whether the stages compute what the model computes."""

from .report import Verification as Verification
from .report import VerificationError as VerificationError
from .verify import verify as verify
