"""Facts about operators that their schemas do not contain: one record for each operator.

A trace holds operators above autograd (linear, softmax, scaled_dot_product_attention), with symbolic sizes. Whoever
asks for a cost, for what autograd keeps or for side effects asks here; an operator without a record is taken to be as
the defaults of `Operator` say. To teach pipecut about an operator, add a record to the table, or complete the one that
exists. The algorithms that read the records are where they are used: at the end of this file, in `sizes`,
and in `split` cost, recompute, state and chain. `pipe_split`, the one operator that pipecut adds, comes last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import has_side_effect

from ..torch_internals import (
    ENTER_AUTOCAST,
    ENTER_VMAP,
    EXIT_AUTOCAST,
    EXIT_VMAP,
    SET_GRAD_ENABLED,
    is_overload,
    schema_of,
)
from .spec import Dim
from .traced import Autocast, Context, Operation

Shape: TypeAlias = tuple[Dim, ...]

# The floating-point operations of a call, from its arguments, shapes in the places of tensors, and its result's shape.
_FlopFormula: TypeAlias = Callable[[Sequence[Any], Shape], Dim]

_Saves = Literal[
    "nothing",
    "result",
    "first argument",
    "all arguments",
    "indices",  # arguments of integers or truth values
    "factors",  # each one, if a gradient flows into another one
    "batched factors",
    "input and weight",
    "quotient",
    "power",
    "dropout mask",
    "maxima",
    "log probabilities",
    "recurrent states",
]


@dataclass(frozen=True)
class Operator:
    """One operator. The defaults hold for most of them."""

    # Cost of the forward. `flops` counts matrix products and convolutions; None: those of the operators it is made of.
    flops: _FlopFormula | None = None
    # "once": each argument is read once and the result is written; "twice": the first argument is read twice;
    # "lookup": only what is taken from the first argument is read.
    reads: Literal["once", "twice", "lookup"] = "once"

    # Cost of the backward. `saves` is what autograd keeps for it; None: found by trying the operator out.
    saves: _Saves | None = None
    recurrent_values: int = 0  # values that the CPU keeps for each position and hidden unit
    backward_flops: float = 1.0  # for the gradient of one argument, as a multiple of the forward's
    backward_bytes: float = 1.5  # moved by a backward without products, as a multiple of the forward's
    has_gradient: bool = True  # False: its result never carries a gradient, although an argument does

    # Effects.
    silent_writes: tuple[int, ...] = ()  # arguments that it updates although its schema does not say so
    updates_if: str | None = None  # it writes to its running statistics only if this argument is true
    writes_values: bool = True  # False: what its schema calls a write changes no value
    passes_through: bool = False  # may return its first argument itself, though a trace shows a new tensor
    is_check: bool = False  # added by the tracer; what it checks holds by construction of the stages
    is_deterministic: bool = True  # False: uninitialised memory

    # Shapes.
    shape_by_arithmetic: bool = False  # the shape of its result follows by arithmetic, whatever the sizes are
    keeps_rows: bool = False  # leaves row i of dim 0 what it was, if there are as many rows after as before
    keeps_numbers: bool = False  # leaves a list of numbers as it is, in another shape or type


def operator_name(target: Any) -> str:
    """Return `aten::add` for an operator overload, and the plain name of any other callable."""
    if is_overload(target):
        return str(schema_of(target).name)
    return getattr(target, "__name__", str(target))


def operator_of(target: Any) -> Operator:
    """Return the record of an operator, given what a trace calls or its name.

    >>> import torch
    >>> operator_of(torch.ops.aten.relu.default).saves, operator_of("aten::addmm").flops([(2,), (2, 3), (3, 5)], (2, 5))
    ('result', 60)
    """
    if is_overload(target):
        return _operator_of_overload(target)
    return OPERATORS.get(target if isinstance(target, str) else operator_name(target), _OTHER)


@functools.cache  # overloads are there for good; other callables may hold on to a model
def _operator_of_overload(target: Any) -> Operator:
    return OPERATORS.get(operator_name(target), _OTHER)


# Formulas of FLOPs.


def _contraction(args: Sequence[Any], out: Shape) -> Dim:
    """A matrix product: each output element sums over the last dim of the first argument."""
    return 2 * math.prod(out) * args[0][-1]


def _second_contraction(args: Sequence[Any], out: Shape) -> Dim:
    return 2 * math.prod(out) * args[1][-1]


def _bilinear(args: Sequence[Any], out: Shape) -> Dim:
    """Each output element sums over the last dims of both factors."""
    return 2 * math.prod(out) * args[0][-1] * args[1][-1]


def _batch_sum(args: Sequence[Any], out: Shape) -> Dim:
    """Products of matrices, summed over the batch."""
    return 2 * math.prod(args[1]) * args[2][-1]


def _convolution(args: Sequence[Any], out: Shape) -> Dim:
    return 2 * math.prod(out) * math.prod(args[1][1:])


def _any_convolution(args: Sequence[Any], out: Shape) -> Dim:
    return (_transposed_convolution if args[6] else _convolution)(args, out)


def _time_convolution(args: Sequence[Any], out: Shape) -> Dim:
    """The weight is (time, channels in, channels out)."""
    return 2 * math.prod(out) * math.prod(args[1][:2])


def _transposed_convolution(args: Sequence[Any], out: Shape) -> Dim:
    return 2 * math.prod(args[0]) * math.prod(args[1][1:])


def _attention(args: Sequence[Any], out: Shape) -> Dim:
    query, key, value = args[:3]
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(args: Sequence[Any], out: Shape) -> Dim:
    """Every weight matrix of the layers is applied to every element of the sequence."""
    weights = next((arg for arg in args[1:] if isinstance(arg, list) and arg and len(arg[0]) == 2), [])
    return 2 * math.prod(args[0][:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _eager_call(args: Sequence[Any], out: Shape) -> Dim:
    """Nobody looked inside: every weight matrix is taken to be applied to every row of the first argument."""
    rows = math.prod(args[0][0][:-1]) if args[0] else 1
    return 2 * rows * sum(math.prod(weight) for weight in args[1] if len(weight) > 1)


# The table: every operator once.

_OTHER = Operator()
OPERATORS: dict[str, Operator] = {}


def _known(names: str, operator: Operator, namespace: str = "aten::") -> None:
    for name in names.split():
        assert f"{namespace}{name}" not in OPERATORS, f"{name} has two records"
        OPERATORS[f"{namespace}{name}"] = operator


# Products. Attention runs its forward once more in the backward, and has four products there instead of two.
_known("linear", Operator(flops=_contraction, saves="input and weight"))
_known("mm bmm dot", Operator(flops=_contraction, saves="factors"))
_known("matmul", Operator(flops=_contraction, saves="batched factors"))
_known("mv vdot _grouped_mm _scaled_mm", Operator(flops=_contraction))
_known("cdist", Operator(flops=_contraction))  # a product for each element of the last dim
_known("addmm baddbmm addmv", Operator(flops=_second_contraction))
_known("addbmm", Operator(flops=_batch_sum))
_known("bilinear", Operator(flops=_bilinear, saves="factors"))
_known("conv1d conv2d conv3d", Operator(flops=_convolution, saves="input and weight"))
_known("convolution", Operator(flops=_any_convolution, saves="input and weight"))
_known("_convolution", Operator(flops=_any_convolution))
_known("conv_tbc", Operator(flops=_time_convolution))
_known(
    "conv_transpose1d conv_transpose2d conv_transpose3d",
    Operator(flops=_transposed_convolution, saves="input and weight"),
)
_known("scaled_dot_product_attention", Operator(flops=_attention, backward_flops=2.5 / 3))
_known("flex_attention", Operator(flops=_attention, backward_flops=2.5 / 3), namespace="")
_known("lstm", Operator(flops=_recurrent, saves="recurrent states", recurrent_values=19))
_known("gru", Operator(flops=_recurrent, saves="recurrent states", recurrent_values=7))
_known("rnn_tanh rnn_relu", Operator(flops=_recurrent, saves="recurrent states", recurrent_values=1))
_known("eager_call", Operator(flops=_eager_call), namespace="pipecut::")

# Norms, softmax, losses
_known("layer_norm rms_norm group_norm", Operator(reads="twice"))
_known(
    "batch_norm", Operator(reads="twice", saves="first argument", silent_writes=(3, 4), updates_if="training")
)  # the mean and the deviation of a channel, which are kept too, are small
_known("instance_norm", Operator(saves="first argument", silent_writes=(3, 4), updates_if="use_input_stats"))
_known("_native_batch_norm_legit", Operator(updates_if="training"))
_known("softmax log_softmax", Operator(reads="twice", saves="result"))
_known("cross_entropy_loss", Operator(reads="twice", saves="log probabilities"))
_known(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits nll_loss nll_loss_nd",
    Operator(saves="all arguments"),
)

# Elementwise
_known("add sub rsub", Operator(saves="nothing", keeps_rows=True))
_known("add_ sub_ neg floor ceil round sign", Operator(saves="nothing"))
_known("mul", Operator(saves="factors", keeps_rows=True))
_known("mul_ outer", Operator(saves="factors"))
_known("div div_", Operator(saves="quotient"))
_known("pow", Operator(saves="power"))
_known(
    "relu relu_ exp exp_ sigmoid sigmoid_ tanh tanh_ _softmax _log_softmax sqrt rsqrt reciprocal leaky_relu_ elu_ "
    "hardtanh_ relu6 relu6_",
    Operator(saves="result"),
)
_known(
    "gelu silu silu_ mish hardswish hardsigmoid softplus log log1p log2 abs sin cos leaky_relu elu celu selu hardtanh "
    "clamp clamp_min clamp_max erf square prelu glu",
    Operator(saves="first argument"),
)
_known("dropout feature_dropout alpha_dropout", Operator(saves="dropout mask", passes_through=True))
_known("feature_alpha_dropout", Operator(passes_through=True))
_known("dropout_", Operator(saves="dropout mask"))
_known("eq ne gt ge lt le logical_not bitwise_not __and__ __or__", Operator(keeps_rows=True))

# Sums and pools
_known("sum mean cumsum", Operator(saves="nothing"))
_known(
    "var std norm linalg_vector_norm avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d",
    Operator(saves="first argument"),
)
_known("max_pool1d max_pool2d max_pool3d", Operator(saves="maxima"))

# Rows and elements taken by index
_known("embedding index index_select gather", Operator(reads="lookup", saves="indices", backward_bytes=1.0))
_known("scatter scatter_add take where masked_fill_ index_put index_put_ index_copy", Operator(saves="indices"))
_known("masked_fill", Operator(saves="indices", keeps_rows=True))

# Views, copies, shapes
_known("to _to_copy clone contiguous reshape", Operator(
    saves="nothing", shape_by_arithmetic=True, keeps_rows=True, keeps_numbers=True
))  # fmt: skip
_known("alias unsqueeze view _unsafe_view", Operator(shape_by_arithmetic=True, keeps_rows=True, keeps_numbers=True))
_known("copy_", Operator(saves="nothing", shape_by_arithmetic=True))
_known("as_strided select permute transpose t", Operator(shape_by_arithmetic=True))
_known("flatten slice lift_fresh_copy", Operator(keeps_rows=True))
_known("expand", Operator(keeps_numbers=True))
_known(
    "cat stack pad constant_pad_nd pad_sequence roll flip tril triu repeat repeat_interleave masked_select index_add "
    "slice_scatter select_scatter chunk split unbind pixel_shuffle upsample_nearest2d upsample_bilinear2d type_as",
    Operator(saves="nothing"),
)

# New tensors, and values outside of autograd
_known("detach", Operator(has_gradient=False, shape_by_arithmetic=True, keeps_rows=True))
# `torch.tensor(1.0)` in a forward is traced as a copy that is detached in place; without a gradient that is nothing.
_known("detach_", Operator(has_gradient=False, writes_values=False))
_known("zeros_like ones_like", Operator(saves="nothing", has_gradient=False))
_known("full_like rand_like randn_like randint_like new_zeros new_ones new_full", Operator(has_gradient=False))
_known("empty_like new_empty new_empty_strided", Operator(has_gradient=False, is_deterministic=False))
_known("empty empty_strided empty_permuted empty_quantized", Operator(is_deterministic=False))
_known(
    "_assert_scalar _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size", Operator(is_check=True)
)


# Effects of an operation besides making its result: writes to arguments, changes of modes.


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that the operation writes to."""
    if not is_overload(target):
        return []
    silent = [args[position] for position in operator_of(target).silent_writes if position < len(args)]
    declared = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(schema_of(target).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [argument for argument in (*silent, *declared) if argument is not None]


def may_draw(op: Operation, *, in_other_modes: bool) -> bool:
    """Return True for an operation that draws random numbers; dropout with a probability of zero does not.

    `in_other_modes` asks for training mode too, in which a probability of zero may be another one.
    """
    target, args, kwargs = op.target, op.args, op.kwargs
    if not is_overload(target) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if in_other_modes:
        return True
    arguments = schema_of(target).arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    chances = [given.get("dropout_p"), given.get("p") if "dropout" in operator_name(target) else None]
    return 0.0 not in chances


def returned_argument(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that the operation hands back after writing to it (`x.add_(y)` is x), or None."""
    if not is_overload(target) or len(schema_of(target).returns) != 1:
        return None
    alias = schema_of(target).returns[0].alias_info
    written = written_arguments(target, args, kwargs)
    return written[0] if alias is not None and alias.is_write and written else None


class Modes:
    """Follows the mode-changing nodes of a trace, in order."""

    def __init__(self) -> None:
        self.context = Context()
        self._blocks = 0

    def follow(self, target: Any, args: Sequence[Any]) -> bool:
        """Take note of a node; return True if it did nothing but change a mode."""
        name = getattr(target, "__name__", "")
        context = self.context
        if target is SET_GRAD_ENABLED:
            self.context = replace(context, grad=args[0])
        elif target is ENTER_AUTOCAST:
            self._blocks += 1
            entered = Autocast(args[0], args[1], args[2], self._blocks)
            self.context = replace(context, autocast=(*context.autocast, entered))
        elif target is EXIT_AUTOCAST:
            self.context = replace(context, autocast=context.autocast[:-1])
        elif name == ENTER_VMAP:
            self.context = replace(context, vmap=context.vmap + 1)
            return False
        elif name == EXIT_VMAP:
            self.context = replace(context, vmap=context.vmap - 1)
            return False
        else:
            return operator_of(target).is_check
        return True


# The operator of pipecut itself: a mark in a model's forward that survives tracing.

torch.library.define("pipecut::pipe_split", "() -> ()")


@torch.library.impl("pipecut::pipe_split", "CompositeExplicitAutograd")
def _run_mark() -> None:
    """Do nothing: an uncut model runs through its marks."""


MARK: Callable[..., object] = torch.ops.pipecut.pipe_split.default
# Without outputs, a mark would be removed as dead code by any pass that cleans a graph.
has_side_effect(MARK)


def pipe_split() -> None:
    """Mark a cut: what runs after this line belongs to the next stage.

    The mark does nothing when the model runs uncut, in eager mode and under `torch.compile`.

    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    ...     def forward(self, x):
    ...         x = self.a(x)
    ...         pipe_split()
    ...         return self.b(x)
    >>> Net()(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return
    MARK()


def is_mark(target: object) -> bool:
    """Return True if a graph node's target is a mark, given as the operator or as the function."""
    return target in (MARK, pipe_split, torch.ops.pipecut.pipe_split)
