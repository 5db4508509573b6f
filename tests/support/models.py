"""Two models for any number of stages: one to be traced, with all that crosses stages, and one that is cut by hand."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import Pipe, PipelineStage, SplitPoint, pipeline
from tests.support.training import Problem

WORDS, WIDTH, LENGTH = 7, 6, 3


class Tangled(nn.Module):
    """Tied embeddings, a skip from the first layer to the last, a mask that late layers use, and a dict as output."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        x = first = self.embed(ids)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index in (last // 2, last):
                x = x * mask[..., None]
            if index == last:
                x = x + first
        return {"logits": self.head(x), "hidden": x}


def tangled_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Of both outputs."""
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten()) + output["hidden"].square().mean()


def tangled_problem(model: nn.Module, samples: int, seed: int = 0) -> Problem:
    """A batch for a Tangled."""
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (samples, LENGTH), generator=numbers)
    target = torch.randint(WORDS, (samples, LENGTH), generator=numbers)
    mask = torch.rand(samples, LENGTH, generator=numbers) < 0.7
    return Problem(model, (ids,), target, tangled_loss, {"mask": mask})


@functools.cache
def tangled_pipe(stages: int) -> Pipe:
    """A Tangled, cut into this many stages. It is traced once: leave its weights as they are."""
    torch.manual_seed(stages)
    model = Tangled(stages).double()
    problem = tangled_problem(model, 3)
    spec = {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, stages)}
    return pipeline(model, problem.args, dict(problem.kwargs), split_spec=spec)


def traced_stages(pipe: Pipe) -> list[PipelineStage]:
    """All stages of a pipe."""
    return [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]


class Opening(nn.Module):
    """The first of the stages cut by hand: it gives a value, integers, and a value without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(ids)
        return x, ids, x.detach() * 2


class Middle(nn.Module):
    """Uses some of what it gets, and hands all of it on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.layer(x)) + start, ids, start


class Closing(nn.Module):
    """Ends in a dict, as the model does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(WIDTH, WORDS), nn.Embedding(WORDS, WORDS)

    def forward(self, x: Tensor, ids: Tensor, start: Tensor) -> dict[str, Tensor]:
        hidden = x * start
        return {"logits": self.layer(hidden) + self.bias(ids), "hidden": hidden}


class ByHand(nn.Module):
    """The stages that are cut by hand, one after the other."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        middle = [Middle() for _ in range(stages - 2)]
        self.parts = nn.ModuleList([Opening(), *middle, Closing()])

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        values: Sequence[Tensor] = (ids,)
        for part in self.parts:
            values = part(*values)
        return values  # type: ignore[return-value]


def by_hand_problem(model: nn.Module, samples: int, seed: int = 0) -> Problem:
    """A batch for a ByHand."""
    problem = tangled_problem(model, samples, seed)
    return Problem(model, problem.args, problem.target, tangled_loss)


def by_hand_model(stages: int) -> ByHand:
    """Its weights are the same each time."""
    torch.manual_seed(stages)
    return ByHand(stages).double()


def stages_by_hand(model: ByHand) -> list[PipelineStage]:
    """All stages of a ByHand."""
    count = len(model.parts)
    return [PipelineStage(part, index, count, "cpu") for index, part in enumerate(model.parts)]


class Chain(nn.Sequential):
    """Layers of one kind, each a stage."""

    def __init__(self, stages: int, width: int = WIDTH) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(stages)))


def chain_problem(stages: int, samples: int, loss_fn: object = F.mse_loss, needs_gradient: bool = False) -> Problem:
    """A Chain in double precision, and numbers to learn."""
    torch.manual_seed(stages)
    model = Chain(stages).double()
    x, y = (torch.randn(samples, WIDTH, dtype=torch.float64) for _ in range(2))
    return Problem(model, (x.requires_grad_(needs_gradient),), y, loss_fn)  # type: ignore[arg-type]


def stages_of_chain(model: nn.Module) -> list[PipelineStage]:
    """All stages of a Chain, cut by hand."""
    parts = list(model.children())
    return [PipelineStage(part, index, len(parts), "cpu") for index, part in enumerate(parts)]


def chain_pipe(problem: Problem) -> Pipe:
    """A Chain, traced and cut into its layers."""
    stages = len(list(problem.model.children()))
    spec = {str(index): SplitPoint.BEGINNING for index in range(1, stages)}
    return pipeline(problem.model, problem.args, split_spec=spec)
