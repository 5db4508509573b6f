"""What a trace forgets is refused in a forward that is cut, and works in a block that is whole."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from pipecut import Pipe, SplitError, SplitPoint, pipeline
from tests.support.equality import assert_same_run, run_apart, run_in_one_graph, run_uncut
from tests.support.nested_values import Call, fresh
from tests.support.sampling import sampled

X = torch.randn(4, 8)
CALL: Call = ((X,), {})
PACKED: list[torch.Size] = []
NOTED: list[float] = []


@torch.library.custom_op("pipecut_tests::note", mutates_args=())
def note(x: Tensor) -> None:
    """Writes down a sum, and returns nothing."""
    NOTED.append(float(x.sum()))


@note.register_fake
def _(x: Tensor) -> None:
    return None


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 5)
    return x * 2


def inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = x * 2
    return x + y.clone()


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.randn_like(x)


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        noise = torch.rand_like(x)
    return x + noise * torch.rand_like(x)


def pack(tensor: Tensor) -> Tensor:
    PACKED.append(tensor.shape)
    return tensor


def packed(x: Tensor) -> Tensor:
    with saved_tensors_hooks(pack, lambda tensor: tensor * 3):
        return x.tanh()


def offloaded(x: Tensor) -> Tensor:
    with save_on_cpu():
        return x.tanh()


FORGOTTEN = [
    ("a hook on a tensor or on its grad_fn", hooked),
    ("inference_mode", inferred),
    ("manual_seed", seeded),
    ("fork_rng", forked),
    ("hooks on saved tensors", packed),
    ("save_on_cpu", offloaded),  # hooks on saved tensors of torch's own
]


class Block(nn.Module):
    """Two layers with a given function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


def around(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Block(function), nn.Linear(8, 8))


def whole(function: Callable[[Tensor], Tensor]) -> tuple[Pipe, nn.Sequential]:
    """A pipe in which the block with the function is whole, and an uncut copy of its model."""
    model = around(function)
    uncut = copy.deepcopy(model)
    return pipeline(model, (X,), split_spec={"2": SplitPoint.BEGINNING}), uncut


@pytest.mark.parametrize(("name", "function"), sampled(FORGOTTEN, lambda case: case[1] is not offloaded))
def test_in_a_forward_that_is_cut_it_is_refused(name: str, function: Callable[[Tensor], Tensor]) -> None:
    """The operations of the trace ran without it: other gradients, other random numbers, other memory."""
    cuts = {"Block": (Block(function), "b"), "1": (around(function), "1.b")}
    for cut_module, (model, path) in cuts.items():
        with pytest.raises(SplitError, match="a module that is not cut") as error:
            pipeline(model, (X,), split_spec={path: SplitPoint.BEGINNING})
        assert name in str(error.value)
        assert f"'{cut_module}'" in str(error.value)


@pytest.mark.parametrize(("name", "function"), sampled(FORGOTTEN, lambda case: case[1] not in (packed, offloaded)))
def test_in_a_block_that_is_whole_it_works(name: str, function: Callable[[Tensor], Tensor]) -> None:
    pipe, uncut = whole(function)
    for run in (run_in_one_graph, run_apart):
        expected = run_uncut(uncut, fresh(CALL), 0)
        assert_same_run(run(pipe, fresh(CALL), 0), expected, run.__name__, set())


def test_a_hook_on_a_tensor_in_a_whole_block_scales_the_gradient() -> None:
    pipe, uncut = whole(hooked)
    pipe(X).sum().backward()
    without = copy.deepcopy(uncut)
    without[1].function = lambda x: x * 2
    without(X).sum().backward()
    torch.testing.assert_close(pipe.traced.model[0].weight.grad, without[0].weight.grad * 5)


def test_hooks_on_saved_tensors_in_a_whole_block_run_at_each_call() -> None:
    pipe, _ = whole(packed)
    PACKED.clear()
    pipe(X)
    pipe(X[:3])
    assert PACKED == [(4, 8), (3, 8)]


def test_a_seed_in_a_whole_block_is_set_at_each_call() -> None:
    pipe, _ = whole(seeded)
    torch.manual_seed(1)
    first = pipe(X)
    torch.manual_seed(2)
    assert torch.equal(pipe(X), first)


def test_a_fork_of_the_random_numbers_in_a_whole_block_leaves_them_as_they_were() -> None:
    pipe, uncut = whole(forked)
    states = []
    for model in (pipe, uncut):
        torch.manual_seed(1)
        model(X)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("path", ["b", "a"])
def test_an_operation_without_results_runs_once_per_call(path: str) -> None:
    """Nothing used its result, and so it was left out of the stages."""

    def noted(x: Tensor) -> Tensor:
        note(x.detach())
        return x.tanh()

    model = Block(noted)
    where = SplitPoint.BEGINNING if path == "b" else SplitPoint.END
    pipe = pipeline(model, (X,), split_spec={path: where})
    NOTED.clear()
    for batch in (X, X[:3]):
        assert torch.equal(pipe(batch), model(batch))
    assert len(NOTED) == 4
    assert NOTED[0] == NOTED[1]
    assert NOTED[2] == NOTED[3]


def test_an_assertion_on_values_is_kept() -> None:
    def asserted(x: Tensor) -> Tensor:
        torch._assert_async((x < 100).all())
        return x.tanh()

    pipe = pipeline(Block(asserted), (X,), split_spec={"b": SplitPoint.BEGINNING})
    pipe(X)
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        pipe(X * 1e4)
