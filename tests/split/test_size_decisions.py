"""What a forward decides by a size holds for other sizes too, or is refused: a cut model never gives a wrong number."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipecut import InputError, Pipe, PipeError, SplitPoint, pipeline
from tests.support.equality import assert_same_run, pipeline_once, rebuild_all, run_apart, run_in_one_graph, run_uncut
from tests.support.nested_values import Call, fresh
from tests.support.separate_stages import SeparateRanks

BEFORE_C = {"c": SplitPoint.BEGINNING}
EXAMPLE_BATCH = 4


class Three(nn.Module):
    """Layers a, b and c around a given function of the model, the model's input and a value."""

    def __init__(self, middle: Callable[[Three, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.middle(self, x, self.a(x)))


def cut(middle: Callable[[Three, Tensor, Tensor], Tensor]) -> tuple[Pipe, Three]:
    """A pipe traced with the example batch, and an uncut copy of its model."""
    model = Three(middle)
    uncut = copy.deepcopy(model)
    return pipeline(model, (torch.randn(EXAMPLE_BATCH, 8),), split_spec=BEFORE_C), uncut


def assert_same_with(pipe: Pipe, uncut: nn.Module, *args: Tensor) -> None:
    """Outputs and gradients of one call, with the stages in one graph and apart."""
    call: Call = (args, {})
    for run in (run_in_one_graph, run_apart):
        expected = run_uncut(uncut, fresh(call), 0)
        assert_same_run(run(pipe, fresh(call), 0), expected, f"{run.__name__}, batch {len(args[0])}", set())


def tripled_if_large(model: Three, x: Tensor, h: Tensor) -> Tensor:
    return h * 3 if x.shape[0] > 2 else h


def checked(model: Three, x: Tensor, h: Tensor) -> Tensor:
    torch._check(x.shape[0] > 2, lambda: "too few")
    return model.b(h)


def normed_unless_single(model: Three, x: Tensor, h: Tensor) -> Tensor:
    return h if x.shape[0] == 1 else (h - h.mean(0)) / h.std(0)


def by_chunks(model: Three, x: Tensor, h: Tensor) -> Tensor:
    return torch.cat([model.b(chunk) for chunk in h.split(2)])


def mean_of_the_first(model: Three, x: Tensor, h: Tensor) -> Tensor:
    first = h[:8]
    return h + first.sum(0) / first.shape[0]


@pytest.mark.parametrize("batch", [3, 4, 7])
@pytest.mark.parametrize("middle", [tripled_if_large, checked, normed_unless_single])
def test_sizes_on_the_same_side_of_a_branch_are_taken(
    middle: Callable[[Three, Tensor, Tensor], Tensor], batch: int
) -> None:
    pipe, uncut = cut(middle)
    assert_same_with(pipe, uncut, torch.randn(batch, 8))


@pytest.mark.parametrize(
    ("middle", "batch", "condition"),
    [
        (tripled_if_large, 2, "batch > 2"),
        (tripled_if_large, 1, "batch > 2"),
        (checked, 2, "batch > 2"),
        (normed_unless_single, 1, "batch != 1"),
    ],
)
def test_sizes_on_the_other_side_of_a_branch_are_refused_with_the_condition(
    middle: Callable[[Three, Tensor, Tensor], Tensor], batch: int, condition: str
) -> None:
    """The branch that the example took was part of the trace, and every later batch took it too."""
    pipe, _ = cut(middle)
    with pytest.raises(InputError, match=condition):
        pipe(torch.randn(batch, 8))


def squeezed(model: Three, x: Tensor, h: Tensor) -> Tensor:
    return h.unsqueeze(1).squeeze()


def answer(pipe: Pipe, x: Tensor) -> Tensor | str:
    """What a call gives with the stages apart, or the message with which it is refused."""
    try:
        return SeparateRanks(pipe, ((x,), {})).forward()
    except InputError as error:
        return str(error)


@pytest.mark.parametrize(
    ("middle", "sure", "refused"),
    [(by_chunks, (4,), (1, 2, 5, 7)), (mean_of_the_first, (4, 7), ()), (squeezed, (4, 7), ())],
)
def test_sizes_that_change_a_number_of_parts_are_right_or_refused(
    middle: Callable[[Three, Tensor, Tensor], Tensor], sure: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    """A loop over chunks ran as often as in the example, a slice was as long, a value had as many dims."""
    pipe, uncut = cut(middle)
    for batch in range(1, 12):
        x = torch.randn(batch, 8)
        actual = answer(pipe, x)
        if isinstance(actual, str):
            assert "batch" in actual
            assert batch not in sure, actual
        else:
            assert torch.equal(actual, uncut(x)), f"batch {batch}"
            assert batch not in refused


@pytest.mark.parametrize("number", [len, lambda x: sum(1.0 for _ in x), lambda x: int(x.shape[0])])
def test_a_plain_number_that_was_one_in_the_example(number: Callable[[Tensor], float]) -> None:
    """torch leaves a size symbolic that the code took as the number 1: every batch was taken to have one row."""
    model = Three(lambda model, x, h: h * number(x))
    pipe = pipeline(model, (torch.randn(1, 8),), split_spec=BEFORE_C)
    for batch in (1, 2, 3):
        x = torch.randn(batch, 8)
        actual = answer(pipe, x)
        assert isinstance(actual, str) if batch > 1 else torch.equal(actual, model(x))  # type: ignore[arg-type]


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3 if x.shape[0] > 2 else x


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


@pytest.mark.parametrize(
    "make",
    [
        Branching,
        lambda: Recurrent(8, 8, batch_first=True),
        pytest.param(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), marks=pytest.mark.slow),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
    ],
    ids=["branch", "LSTM", "transformer", "transformer in eval"],
)
def test_a_block_that_is_whole_may_decide_anew_at_each_call(make: Callable[[], nn.Module]) -> None:
    """Its own code runs, not its trace: torch's own layers look whether a size is 1, and work for both."""
    model = nn.Sequential(nn.Linear(8, 8), make(), nn.Linear(8, 8))
    uncut = copy.deepcopy(model)
    pipe = pipeline(model, (torch.randn(EXAMPLE_BATCH, 5, 8),), split_spec={"2": SplitPoint.BEGINNING})
    for batch in (1, 2, 3, 7):
        assert_same_with(pipe, uncut, torch.randn(batch, 5, 8))


def test_a_condition_on_two_sizes_names_both() -> None:
    class Longer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x, y = self.a(x), self.a(y)
            return self.b(x.sum(0) if x.shape[0] > y.shape[0] else y.sum(0))

    model = Longer()
    pipe = pipeline(model, (torch.randn(6, 8), torch.randn(3, 8)), split_spec={"b": SplitPoint.BEGINNING})
    assert_same_with(pipe, copy.deepcopy(model), torch.randn(5, 8), torch.randn(4, 8))
    with pytest.raises(PipeError, match="batch > y_dim0|y_dim0 < batch"):
        pipe(torch.randn(4, 8), torch.randn(5, 8))


class Block(nn.Module):
    """A transformer block that reads sizes and reshapes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (part.view(B, T, 2, D // 2).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.norm2(x))


class Flattening(Three):
    """Reshapes by the batch directly in the forward that is cut."""

    def forward(self, x: Tensor) -> Tensor:
        B = x.shape[0]
        h = self.b(self.a(x.reshape(B, -1))).view(B, 2, 4)
        return self.c(h.reshape(B, -1)) / B


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).eval()


@pytest.mark.parametrize("way", [pipeline_once, rebuild_all])
@pytest.mark.parametrize(
    ("make", "shape", "path"),
    [
        pytest.param(lambda: nn.Sequential(Block(), Block()), (5, 8), "1", marks=pytest.mark.slow),
        (lambda: nn.Sequential(Block(), Block()), (5, 8), "1.mlp"),
        (convolutions, (3, 8, 8), "3"),
        (lambda: Flattening(tripled_if_large), (2, 4), "c"),
    ],
    ids=["transformer", "inside a block", "convolutions", "reshape"],
)
def test_models_that_decide_nothing_take_any_batch(
    make: Callable[[], nn.Module], shape: tuple[int, ...], path: str, way: Callable[..., Pipe]
) -> None:
    model = make()
    uncut = copy.deepcopy(model)
    pipe = way(model, ((torch.randn(EXAMPLE_BATCH, *shape),), {}), {path: SplitPoint.BEGINNING})
    for batch in (1, 2, 3, 7):
        assert_same_with(pipe, uncut, torch.randn(batch, *shape))
