"""A chunk spec is one class: those defined here are known to this file alone, and cut, merge and explain themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import ScheduleGPipe, SplitPoint, pipeline
from pipecut.errors import InputError, StepError
from pipecut.stage import ChunkSpec, PipelineStage, Replicate, TensorChunkSpec
from pipecut.stage.microbatch import merge_chunks, split_by_specs

MICROBATCHES = 3


class Interleave(ChunkSpec):
    """Row i goes to microbatch i modulo their number."""

    def samples(self, value: Any, name: str) -> int:
        return len(value)

    def cut(self, value: Any, sizes: Sequence[int], name: str) -> list[Any]:
        return [value[nth :: len(sizes)] for nth in range(len(sizes))]

    def merge(self, values: Sequence[Any], weights: Sequence[float] | None, name: str) -> Any:
        merged = values[0].new_empty(sum(map(len, values)), *values[0].shape[1:])
        for nth, value in enumerate(values):
            merged[nth :: len(values)] = value
        return merged

    def __repr__(self) -> str:
        return "Interleave()"


class Prompts:
    """A batch that is not a tensor, and whose samples pipecut cannot see."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths


class CutPrompts(ChunkSpec):
    """Consecutive samples of Prompts."""

    keeps_order = True

    def samples(self, value: Prompts, name: str) -> int:
        return len(value.lengths)

    def cut(self, value: Prompts, sizes: Sequence[int], name: str) -> list[Prompts]:
        ends = [sum(sizes[: nth + 1]) for nth in range(len(sizes))]
        return [Prompts(value.lengths[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    def __repr__(self) -> str:
        return "CutPrompts()"


def model_and_batch() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.randn(8, 4).double(), torch.randn(8, 2).double()


def interleaving(model: nn.Module, x: Tensor, **options: Any) -> Any:
    pipe = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
    stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    return ScheduleGPipe(stages, MICROBATCHES, nn.functional.mse_loss, args_chunk_spec=(Interleave(),), **options)


def test_a_model_trains_on_interleaved_rows_as_uncut() -> None:
    model, x, y = model_and_batch()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    schedule = interleaving(model, x, target_chunk_spec=Interleave(), output_merge_spec=Interleave())
    losses: list[Tensor] = []
    output = schedule.step(x, target=y, losses=losses)
    torch.testing.assert_close(output, model(x))
    for nth, part in enumerate(losses):
        torch.testing.assert_close(part, nn.functional.mse_loss(model(x)[nth::3], y[nth::3]))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_a_target_in_another_order_than_the_inputs_is_refused() -> None:
    model, x, y = model_and_batch()
    for spec in (None, TensorChunkSpec(0)):
        with pytest.raises(InputError, match=r"inputs are not cut into consecutive samples, and target is cut so by "):
            interleaving(model, x, target_chunk_spec=spec, output_merge_spec=Interleave()).step(x, target=y)


def test_an_output_of_reordered_samples_is_not_merged_by_default() -> None:
    model, x, y = model_and_batch()
    with pytest.raises(StepError, match="how to bring output back into the order of the batch is not known: say in"):
        interleaving(model, x, target_chunk_spec=Interleave()).step(x, target=y)
    unmerged = interleaving(model, x, target_chunk_spec=Interleave())
    assert unmerged.step(x, target=y, return_outputs=False) is None


def test_arguments_in_different_orders_are_refused() -> None:
    with pytest.raises(InputError, match=r"args\[0\] is cut into consecutive samples, and args\[1\] by Interleave\(\)"):
        split_by_specs((torch.ones(4), torch.ones(4)), None, 2, (None, Interleave()))
    made = split_by_specs((torch.arange(4), torch.ones(2)), None, 2, (Interleave(), Replicate()))
    assert [args[0].tolist() for args in made.args] == [[0, 2], [1, 3]]
    assert not made.in_order


def test_the_samples_of_an_own_spec_count_like_those_of_a_tensor() -> None:
    specs = (CutPrompts(), None)
    made = split_by_specs((Prompts([3, 1, 2]), torch.arange(3)), None, 2, specs)
    assert [args[0].lengths for args in made.args] == [[3, 1], [2]]
    assert made.in_order
    with pytest.raises(InputError) as caught:
        split_by_specs((Prompts([3, 1]), torch.arange(3)), None, 2, specs)
    assert "args[0] has 2 by CutPrompts()" in str(caught.value)
    with pytest.raises(InputError, match=r"1 sample cannot be cut into 2 microbatches \(args\[0\] cut by CutPrompts"):
        split_by_specs((Prompts([3]),), None, 2, (CutPrompts(),))


def test_a_stage_cut_by_hand_takes_objects_that_an_own_spec_cuts() -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, prompts: Prompts) -> Tensor:
            return torch.tensor(prompts.lengths) * self.weight

    stage = PipelineStage(Embed(), 0, 1, "cpu")
    schedule = ScheduleGPipe(stage, 2, nn.functional.mse_loss, args_chunk_spec=(CutPrompts(),))
    output = schedule.step(Prompts([3, 1, 2]), target=torch.zeros(3))
    assert output.tolist() == [3, 1, 2]
    torch.testing.assert_close(stage.submod.weight.grad, torch.tensor([2 * (9 + 1 + 4) / 3]))


def test_a_spec_without_merge_is_for_arguments_only() -> None:
    with pytest.raises(
        InputError, match=r"output_merge_spec is CutPrompts\(\) .*, which has no method merge\(\): write"
    ):
        merge_chunks([torch.ones(2)], CutPrompts())


def test_a_cut_into_another_number_of_parts() -> None:
    class Halves(Interleave):
        def cut(self, value: Any, sizes: Sequence[int], name: str) -> list[Any]:
            return super().cut(value, sizes[:2], name)

    with pytest.raises(InputError, match=r"Interleave\(\) cut args\[0\] into 2 parts, and there are 3 microbatches"):
        split_by_specs((torch.ones(6),), None, 3, (Halves(),))
