"""Stages: cut and merge microbatches, run a module forward and backward, hold it on several ranks, load and save it.

Begin with stage.py. `microbatch` cuts calls and merges results, `backward` computes gradients in full or in two parts,
`replica` steers DistributedDataParallel and fully_shard, `materialize` gives stages values and saves them.
"""

from .backward import PendingWeights as PendingWeights
from .backward import StageWeights as StageWeights
from .backward import full_backward as full_backward
from .backward import input_backward as input_backward
from .backward import max_rows as max_rows
from .backward import min_rows_to_defer as min_rows_to_defer
from .backward import weight_backward as weight_backward
from .backward import weight_sizes as weight_sizes
from .dtensor import MeshLayout as MeshLayout
from .dtensor import describe as describe
from .dtensor import describe_tensor as describe_tensor
from .dtensor import full_tensor as full_tensor
from .dtensor import is_distributed as is_distributed
from .dtensor import local_part as local_part
from .dtensor import place_like as place_like
from .dtensor import placement_of as placement_of
from .dtensor import ready_to_send as ready_to_send
from .materialize import CheckpointLike as CheckpointLike
from .materialize import InitFunction as InitFunction
from .materialize import Values as Values
from .materialize import empty_weights as empty_weights
from .materialize import materialize as materialize
from .materialize import save_stage as save_stage
from .microbatch import BatchDims as BatchDims
from .microbatch import ChunkSpec as ChunkSpec
from .microbatch import CustomReducer as CustomReducer
from .microbatch import LossReducer as LossReducer
from .microbatch import Microbatches as Microbatches
from .microbatch import Replicate as Replicate
from .microbatch import Rule as Rule
from .microbatch import TensorChunkSpec as TensorChunkSpec
from .microbatch import batch_dims as batch_dims
from .microbatch import check_merge_spec as check_merge_spec
from .microbatch import cut_rows as cut_rows
from .microbatch import even_sizes as even_sizes
from .microbatch import match_specs as match_specs
from .microbatch import merge_chunks as merge_chunks
from .microbatch import open_value as open_value
from .microbatch import split_args_kwargs_into_chunks as split_args_kwargs_into_chunks
from .microbatch import split_by_dims as split_by_dims
from .microbatch import split_by_specs as split_by_specs
from .microbatch import split_tensor as split_tensor
from .microbatch import sum_reducer as sum_reducer
from .origin import CallVariants as CallVariants
from .origin import StageOrigin as StageOrigin
from .origin import check_gradients as check_gradients
from .origin import check_has_memory as check_has_memory
from .origin import held_elsewhere as held_elsewhere
from .origin import names_without_memory as names_without_memory
from .origin import tensors_of as tensors_of
from .randomness import Generators as Generators
from .randomness import RandomStream as RandomStream
from .randomness import StepSeeds as StepSeeds
from .randomness import derive_seed as derive_seed
from .randomness import random_streams as random_streams
from .replica import check_not_within_pipeline as check_not_within_pipeline
from .replica import unwrapped_name as unwrapped_name
from .stage import Flight as Flight
from .stage import Item as Item
from .stage import PipelineStage as PipelineStage
from .stage import build_stage as build_stage
from .stage import is_initialized as is_initialized
