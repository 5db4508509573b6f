"""Cut a call into those of the microbatches, and merge their results: begin with spec.py.

A `ChunkSpec` says how one value is cut and merged. `split_by_specs` and `merge_chunks` match specs with the leaves of
nested values and leave the rest to them: a new kind of spec is one class.
"""

from .calls import BatchDims, batch_dims, open_value
from .merge import check_merge_spec, merge_chunks
from .spec import ChunkSpec, CustomReducer, LossReducer, Replicate, Rule, TensorChunkSpec, match_specs, sum_reducer
from .split import Microbatches, even_sizes, split_args_kwargs_into_chunks, split_by_dims, split_by_specs, split_tensor
from .tensors import cut_rows

__all__ = [
    "BatchDims",
    "ChunkSpec",
    "CustomReducer",
    "LossReducer",
    "Microbatches",
    "Replicate",
    "Rule",
    "TensorChunkSpec",
    "batch_dims",
    "check_merge_spec",
    "cut_rows",
    "even_sizes",
    "match_specs",
    "merge_chunks",
    "open_value",
    "split_args_kwargs_into_chunks",
    "split_by_dims",
    "split_by_specs",
    "split_tensor",
    "sum_reducer",
]
