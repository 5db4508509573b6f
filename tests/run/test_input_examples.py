"""Stages made with `input_args`: what they get in a step has to be like that, but for the number of samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import InputError, PipelineStage, Replicate, Schedule1F1B, StepError, TensorChunkSpec

WIDTH = 8


class Sum(nn.Linear):
    """Adds what it is called with, nested or not."""

    def forward(self, x: Any, mask: Tensor | None = None) -> Tensor:
        x = x if isinstance(x, Tensor) else x["left"] + x["right"][0]
        return super().forward(x if mask is None else x * mask)


class Wrapped(nn.Module):
    """Does not show what its module takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Sum(WIDTH, WIDTH)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inside(*args, **kwargs)  # type: ignore[no-any-return]


def scheduled(first: Any, second: Any = None, module: nn.Module | None = None, **options: Any) -> Schedule1F1B:
    torch.manual_seed(0)
    modules = (module or Sum(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    stages = [
        PipelineStage(part, index, 2, "cpu", input_args=example)
        for index, (part, example) in enumerate(zip(modules, (first, second), strict=True))
    ]
    return Schedule1F1B(stages, 2, F.mse_loss, **options)


def a(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*sizes, dtype=dtype)


REMEDY = "pass inputs like the example, make the stage with an example of these, or leave out input_args"
WRONG = {
    "width": ((a(4, 7),), (a(6, WIDTH),), r"float32\[4, 7\]", r"float32\[3, 8\]"),
    "dtype": (
        (a(4, WIDTH, dtype=torch.float64),), (a(6, WIDTH),), r"float64\[4, 8\]", r"float32\[3, 8\]"
    ),
    "dims": ((a(4, 3, WIDTH),), (a(6, WIDTH),), r"float32\[4, 3, 8\]", r"float32\[3, 8\]"),
    "too few": ((a(4, WIDTH), a(4, 1)), (a(6, WIDTH),), r"float32\[4, 8\], float32\[4, 1\]", r"float32\[3, 8\]"),
    "too many": ((a(4, WIDTH),), (a(6, WIDTH), a(6, 1)), r"float32\[4, 8\]", r"float32\[3, 8\], float32\[3, 1\]"),
    "nested": (
        ({"left": a(4, WIDTH), "right": [a(4, WIDTH)]},),
        ({"left": a(6, WIDTH), "right": [a(6, 1)]},),
        r"float32\[4, 8\], float32\[4, 8\]",
        r"float32\[3, 8\], float32\[3, 1\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_inputs_of_a_step_that_are_not_like_the_example(kind: str) -> None:
    example, args, expected, got = WRONG[kind]
    schedule = scheduled(example)
    text = (
        f"stage 0 was made for input_args {expected}, the number of samples aside, and the inputs of "
        rf"step\(\) are {got} in a microbatch: {REMEDY}"
    )
    for call in (schedule.step, schedule.eval):
        with pytest.raises(InputError, match=text):
            call(*args, target=a(6, WIDTH))
    assert all(parameter.grad is None for stage in schedule.stages for parameter in stage.submod.parameters())


def test_inputs_like_the_example_in_any_number() -> None:
    for example, args, kwargs in (
        (a(4, WIDTH), (a(6, WIDTH),), {}),
        (a(4, WIDTH), (), {"x": a(6, WIDTH)}),
        (a(4, WIDTH), (a(6, WIDTH),), {"mask": a(6, 1)}),
        ((a(4, WIDTH), a(4, 1)), (a(6, WIDTH),), {"mask": a(6, 1)}),
        (({"left": a(4, WIDTH), "right": [a(4, WIDTH)]},), ({"left": a(6, WIDTH), "right": [a(6, WIDTH)]},), {}),
    ):
        output = scheduled(example).step(*args, target=a(6, WIDTH), **kwargs)
        assert output.shape == (6, WIDTH)


def test_a_keyword_in_the_place_of_an_example() -> None:
    with pytest.raises(
        InputError, match=r"the inputs of step\(\) are float32\[3, 8\], float32\[3, 2\] in a microbatch"
    ):
        scheduled((a(4, WIDTH), a(4, 1))).step(a(6, WIDTH), mask=a(6, 2), target=a(6, WIDTH))
    with pytest.raises(InputError, match=r"the inputs of step\(\) are float64\[3, 8\] in a microbatch"):
        scheduled(a(4, WIDTH)).step(x=a(6, WIDTH, dtype=torch.float64), target=a(6, WIDTH))
    # A wrapper does not say which of its places a keyword is for.
    assert scheduled(a(4, WIDTH), module=Wrapped()).step(x=a(6, WIDTH), target=a(6, WIDTH)).shape == (6, WIDTH)


class Middle(nn.Linear):
    """Has its samples in dim 1, and a table that all of them share."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x.mean(0) + table)


def test_samples_in_another_dim() -> None:
    specs = (TensorChunkSpec(1), Replicate())
    example = (a(5, 2, WIDTH), a(1, WIDTH))

    def run(*args: Tensor) -> Tensor:
        schedule = scheduled(
            example, module=Middle(WIDTH, WIDTH), args_chunk_spec=specs, target_chunk_spec=TensorChunkSpec(0)
        )
        output: Tensor = schedule.step(*args, target=a(6, WIDTH))
        return output

    assert run(a(5, 6, WIDTH), a(1, WIDTH)).shape == (6, WIDTH)
    with pytest.raises(InputError, match=r"the inputs of step\(\) are float32\[4, 3, 8\], float32\[1, 8\]"):
        run(a(4, 6, WIDTH), a(1, WIDTH))
    with pytest.raises(InputError, match=r"the inputs of step\(\) are float32\[5, 3, 8\], float32\[2, 8\]"):
        run(a(5, 6, WIDTH), a(2, WIDTH))


def test_what_a_later_stage_gets() -> None:
    text = r"stage 1 was made for input_args float32\[4, 7\], and gets float32\[3, 8\] from stage 0: check what stage 0"
    with pytest.raises(StepError, match=text):
        scheduled(None, a(4, 7)).step(a(6, WIDTH), target=a(6, WIDTH))
    scheduled(None, a(4, WIDTH)).step(a(6, WIDTH), target=a(6, WIDTH))
