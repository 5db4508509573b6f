"""For random nested arguments, cutting and merging gives back what was there."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecut.pipe_ir.structure import Atom, flatten, map_leaves, unflatten
from pipecut.stage.microbatch import Replicate, TensorChunkSpec, merge_chunks, split_by_specs
from tests.support.nested_values import assert_same
from tests.support.properties import examples


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    content: Any
    label: Any = None


@dataclasses.dataclass(frozen=True)
class Draft(Atom):
    """Stands for a tensor until the number of samples is known: the dim that they lie in, None for no such dim."""

    dim: int | None
    rest: tuple[int, ...]

    def tensor(self, samples: int) -> torch.Tensor:
        shape = list(self.rest)
        if self.dim is not None:
            shape.insert(self.dim, samples)
        return torch.randn(shape)

    @property
    def spec(self) -> Any:
        return Replicate() if self.dim is None else TensorChunkSpec(self.dim)


REST = st.lists(st.integers(0, 3), max_size=2).map(tuple)
SPLIT_AT_0 = st.builds(Draft, st.just(0), REST)
SPLIT_ANYWHERE = REST.flatmap(lambda rest: st.builds(Draft, st.integers(0, len(rest)), st.just(rest)))
WHOLE = st.builds(Draft, st.none(), REST)
SCALAR = torch.tensor(0.3)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3), st.just(SCALAR)
)


def nested(tensors: st.SearchStrategy[Draft]) -> st.SearchStrategy[Any]:
    """Nested values with drafts of tensors in them."""
    return st.recursive(
        st.one_of(tensors, tensors, PLAIN),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from(["a", "b", 0, "it's"]), inner, max_size=3),
            st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(OrderedDict),
            st.builds(Pair, inner, inner),
            st.builds(Box, inner),
        ),
        max_leaves=8,
    )


def call_of(tensors: st.SearchStrategy[Draft]) -> st.SearchStrategy[Any]:
    """Positional and keyword arguments."""
    return st.tuples(
        st.lists(nested(tensors), max_size=3).map(tuple), st.dictionaries(st.sampled_from("xyz"), nested(tensors))
    )


def realised(value: Any, samples: int) -> Any:
    """The value with tensors for the drafts."""
    return map_leaves(lambda leaf: leaf.tensor(samples) if isinstance(leaf, Draft) else leaf, value)


def specs_of(value: Any) -> Any:
    """The specs of the drafts in the same structure, the default for all else."""
    return map_leaves(lambda leaf: leaf.spec if isinstance(leaf, Draft) else None, value)


CHUNKS_AND_SAMPLES = st.integers(1, 5).flatmap(lambda chunks: st.tuples(st.just(chunks), st.integers(chunks, 12)))


@settings(max_examples=examples(25))
@given(call=call_of(SPLIT_AT_0), numbers=CHUNKS_AND_SAMPLES)
def test_by_default_merging_undoes_cutting(call: Any, numbers: tuple[int, int]) -> None:
    chunks, samples = numbers
    args, kwargs = realised(call, samples)
    made = split_by_specs(args, kwargs, chunks)
    assert len(made.args) == len(made.kwargs) == chunks
    merged = merge_chunks(list(zip(made.args, made.kwargs, strict=True)), None, made.sizes)
    assert_same(merged, (args, kwargs), "merged")


@settings(max_examples=examples(25))
@given(call=call_of(st.one_of(SPLIT_ANYWHERE, WHOLE)), numbers=CHUNKS_AND_SAMPLES)
def test_with_specs_merging_undoes_cutting(call: Any, numbers: tuple[int, int]) -> None:
    chunks, samples = numbers
    args, kwargs = realised(call, samples)
    specs = specs_of(call)
    made = split_by_specs(args, kwargs, chunks, *specs)
    merged = merge_chunks(list(zip(made.args, made.kwargs, strict=True)), specs, made.sizes)
    assert_same(merged, (args, kwargs), "merged")


@settings(max_examples=examples(25))
@given(call=call_of(SPLIT_ANYWHERE), numbers=CHUNKS_AND_SAMPLES)
def test_every_chunk_is_the_same_rows_of_every_tensor(call: Any, numbers: tuple[int, int]) -> None:
    chunks, samples = numbers
    args, kwargs = realised(call, samples)
    made = split_by_specs(args, kwargs, chunks, *specs_of(call))
    start = 0
    for index in range(chunks):
        size = samples // chunks + (index < samples % chunks)
        rows = range(start, start + size)
        expected = unflatten(
            flatten(call)[1],
            [
                leaf.index_select(draft.dim, torch.tensor(rows)) if isinstance(draft, Draft) else leaf
                for draft, leaf in zip(flatten(call)[0], flatten((args, kwargs))[0], strict=True)
            ],
        )
        assert_same((made.args[index], made.kwargs[index]), expected, f"microbatch {index}")
        start += size
