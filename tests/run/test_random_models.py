"""Any model, cut anywhere, trained by any plan in microbatches: outputs, gradients and buffers of the uncut model."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipecut import PipelineStage, PlannedSchedule, TensorChunkSpec, pipeline
from pipecut.errors import SplitError
from pipecut.schedule import Plan, plan_for
from tests.schedule.random_plans import Shape, random_plan
from tests.split.random_models import Case, Net, cases, leaves_of
from tests.split.test_random_models import (
    NOT_A_MODEL,
    Arguments,
    assert_nearly_same,
    assert_same_output,
    buffers_of,
    case_spec,
    gradients_of,
    ignored_warnings,
    is_a_refusal,
)
from tests.support.properties import examples

EXAMPLES = examples(10)


class Recorder:
    """A loss in which each number of the output has a weight of its own; it keeps the outputs by their first sample."""

    def __init__(self) -> None:
        self.outputs: dict[int, Any] = {}

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        self.outputs[int(target[0])] = output
        terms = [torch.zeros((), dtype=torch.float64)]
        for position, leaf in enumerate(leaves_of(output)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                weights = torch.cos(torch.arange(leaf.numel(), dtype=leaf.dtype) + position).reshape(leaf.shape)
                terms.append((leaf * weights).sum())
        return torch.stack(terms).sum()


def in_microbatches(model: nn.Module, arguments: Arguments, sizes: Sequence[int]) -> Recorder:
    """The uncut model on one microbatch after the other, each with the weight of its samples."""
    recorder, start, total = Recorder(), 0, sum(sizes)
    for size in sizes:
        args = [value.narrow(0, start, size) for value in arguments[0]]
        kwargs = {name: value.narrow(0, start, size) for name, value in arguments[1].items()}
        loss = recorder(model(*args, **kwargs), torch.arange(start, start + size))
        if not loss.requires_grad:
            reject()
        (loss * size / total).backward()
        start += size
    return recorder


def has_state(case: Case) -> bool:
    """Whether what a microbatch does depends on those before it."""
    return bool(re.search("'(batch norm|running mean|running sum|counted)'", repr(case)))


def a_plan(random: Random, stages: int, microbatches: int, in_order: bool) -> Plan:
    if not in_order:
        ranks = random.randint(1, stages)
        return random_plan(random, Shape(stages, ranks, microbatches, overlaps=random.random() < 0.5, straight=True))
    divisors = [ranks for ranks in range(1, stages + 1) if stages % ranks == 0]
    ranks = random.choice(divisors)
    name = random.choice(["GPipe", "1F1B", "ZB-H1", "ZB-H2"] if ranks == stages else ["Interleaved1F1B", "LoopedBFS"])
    return plan_for(name, ranks=ranks, chunks=stages // ranks, microbatches=microbatches)


def check_case(case: Case, number: int, tally: Counter[str]) -> None:
    """One model with one plan."""
    random = Random(number)
    microbatches = random.randint(1, 3)
    sizes = [3] + [2] * (microbatches - 1)  # batch norm takes no single sample
    model = case.build()
    uncut, arguments = copy.deepcopy(model), case.example(sum(sizes))
    try:
        expected = in_microbatches(uncut, arguments, sizes)
    except RuntimeError as error:
        if not re.search(NOT_A_MODEL, str(error)):
            raise
        reject()
    try:
        with ignored_warnings():
            args, kwargs = case.example(3)
            pipe = pipeline(model, args, kwargs, split_spec=case_spec(case) or None, outputs="all")
    except SplitError as error:
        if not is_a_refusal(error):
            raise
        reject()
    plan = a_plan(random, pipe.num_stages, microbatches, in_order=has_state(case))
    recorder = Recorder()
    stages = [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]
    mine = case.example(sum(sizes))
    # A trace does not always tell that two inputs are of one batch: one of them may be unused.
    specs = tuple(TensorChunkSpec(0) for _ in mine[0]), {name: TensorChunkSpec(0) for name in mine[1]}
    schedule = PlannedSchedule(stages, plan, recorder, *specs)
    schedule.step(*mine[0], **mine[1], target=torch.arange(sum(sizes)), return_outputs=False)
    assert recorder.outputs.keys() == expected.outputs.keys()
    for start, output in expected.outputs.items():
        assert_same_output(recorder.outputs[start], output, f"output of the microbatch from sample {start}")
    assert_same_gradients(gradients_of(model, mine), gradients_of(uncut, arguments))
    check_buffers(stages, uncut)
    tally["checked"] += 1
    tally[f"{plan.name} on {plan.ranks} ranks"] += 1


def assert_same_gradients(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Zeros stand for no gradient where a later stage cuts the way to the loss."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        mine = actual[name]
        if gradient is None:
            assert mine is None or not mine.any(), f"the gradient of {name} should be None"
        else:
            assert mine is not None, f"the gradient of {name} is None"
            assert_nearly_same(mine, gradient, f"the gradient of {name}")


def check_buffers(stages: Sequence[PipelineStage], uncut: Net | nn.Module) -> None:
    expected = buffers_of(uncut)
    for stage in stages:
        for name, buffer in stage.submod.named_buffers(remove_duplicate=False):
            if name in expected:
                assert_nearly_same(buffer, expected[name], f"buffer {name} of stage {stage.stage_index}")


@pytest.mark.hypothesis
def test_random_models_by_random_plans() -> None:
    tally: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(cases(), st.integers(0, 2**32 - 1))
    def check(case: Case, number: int) -> None:
        check_case(case, number, tally)

    check()
    print(dict(tally))
    assert tally["checked"] >= EXAMPLES
