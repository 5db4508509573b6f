"""`dynamic=`: what a user may write, and what is refused before anything is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import SplitPoint, pipeline
from pipecut.errors import InputError, PipeWarning
from pipecut.pipe_ir.inputs import read_example


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, more: dict[str, Tensor], scale: float = 1.0, **options: Tensor) -> Tensor:
        return self.b(self.a(x) * more["mask"].unsqueeze(-1)) * scale


X, MASK = torch.ones(3, 5, 4), torch.ones(3, 5)


def names_for(dynamic: Any, **kwargs: Any) -> dict[tuple[int, int], str | None]:
    return dict(read_example(Net(), (X, {"mask": MASK}), kwargs, dynamic).dynamic.asked)


@pytest.mark.parametrize(
    ("dynamic", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"x": {1: "seq"}}, {(0, 1): "seq"}),
        ({"x": {-2: "seq"}}, {(0, 1): "seq"}),
        ({"x": [1]}, {(0, 1): None}),
        ({"x": ("batch", "seq", None)}, {(0, 0): "batch", (0, 1): "seq"}),
        ({"x": ["batch", "seq", 4]}, {(0, 0): "batch", (0, 1): "seq"}),
        ({"more['mask']": {1: "seq"}}, {(1, 1): "seq"}),
        ({"mask": {1: "seq"}}, {(1, 1): "seq"}),
    ],
)
def test_ways_to_write_it(dynamic: Any, expected: dict[tuple[int, int], str | None]) -> None:
    assert names_for(dynamic) == expected


def test_an_input_that_comes_by_keyword_is_called_by_its_keyword() -> None:
    assert names_for({"extra": {1: "seq"}}, extra=MASK) == {(2, 1): "seq"}


INPUTS = "\n  inputs: x [3, 5, 4], more['mask'] [3, 5]"

REFUSED: list[tuple[Any, str]] = [
    (
        ["x"],
        'dynamic must be "auto", or a dict from inputs to the names of their dims, such as {"x": {0: "batch"}}; got '
        "list",
    ),
    (
        "all",
        'dynamic must be "auto", or a dict from inputs to the names of their dims, such as {"x": {0: "batch"}}; got '
        "'all'",
    ),
    (
        {"xx": {1: "seq"}},
        "dynamic names 'xx', which is not a tensor input of Net in the example; did you mean x?" + INPUTS,
    ),
    (
        {"scale": {0: "n"}},
        "dynamic names 'scale', which is not a tensor input of Net in the example" + INPUTS,
    ),
    (
        {"more": {1: "seq"}},
        "dynamic names 'more', which is not a tensor input of Net in the example; did you mean more['mask']?" + INPUTS,
    ),
    (
        {"x": {3: "seq"}},
        "dynamic names dim 3 of x, which has 3 dims in the example: [3, 5, 4]; use dims 0 to 2",
    ),
    (
        {"x": [-4]},
        "dynamic names dim -4 of x, which has 3 dims in the example: [3, 5, 4]; use dims 0 to 2",
    ),
    (
        {"x": {1: "seq", -2: "time"}},
        "dynamic calls dim 1 of x both 'seq' and 'time'; keep one of the names",
    ),
    (
        {"mask": {1: "a"}, "more['mask']": {1: "b"}},
        "dynamic calls dim 1 of more['mask'] both 'a' and 'b'; keep one of the names",
    ),
    (
        {"x": {0: "n", 1: "n"}},
        "dynamic calls both dim 0 of x and dim 1 of x 'n', and they are 3 and 5 in the example; one name is "
        "one size: use two names, or an example in which they are the same",
    ),
    (
        {"x": ("batch", "seq")},
        "dynamic has ('batch', 'seq') for x, which has 3 dims in the example: [3, 5, 4]; give each dim a "
        "name, or None to leave it as it is",
    ),
    (
        {"x": ("batch", "seq", 8)},
        "dynamic says that dim 2 of x is 8, and it is 4 in the example; give it a name if it can have several sizes",
    ),
    (
        {"x": {1: "for"}},
        "dynamic calls dim 1 of x 'for', which cannot be the name of a size; use a word such as 'seq' that "
        "means nothing else in Python",
    ),
    (
        {"x": {1: "seq len"}},
        "dynamic calls dim 1 of x 'seq len', which cannot be the name of a size; use a word such as 'seq' "
        "that means nothing else in Python",
    ),
    (
        {"x": "seq"},
        'dynamic has \'seq\' for x; write the names by dim, {1: "seq"}, or those of all dims, ("batch", '
        '"seq"), or the dims alone, [1]',
    ),
    (
        {"x": {"1": "seq"}},
        "dynamic has {'1': 'seq'} for x; write the names by dim, {1: \"seq\"}, or those of all dims, (\"batch\", "
        '"seq"), or the dims alone, [1]',
    ),
]


@pytest.mark.parametrize(("dynamic", "message"), REFUSED)
def test_what_cannot_be_meant_is_refused(dynamic: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        pipeline(Net(), (X, {"mask": MASK}), num_stages=2, dynamic=dynamic)
    assert str(caught.value) == message


def test_a_tensor_without_dims_has_no_size_to_name() -> None:
    with pytest.raises(InputError, match=r"dim 0 of options\['extra'\], which is a tensor without dims; leave it out"):
        names_for({"extra": {0: "n"}}, extra=torch.tensor(1.0))


def test_a_size_fixed_in_a_layer_of_torch_is_reported_at_that_layer() -> None:
    """The search for the user's line went past the trace, and named the line that called pipeline()."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(0, (2, 4)))
    with pytest.warns(PipeWarning, match=r"dim 0 of input is always 8: fixed at .*modules.flatten\.py:\d+, in forward"):
        pipeline(model, (torch.ones(8, 4),), split_spec={"1": SplitPoint.BEGINNING})
