"""Cut the arguments of a call into those of the microbatches.

All arguments are cut into the same numbers of samples: sample i of one argument and sample i of another stay together.
Where that is not certain, the call raises an error. Chunks of tensors are views: nothing is copied, and a gradient that
reaches a chunk reaches the tensor that it is of.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InputError, SpecCountError, TooFewSamplesError
from ...pipe_ir import unflatten
from ...text import shape_text
from .calls import Call, open_call
from .spec import DEFAULT, ChunkSpec, Replicate, Rule, TensorChunkSpec, match_specs, written_call
from .tensors import is_block_mask, rows_along


@dataclass(frozen=True)
class Microbatches:
    """The calls of the microbatches; `sizes` are their numbers of samples, or None if nothing was cut.

    `dims` are those along which the leaves of the call were cut, None for what was not cut along a dim. `in_order` is
    False if the microbatches do not hold consecutive samples of the batch.
    """

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    sizes: tuple[int, ...] | None
    dims: tuple[int | None, ...] = ()
    in_order: bool = True

    @property
    def samples_first(self) -> bool:
        """True if everything that was cut has its samples in dim 0."""
        return self.in_order and all(dim in (None, 0) for dim in self.dims)


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Return the positional and the keyword arguments of each microbatch; see `split_by_specs`.

    >>> args, kwargs = split_args_kwargs_into_chunks((torch.arange(5), "gelu"), {"y": torch.arange(5)}, 2)
    >>> args
    [(tensor([0, 1, 2]), 'gelu'), (tensor([3, 4]), 'gelu')]
    >>> kwargs
    [{'y': tensor([0, 1, 2])}, {'y': tensor([3, 4])}]
    """
    made = split_by_specs(args, kwargs, chunks, args_chunk_spec, kwargs_chunk_spec)
    return made.args, made.kwargs


def split_by_specs(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    *,
    fewer: bool = False,
) -> Microbatches:
    """Cut a call as the specs say; with `fewer`, too few samples make fewer microbatches, of one sample each.

    `args_chunk_spec` is a tuple with an entry for each positional argument, `kwargs_chunk_spec` a dict with the names
    of keyword arguments. An entry is TensorChunkSpec(dim), Replicate(), another ChunkSpec, None for the default, or a
    nested value of these for a nested argument. By default a tensor is cut along dim 0, if it has one; a BlockMask
    along its batch, if that is not 1; and all other values go to every microbatch.

    >>> x, table = torch.zeros(5, 2), torch.zeros(7, 2)
    >>> split_by_specs((x, table), None, 2, (None, Replicate())).sizes
    (3, 2)
    """
    _check_chunks(chunks)
    call = open_call(args, kwargs, None)
    if not args and not kwargs:
        return Microbatches([()] * chunks, [{} for _ in range(chunks)], None)
    if isinstance(args_chunk_spec, tuple | list) and len(args_chunk_spec) != len(args):
        raise SpecCountError(
            f"args_chunk_spec has entries for {len(args_chunk_spec)} arguments, and there are {len(args)} "
            "positional ones: write None for an argument that is cut in the default way"
        )
    rules = [
        *match_specs(args_chunk_spec, call.args, "args_chunk_spec", "cut"),
        *match_specs(kwargs_chunk_spec, call.kwargs, "kwargs_chunk_spec", "cut"),
    ]
    return _split(call, chunks, rules, knows_batch=False, fewer=fewer)


def split_by_dims(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    dims: Mapping[str, int | None],
    signature: inspect.Signature,
    *,
    fewer: bool = False,
) -> Microbatches:
    """Cut a call whose tensors have their samples in known dims, None for a tensor that has none.

    The tensors are named as in `TracedInput.path`: by the parameters of `signature`, that of the model's forward.

    >>> def forward(x, batch): ...
    >>> call = (torch.zeros(2, 5),), {"batch": {"mask": torch.zeros(5), "table": torch.zeros(9)}}
    >>> dims = {"x": 1, "batch['mask']": 0, "batch['table']": None}
    >>> first, second = split_by_dims(*call, 2, dims, inspect.signature(forward)).kwargs
    >>> second["batch"]["mask"].shape, second["batch"]["table"].shape
    (torch.Size([2]), torch.Size([9]))
    """
    _check_chunks(chunks)
    call = open_call(args, kwargs, signature)
    return _split(call, chunks, [_known(name, leaf, dims) for name, leaf in call.named], knows_batch=True, fewer=fewer)


def split_tensor(tensor: torch.Tensor, spec: TensorChunkSpec, num_chunks: int) -> list[torch.Tensor]:
    """Cut one tensor.

    >>> [chunk.shape for chunk in split_tensor(torch.zeros(2, 5), TensorChunkSpec(1), 2)]
    [torch.Size([2, 3]), torch.Size([2, 2])]
    """
    made = split_by_specs((), {"tensor": tensor}, num_chunks, None, {"tensor": spec})
    return [kwargs["tensor"] for kwargs in made.kwargs]


def _check_chunks(chunks: int) -> None:
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise InputError(f"the number of microbatches must be an integer of at least 1; got {chunks!r}")


def _known(name: str, leaf: Any, dims: Mapping[str, int | None]) -> Rule:
    if name in dims:
        dim = dims[name]
        return Rule(Replicate() if dim is None else TensorChunkSpec(dim))
    if isinstance(leaf, torch.Tensor):
        raise InputError(
            f"{name} is a tensor {shape_text(leaf.shape)}, and it is not known in which dim its samples are: "
            f"they are known of {', '.join(dims) or 'no argument'}"
        )
    return Rule(DEFAULT, given=False)


@dataclass(frozen=True, eq=False)
class _Leaf:
    """One leaf of a call, and the way it is cut."""

    name: str
    value: Any
    rule: Rule
    samples: int | None  # None if it has none, and goes to every microbatch
    dim: int | None

    @classmethod
    def of(cls, name: str, value: Any, rule: Rule) -> _Leaf:
        dim = rule.spec.cut_dim(value, name)
        samples = rule.spec.samples(value, name) if dim is None else rows_along(value, dim)
        return cls(name, value, rule, samples, dim)

    @property
    def described(self) -> str:
        return self.name if self.dim is None else f"{self.name} of shape {shape_text(self.value.shape)}"

    @property
    def way(self) -> str:
        return f"by {self.rule.spec!r}" if self.dim is None else f"along dim {self.dim}"

    def cut(self, sizes: Sequence[int]) -> Sequence[Any]:
        pieces = self.rule.spec.cut(self.value, sizes, self.name)
        if len(pieces) != len(sizes):
            raise InputError(
                f"{self.rule.spec!r} cut {self.name} into {len(pieces)} parts, and there are {len(sizes)} microbatches"
            )
        return pieces


def _split(call: Call, chunks: int, rules: Sequence[Rule], *, knows_batch: bool, fewer: bool) -> Microbatches:
    leaves = [_Leaf.of(name, value, rule) for (name, value), rule in zip(call.named, rules, strict=True)]
    sizes = _agreed_sizes(call, leaves, chunks, knows_batch=knows_batch, fewer=fewer)
    in_order = _agreed_order([leaf for leaf in leaves if leaf.samples is not None])
    chunks = chunks if sizes is None else len(sizes)
    pieces = _cut_all(leaves, (1,) * chunks if sizes is None else sizes)
    count = sum(1 for _ in call.args.paths())
    return Microbatches(
        [unflatten(call.args, [piece[index] for piece in pieces[:count]]) for index in range(chunks)],
        [unflatten(call.kwargs, [piece[index] for piece in pieces[count:]]) for index in range(chunks)],
        sizes,
        tuple(leaf.dim for leaf in leaves),
        in_order,
    )


def _cut_all(leaves: Sequence[_Leaf], sizes: Sequence[int]) -> list[Sequence[Any]]:
    # One tensor passed twice stays one tensor in every microbatch.
    made: dict[tuple[int, int | ChunkSpec], Sequence[Any]] = {}
    pieces = []
    for leaf in leaves:
        key = id(leaf.value), leaf.rule.spec if leaf.dim is None else leaf.dim
        if key not in made:
            made[key] = leaf.cut(sizes)
        pieces.append(made[key])
    return pieces


def _agreed_order(leaves: Sequence[_Leaf]) -> bool:
    """Return True if all leaves are cut into consecutive samples, False if none is."""
    in_order = [leaf for leaf in leaves if leaf.rule.spec.keeps_order]
    others = [leaf for leaf in leaves if not leaf.rule.spec.keeps_order]
    if in_order and others:
        raise InputError(
            f"{in_order[0].name} is cut into consecutive samples, and {others[0].name} {others[0].way}, which does not "
            "keep the order of the samples: give both the same spec, or set keeps_order = True in its class if it does"
        )
    return not others


def even_sizes(samples: int, chunks: int) -> tuple[int, ...]:
    """Return sizes that differ by at most one, the larger ones first.

    >>> even_sizes(10, 4)
    (3, 3, 2, 2)
    """
    size, larger = divmod(samples, chunks)
    return (size + 1,) * larger + (size,) * (chunks - larger)


def _agreed_sizes(
    call: Call, leaves: Sequence[_Leaf], chunks: int, *, knows_batch: bool, fewer: bool
) -> tuple[int, ...] | None:
    """Return the sizes of the microbatches; None if no leaf has samples."""
    counted = [leaf for leaf in leaves if leaf.samples is not None]
    totals = collections.Counter(leaf.samples or 0 for leaf in counted)
    if not totals:
        return None
    ((total, _),) = totals.most_common(1)
    if len(totals) > 1:
        lines = [f"the arguments to be cut into {chunks} microbatches do not have the same number of samples:"]
        lines += [f"  {leaf.described} has {leaf.samples} {leaf.way}" for leaf in counted]
        if knows_batch:
            lines.append("for the model they are the samples of one batch: pass as many in each")
        else:
            lines += _other_specs(call, leaves, total)
        raise InputError("\n".join(lines))
    if total >= chunks:
        return even_sizes(total, chunks)
    if fewer and total:
        return even_sizes(total, total)
    first = counted[0]
    shape = "" if first.dim is None else f" has shape {shape_text(first.value.shape)},"
    most = f", or ask for fewer microbatches, at most {total}" if total else ""
    raise TooFewSamplesError(
        f"{total} {'sample' if total == 1 else 'samples'} cannot be cut into {chunks} microbatches "
        f"({first.name}{shape} cut {first.way}): pass at least {1 if fewer else chunks}{most}",
        total,
    )


def _other_specs(call: Call, leaves: Sequence[_Leaf], batch: int) -> list[str]:
    """Return lines that say what to write if the leaves that differ from most others are not of the batch."""
    odd = [leaf for leaf in leaves if leaf.samples not in (None, batch)]
    specs = [Replicate() if leaf in odd else _explicit_spec(leaf) for leaf in leaves]
    return [
        f"if {' and '.join(leaf.name for leaf in odd)} should go to every microbatch whole, write",
        f"  {written_call(call.args, call.kwargs, specs)}",
        "and if the samples lie along another dim, TensorChunkSpec(dim) there",
    ]


def _explicit_spec(leaf: _Leaf) -> ChunkSpec | None:
    """Return the spec that cuts a leaf as it is cut now; None for what needs none, such as a number."""
    if leaf.dim is not None:
        return TensorChunkSpec(leaf.dim)
    if leaf.rule.given and not isinstance(leaf.rule.spec, TensorChunkSpec):
        return leaf.rule.spec
    return Replicate() if leaf.rule.given or is_block_mask(leaf.value) else None
