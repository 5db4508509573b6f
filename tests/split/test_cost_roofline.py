"""Times by roofline, and the chain of blocks that they are added up in."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipecut import PipeError, pipeline
from pipecut.split.chain import Chain, StageTie, chain_of
from pipecut.split.cost import Machine, OperationTimes, Times
from pipecut.split.cost.operation import CostFinder

ARITHMETIC = Machine(matmul_flops={torch.float32: 1.0}, memory_bandwidth=1e30, overhead=0.0, link_bandwidth=1.0)
MEMORY = Machine(matmul_flops={torch.float32: 1e30}, memory_bandwidth=1.0, overhead=0.0)


class Skip(nn.Module):
    """The first value is used again at the end, and the first weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        begin = self.first(x)
        return self.last(self.third(self.second(begin))) + begin  # type: ignore[no-any-return]


def times_of(model: nn.Module, x: Tensor, machine: Machine) -> Times:
    traced = pipeline(model, (x,)).traced
    times = OperationTimes(CostFinder(traced), machine, traced.hints)
    return sum(map(times.of, traced.operations), Times())


def chain(model: nn.Module, x: Tensor) -> Chain:
    return chain_of(pipeline(model, (x,)).traced, ARITHMETIC)


def test_a_layer_has_its_operations_once_in_each_part() -> None:
    flops = 2 * 3 * 8 * 16
    assert times_of(nn.Sequential(nn.Linear(8, 16)), torch.ones(3, 8, requires_grad=True), ARITHMETIC) == Times(
        flops, flops, flops
    )


def test_the_first_layer_has_no_input_gradient_and_a_frozen_one_no_weight_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    flops = 2 * 3 * 8 * 8
    assert times_of(model, torch.ones(3, 8), ARITHMETIC) == Times(2 * flops, flops, 2 * flops)
    model[1].requires_grad_(False)
    assert times_of(model, torch.ones(3, 8), ARITHMETIC) == Times(2 * flops, flops, flops)


def test_weight_gradients_are_added_to_what_is_there() -> None:
    with_weight = times_of(nn.Sequential(nn.Linear(8, 8, bias=False)), torch.ones(3, 8), MEMORY)
    moved = 4 * (3 * 8 + 8 * 8 + 3 * 8)
    passes = 3  # the gradient is read, so is the sum, and the sum is written
    assert with_weight == Times(moved, 0.0, moved + passes * 8 * 8 * 4)


def test_a_checkpoint_runs_its_forward_again() -> None:
    class Model(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.layer, self.again = nn.Linear(8, 8, bias=False), again

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=False) if self.again else self.layer(x)  # type: ignore[no-any-return]

    plain, again = (times_of(Model(each), torch.ones(3, 8), ARITHMETIC) for each in (False, True))
    assert again.backward_input - plain.backward_input == plain.forward


def test_one_trace_has_the_times_of_any_batch() -> None:
    traced = pipeline(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.ones(2, 8),)).traced
    small, large = (chain_of(traced, ARITHMETIC, {"batch": batch}) for batch in (2, 20))
    assert [each.forward * 10 for each in small.times] == [each.forward for each in large.times]
    assert large.places[0].sent == 20 * 8 * 4


def test_skips_count_at_every_cut_that_they_cross() -> None:
    value = 4.0 * 8 * 3
    places = {place.cut.label: place.sent for place in chain(Skip(), torch.ones(3, 8)).places}
    assert places == {
        "the cut after 'first'": value,
        "the cut after 'second'": 2 * value,
        "the cut after 'third'": 2 * value,
        "the cut after 'last'": 2 * value,
    }


def test_a_tied_weight_counts_once_in_a_stage_and_is_summed_between_two() -> None:
    found = chain(Skip(), torch.ones(3, 8))
    weight = 8 * 8 * 4
    assert [cost.parameter_bytes for cost in found.stage_costs(())] == [3 * weight]
    assert [cost.parameter_bytes for cost in found.stage_costs((2,))] == [2 * weight, 2 * weight]
    assert found.ties(()) == ()
    assert found.ties((2,)) == (StageTie((0, 1), weight),)


def test_masks_are_not_sent() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(8, 8).tril()
            return self.second(self.first(x) @ mask) @ mask  # type: ignore[no-any-return]

    assert {place.sent for place in chain(Masked(), torch.ones(3, 8)).places} == {3.0 * 8 * 4}


def test_fewer_places_have_the_same_sums() -> None:
    found = chain(Skip(), torch.ones(3, 8))
    joined = found.with_places([1])
    assert [cost.times.total for cost in joined.stage_costs((1,))] == [
        pytest.approx(cost.times.total) for cost in found.stage_costs((2,))
    ]
    assert [dataclasses.replace(cost, times=Times()) for cost in joined.stage_costs((1,))] == [
        dataclasses.replace(cost, times=Times()) for cost in found.stage_costs((2,))
    ]


def test_a_machine_is_measured_once() -> None:
    machine = Machine.measure("cpu")
    assert machine is Machine.measure(torch.device("cpu"))
    assert machine.matmul_flops[torch.float32] > 1e8
    assert machine.memory_bandwidth > 1e7
    assert 0 < machine.overhead < 1e-2
    assert "GFLOP/s" in str(machine)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_bandwidth": 0.0}, r"Machine\(memory_bandwidth=0.0\): a rate is what passes in a second"),
        ({"overhead": -1.0}, r"Machine\(overhead=-1.0\): give seconds, 0 or more"),
        ({"link_latency": math.nan}, r"Machine\(link_latency=nan\)"),
        ({"matmul_flops": {torch.bfloat16: 1.0}}, "has no rate for torch.float32"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(PipeError, match=message):
        Machine(**fields)  # type: ignore[arg-type]
