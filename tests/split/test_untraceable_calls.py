"""Modules that stay as they are, called in all the ways in which modules are called, give what they give uncut."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from pipecut import Pipe, SplitError, SplitPoint, pipeline
from tests.split.untraceable_models import WIDTH, Branching, Experts, sequential


def cut_and_compare(model: nn.Module, *others: tuple[Any, ...], at: str, **options: Any) -> Pipe:
    """Cut before a module, and compare outputs, gradients by name and buffers for calls of other sizes."""
    pipe = pipeline(model, others[0], split_spec={at: SplitPoint.BEGINNING}, tracer="fx", **options)
    assert pipe.traced.fallbacks
    for args in others:
        torch.manual_seed(0)
        reference = copy.deepcopy(model)
        state = copy.deepcopy(model.state_dict())
        expected = reference(*(copy.deepcopy(arg) for arg in args))
        torch.manual_seed(0)
        actual = pipe(*(copy.deepcopy(arg) for arg in args))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        model.zero_grad(set_to_none=True)
        reference.zero_grad(set_to_none=True)
        _total(expected).backward()
        _total(actual).backward()
        own = dict(model.named_parameters())
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(own[name].grad, parameter.grad, rtol=0, atol=0, msg=name)
        after = {key: value for stage in pipe.stages for key, value in stage.state_dict().items()}
        torch.testing.assert_close(after, dict(reference.state_dict()), rtol=0, atol=0)
        for stage in pipe.stages:
            stage.load_state_dict({key: state[key] for key in stage.state_dict()})
    return pipe


def _total(output: Any) -> Tensor:
    tensors = output if isinstance(output, tuple) else (output,)
    return sum((tensor.sum() for tensor in tensors if isinstance(tensor, Tensor)), torch.zeros(()))


def batches(*shape: int) -> list[tuple[Tensor, ...]]:
    """One input in three batch sizes."""
    torch.manual_seed(1)
    return [(torch.randn(size, *shape),) for size in (4, 7, 1)]


class Around(nn.Module):
    """A block between layers; what it is given and gives is said by the subclass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(WIDTH, WIDTH), block
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.block(self.first(x)))


def decide(x: Tensor) -> bool:
    """What cannot be traced, in one word."""
    return x.sum().item() > 0


class Recalled(Around):
    def forward(self, x: Tensor) -> Any:
        h = self.block(self.first(x))
        return self.last(h) + self.block(h)


def test_a_module_called_twice() -> None:
    pipe = cut_and_compare(Recalled(Branching()), *batches(WIDTH), at="block#1")
    assert [item.path for item in pipe.traced.fallbacks] == ["block"]
    assert "block#1" in pipe.stage_infos[1].modules
    assert {name for tie in pipe.tied_parameters for name in tie.names} >= {"block.high.weight", "block.low.bias"}


class WritesInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return x * 3 if decide(x) else x * 5


class UsesWritten(Around):
    def forward(self, x: Tensor) -> Any:
        h = self.first(x) * 1
        y = self.block(h)
        return self.last(y) + h


def test_a_module_that_writes_to_its_argument() -> None:
    pipe = cut_and_compare(UsesWritten(WritesInPlace()), *batches(WIDTH), at="last")
    assert len(pipe.edges) == 2
    cut_and_compare(UsesWritten(WritesInPlace()), *batches(WIDTH), at="block")


class HandsOn(nn.Module):
    """Returns its argument, and a view of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if decide(x):
            return x, x[:, 1:]
        return x, x[:, 1:]


class WritesToView(Around):
    def forward(self, x: Tensor) -> Any:
        same, view = self.block(self.first(x) * 1)
        view.mul_(2)
        return self.last(same)


def test_results_that_share_memory_with_an_argument() -> None:
    cut_and_compare(WritesToView(HandsOn()), *batches(WIDTH)[:2], at="last")
    model = WritesToViewAcross(HandsOn())
    with pytest.raises(SplitError, match="one of them in place|another view of it in place"):
        pipeline(model, batches(WIDTH)[0], split_spec={"middle": SplitPoint.BEGINNING}, tracer="fx")


class WritesToViewAcross(Around):
    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.middle = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        same, view = self.block(self.first(x) * 1)
        view = self.middle(view)
        view.mul_(2)
        return self.last(same)


class ManyResults(nn.Module):
    """A tensor, a size, a number, None, text, a parameter, and a tensor without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = x * self.weight if decide(x) else x * self.weight * 2
        return y, x.shape[0], 3, None, "text", self.weight, y.detach(), (x > 0), y.t()


class TakesMany(Around):
    def forward(self, x: Tensor) -> Any:
        y, rows, number, nothing, text, weight, quiet, positive, turned = self.block(self.first(x))
        assert nothing is None
        assert text == "text"
        h = self.last(y).reshape(rows, -1) * number + weight
        return h, quiet * positive, turned @ h


def test_many_kinds_of_results() -> None:
    model = TakesMany(ManyResults())
    pipe = cut_and_compare(model, *batches(WIDTH), at="last")
    specs = sorted(str(edge.spec) for edge in pipe.edges)
    assert specs == [
        "bool[batch, 8]",
        "float32[8] grad",  # the parameter
        "float32[batch, 8]",
        "float32[batch, 8] grad",
        "float32[batch, 8] grad",  # the transposed one goes as it lies in memory
    ]


class Checkpointing(Around):
    def forward(self, x: Tensor) -> Any:
        h = torch.utils.checkpoint.checkpoint(self.block, self.first(x), use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.block(h)
        with torch.no_grad():
            shift = self.block(x)
        return self.last(h.float() + shift)


def test_checkpoints_autocast_and_no_grad_around() -> None:
    cut_and_compare(Checkpointing(Branching()), *batches(WIDTH), at="last")


class Drawing(nn.Module):
    """Draws random numbers, of torch's and Python's, and updates a running mean."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        self.mean.mul_(0.99)
        return nn.functional.dropout(self.norm(x), 0.5) if decide(x) else self.norm(x)


def test_the_model_and_the_generators_stay_as_they_were() -> None:
    model = Around(Drawing())
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    pipeline(model, (x,), num_stages=2, tracer="fx")
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.equal(x, kept)
    assert type(model.block) is Drawing


def test_buffers_and_random_numbers() -> None:
    cut_and_compare(Around(Drawing()), *batches(WIDTH)[:2], at="last")


def test_a_symbolic_sequence() -> None:
    model = Around(Branching())
    torch.manual_seed(2)
    calls = [(torch.randn(rows, length, WIDTH),) for rows, length in ((4, 6), (3, 9), (1, 1))]
    pipe = cut_and_compare(model, *calls, at="last", dynamic={"x": {1: "seq"}})
    assert str(pipe.edges[0].spec) == "float32[batch, seq, 8] grad"


class Flattening(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return flat * 2 if decide(flat) else flat


def test_a_product_of_symbolic_sizes() -> None:
    torch.manual_seed(2)
    calls = [(torch.randn(rows, length, WIDTH),) for rows, length in ((4, 6), (3, 9))]
    pipe = cut_and_compare(Around(Flattening()), *calls, at="last", dynamic={"x": {1: "seq"}})
    assert str(pipe.edges[0].spec) == "float32[batch*seq, 8] grad"


def test_experts_inside_a_block_that_is_traced() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.experts = nn.LayerNorm(WIDTH), Experts()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.experts(self.norm(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    pipe = cut_and_compare(model, *batches(WIDTH), at="2.experts")
    assert [item.path for item in pipe.traced.fallbacks] == [f"{number}.experts" for number in range(4)]
    assert pipe.stage_infos[0].modules == ("0", "1", "2.norm")


def test_a_hook_on_a_model_that_is_cut_around_such_a_module() -> None:
    model = Around(Branching())
    model.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.warns(UserWarning, match="has a forward hook and is cut"):
        cut_and_compare(model, *batches(WIDTH), at="last")


class Plan:
    """A Python object that only the model's own code can make."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Planned(nn.Module):
    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        return x * plan.factor if decide(x) else x


class MakesPlans(Around):
    def forward(self, x: Tensor) -> Any:
        return self.last(self.block(self.first(x), Plan(2.0)))


def test_an_argument_that_generated_code_cannot_make() -> None:
    x = batches(WIDTH)[0]
    with pytest.raises(
        SplitError, match=r"'block' could not be traced \(.*neither a tensor nor a plain value.*Pass it"
    ):
        pipeline(MakesPlans(Planned()), x, split_spec={"last": SplitPoint.BEGINNING}, tracer="fx")
    model = nn.Sequential(MakesPlans(Planned()), nn.Linear(WIDTH, WIDTH))
    cut_and_compare(model, *batches(WIDTH), at="1")


def test_names_are_the_models() -> None:
    model = sequential(Branching)
    pipe = pipeline(model, (torch.randn(4, WIDTH, dtype=torch.double),), num_stages=3, tracer="fx")
    assert {key for stage in pipe.stages for key in stage.state_dict()} == set(model.state_dict())
    assert pipe.unused_parameters == ()
