"""Bugs that were found once: each test tells the story of one."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipecut import PipeError, PipeWarning, SplitError, SplitPoint, pipeline
from tests.support.equality import assert_equals_uncut

X = torch.randn(4, 8)
BEFORE_C = {"c": SplitPoint.BEGINNING}


class Three(nn.Module):
    """Layers a, b and c around a given function of the model and a value."""

    def __init__(self, middle: Callable[[Three, Tensor], Tensor], **members: object) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle = middle
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.middle(self, self.b(self.a(x))))


def dropout_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, model.training)


def dropout_by_name(model: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, getattr(model, "training"))  # noqa: B009


@pytest.mark.parametrize("middle", [dropout_of, dropout_by_name])
def test_a_mode_that_is_read_outside_the_class_is_followed(middle: Callable[[Three, Tensor], Tensor]) -> None:
    """Looking for the name `training` in the code of the class missed functions outside it, and getattr."""
    model = Three(middle)
    uncut = copy.deepcopy(model)
    pipe = pipeline(model, (X,), split_spec=BEFORE_C)
    for training in (True, False):
        pipe.train(training)
        torch.manual_seed(1)
        actual = pipe(X)
        torch.manual_seed(1)
        assert torch.equal(actual, uncut.train(training)(X))


def test_a_result_that_is_none_in_one_mode_is_told() -> None:
    """`aux is not None` was decided at the trace, and the auxiliary loss was lost after train()."""

    class WithLoss(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            return (x, x.mean()) if self.training else (x, None)

    def middle(model: Three, x: Tensor) -> Tensor:
        x, loss = model.extra(x)  # type: ignore[operator]
        return x if loss is None else x + loss

    pipe = pipeline(Three(middle, extra=WithLoss()).eval(), (X,), split_spec=BEFORE_C)
    with pytest.raises(PipeError, match="'extra' returned None when the model was traced, and now a tensor"):
        pipe.train()(X)
    pipe = pipeline(Three(middle, extra=WithLoss()), (X,), split_spec=BEFORE_C)
    with pytest.raises(PipeError, match="'extra' returned a tuple of 2 with a tensor at 0, 1 .* and now"):
        pipe.eval()(X)


def test_a_number_that_a_module_counts_is_not_frozen() -> None:
    """The number that a whole module returned was part of the code around it, and did not count on."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x, self.count

    def middle(model: Three, x: Tensor) -> Tensor:
        x, count = model.counter(x)  # type: ignore[operator]
        return x * count

    pipe = pipeline(Three(middle, counter=Counter()), (X,), split_spec=BEFORE_C)
    pipe(X)
    counter = next(stage.counter for stage in pipe.stages if hasattr(stage, "counter"))
    counter.count += 1  # type: ignore[operator, union-attr]
    with pytest.raises(PipeError, match="'counter' returned 0 when the model was traced, and now 1"):
        pipe(X)


@pytest.mark.parametrize("value", [0, [], torch.zeros(8)], ids=["number", "list", "tensor"])
def test_an_attribute_that_a_cut_forward_sets_is_warned_of(value: object) -> None:
    """Counters and caches in plain attributes kept their values from the trace without a word."""

    def middle(model: Three, x: Tensor) -> Tensor:
        model.state = [*model.state, 1] if isinstance(model.state, list) else model.state + 1  # type: ignore[operator]
        return x

    with pytest.warns(PipeWarning, match=r"the forward of 'Three' sets self\.state, and is cut"):
        pipeline(Three(middle, state=value), (X,), split_spec=BEFORE_C)


def test_what_a_model_returns_in_the_other_mode_is_compared_too() -> None:
    """The operations were the same in both modes, and only the structure of the output was not."""

    class Tuple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            y = self.b(self.a(x))
            return (y, x) if self.training else y

    pipe = pipeline(Tuple(), (X,), split_spec={"b": SplitPoint.BEGINNING})
    assert len(pipe(X)) == 2
    with pytest.raises(PipeError, match="was cut in training mode"):
        pipe.eval()(X)


def test_constants_that_depend_on_the_mode_are_compared_too() -> None:
    def middle(model: Three, x: Tensor) -> Tensor:
        return x * (torch.tensor(0.5) if model.training else torch.tensor(2.0))

    pipe = pipeline(Three(middle), (X,), split_spec=BEFORE_C)
    with pytest.raises(PipeError, match="was cut in training mode"):
        pipe.eval()(X)


def test_two_inputs_of_one_size_may_not_differ_in_size_later() -> None:
    """A batch of 1 beside a batch of 4 broadcasts in the model; in the trace the two sizes were one symbol."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.b(self.a(x) + y) / y.shape[0]

    pipe = pipeline(Sum(), (X, X), split_spec={"b": SplitPoint.BEGINNING})
    with pytest.raises(PipeError, match=r"y \(dim 0\) has size 1, and x \(dim 0\) has 4; in the trace it is batch"):
        pipe(X, X[:1])


def test_constants_survive_to_empty() -> None:
    """Tensors made from Python values were buffers of the stage: to_empty() wiped them."""

    def middle(model: Three, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0] * 4, device=x.device) + torch.tensor(3.0)

    model = Three(middle)
    with torch.device("meta"):
        empty = Three(middle)
    pipe = pipeline(empty, (X,), split_spec={"c": SplitPoint.BEGINNING})
    for stage in pipe.stages:
        stage.to_empty(device="cpu")
        state = {name: tensor for name, tensor in model.state_dict().items() if name in stage.state_dict()}
        stage.load_state_dict(state)
    assert torch.equal(pipe(X), model(X))


def test_a_buffer_written_through_a_view_in_two_stages_is_refused() -> None:
    """Only writes to the buffer itself were looked for, and each stage had a cache of its own."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(16, 8))
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.cache[: x.shape[0]].copy_(x)
            return self.b(self.a(x)) + self.cache[: x.shape[0]]

    with pytest.raises(SplitError, match=r"buffer cache is updated in forward and used by stages \[0, 1\]"):
        pipeline(Cache(), (X,), split_spec={"b": SplitPoint.BEGINNING})


def test_modules_in_a_plain_list_keep_their_parameters() -> None:
    """Copies of unregistered modules had parameters of their own, and the model's got no gradients."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(8, 8)]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    hidden = Hidden()
    model = nn.Sequential(nn.Linear(8, 8), hidden, nn.Linear(8, 8))
    pipe = pipeline(model, (X,), split_spec={"1": SplitPoint.BEGINNING})
    pipe(X).sum().backward()
    actual = hidden.layers[0].weight.grad
    hidden.layers[0].weight.grad = None
    model(X).sum().backward()
    assert actual is not None
    assert torch.equal(actual, hidden.layers[0].weight.grad)


class Holding(nn.Module):
    """A block whose activation is a function that holds on to the block."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(2.0))
        scaled = lambda x: x * self.scale  # noqa: E731
        self.kept: object = {
            "function": scaled,
            "in a dict": {"scaled": scaled},
            "nested": lambda x: scaled(x),
            "bound": self.scaled,
            "partial": functools.partial(Holding.scaled, self),
        }[how]

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        function = self.kept["scaled"] if isinstance(self.kept, dict) else self.kept
        return function(self.linear(x))  # type: ignore[operator]


@pytest.mark.parametrize("how", ["function", "in a dict", "nested", "bound", "partial"])
def test_functions_that_hold_on_to_a_module_use_the_stages_parameters(how: str) -> None:
    """A copied block called a function that went on using the original block's parameters."""
    model = nn.Sequential(nn.Linear(8, 8), Holding(how), nn.Linear(8, 8))
    pipe = pipeline(model, (X,), split_spec={"1": SplitPoint.BEGINNING})
    before = pipe(X)
    stage = pipe.get_stage_module(1)
    changed = {name: tensor.detach().clone() for name, tensor in stage.state_dict().items()}
    changed["1.scale"] = torch.tensor(-2.0)
    stage.load_state_dict(changed, assign=True)
    expected = model[2](model[1].linear(model[0](X)) * -2.0)
    torch.testing.assert_close(pipe(X), expected)
    assert not torch.equal(pipe(X), before)


def test_a_reentrant_checkpoint_without_gradients_sends_none() -> None:
    """Its results have no gradient at run time, and the edge said that they had."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.a, x, use_reentrant=True))

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        pipe = assert_equals_uncut(First(), (X,), split_spec={"b": SplitPoint.BEGINNING}, expect_stages=2)
    assert [edge.spec.requires_grad for edge in pipe.edges] == [False]


def test_a_block_around_a_module_that_is_cut_elsewhere_is_not_called_as_it_is() -> None:
    """A shared module had generated code for its other call, and a whole block around it ran into that."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.outer = nn.Sequential(self.inner, nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.inner(x))

    assert_equals_uncut(Shared(), (X,), split_spec={"inner.1": SplitPoint.BEGINNING}, expect_stages=2)


def test_dropout_that_passes_its_input_through_is_one_memory_with_it() -> None:
    """In evaluation mode dropout returns its argument itself; a write after the cut reached only one of the two."""

    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            y = self.drop(x)
            z = self.b(x)
            y.add_(1)
            return z + x

    with pytest.raises(SplitError, match="are views of one tensor"):
        pipeline(Passing().eval(), (X,), split_spec={"b": SplitPoint.BEGINNING})


def test_a_stage_lets_go_of_values_as_the_model_does() -> None:
    """The variables of generated code kept every block's output until the stage was done."""
    alive: list[int] = []
    outputs: list[weakref.ref[Tensor]] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            outputs.append(weakref.ref(x))
            alive.append(sum(output() is not None for output in outputs))
            return super().forward(x)

    pipe = pipeline(nn.Sequential(*(Watched(8, 8) for _ in range(6))), (X,), split_spec={"5": SplitPoint.BEGINNING})
    alive.clear()
    outputs.clear()
    with torch.no_grad():
        pipe.get_stage_module(0)(X)
    assert alive == [1, 2, 2, 2, 2], "the caller holds the first input, and each block its own"


def test_a_module_that_a_block_only_refers_to_comes_along() -> None:
    """A block kept a reference to its parent's dropout, which was in no stage, and called None."""

    class Borrowing(nn.Module):
        def __init__(self, lender: nn.Module) -> None:
            super().__init__()
            self.linear, self.borrowed = nn.Linear(8, 8), [lender]

        def forward(self, x: Tensor) -> Tensor:
            return self.borrowed[0](self.linear(x))

    class Lending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tanh, self.a = nn.Tanh(), nn.Linear(8, 8)
            self.b = Borrowing(self.tanh)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.tanh(self.a(x)))

    assert_equals_uncut(Lending(), (X,), split_spec={"b": SplitPoint.BEGINNING}, expect_stages=2)


def test_a_buffer_that_is_updated_in_the_other_mode_only_is_not_shared_by_stages() -> None:
    """Cut in evaluation mode, the average was read by another stage, which had an old copy after train()."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.lerp_(x.detach().mean(0), 0.1)
            return x - self.mean

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.average, self.a = Average(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.average(x)) + self.average.mean

    for training in (True, False):
        with pytest.raises(SplitError, match=r"buffer average\.mean is updated in forward and used by stages \[0, 1\]"):
            pipeline(Reading().train(training), (X,), split_spec={"a": SplitPoint.BEGINNING})


class Masked(nn.Module):
    """A mask with one row, for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.b(self.a(x) * mask)


def test_an_input_with_one_row_is_broadcast_over_the_batch() -> None:
    """Its one row was traced as a batch of its own, which cannot be broadcast: the trace failed."""
    model, mask = Masked(), torch.rand(1, 4)
    pipe = pipeline(model, (torch.randn(3, 4), mask), split_spec={"b": SplitPoint.BEGINNING})
    x = torch.randn(7, 4)
    assert torch.equal(pipe(x, mask), model(x, mask))


class Difference(nn.Module):
    """A model of two inputs, which examples often pass as one tensor: `labels=ids`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.c(self.a(x) - y)


@pytest.mark.parametrize("tracer", ["export", "fx"])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_an_example_that_passes_one_tensor_twice_has_two_inputs(tracer: str, needs_gradient: bool) -> None:
    """torch.export took the two for one input, and a call with two different tensors was silently wrong."""
    model, one = Difference(), X.clone().requires_grad_(needs_gradient)
    pipe = pipeline(model, (one, one), split_spec=BEFORE_C, tracer=tracer)
    assert [entry.path for entry in pipe.traced.inputs] == ["x", "y"]
    x, y = torch.randn(2, 4, 8)
    torch.testing.assert_close(pipe(x, y), model(x, y))
    torch.testing.assert_close(pipe(x, x), model(x, x))


class Pairs(nn.Module):
    """A forward that uses a sequence's length as an argument, and splits the sequence in a way that fixes it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + x.new_ones(1, x.shape[1], 1)
        return torch.cat([part * 2 for part in self.c(x).split(2, dim=1)], 1)


def test_a_sequence_of_one_is_a_number_and_not_true() -> None:
    """A size that had become the plain number 1 was taken for True, and the cut refused as a value from outside."""
    model, x = Pairs(), torch.randn(1, 1, 8)
    pipe = pipeline(model, (x,), split_spec=BEFORE_C, dynamic={"x": {1: "seq"}})
    assert torch.equal(pipe(x), model(x))


def test_an_output_that_is_a_device() -> None:
    """The caches of SpeechT5 have their device as an attribute, and no other line of its last stage named one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, object]:
            y = self.c(self.a(x))
            return {"y": y, "device": y.device}

    model = Net()
    pipe = pipeline(model, (X,), split_spec=BEFORE_C)
    assert pipe(X)["device"] == X.device
    torch.testing.assert_close(pipe(X)["y"], model(X)["y"])
