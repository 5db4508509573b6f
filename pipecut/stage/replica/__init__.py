"""Stages that other ranks hold too, as copies (DistributedDataParallel, replicate()) or in shards (fully_shard).

Begin with base.py. Each wrapper is one file and an entry in the table of wrappers.py.
"""

from .base import Replica
from .wrappers import UnwrappedNames, check_not_within_pipeline, groups_of, replica_of, wrapped_parts

__all__ = ["Replica", "UnwrappedNames", "check_not_within_pipeline", "groups_of", "replica_of", "wrapped_parts"]
