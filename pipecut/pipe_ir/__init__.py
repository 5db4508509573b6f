"""Traces of models and the values that describe a cut: operations, specs, nested structures, edges.

Read traced.py first, then tracing/run.py.
"""

from .copies import clone as clone
from .copies import quiet_subclass as quiet_subclass
from .copies import stand_in_for_meta as stand_in_for_meta
from .inputs import active_autocast as active_autocast
from .inputs import bind_inputs as bind_inputs
from .inputs import read_example as read_example
from .operators import Shape as Shape
from .operators import is_mark as is_mark
from .operators import operator_name as operator_name
from .operators import operator_of as operator_of
from .operators import pipe_split as pipe_split
from .sizes.dynamic import Dynamic as Dynamic
from .sizes.faults import warn_of_fixed_dims as warn_of_fixed_dims
from .sizes.symbols import sizes_of as sizes_of
from .spec import Dim as Dim
from .spec import TensorSpec as TensorSpec
from .structure import LEAF as LEAF
from .structure import Atom as Atom
from .structure import NthLeaf as NthLeaf
from .structure import Path as Path
from .structure import Structure as Structure
from .structure import flatten as flatten
from .structure import is_plain_object as is_plain_object
from .structure import map_leaves as map_leaves
from .structure import unflatten as unflatten
from .traced import HERE as HERE
from .traced import PLAIN_TYPES as PLAIN_TYPES
from .traced import Autocast as Autocast
from .traced import Condition as Condition
from .traced import ConstantRef as ConstantRef
from .traced import Context as Context
from .traced import Edge as Edge
from .traced import Fallback as Fallback
from .traced import FixedDim as FixedDim
from .traced import ModuleRef as ModuleRef
from .traced import Opaque as Opaque
from .traced import Operation as Operation
from .traced import PipeInfo as PipeInfo
from .traced import RecomputedValue as RecomputedValue
from .traced import Ref as Ref
from .traced import Size as Size
from .traced import Span as Span
from .traced import StageInfo as StageInfo
from .traced import Template as Template
from .traced import TiedParameter as TiedParameter
from .traced import TracedCall as TracedCall
from .traced import TracedInput as TracedInput
from .traced import TracedModel as TracedModel
from .tracing.run import has_forward_hooks as has_forward_hooks
from .tracing.tracer import ModelTracer as ModelTracer
from .tracing.tracer import TracerName as TracerName
from .tracing.tracer import check_tracer_name as check_tracer_name
