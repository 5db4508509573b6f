"""Modules that other ranks hold too, as copies (DistributedDataParallel) or in shards (fully_shard)."""

from .replica import Replica, refuse_ranks_of_pipeline, replica_of, wrappers_in

__all__ = ["Replica", "refuse_ranks_of_pipeline", "replica_of", "wrappers_in"]
