"""Limits in seconds, all of them guards against hangs: far above what any work takes on a machine however busy.

What is slow is waited for; only what would never end is cut off. Where even that strikes, set PIPECUT_PATIENCE=3.
"""

from __future__ import annotations

from pipecut.run import PATIENCE

WORK = 600.0 * PATIENCE  # for a script, or a function on ranks
HANG = 1800.0 * PATIENCE  # for a test, by pytest-timeout: above all others, which say more
