"""Parameters, buffers and state of a schedule's stages: the model's own names, in the model's order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipecut import Pipe, PipelineStage, Schedule1F1B, SplitPoint, get_schedule_class, pipeline
from pipecut.errors import InputError
from pipecut.schedule import plan_for
from tests.support.ranks import Ranks

WIDTH = 4


class Counted(nn.Linear):
    """A layer with buffers, saved and not, and extra state."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("cache", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.cache  # type: ignore[operator]

    def get_extra_state(self) -> Tensor:
        return torch.tensor(3)

    def set_extra_state(self, state: Tensor) -> None:
        assert state == 3


class Unordered(nn.Module):
    """Defined in another order than it runs in, with a table that its first and last layer share."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Counted() for _ in range(4))
        self.embed = nn.Embedding(9, WIDTH)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


TOKENS = torch.arange(8).reshape(4, 2)


def loss_fn(output: Tensor) -> Tensor:
    return output.sum()


def cut(model: nn.Module) -> Pipe:
    spec = {f"blocks.{index}": SplitPoint.BEGINNING for index in (1, 2, 3)}
    return pipeline(model, (TOKENS,), split_spec=spec)


def in_one_process(pipe: Pipe) -> Schedule1F1B:
    return Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)], 2, loss_fn)


def assert_same_as(schedule: Any, model: nn.Module) -> None:
    parameters = list(model.named_parameters())
    assert [name for name, _ in schedule.named_parameters()] == [name for name, _ in parameters]
    assert all(mine is own for mine, (_, own) in zip(schedule.parameters(), parameters, strict=True))
    assert [name for name, _ in schedule.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert list(schedule.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_all_stages_in_one_process_are_the_model(order: tuple[int, ...]) -> None:
    model = Unordered()
    pipe = cut(model)
    schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in order], 2, loss_fn)
    assert_same_as(schedule, model)
    assert [name for name, _ in schedule.named_parameters()][0] == "head.weight"
    fresh = Unordered()
    fresh.load_state_dict(schedule.state_dict())
    assert torch.equal(fresh.embed.weight, model.embed.weight)


def test_an_optimizer_over_the_schedule_trains_the_model() -> None:
    model = Unordered()
    uncut = copy.deepcopy(model)
    schedule = in_one_process(cut(model))
    mine, theirs = (torch.optim.AdamW(each.parameters()) for each in (schedule, uncut))  # type: ignore[attr-defined]
    for _ in range(2):
        schedule.step(TOKENS)
        for part in TOKENS.split(2):
            (loss_fn(uncut(part)) / 2).backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in uncut.state_dict().items():
        assert torch.equal(schedule.state_dict()[name], tensor), name


def test_wrappers_around_a_stage_and_inside_of_one_leave_no_prefix() -> None:
    model = Unordered()
    pipe = cut(model)
    stages = [pipe.build_stage(index, "cpu") for index in range(4)]
    blocks: Any = stages[1].submod.blocks
    blocks[1] = checkpoint_wrapper(blocks[1])
    blocks = stages[2].submod.blocks
    blocks[2] = torch.compile(blocks[2])
    stages[3].submod = torch.compile(stages[3].submod)  # type: ignore[assignment]
    assert any("_orig_mod" in name for name, _ in stages[3].submod.named_parameters())
    assert_same_as(Schedule1F1B(stages, 2, loss_fn), model)


def test_a_holder_of_a_tie_may_be_wrapped_inside_its_stage() -> None:
    """It was not found under its name, and every step raised, with advice that did not help."""
    model = Unordered()
    uncut, pipe = copy.deepcopy(model), cut(model)
    stages = [pipe.build_stage(index, "cpu") for index in range(4)]
    stages[0].submod.embed = checkpoint_wrapper(stages[0].submod.embed)
    schedule = Schedule1F1B(stages, 2, loss_fn)
    schedule.add_loss(lambda named: named["embed.weight"].sum() if "embed.weight" in named else 0)
    schedule.step(TOKENS)
    for part in TOKENS.split(2):
        (loss_fn(uncut(part)) / 2).backward()
    uncut.embed.weight.sum().backward()
    for name, parameter in uncut.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, msg=name)


def test_a_module_of_the_user_may_be_called_as_torch_calls_its_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)  # type: ignore[no-any-return]

    model = Net()
    pipe = pipeline(model, (torch.ones(4, WIDTH),), split_spec={"module.1": SplitPoint.BEGINNING})
    assert_same_as(in_one_process(pipe), model)


def test_an_adapter_comes_after_what_is_before_it_in_its_stage() -> None:
    model = Unordered()
    pipe = cut(model)
    schedule = in_one_process(pipe)
    for index in (1, 3):
        module = schedule.stages[index].submod
        module.blocks[index].adapter = nn.Linear(WIDTH, 1, bias=False)  # type: ignore[index]
    names = [name for name, _ in schedule.named_parameters()]
    known = [name for name, _ in model.named_parameters()]
    for index in (1, 3):
        known.insert(known.index(f"blocks.{index}.bias") + 1, f"blocks.{index}.adapter.weight")
    assert names == known


def by_hand(*modules: nn.Module, **options: Any) -> Schedule1F1B:
    stages = [PipelineStage(module, index, len(modules), "cpu") for index, module in enumerate(modules)]
    return Schedule1F1B(stages, 2, loss_fn, **options)


def test_modules_cut_by_hand_that_keep_the_names() -> None:
    first, last = nn.ModuleDict({"embed": nn.Embedding(9, 4)}), nn.ModuleDict({"head": nn.Linear(4, 9)})
    schedule = by_hand(first, last)
    assert [name for name, _ in schedule.named_parameters()] == ["embed.weight", "head.weight", "head.bias"]
    assert list(schedule.state_dict()) == ["embed.weight", "head.weight", "head.bias"]
    last["head"].weight = first["embed"].weight  # type: ignore[union-attr]
    schedule = by_hand(first, last, ties=[{0: "embed.weight", 1: "head.weight"}])
    assert [name for name, _ in schedule.named_parameters()] == ["embed.weight", "head.bias"]
    assert list(schedule.state_dict()) == ["embed.weight", "head.weight", "head.bias"]


def test_modules_cut_by_hand_with_the_same_names_need_none() -> None:
    schedule = by_hand(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    assert len(list(schedule.parameters())) == 4
    told = "stages 0 and 1 both hold a tensor named '{}'.* keep their names .* schedule.parameters\\(\\) needs no names"
    with pytest.raises(InputError, match=told.format("weight")):
        dict(schedule.named_parameters())
    with pytest.raises(InputError, match=told.format("running_mean")):
        dict(schedule.named_buffers())
    with pytest.raises(InputError, match=told.format("weight")):
        schedule.state_dict()


def test_holders_of_a_tie_that_were_copied_apart_are_all_trained() -> None:
    model = Unordered()
    pipe = cut(model)
    schedule = in_one_process(pipe)
    copied: Any = schedule.stages[3].submod
    copied.head.weight = nn.Parameter(copied.head.weight.detach().clone())
    named = dict(schedule.named_parameters())
    assert named["embed.weight"] is model.embed.weight
    assert named["head.weight"] is copied.head.weight
    assert len(list(schedule.parameters())) == len(named)


def test_copies_of_one_name_need_none() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self.between(self.shared(x)))  # type: ignore[no-any-return]

    schedule = in_one_process(pipeline(Twice(), (torch.ones(4, WIDTH),), num_stages=3))
    copied: Any = schedule.stages[2].submod
    copied.shared.weight = nn.Parameter(copied.shared.weight.detach().clone())
    assert len(list(schedule.parameters())) == 5
    with pytest.raises(InputError, match="stages 0 and 2 both hold a tensor named 'shared.weight', and"):
        list(schedule.named_parameters())


# On ranks: those of a pipeline, and two copies of it.


def held_by(rank: int) -> tuple[list[str], list[str], list[str]]:
    pipe = cut(Unordered())
    plan = plan_for("Interleaved1F1B", ranks=2, chunks=2, microbatches=2)
    stages = [pipe.build_stage(index, "cpu") for index in plan.placement.stages_of[rank]]
    schedule: Any = get_schedule_class("Interleaved1F1B")(stages, 2, loss_fn)  # type: ignore[arg-type]
    schedule.step(*((TOKENS,) if rank == 0 else ()))
    return (
        [name for name, _ in schedule.named_parameters()],
        list(schedule.state_dict()),
        list(dict(schedule.named_buffers())),
    )


@pytest.mark.distributed
def test_each_rank_has_its_own_in_order_and_a_tie_by_its_first_name(two_ranks: Ranks) -> None:
    model = Unordered()
    first, last = two_ranks.run(held_by)
    parameters, state = [name for name, _ in model.named_parameters()], list(model.state_dict())
    buffers = [name for name, _ in model.named_buffers()]
    assert first[0] == [name for name in parameters if name == "head.weight" or name[:8] in ("blocks.0", "blocks.2")]
    assert last[0] == [name for name in parameters if name not in first[0] or name == "head.weight"]
    for mine in (first, last):
        ties = {"head.weight", "embed.weight"}
        kept = [
            name for name in state if name in ties or name in mine[0] or name.rpartition(".")[0] + ".bias" in mine[0]
        ]
        assert mine[1] == kept
        assert mine[2] == [name for name in buffers if name.rpartition(".")[0] + ".bias" in mine[0]]


def held_under(rank: int, wrapper: str) -> tuple[list[str], list[str]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    pipe = cut(Unordered())
    stages = [pipe.build_stage(index, "cpu", mesh["pp"].get_group()) for index in range(4)]
    for stage in stages:
        if wrapper == "fully_shard":
            fully_shard(stage.submod, mesh=mesh["dp"])
        else:
            stage.submod = DistributedDataParallel(stage.submod, process_group=mesh["dp"].get_group())
    schedule: Any = get_schedule_class("Interleaved1F1B")(stages, 2, loss_fn)  # type: ignore[arg-type]
    return [name for name, _ in schedule.named_parameters()], list(schedule.state_dict())


@pytest.mark.distributed
@pytest.mark.parametrize("wrapper", ["fully_shard", "DistributedDataParallel"])
def test_stages_under_data_parallel_wrappers(two_ranks: Ranks, wrapper: str) -> None:
    model = Unordered()
    parameters = [name for name, _ in model.named_parameters()]
    if wrapper == "fully_shard":
        parameters.insert(1, "embed.weight")  # each stage has its own shards
    for names, state in two_ranks.run(held_under, wrapper):
        assert names == parameters
        assert state == list(model.state_dict())
