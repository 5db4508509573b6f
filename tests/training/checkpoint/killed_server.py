"""Preload of the server that forks the ranks of a job to be killed: with the cut model each of them begins at once."""

from tests.training.checkpoint.jobs import cut
from tests.training.checkpoint.killed_job import RANKS

cut(RANKS)
