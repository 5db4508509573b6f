"""Cuts inside no_grad and autocast blocks of a model's own forward: each part enters the mode again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipecut import PlannedSchedule, SplitPoint, pipe_split, pipeline
from pipecut.schedule import plan_for
from tests.run.test_sizes_from_data import WIDTH, by_microbatches, cut, loss_fn
from tests.support.equality import assert_equals_uncut
from tests.support.training import assert_same_gradients, gradients_of


class _Layers(nn.Module):
    dtype = torch.float32  # autocast leaves float64 as it is

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))


class InAutocast(_Layers):
    """One block of bfloat16 over three stages, with a block of float32 inside that is cut too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers[1](x)
            square = x @ x.t()
            pipe_split()
            x = square @ self.layers[2](x)
            with torch.autocast("cpu", enabled=False):
                x = self.layers[3](x.float())
                pipe_split()
                x = self.layers[4](x)
            x = self.layers[4](x) + self.layers[1](x)  # a weight of the first stage: its cast is another one here
            pipe_split()
            x = self.layers[2](x)
        return self.layers[5](x.float())  # type: ignore[no-any-return]


class InNoGrad(_Layers):
    """Values made without gradients cross, and values with gradients are used without."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            target = self.layers[1](x)
            pipe_split()
            target = self.layers[2](target + x) * 2
        x = self.layers[3](x) + target
        pipe_split()
        with torch.no_grad():
            scale = self.layers[4](x)
            with torch.enable_grad():
                deep = self.layers[5](x)
                pipe_split()
                deep = torch.relu(deep)
            scale = scale * 2
        return x + scale + deep


class _Around(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.beside = inside, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inside(x)) + self.beside(x)  # type: ignore[no-any-return]


class Nested(_Layers):
    """Modules that are called under a mode, and cut there; and called again, without gradients, as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.block = _Around(_Around(nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.block(self.layers[0](x))
        with torch.no_grad():
            still = self.block(x.float())
        return self.layers[1](x.float()) + still  # type: ignore[no-any-return]


MODELS: list[type[nn.Module]] = [InAutocast, InNoGrad]
WITHIN = 2e-2  # of bfloat16: a weight in two stages is cast in both, and its gradients are summed in float32


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_training(kind: type[nn.Module]) -> None:
    model, pipe = cut(kind)
    x, y = torch.randn(2, 9, WIDTH)
    expected = by_microbatches(model, x, y, 3)
    for name, ranks in {"1F1B": 4, "ZB-H1": 4, "ZBVZeroBubble": 2}.items():
        plan = plan_for(name, ranks=ranks, chunks=4 // ranks, microbatches=3)
        schedule = PlannedSchedule([pipe.build_stage(index, "cpu") for index in range(4)], plan, loss_fn)
        model.zero_grad(set_to_none=True)
        output = schedule.step(x, target=y)
        torch.testing.assert_close(output, torch.cat([model(part) for part in x.tensor_split(3)]), rtol=0, atol=0)
        assert_same_gradients(gradients_of(model), expected, WITHIN if kind is InAutocast else 1e-6)


def test_dtypes_and_gradients_of_what_crosses() -> None:
    edges = [str(edge) for edge in cut(InAutocast)[1].edges]
    assert "layers_1: 0 -> 1 bfloat16[batch, 4] grad" in edges
    assert "layers_3: 1 -> 2 float32[batch, 4] grad" in edges
    edges = [str(edge) for edge in cut(InNoGrad)[1].edges]
    assert "layers_1: 0 -> 1 float32[batch, 4]" in edges  # made without gradients: none comes back
    assert "layers_5: 2 -> 3 float32[batch, 4] grad" in edges


@pytest.mark.parametrize(
    "path",
    ["block.inside", *(pytest.param(path, marks=pytest.mark.slow) for path in ("block.inside.inside", "block#1"))],
)
def test_modules_that_are_cut_under_a_mode(path: str) -> None:
    """Bit for bit, with kept modules and with rebuilt ones."""
    torch.manual_seed(0)
    assert_equals_uncut(Nested(), (torch.randn(3, WIDTH),), split_spec={path: SplitPoint.END}, expect_stages=2)


def test_automatic_cuts_go_through_blocks() -> None:
    """A frozen encoder under no_grad was one block that no cut could enter."""

    class Frozen(_Layers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for layer in self.layers[:5]:
                    x = layer(x)
            return self.layers[5](x)  # type: ignore[no-any-return]

    model, x = Frozen(), torch.randn(4, WIDTH)
    pipe = pipeline(model, (x,), num_stages=3)
    torch.testing.assert_close(pipe(x), model(x))
    assert not any(edge.spec.requires_grad for edge in pipe.edges)
