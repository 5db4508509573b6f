"""Cuts found by pipecut itself."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipecut import Pipe, PipeWarning, SplitPoint, pipeline, plan
from pipecut.errors import InputError, SplitError
from pipecut.planning import measure as stage_times
from pipecut.planning.measure import Run
from pipecut.planning.measured_chain import _fitted, _MeasuredCut, measured_chain, refined_cut
from pipecut.split.automatic import BalancedCut, balanced_cut
from pipecut.split.balance.solve import evaluate_cuts
from pipecut.split.chain import chain_of
from pipecut.split.cost import Times
from pipecut.split.cost.machine import Machine
from tests.support.sampling import sampled


class Residual(nn.Module):
    """Two layers and a skip around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


def flops(pipe: Pipe) -> list[int]:
    return [int(info.flops.subs(dict.fromkeys(info.flops.free_symbols, 4))) for info in pipe.stage_infos]


@pytest.mark.parametrize("num_stages", sampled([1, 2, 4, 8], lambda stages: stages == 4))
def test_equal_blocks_are_dealt_out_evenly_and_stay_whole(num_stages: int) -> None:
    model = nn.Sequential(*(Residual(8) for _ in range(8)))
    pipe = pipeline(model, (torch.ones(4, 8),), num_stages=num_stages)
    assert [info.modules for info in pipe.stage_infos] == [
        tuple(str(8 // num_stages * stage + member) for member in range(8 // num_stages)) for stage in range(num_stages)
    ]
    assert len(set(flops(pipe))) == 1


def test_a_heavy_layer_gets_a_stage_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4096), nn.Linear(4096, 8), nn.Linear(8, 8))
    pipe = pipeline(model, (torch.ones(4, 8),), num_stages=2)
    assert [info.modules for info in pipe.stage_infos] == [("0", "1", "2"), ("3", "4")]


def test_einsum_weighs_as_much_as_the_product_that_it_is() -> None:
    """einsum counted as no work at all: 9 of 12 equal layers came to lie in the first of two stages."""

    class Einsum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bti,ij->btj", x, self.weight)

    model = nn.Sequential(*(Einsum() for _ in range(6)), *(nn.Linear(64, 64, bias=False) for _ in range(6)))
    pipe = pipeline(model, (torch.randn(8, 64, 64),), num_stages=2)
    assert [len(info.modules) for info in pipe.stage_infos] == [6, 6]
    chain = chain_of(pipe.traced)
    assert chain.deferred == (2 * 8 * 64 * 64 * 4,) * 12


def test_at_equal_balance_the_cut_goes_where_least_is_sent() -> None:
    narrow = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2), nn.Linear(2, 64), nn.Linear(64, 64))
    pipe = pipeline(narrow, (torch.ones(4, 64),), num_stages=2)
    assert [str(edge.spec) for edge in pipe.edges] == ["float32[batch, 2] grad"]


def test_regions_are_never_cut() -> None:
    class Checkpointing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
            self.head = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.layers, x, use_reentrant=False))  # type: ignore[no-any-return]

    with pytest.warns(PipeWarning, match="of the model's time"):
        pipe = pipeline(Checkpointing(), (torch.ones(4, 8),), num_stages=2)
    assert [info.modules for info in pipe.stage_infos] == [("layers",), ("head",)]


class Norms(nn.Module):
    """Layers with running statistics and dropout, whose copies must not touch the model."""

    def __init__(self, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.5)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_measured_costs_leave_the_model_and_the_random_numbers_alone() -> None:
    model, x = Norms(), torch.randn(16, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    pipe = pipeline(model, (x,), num_stages=3, cost="measured")
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    assert pipe.num_stages == 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_equal_blocks_are_measured_once_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def pretend(module: nn.Module, inputs: list[object]) -> list[Run]:
        calls.append(module)
        return [(float(len(calls)), 0.0, 0.0)]

    monkeypatch.setattr(stage_times, "_some_runs", pretend)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 2)), torch.ones(4, 8)
    chain = measured_chain(chain_of(pipeline(model, (x,)).traced), (x,))
    assert len(calls) == 3 * stage_times._PASSES == 9
    # The first layer has no input that needs a gradient: its backward is another one. The median is of the middle pass.
    assert [times.forward for times in chain.times] == [4.0, 5.0, 5.0, 5.0, 5.0, 6.0]


def test_a_cut_is_corrected_by_what_its_stages_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers 4 and 5 are as long as the others by themselves, and take four times as long inside a stage."""
    lengths = [1, 1, 1, 1, 4, 4]

    def pretend(module: nn.Module, inputs: list[object]) -> list[Run]:
        names = {int(name.split(".")[0]) for name, _ in module.named_parameters()}
        alone = len(names) == 1
        return [(float(sum(1 if alone else lengths[name] for name in names)), 0.0, 0.0)]

    monkeypatch.setattr(stage_times, "_some_runs", pretend)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.ones(4, 8)
    chain = measured_chain(chain_of(pipeline(model, (x,)).traced), (x,))
    assert {times.forward for times in chain.times} == {1.0}
    assert balanced_cut(chain, 2).balance.cuts == (3,)  # 3 and 9
    found = refined_cut(chain, functools.partial(balanced_cut, stages=2), (x,))
    assert [cut.label for cut in found.plan.cuts] == ["the cut after '3'"]  # 4 and 8


def test_times_are_fitted_to_the_stages_of_all_measured_cuts() -> None:
    """Of two cuts the stages took 3 and 9, and 4 and 8: so the block between them took 1."""
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.ones(4, 8)
    chain = chain_of(pipeline(model, (x,), num_stages=1).traced).with_times([Times(1.0)] * 6)
    measured = []
    for cut, totals in ((3, (3.0, 9.0)), (4, (4.0, 8.0))):
        balance = evaluate_cuts(chain.blocks(), [cut], 2)
        measured.append(_MeasuredCut(BalancedCut(chain.plan([cut]), balance, chain), None, [[*map(Times, totals)]]))
    assert measured[0].imbalance == 1.5
    fitted = [each.forward for each in _fitted(chain, measured).times]
    assert fitted == pytest.approx([1, 1, 1, 1, 4, 4], rel=0.01)


def test_what_was_measured_of_a_block_is_divided_inside_it() -> None:
    model, x = nn.Sequential(*(Residual(16) for _ in range(2))), torch.ones(4, 16)
    chain = chain_of(pipeline(model, (x,)).traced)
    outer = chain.up_to(0)
    assert len(outer.times) < len(chain.times)
    measured = measured_chain(outer, (x,))
    assert len(measured.times) == len(outer.times) == 2
    assert all(times.backward_weight > 0 for times in measured.times)
    fine = measured_chain(chain, (x,))
    assert len(fine.times) == len(chain.times)


def test_a_model_without_values_cannot_be_measured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InputError, match='cost="measured" runs the model, and 0.weight is on the meta device'):
        pipeline(model, (torch.ones(2, 4),), num_stages=2, cost="measured")


def test_a_faster_rank_gets_more() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    pipe = pipeline(model, (torch.ones(64, 64),), num_stages=2, speeds=[1.0, 3.0])
    assert [len(info.modules) for info in pipe.stage_infos] == [2, 6]


def test_a_memory_limit_moves_the_cut() -> None:
    model = nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 1024), *(nn.Linear(1024, 1024) for _ in range(2)))
    x = torch.ones(4, 64)
    free = pipeline(model, (x,), num_stages=2)
    tight = pipeline(model, (x,), num_stages=2, memory_limit=2.4 * 1024 * 1024 * 4 * 4)
    assert [len(info.modules) for info in free.stage_infos] != [3, 1]
    assert [len(info.modules) for info in tight.stage_infos] == [2, 2]
    with pytest.raises(
        SplitError, match=r"no cut into 2 stages fits memory_limit=1 MB: the least that would do is 3\d"
    ):
        pipeline(model, (x,), num_stages=2, memory_limit=1e6)


def test_a_block_that_is_too_large_is_named() -> None:
    class Giant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 256), nn.Linear(256, 8)
            self.weight = nn.Parameter(torch.randn(256, 256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(20):
                x = torch.tanh(x @ self.weight)
            return self.last(x)  # type: ignore[no-any-return]

    message = (
        r"what lies between the cut after 'first' and the cut before 'last' takes \d+% of the model's time and cannot "
        r"be cut: the longest of 2 stages takes 1\.\d\d times the mean. Use fewer stages, or divide it into modules"
    )
    with pytest.warns(PipeWarning, match=message) as caught:
        pipeline(Giant(), (torch.ones(64, 8),), num_stages=2)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_block_is_too_large_though_its_stage_sends_much() -> None:
    """The transfer made the stage longer, so that the block alone was less than nine tenths of it: not a word."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4096), nn.Linear(4096, 8), nn.Linear(8, 8))
    with pytest.warns(
        PipeWarning,
        match=r"what lies between the cut after '\d' and the cut after '\d' takes \d+% of the model's time and cannot "
        r"be cut: the longest of 4 stages takes 1.95 times the mean",
    ):
        pipeline(model, (torch.ones(2, 8),), num_stages=4)


@pytest.mark.parametrize(
    ("schedule", "layers", "words"),
    [
        ("1F1B", 3, "the longest of 4 stages takes 3.9. times the mean. Use fewer stages"),
        ("ZBVZeroBubble", 7, "the busiest of 4 ranks takes 3.9. times the mean. Use fewer ranks"),
    ],
)
def test_a_plan_warns_of_it_too(schedule: str, layers: int, words: str) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)), nn.Linear(64, 50000))
    with pytest.warns(PipeWarning, match=rf"and the end of the model takes 9\d% of .* be cut: {words}") as caught:
        plan(
            model, torch.ones(2, 64), ranks=4, batch=8, schedules=[schedule], machine=Machine.nominal("cpu"),
            time_budget=0.0,
        )  # fmt: skip
    assert [warning.filename for warning in caught] == [__file__]


def test_a_memory_limit_as_people_write_it() -> None:
    """A text was taken for a list: "memory_limit has 3 numbers"."""
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.ones(2, 64)
    assert pipeline(model, (x,), num_stages=2, memory_limit="1GB").num_stages == 2
    assert pipeline(model, (x,), num_stages=2, memory_limit=["1GiB", float("inf")]).num_stages == 2
    with pytest.raises(SplitError, match="no cut into 2 stages fits memory_limit=1 kB"):
        pipeline(model, (x,), num_stages=2, memory_limit="1kB")
    for wrong, text in (
        ("much", "memory_limit='much': write it as 24GB, 512MiB, or a number of bytes"),
        (["1GB"], r"memory_limit=\['1GB'\]: give one size for all ranks, such as '24GB', or one for each of 2"),
        (-1, "memory_limit=-1: give the bytes that a rank has, more than 0"),
        ([None, 1], "memory_limit=None: write it as 24GB"),
    ):
        with pytest.raises(InputError, match=text):
            pipeline(model, (x,), num_stages=2, memory_limit=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 9}, "9 stages were asked for, and this model can be cut into 3 at the most"),
        ({"num_stages": 2, "cost": "guess"}, 'cost=\'guess\': give "analytic" or "measured"'),
        ({"cost": "measured"}, "cost is for cuts that are found automatically: give num_stages too"),
        ({"memory_limit": 1e9}, "memory_limit is for cuts that are found automatically"),
        ({"num_stages": 2, "speeds": [1.0, 0.0]}, r"speeds\[1\] is 0.0: rank 1 would never finish"),
        ({"num_stages": 2, "speeds": [1.0]}, "speeds has 1 numbers, and there are 2 ranks"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with pytest.raises(SplitError, match=message):
        pipeline(model, (torch.ones(2, 4),), **options)


def test_train_and_eval_are_cut_alike() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            self.dropout = nn.Dropout(0.9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = self.dropout(nn.functional.dropout(layer(x), 0.5, self.training))
            return x

    model, x = Moody(), torch.randn(8, 32)
    pipe = pipeline(model, (x,), num_stages=4)
    torch.testing.assert_close(pipe.eval()(x), model.eval()(x))


class DependsOnData(nn.Module):
    """The number of chosen rows is known only when it runs; most of the work lies between the choice and its use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(*(nn.Linear(16, 16) for _ in range(24))), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[:3](x)
        chosen = hidden[hidden.sum(1) > 0]
        return self.layers[3:](x) + self.last(chosen).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("cost", ["analytic", "measured"])
def test_a_size_that_depends_on_the_data_crosses_the_best_cut(cost: Any) -> None:
    """A cut there was refused, and all but three layers were one stage."""
    model, x = DependsOnData(), torch.randn(4, 16)
    pipe = pipeline(model, (x,), num_stages=2, cost=cost)
    assert 8 < len(list(pipe.stages[0].parameters())) < 48
    assert "u0" in [str(dim) for edge in pipe.edges for dim in edge.spec.shape]
    torch.testing.assert_close(pipe(x), model(x))


class NumberFromData(nn.Module):
    """A number out of a tensor, used up to layer 4 of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = x.abs().sum().item()
        for index, layer in enumerate(self.layers):
            x = layer(x) * (number * 2) if index == 4 else layer(x)
        return x


def test_a_number_from_the_data_crosses_the_best_cut() -> None:
    model, x = NumberFromData(), torch.randn(4, 16)
    pipe = pipeline(model, (x,), num_stages=2)
    assert {name.split(".")[1] for name, _ in pipe.stages[1].named_parameters()} == {"3", "4", "5"}
    torch.testing.assert_close(pipe(2 * x), model(2 * x))


def test_the_balance_of_an_automatic_cut_is_printed() -> None:
    """Bottleneck, mean and the proven bound were found, and thrown away with the chain."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    pipe = pipeline(model, (torch.ones(4, 8),), num_stages=2)
    assert f"balance: {pipe.balance}" in str(pipe)
    assert pipe.explain()["balance"] == (pipe.balance,)
    assert re.fullmatch(
        r"the busiest rank takes [\d.]+ ms for a microbatch, 1\.\d+ times the mean of [\d.]+ ms; no cut takes less "
        r"than [\d.]+ ms \(proven best\), by analytic times on cpu",
        pipe.balance,
    )
    assert pipeline(model, (torch.ones(4, 8),), num_stages=2, cost="measured").balance.endswith("by measured times")
    by_hand = pipeline(model, (torch.ones(4, 8),), split_spec={"1": SplitPoint.BEGINNING})
    assert "balance" not in str(by_hand)
