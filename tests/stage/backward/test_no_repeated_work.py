"""Split in two, a backward runs no operation twice, and calls every hook once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from pipecut.stage import PipelineStage
from pipecut.stage.backward import StageWeights, input_backward, weight_backward
from tests.stage.backward.runs import (
    CASES_AND_WAYS,
    WAYS,
    Microbatch,
    assert_same_gradients,
    choose_way,
    forward,
    gradients_of,
    is_quick,
    run_step,
    run_torch,
    torch_backward,
)
from tests.stage.backward.stages import CASES, PRODUCTS, REENTRANT, StageCase, floats, linears, rows, stack
from tests.support.sampling import sampled


class Flops(TorchDispatchMode):
    """Adds up what products cost. torch's own FlopCounterMode also puts hooks everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        self.total += 0 if count is None else int(count(*args, **(kwargs or {}), out_val=made))
        return made


def flops(operation: str, batch: Microbatch, weights: Any = None) -> int:
    with Flops() as counted:
        torch_backward(batch) if operation == "torch" else run_step(operation, batch, weights)
    return counted.total


@pytest.mark.parametrize(("case", "way"), sampled(CASES_AND_WAYS, is_quick), ids=str)
def test_no_product_is_computed_twice(case: StageCase, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = case.module()
    weights = choose_way(way, monkeypatch)(module)
    batch = forward(case, module, 0)
    inputs_part = flops("I", batch, weights)
    weights_part = flops("W", batch)
    assert inputs_part + weights_part == flops("torch", forward(case, module, 0))


@pytest.mark.parametrize(
    "case", [case for case in PRODUCTS if "sparse" not in case.name and "parameter" not in case.name], ids=str
)
def test_half_of_the_products_can_wait(case: StageCase, monkeypatch: pytest.MonkeyPatch) -> None:
    module = case.module()
    weights = choose_way("deferred", monkeypatch)(module)
    batch = forward(case, module, 0)
    assert flops("I", batch, weights) == flops("W", batch) > 0


@pytest.mark.parametrize(
    "name",
    [
        "tied embedding and head",
        "weight norm",
        "symmetric weight",
        "low-rank update",
        "rounded weight",
        "slices of one weight",
        "a layer used twice",
        "convolution",
        "transposed convolution",
        "attention",
        "transformer block",
        "autocast",
        "a branch without input",
    ],
)
def test_products_with_weights_of_many_kinds_can_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in CASES if case.name == name)
    module = case.module()
    weights = choose_way("deferred", monkeypatch)(module)
    batch = forward(case, module, 0)
    run_step("I", batch, weights)
    assert flops("W", batch) > 0


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("name", ["input that needs no gradient", "no input has influence", "first stage, of tokens"])
def test_all_can_wait_if_no_input_wants_a_gradient(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in CASES if case.name == name)
    module = case.module()
    weights = choose_way(way, monkeypatch)(module)
    batch = forward(case, module, 0)
    assert flops("I", batch, weights) == 0
    assert flops("W", batch) > 0


@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_parameters(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are called once, in the weight part; what they return is what is added, and then .grad is complete."""
    module = linears(lambda self, value: self.second(self.first(self.first(value))))()
    calls: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.grad = torch.ones_like(parameter)

        def change(gradient: Tensor, name: str = name) -> Tensor:
            calls.append(f"{name} arrives")
            return gradient * 2

        def look(parameter: Tensor, name: str = name) -> None:
            calls.append(f"{name} is added")
            assert parameter.grad is not None
            assert not torch.equal(parameter.grad, torch.ones_like(parameter))

        parameter.register_hook(change)
        parameter.register_post_accumulate_grad_hook(look)
    weights = choose_way(way, monkeypatch)(module)
    inputs = floats(6, 8)
    _, pending = input_backward([module(inputs)], [torch.ones(6, 8)], [inputs], weights)
    assert calls == []
    weight_backward(pending)
    expected = [f"{name} {what}" for name, _ in module.named_parameters() for what in ("arrives", "is added")]
    assert sorted(calls) == sorted(expected)
    for name, parameter in module.named_parameters():
        assert len(parameter._backward_hooks) == 1, name
    plain = linears(lambda self, value: self.second(self.first(self.first(value))))()
    plain.load_state_dict(module.state_dict())
    plain(inputs).sum().backward()
    doubled = {name: 1 + 2 * parameter.grad for name, parameter in plain.named_parameters()}  # type: ignore[operator]
    assert_same_gradients("", gradients_of(module), doubled, exact=False)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_inputs_and_activations(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are called once, in the input part."""
    module = stack()
    weights = choose_way(way, monkeypatch)(module)
    calls: list[str] = []
    inputs = floats(6, 8)
    inputs.register_hook(lambda gradient: calls.append("input"))
    hidden = module[:2](inputs)  # type: ignore[index]
    hidden.register_hook(lambda gradient: calls.append("hidden"))
    output = module[2:](hidden)  # type: ignore[index]
    output.register_hook(lambda gradient: calls.append("output"))
    _, pending = input_backward([output], [torch.ones(6, 8)], [inputs], weights)
    assert calls == ["output", "hidden", "input"]
    weight_backward(pending)
    assert calls == ["output", "hidden", "input"]


def test_hooks_that_only_a_full_backward_can_call() -> None:
    """torch refuses hooks on several tensors, leaves among them, in a backward for chosen tensors."""
    module = nn.Linear(2048, 2048)
    weights = StageWeights(module.parameters())
    inputs = floats(64, 2048)
    with FlopCounterMode(display=False) as counter:  # which puts such hooks on what goes into a module
        output = module(inputs)
        forward_flops = counter.get_total_flops()
        _, pending = input_backward([output], [torch.ones(64, 2048)], [inputs], weights)
        weight_backward(pending)
    assert counter.get_total_flops() == 3 * forward_flops
    assert module.weight.grad is not None


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_modules(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = stack()
    weights = choose_way(way, monkeypatch)(module)
    calls: list[str] = []
    for name, layer in module.named_children():
        layer.register_full_backward_hook(lambda *_, name=name: calls.append(name))
    inputs = floats(6, 8)
    _, pending = input_backward([module(inputs)], [torch.ones(6, 8)], [inputs], weights)
    weight_backward(pending)
    assert calls == ["3", "2", "1", "0"]


@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_accumulators(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As data-parallel wrappers put them: who holds an accumulator is seen, though its hooks cannot be listed."""
    module = stack()
    held = {name: get_gradient_edge(parameter).node for name, parameter in module.named_parameters()}
    calls: list[str] = []
    for name, accumulator in held.items():
        accumulator.register_hook(lambda *_, name=name: calls.append(name))
    weights = choose_way(way, monkeypatch)(module)
    inputs = floats(6, 8)
    _, pending = input_backward([module(inputs)], [torch.ones(6, 8)], [inputs], weights)
    assert calls == []
    weight_backward(pending)
    assert sorted(calls) == sorted(held)


def test_hooks_on_accumulators_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stack()
    weights = choose_way("at once", monkeypatch)(module)
    assert weights.has_no_gradient_listeners()
    calls: list[str] = []
    held = {name: get_gradient_edge(parameter).node for name, parameter in module.named_parameters()}
    for name, accumulator in held.items():
        accumulator.register_hook(lambda *_, name=name: calls.append(name))
    weights.refresh()
    assert not weights.has_no_gradient_listeners()
    inputs = floats(6, 8)
    _, pending = input_backward([module(inputs)], [torch.ones(6, 8)], [inputs], weights)
    assert calls == []
    weight_backward(pending)
    assert sorted(calls) == sorted(held)
    del held, accumulator
    weights.refresh()
    assert weights.has_no_gradient_listeners()


def test_a_stage_keeps_its_weights_from_step_to_step_until_they_change() -> None:
    stage = PipelineStage(stack(), 0, 1, "cpu")
    first = stage.weights
    stage.begin_step()
    assert stage.weights is first
    stage.submod.get_parameter("0.bias").requires_grad_(False)
    stage.begin_step()
    assert len(stage.weights.parameters) == len(first.parameters) - 1
    # A wrapper holds accumulators without a hook that torch counts.
    held = get_gradient_edge(stage.submod.get_parameter("0.weight")).node
    stage.begin_step()
    assert not stage.weights.has_no_gradient_listeners()
    del held
    stage.begin_step()
    assert stage.weights.has_no_gradient_listeners()


def test_weights_are_not_free_while_a_graph_is_alive() -> None:
    module = stack()
    output = module(floats(6, 8))
    weights = StageWeights(module.parameters())
    assert not weights.has_no_gradient_listeners()
    del output
    weights.refresh()
    assert weights.has_no_gradient_listeners()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("way", WAYS)
def test_distributed_data_parallel(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are reduced once, in the last weight part, when all microbatches are added up."""
    case = StageCase("stack", stack, rows)
    module = DistributedDataParallel(stack())
    theirs = stack()
    theirs.load_state_dict(module.module.state_dict())
    run_torch(case, theirs, [0, 1, 2])
    reduced: list[Tensor] = []

    def reduce(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reduced.append(bucket.buffer().clone())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    module.register_comm_hook(None, lambda _, bucket: reduce(bucket))
    weights = choose_way(way, monkeypatch)(module)
    with module.no_sync():
        batches = [forward(case, module, seed) for seed in range(3)]
        for operation, number in ("I0", "I1", "W0", "I2", "W1"):
            run_step(operation, batches[int(number)], weights)
    assert reduced == []
    module.reducer.prepare_for_backward([])
    run_step("W", batches[2], weights)
    (sums,) = reduced
    assert sums.numel() == sum(parameter.numel() for parameter in module.parameters())
    assert_same_gradients("", gradients_of(module.module), gradients_of(theirs), exact=True)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("way", WAYS)
def test_fully_shard(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph knows other parameters than the module: gathered ones. They get the gradients, in the weight part."""
    case = StageCase("stack", stack, rows)
    theirs, module = stack(), stack()
    module.load_state_dict(theirs.state_dict())
    run_torch(case, theirs, [0, 1, 2])
    for part in (module[0], module[2], module):  # type: ignore[index]
        fully_shard(part)
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_requires_gradient_sync(False)
        part.set_reshard_after_backward(False)
    weights = choose_way(way, monkeypatch)(module)
    assert not (isinstance(weights, StageWeights) and weights.has_no_gradient_listeners())
    batches = [forward(case, module, seed) for seed in range(3)]
    for operation, number in ("I0", "I1", "W0", "I2", "W1"):
        before = gradients_of(module)
        run_step(operation, batches[int(number)], weights)
        if operation == "I":
            assert_same_gradients(f" after I{number}", gradients_of(module), before, exact=True)
    run_step("W", batches[2], weights)
    gathered = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert_same_gradients("", gathered, gradients_of(theirs), exact=True)


@pytest.mark.parametrize("case", [*CASES, REENTRANT], ids=str)
def test_hooks_of_ours_are_gone_after_the_input_part(case: StageCase, monkeypatch: pytest.MonkeyPatch) -> None:
    module = case.module()
    weights = choose_way("deferred", monkeypatch)(module)
    batch = forward(case, module, 0)
    nodes = [get_gradient_edge(output).node for output in batch.outputs if output.requires_grad]
    run_step("I", batch, weights)
    while nodes:
        node = nodes.pop()
        handle = node.register_hook(print)
        hooks = handle.hooks_dict_ref().values()  # type: ignore[union-attr]
        assert not [hook for hook in hooks if hook.__module__.startswith("pipecut")]
        handle.remove()
        nodes += [target for target, _ in node.next_functions if target is not None]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("way", WAYS)
def test_tensor_parallel(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and what they meet are DTensors, and so are the gradients."""
    case = StageCase("stack", stack, rows)
    theirs, module = stack(), stack()
    module.load_state_dict(theirs.state_dict())
    run_torch(case, theirs, [0, 1])
    mesh = init_device_mesh("cpu", (1,))
    parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    weights = choose_way(way, monkeypatch)(module)
    batches = [forward(case, module, seed) for seed in range(2)]
    for operation, number in ("I0", "I1", "W1", "W0"):
        run_step(operation, batches[int(number)], weights)
    local = {name: parameter.grad.to_local() for name, parameter in module.named_parameters()}  # type: ignore[union-attr]
    assert_same_gradients("", local, gradients_of(theirs), exact=True)
