"""Machines: the table, files, the default for a model, and cuts that are priced for a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipecut
from pipecut import InputError, Machine, SplitError, pipeline
from pipecut.split.automatic import balanced_cut
from pipecut.split.chain import chain_of
from pipecut.split.cost import machine_of

ENTRY = {"peak_tflops": {"float32": 20, "bfloat16": 300}, "memory_gb_per_s": 2000, "link_gb_per_s": 50}


def written(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "machines.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_every_machine_of_the_table_is_whole_and_has_its_source() -> None:
    table = json.loads((Path(pipecut.__file__).parent / "split/cost/machines.json").read_text())
    for name in table:
        machine = Machine.named(name)
        assert machine.name == name
        assert machine.source
        assert machine.memory is not None
        assert machine.network_bandwidth is not None
        assert machine.matmul_flops[torch.float16] > machine.matmul_flops[torch.float32]
        assert machine.network_bandwidth <= machine.link_bandwidth < machine.memory_bandwidth


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(InputError, match=r"machine='h10' is not known.*'h100'.*Give one of cpu, h100") as caught:
        machine_of("h10")
    assert "a file of machines" in str(caught.value)
    with pytest.raises(InputError, match="machine= is a int: give a name such as 'h100'"):
        machine_of(3)  # type: ignore[arg-type]


def test_a_machine_from_a_file(tmp_path: Path) -> None:
    machine = machine_of(written(tmp_path, {"mine": ENTRY}))
    assert machine is not None
    assert (machine.name, machine.link_bandwidth, machine.memory) == ("mine", 50e9, None)
    path = written(tmp_path, {"mine": ENTRY, "other": {**ENTRY, "link_gb_per_s": 1}})
    assert Machine.load(f"{path}#other").link_bandwidth == 1e9
    with pytest.raises(InputError, match="has 2 machines: say which, as '.*#mine'"):
        Machine.load(path)
    with pytest.raises(InputError, match="has no machine 'third': it has mine, other"):
        Machine.load(f"{path}#third")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a JSON file of machines"),
        ([1], "is not a file of machines: it should hold an entry per name"),
        ({"mine": {}}, "machine 'mine' has no peak_tflops with a rate for float32"),
        ({"mine": {**ENTRY, "peak_tflops": {"float32": 1, "float33": 1}}}, "'float33', which is not a dtype of torch"),
        ({"mine": {"peak_tflops": {"float32": 1}, "link_gb_per_s": 1}}, "machine 'mine' has no memory_gb_per_s"),
        ({"mine": {**ENTRY, "link_gb_per_s": "fast"}}, "link_gb_per_s = 'fast'; it should be a number above 0"),
        ({"mine": {**ENTRY, "memory_gb": 0}}, "memory_gb = 0; it should be a number above 0"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        machine_of(written(tmp_path, content))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: there is no such file"):
        pipeline(nn.Sequential(nn.Linear(2, 2)), (torch.ones(2, 2),), num_stages=1, machine=tmp_path / "none.json")


def test_more_ranks_than_a_host_has_are_linked_by_the_network() -> None:
    machine = Machine.named("h100")
    assert machine.linking(8) is machine
    assert machine.linking(9).link_bandwidth == machine.network_bandwidth


def test_machine_is_for_analytic_cuts_that_are_found() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(2, 2)
    with pytest.raises(SplitError, match="machine is for cuts that are found automatically: give num_stages too"):
        pipeline(model, (x,), machine="h100")
    with pytest.raises(SplitError, match='cost="measured" measures this machine: leave out machine='):
        pipeline(model, (x,), num_stages=2, machine="h100", cost="measured")


WIDTH = 1024


class Layer(nn.Module):
    """A layer as transformers have it: two parts around a residual stream, of which one is wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.mlp(x)


ARITHMETIC = Machine(matmul_flops={torch.float32: 1e12}, memory_bandwidth=1e18, overhead=0.0, link_bandwidth=1e15)


def cut(layers: int, head: int, **options: Any) -> tuple[str, int]:
    """Cut layers of 9 matrix products and a head of some in two: the last module of stage 0, and the width sent."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(layers)), nn.Linear(WIDTH, head * WIDTH))
        x = torch.ones(4, 512, WIDTH)
    pipe = pipeline(model, (x,), num_stages=2, **{"machine": ARITHMETIC, **options})
    return list(pipe.stages[0].state_dict())[-1].removesuffix(".bias"), max(edge.spec.shape[-1] for edge in pipe.edges)  # type: ignore[type-var]


def test_layers_stay_whole_unless_a_cut_inside_gains_more_than_a_few_per_cent() -> None:
    """27 | 32 by whole layers, and 28 | 31 inside: a gain of 3.2 per cent."""
    assert cut(6, head=5) == ("2.mlp.2", WIDTH)
    assert cut(6, head=5, cut_inside_layers=True) == ("3.mix", WIDTH)


def test_a_cut_inside_a_layer_that_gains_much_is_made() -> None:
    """18 | 11 by whole layers, and 14 | 15 inside of the wide part."""
    assert cut(3, head=2) == ("1.mlp.0", 4 * WIDTH)
    assert cut(3, head=2, cut_inside_layers=False) == ("1.mlp.2", WIDTH)


def test_cuts_inside_of_layers_are_few_and_have_their_reason() -> None:
    """Six layers of 9 and a head of 13 in three stages: 27 | 27 | 13 by whole layers; one cut inside is enough."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(6)), nn.Linear(WIDTH, 13 * WIDTH))
        x = torch.ones(4, 512, WIDTH)
    pipe = pipeline(model, (x,), num_stages=3, machine=ARITHMETIC)
    found = balanced_cut(chain_of(pipe.traced, ARITHMETIC), 3)
    inside = [found.chain.places[cut - 1].inside_layer for cut in found.balance.cuts]
    assert inside.count(True) == 1
    assert found.with_whole_layers is not None
    longer = found.with_whole_layers / found.balance.bottleneck - 1
    reason = f"1 of 2 cuts is inside of a layer: with whole layers the busiest rank would take {longer:.1%} longer"
    assert reason in found.summary
    assert longer > 0.03
    assert reason in pipe.balance
    assert "inside of a layer" not in balanced_cut(found.chain, 3, cut_inside_layers=False).summary


def test_a_slow_link_keeps_a_cut_out_of_the_wide_part() -> None:
    """Sending four widths instead of one costs more there than the better balance gains."""
    slow = Machine(matmul_flops={torch.float32: 1e12}, memory_bandwidth=1e18, overhead=0.0, link_bandwidth=2e9)
    assert cut(3, head=2, machine=slow)[1] == WIDTH


def test_no_place_is_left_outside_of_layers() -> None:
    with pytest.raises(SplitError, match="4 stages were asked for.*3 at the most.*cut_inside_layers=True, or divide"):
        pipeline(
            nn.Sequential(Layer(), Layer(), Layer()), (torch.ones(2, WIDTH),), num_stages=4, cut_inside_layers=False
        )


def test_the_default_machine_is_where_the_model_is() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8)
    assert pipeline(model, (x,), num_stages=2).balance.endswith("by analytic times on cpu")
    assert pipeline(model, (x,), num_stages=2, machine="a100").balance.endswith("on a100")
    found = pipecut.plan(model, x, ranks=2, batch=8, machine="A100", schedules=["1F1B"], time_budget=0.0)
    assert "by analytic times on a100" in str(found)
    model, x = model.to("meta"), x.to("meta")
    assert pipeline(model, (x,), num_stages=2).balance.endswith("by analytic times on h100")
    found = pipecut.plan(model, x, ranks=2, batch=8, schedules=["1F1B"], time_budget=0.0)
    assert "by analytic times on h100" in str(found)


@pytest.mark.slow
def test_layers_of_a_published_model_stay_whole_unless_a_cut_inside_gains() -> None:
    """32 layers and a head as long as 2.4 of them, as Llama of 8B has, on the accelerator of the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(32)), nn.Linear(WIDTH, 22 * WIDTH)).to(torch.bfloat16)
        x = torch.ones(1, 4096, WIDTH, dtype=torch.bfloat16)
    chain = chain_of(pipeline(model, (x,), num_stages=1).traced)
    assert chain.machine.name == "h100"
    inside = {place.cut.tick for place in chain.places if place.inside_layer}
    for stages in (4, 8, 16):
        found = balanced_cut(chain, stages)
        whole = balanced_cut(chain, stages, cut_inside_layers=False)
        cuts_inside = [cut.label for cut in found.plan.cuts if cut.tick in inside]
        if stages == 4:
            assert not cuts_inside
        gain = whole.balance.bottleneck / found.balance.bottleneck
        assert gain > 1.03 if cuts_inside else gain == pytest.approx(1, abs=0.05)
