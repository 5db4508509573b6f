"""A call cut into those of the microbatches, and their results put together again."""

from .merge import merge_chunks
from .spec import CustomReducer, LossReducer, Replicate, TensorChunkSpec, sum_reducer
from .split import Microbatches, split_args_kwargs_into_chunks, split_by_dims, split_by_specs, split_tensor

__all__ = [
    "CustomReducer",
    "LossReducer",
    "Microbatches",
    "Replicate",
    "TensorChunkSpec",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "split_by_dims",
    "split_by_specs",
    "split_tensor",
    "sum_reducer",
]
