"""The Pipe that users get: a cut model.

Read pipe.py first; variants.py has the other forms of its calls, report.py prints and explains one.
"""

from .pipe import Pipe as Pipe
from .pipe import check_is_uncut_model as check_is_uncut_model
from .report import unsent_text as unsent_text
