"""What a backward in two parts keeps, and for how long."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pipecut.stage.backward import StageWeights, input_backward, weight_backward
from tests.stage.backward.runs import WAYS, choose_way, forward, run_step
from tests.stage.backward.stages import CASES, REENTRANT, Runs, StageCase, floats, linears, parameter


@pytest.fixture(autouse=True, scope="module")
def settled() -> None:
    """Leave all that is there out of what the collector looks at: it is called after each case."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """What is let go must be gone at once."""
    gc.disable()
    yield
    gc.enable()


class Memory:
    """Which tensors are still in memory, by name: not the Python objects count, but what they refer to."""

    def __init__(self) -> None:
        self._storages: dict[str, StorageWeakRef] = {}

    def watch(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self._storages[name] = StorageWeakRef(tensor.untyped_storage())

    @property
    def alive(self) -> set[str]:
        return {name for name, storage in self._storages.items() if not storage.expired()}


def layered(memory: Memory) -> nn.Module:
    """Two layers; between them values that only the way to the inputs needs, and values that a weight needs too."""

    def run(self: Any, value: Tensor) -> Tensor:
        first_in = value * 2
        first_out = self.first(first_in)
        squashed = first_out.sigmoid()  # saved for its own backward
        second_in = squashed + 1  # saved for the weight of the second layer
        memory.watch(first_in=first_in, first_out=first_out, squashed=squashed, second_in=second_in)
        return self.second(second_in).tanh()

    return linears(run)()


@pytest.mark.parametrize("way", ["deferred", "deferred, through autograd"])
def test_the_input_part_keeps_only_what_weight_gradients_need(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    module = layered(memory)
    weights = choose_way(way, monkeypatch)(module)
    inputs = floats(6, 8)
    output = module(inputs)
    assert memory.alive == {"first_in", "squashed", "second_in"}
    _, pending = input_backward([output], [torch.ones(6, 8)], [inputs], weights)
    assert memory.alive == {"first_in", "second_in"}  # though the output, and with it the graph, is still there
    weight_backward(pending)
    assert memory.alive == set()


@pytest.mark.parametrize("way", ["at once", "through autograd"])
def test_without_anything_put_off_the_input_part_keeps_no_activation(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    module = layered(memory)
    weights = choose_way(way, monkeypatch)(module)
    inputs = floats(6, 8)
    output = module(inputs)
    _, pending = input_backward([output], [torch.ones(6, 8)], [inputs], weights)
    assert memory.alive == set()
    weight_backward(pending)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_arrive_are_released(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage's output and its gradient may go as soon as the input part is done, or the weight part needs them."""
    memory = Memory()
    module = layered(memory)
    weights = choose_way(way, monkeypatch)(module)
    inputs, arriving = floats(6, 8), torch.ones(6, 8)
    output = module(inputs)
    memory.watch(output=output, arriving=arriving, inputs=inputs)
    _, pending = input_backward([output], [arriving], [inputs], weights)
    del output, arriving, inputs
    assert memory.alive <= {"first_in", "second_in"}
    weight_backward(pending)
    assert memory.alive == set()


class AtProducts(TorchDispatchMode):
    """Notes what is in memory whenever two matrices are multiplied."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory
        self.seen: list[set[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.append(self.memory.alive)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["deferred", "deferred, through autograd"])
def test_the_weight_part_releases_as_it_goes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    module = layered(memory)
    weights = choose_way(way, monkeypatch)(module)
    inputs = floats(6, 8)
    _, pending = input_backward([module(inputs)], [torch.ones(6, 8)], [inputs], weights)
    with AtProducts(Memory()):  # the first time it imports, which keeps what it meets
        torch.ones(1, 1) @ torch.ones(1, 1)
    with AtProducts(memory) as products:
        weight_backward(pending)
    assert [len(alive) for alive in products.seen] == [2, 1]


def test_large_gradients_do_not_pile_up() -> None:
    """Each is added before the next is computed: in the weight part there is room for one besides the sums."""
    width = 1024
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    for each in module.parameters():
        each.grad = torch.zeros_like(each)
    memory = Memory()
    weights = StageWeights(module.parameters())
    rows = 160  # too many for products to be added while they are computed
    inputs = floats(rows, width)
    _, pending = input_backward([module(inputs)], [torch.ones(rows, width)], [inputs], weights)

    class Results(AtProducts):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = super().__torch_dispatch__(func, types, args, kwargs)
            if func is torch.ops.aten.mm.default:
                self.memory.watch(**{f"product {len(self.seen)}": made})
            return made

    with AtProducts(Memory()):  # the first time it imports, which keeps what it meets
        torch.ones(1, 1).add_((torch.ones(1, 1) @ torch.ones(1, 1)).t())
    with Results(memory) as products:
        weight_backward(pending)
    assert products.seen == [set(), set(), set()]
    assert memory.alive == set()


def test_few_rows_leave_no_product_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is added to the sum while it is computed."""
    module = linears(lambda self, value: self.second(self.first(value)))()
    weights = choose_way("deferred, and added while computed", monkeypatch)(module)
    for each in module.parameters():
        each.grad = torch.zeros_like(each)
    inputs = floats(6, 8)
    _, pending = input_backward([module(inputs)], [torch.ones(6, 8)], [inputs], weights)
    with AtProducts(Memory()) as products:
        weight_backward(pending)
    assert products.seen == []


@pytest.mark.parametrize("existing", [False, True])
def test_first_gradients_are_not_copied(existing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that becomes .grad is the one that was computed, whether the weight was transposed or not."""
    module = Runs(
        lambda self, value: value @ self.right @ self.flipped.t(), right=parameter(8, 8), flipped=parameter(8, 8)
    )
    weights = choose_way("deferred, through autograd", monkeypatch)(module)
    if existing:
        for each in module.parameters():
            each.grad = torch.zeros_like(each)
    inputs = floats(6, 8)
    _, pending = input_backward([module(inputs)], [torch.ones(6, 8)], [inputs], weights)

    class Copies(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
            return func(*args, **(kwargs or {}))

    with Copies() as copies:
        weight_backward(pending)
    assert copies.count == 0


@pytest.mark.parametrize("case", [*CASES, REENTRANT], ids=str)
@pytest.mark.parametrize("way", ["at once", "deferred"])
def test_nothing_is_left_in_reference_cycles(case: StageCase, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = case.module()
    weights = choose_way(way, monkeypatch)(module)
    batch = forward(case, module, 0)
    gc.collect()  # what the forward of a user's module leaves behind is not ours
    run_step("I", batch, weights)
    run_step("W", batch, weights)
    del batch
    module.zero_grad()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        left = [value for value in gc.garbage if isinstance(value, Tensor) or "pipecut" in type(value).__module__]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []


def test_a_failed_input_part_leaves_the_gradients_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that adds all gradients at once is a full backward, which may have added some; the step puts them back."""

    def fail(gradient: Tensor) -> None:
        raise ValueError("a fault of the user's")

    for way in [way for way in WAYS if way.endswith("through autograd")]:
        module = linears(lambda self, value: self.second(self.first(value)))()
        weights = choose_way(way, monkeypatch)(module)
        before = torch.ones(8, 8)
        module.second.weight.grad = before  # type: ignore[union-attr]
        inputs = floats(6, 8)
        inputs.register_hook(fail)
        with pytest.raises(ValueError, match="a fault of the user's"):
            input_backward([module(inputs)], [torch.ones(6, 8)], [inputs], weights)
        assert module.second.weight.grad is before  # type: ignore[union-attr]
        assert torch.equal(before, torch.ones(8, 8))
        assert module.first.weight.grad is None  # type: ignore[union-attr]
