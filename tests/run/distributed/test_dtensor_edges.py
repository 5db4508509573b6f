"""DTensors that go from one stage to the next: two ranks of a pipeline, each of them two ranks that share a module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipecut import PipelineStage, get_schedule_class
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

WIDTH, HIDDEN = 4, 8
STAGES = {"1F1B": ([0], [1]), "Interleaved1F1B": ([0, 2], [1, 3]), "ZBVZeroBubble": ([0, 3], [1, 2])}
PLACEMENTS = {"replicated": Replicate(), "sharded": Shard(1), "partial": Partial()}


class Block(nn.Module):
    """Two layers, of which the first can be cut by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def meshes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def check_gradients(whole: nn.Sequential, modules: dict[int, nn.Module]) -> None:
    for index, module in modules.items():
        wanted = dict(whole[index].named_parameters())
        for name, parameter in module.named_parameters():
            grad = parameter.grad
            found = grad.full_tensor() if isinstance(grad, DTensor) else grad
            torch.testing.assert_close(found, wanted[name].grad, msg=lambda text, name=name: f"{name}: {text}")


def batch(length: int = 3) -> tuple[Tensor, Tensor]:
    x = torch.randn(9, length, WIDTH, dtype=torch.float64)
    return x, torch.randn_like(x)


def train(rank: int, name: str, between: str) -> int:
    """Two steps: samples that do not divide evenly, nor positions; the gradient of the input comes out too."""
    mesh, placement = meshes(), PLACEMENTS[between]
    edge = Replicate() if isinstance(placement, Partial) else placement  # of the whole model
    total = sum(map(len, STAGES[name]))
    torch.manual_seed(0)
    whole = nn.Sequential(*(Block() for _ in range(total))).double()
    modules: dict[int, nn.Module] = {}
    for index in STAGES[name][mesh["pp"].get_local_rank()]:
        takes, gives = edge if index == 0 else placement, edge if index == total - 1 else placement
        plan = {
            "up": ColwiseParallel(input_layouts=takes),
            "down": RowwiseParallel(output_layouts=gives, use_local_output=False),
        }
        modules[index] = parallelize_module(copy.deepcopy(whole[index]), mesh["tp"], plan)
    group = mesh["pp"].get_group()
    stages = [PipelineStage(part, index, total, "cpu", group=group) for index, part in modules.items()]
    x, y = batch()
    given, target = (distribute_tensor(value, mesh["tp"], [edge]) for value in (x, y))
    schedule = get_schedule_class(name)(stages, 4, squares)  # type: ignore[arg-type]
    losses: list[Tensor] = []
    for _ in range(2):
        output = schedule.step(*((given.requires_grad_(),) if 0 in modules else ()), target=target, losses=losses)
        expected = squares(whole(x.requires_grad_()), y)
        expected.backward()
    check_gradients(whole, modules)
    if 0 in modules:
        assert isinstance(given.grad, DTensor)
        torch.testing.assert_close(given.grad.full_tensor(), x.grad)
    if total - 1 in modules:
        assert isinstance(output, DTensor)
        assert output.placements == (edge,)
        torch.testing.assert_close(output.full_tensor(), whole(x).detach())
    assert all(type(loss) is Tensor for loss in losses)
    assert schedule.mean_loss() == pytest.approx(expected.item())
    return len(losses)


@pytest.mark.distributed
@pytest.mark.parametrize("between", sampled(PLACEMENTS, lambda between: between != "replicated"))
@pytest.mark.parametrize("name", sampled(STAGES, lambda name: name == "1F1B"))
def test_gradients_are_those_of_the_uncut_model(four_ranks: Ranks, name: str, between: str) -> None:
    assert sorted(four_ranks.run(train, name, between)) == [0, 0, 4, 4]


# ---------------------------------------------------------------------- two stages, one module each


class Gathering(nn.Module):
    """A plain module, whose parameters are on no mesh, and which gathers what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Tensor:
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        return self.layer(whole)  # type: ignore[no-any-return]


class InTurns(nn.Module):
    """Uses its first input in every second microbatch only; its second one is a plain tensor."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.block, self.used = Block(), first

    def forward(self, x: Tensor, plain: Tensor) -> Tensor:
        used, self.used = self.used, not self.used
        value = x if used else x.detach()
        if isinstance(value, DTensor):
            return self.block(value).full_tensor() + plain  # type: ignore[no-any-return]
        return self.block(value) + plain  # type: ignore[no-any-return]


class Two(nn.Module):
    """Returns what a block makes, and a plain tensor with it."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.layer = Block(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), self.layer(x)


def block_plan(prefix: str = "") -> dict[str, Any]:
    return {
        f"{prefix}up": ColwiseParallel(input_layouts=Replicate()),
        f"{prefix}down": RowwiseParallel(output_layouts=Replicate(), use_local_output=False),
    }


def run_two(
    whole: nn.Sequential,
    plans: tuple[dict[str, Any], dict[str, Any]],
    mesh: DeviceMesh,
    microbatches: int = 4,
    **options: Any,
) -> None:
    """One step of two stages, of which each is parallelized as its plan says; gradients as of the uncut model."""
    place = mesh["pp"].get_local_rank()
    module = copy.deepcopy(whole[place])
    if plans[place]:
        parallelize_module(module, mesh["tp"], plans[place])
    stage = PipelineStage(module, place, 2, "cpu", group=mesh["pp"].get_group(), **(options if place else {}))
    x, y = batch()
    get_schedule_class("1F1B")(stage, microbatches, squares).step(*(() if place else (x,)), target=y)
    for part, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        values = whole[0](part)
        output = whole[1](*values) if isinstance(values, tuple) else whole[1](values)
        (squares(output, target) * len(part) / len(x)).backward()
    check_gradients(whole, {place: module})


def ask_for_mesh(rank: int) -> list[Any]:
    mesh = meshes()
    asked: list[Any] = []

    def get_mesh(*args: Any) -> DeviceMesh:
        asked.append((args[0], args[1] == mesh["tp"]._layout, len(args)))
        return mesh["tp"]

    run_two(nn.Sequential(Block(), Gathering()).double(), (block_plan(), {}), mesh, get_mesh=get_mesh)
    return asked


@pytest.mark.distributed
def test_the_mesh_comes_from_get_mesh_for_a_module_that_is_on_none(four_ranks: Ranks) -> None:
    assert four_ranks.run(ask_for_mesh) == [[], [], [(("tp",), True, 2)], [(("tp",), True, 2)]]


def use_in_turns(rank: int, first: bool) -> None:
    run_two(nn.Sequential(Two(), InTurns(first)).double(), (block_plan("block."), block_plan("block.")), meshes())


@pytest.mark.distributed
@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_are_now_partial_and_now_zeros(four_ranks: Ranks, first: bool) -> None:
    """What is known of a gradient comes with the first one; later ones may lie on the mesh in another way."""
    four_ranks.run(use_in_turns, first)


def miss_the_mesh(rank: int) -> str:
    mesh = meshes()
    with pytest.raises(RuntimeError) as caught:
        run_two(nn.Sequential(Block(), Gathering()).double(), (block_plan(), {}), mesh)
    return str(caught.value)


@pytest.mark.distributed
def test_a_mesh_that_nobody_knows_is_an_error_on_all_ranks(four_ranks: Ranks) -> None:
    messages = four_ranks.run(miss_the_mesh)
    four_ranks.close()
    for message in messages:
        assert "failed in 1RECV_F0 (stage 1, microbatch 0)" in message
        assert "stage 1 gets a DTensor on the mesh (tp=2), dim names ('tp',) and layout" in message
        assert "make the stage with get_mesh=" in message
