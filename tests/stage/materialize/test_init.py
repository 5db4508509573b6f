"""Stages of a model without memory are initialised by a function, as the whole model would be."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from pipecut import Pipe, PipeError, PipelineStage, SplitPoint, empty_weights, pipeline
from tests.stage.materialize.models import Tied, assert_trains_like, build_all, cut


def init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding | nn.BatchNorm1d):
        module.reset_parameters()
    if isinstance(module, Tied):
        module.table.copy_(torch.arange(8) / 8)  # type: ignore[operator]
        nn.init.zeros_(module.head.bias)
    if hasattr(module, "scale"):
        nn.init.normal_(module.scale)


def meta_model() -> Tied:
    with torch.device("meta"):
        return Tied()


@functools.cache
def meta_pipe() -> Pipe:
    """Cut once, for building stages does not change it."""
    return cut(meta_model())


def gathered(stages: list[PipelineStage]) -> dict[str, Tensor]:
    return {name: value for stage in stages for name, value in stage.submod.state_dict().items()}


def test_initialised_stages_train_like_a_model_with_their_values() -> None:
    model = meta_model()
    stages = build_all(cut(model), init=init)
    uncut = Tied()
    uncut.load_state_dict(gathered(stages))
    assert torch.equal(uncut.head.bias, torch.zeros(11))
    assert_trains_like(stages, uncut)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    cut(model)


def test_values_depend_on_the_seed_and_the_names_and_not_on_the_cut() -> None:
    torch.manual_seed(1)
    fine = gathered(build_all(meta_pipe(), init=init))
    torch.manual_seed(1)
    torch.rand(5)
    with empty_weights():
        other = Tied()
    pipe = cut(other, {"blocks.2": SplitPoint.BEGINNING})
    for index in (1, 0):
        stage = pipe.build_stage(index, "cpu", init=init)
        for name, value in stage.submod.state_dict().items():
            assert torch.equal(value, fine[name]), name
    torch.manual_seed(2)
    assert not torch.equal(gathered(build_all(meta_pipe(), init=init))["embed.weight"], fine["embed.weight"])


def test_a_tied_parameter_has_the_same_values_where_its_holders_are_built_apart() -> None:
    first = meta_pipe().build_stage(0, "cpu", init=init)
    last = cut(meta_model()).build_stage(3, "cpu", init=init)
    assert torch.equal(first.submod.get_parameter("embed.weight"), last.submod.get_parameter("head.weight"))


def test_the_random_numbers_of_the_program_go_on_as_before() -> None:
    pipe = meta_pipe()
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    pipe.build_stage(0, "cpu", init=init)
    assert torch.equal(torch.rand(3), expected)


def test_init_sees_the_whole_model_children_first_and_only_once() -> None:
    seen = []

    def note(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        init(module)

    meta_pipe().build_stage(2, "cpu", init=note)  # blocks.3
    assert seen == ["BatchNorm1d", "Linear", "Block", "ModuleList", "Tied"]


def test_parameters_may_be_replaced() -> None:
    def replace(module: nn.Module) -> None:
        init(module)
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.full_like(module.weight, 2.0))

    pipe = meta_pipe()
    stage = pipe.build_stage(1, "cpu", init=replace)
    weight = stage.submod.get_parameter("blocks.1.linear.weight")
    assert weight.unique().tolist() == [2.0]

    def wrong(module: nn.Module) -> None:
        init(module)
        if isinstance(module, nn.Linear):
            module.bias = nn.Parameter(torch.zeros(3))

    message = r"init replaced blocks\.1\.linear\.bias, float32\[8\] when the model was cut, by float32\[3\]"
    with pytest.raises(PipeError, match=message):
        pipe.build_stage(1, "cpu", init=wrong)


def test_what_init_forgets_is_named() -> None:
    def forgetful(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    with pytest.raises(PipeError) as caught:
        meta_pipe().build_stage(1, "cpu", init=forgetful)
    assert str(caught.value).startswith(
        "init left without values: blocks.1.scale (parameter), blocks.1.norm.weight (parameter), "
    )
    assert "blocks.1.norm.num_batches_tracked (buffer)" in str(caught.value)
    assert "have their values if the model is made under pipecut.empty_weights()" in str(caught.value)


def test_what_init_writes_only_in_part_is_named() -> None:
    def partial(module: nn.Module) -> None:
        before = module.weight.clone() if isinstance(module, nn.Linear) else None
        init(module)
        if before is not None:
            module.weight[1:] = before[1:]  # type: ignore[index, operator]

    with pytest.raises(PipeError, match=r"init left without values: blocks\.3\.linear\.weight \(parameter\)\. It is"):
        meta_pipe().build_stage(2, "cpu", init=partial)


def test_an_init_that_fails_is_told_with_its_module() -> None:
    def reads(module: nn.Module) -> None:
        if isinstance(module, Tied) and module.head.weight.sum() > 0:
            return

    with pytest.raises(
        PipeError, match=r"init failed for the model \(Tied\): .* What other stages hold is on the meta"
    ):
        meta_pipe().build_stage(2, "cpu", init=reads)


def without_values(pipe: Pipe) -> str:
    with pytest.raises(PipeError) as caught:
        pipe.build_stage(1, "cpu")
    return str(caught.value)


def test_a_stage_without_values_says_the_ways_to_give_them() -> None:
    assert without_values(meta_pipe()) == (
        "stage 1 has no values, only shapes (on the meta device): blocks.1.scale, blocks.1.norm.weight, "
        "blocks.1.norm.bias, blocks.1.linear.weight, blocks.1.linear.bias and 11 more. Give them with "
        "pipe.build_stage(1, device, init=function), where the function is called with each module to initialise it, "
        "or with pipe.build_stage(1, device, checkpoint=path). For a stage cut by hand: "
        "module.to_empty(device=device), then load_state_dict"
    )


class WithAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), Offset()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x))
        return result


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.offset = torch.arange(4.0)  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.offset.to(x.device)


def test_a_tensor_that_is_neither_parameter_nor_buffer_keeps_its_value() -> None:
    with empty_weights():
        model = WithAttribute()
    pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"b": SplitPoint.BEGINNING})
    stage = pipe.build_stage(1, "cpu", checkpoint=WithAttribute().state_dict())
    assert torch.equal(stage.submod(torch.zeros(1, 4)), torch.arange(4.0)[None])


def test_empty_weights_keeps_ties_flags_and_notes() -> None:
    shared = nn.Parameter(torch.randn(3), requires_grad=False)
    shared.note = "kept"  # type: ignore[attr-defined]
    holders = [nn.Module(), nn.Module()]
    with empty_weights():
        for holder in holders:
            holder.weight = shared
            holder.register_parameter("none", None)
        layers = [nn.Linear(5_000, 5_000) for _ in range(200)]  # 20 GB
        lazy = nn.LazyLinear(3)
    assert holders[0].weight is holders[1].weight
    assert (shared.device.type, shared.requires_grad, vars(shared)["note"]) == ("meta", False, "kept")
    assert all(layer.weight.is_meta and layer.weight.requires_grad for layer in layers)
    assert not lazy.weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


class Remembers(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.last = torch.zeros(4)  # neither parameter nor buffer


def reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def test_an_attribute_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Remembers())
    pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
    pipe.build_stage(0, "cpu", init=reset)
    with pytest.raises(
        PipeError, match=r"1\.last in stage 1 is a tensor on the meta device that is neither parameter nor"
    ):
        pipe.build_stage(1, "cpu", init=reset)


class Shifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shift = [torch.zeros(4)]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x) + torch.empty_like(self.shift[0], device=x.device))
        return result


def test_a_tensor_on_the_meta_device_that_a_cut_forward_uses_is_refused() -> None:
    with torch.device("meta"):
        model = Shifts()
    pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"b": SplitPoint.BEGINNING})
    with pytest.raises(PipeError, match=r"the forward uses a tensor on the meta device that is neither .*shape \[4\]"):
        pipe.build_stage(1, "cpu", init=reset)


class Marked(Tensor):
    pass


def test_a_tensor_of_another_class_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
    pipe.stages[1].get_submodule("1").register_buffer("table", torch.ones(2).as_subclass(Marked))
    with pytest.raises(PipeError, match=r"1\.table is a Marked, which cannot be recreated with values: make the model"):
        pipe.build_stage(1, "cpu", init=reset)
