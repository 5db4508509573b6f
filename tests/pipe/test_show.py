"""print(pipe): what a user sees of a cut model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecut import SplitPoint, pipeline
from pipecut.pipe.report import fold


class Skipping(nn.Module):
    """A tied pair of layers, a skip over one stage, a mask used late, and a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        early = self.layers[0](x)
        late = self.layers[3](self.layers[2](self.layers[1](early)))
        return (late + early) * mask  # type: ignore[no-any-return]


def test_the_table_tells_stages_edges_ties_and_unused_parameters() -> None:
    cuts = {"layers.1": SplitPoint.BEGINNING, "layers.3": SplitPoint.BEGINNING}
    pipe = pipeline(Skipping(), (torch.ones(2, 4), torch.ones(2, 1)), split_spec=cuts)
    text = str(pipe)
    assert "Skipping in 3 stages" in text
    assert "layers.1 to layers.2" in text
    assert "activation layers_0: stage 0 -> 2 (skips 1 stage)  float32[batch, 4] grad" in text
    assert "root input mask: stage 0 -> 2 (skips 1 stage)  float32[batch, 1]" in text
    assert "tied: layers.0.weight = layers.3.weight in stages 0, 2 (owner: stage 0)" in text
    assert "unused parameters: spare.weight, spare.bias" in text
    assert "symbolic dims, as in the example: batch=2" in text
    rows = [[cell.strip() for cell in line.split("│")[1:5]] for line in text.splitlines() if line.startswith("│")]
    assert [row for row in rows if row[0]] == [
        ["0", "layers.0", "20", "64"],
        ["1", "layers.1 to layers.2", "40", "128"],
        ["2", "layers.3", "26", "64"],
    ]


def test_readable_is_the_code_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
    expected = """\
# stage 0, the stage itself
def forward(self, input):
    _0 = self._modules['0'](input)
    return _0.contiguous()

# stage 1, the stage itself
def forward(self, _0):
    _1 = self._modules['1'](_0)
    return _1
"""
    assert pipe.print_readable() == expected
    assert capsys.readouterr().out == expected + "\n"


def test_runs_of_numbered_modules_are_folded() -> None:
    assert fold(["a", "h.0", "h.1", "h.3", "h.4", "b"]) == ["a", "h.0 to h.1", "h.3 to h.4", "b"]
    assert fold([]) == []
