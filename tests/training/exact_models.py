"""Random models in small whole numbers, whose gradients are exact in float32: no order of sums changes a bit of them.

They have ties, frozen and unused layers, skips, and layers that are defined in another order than they run in.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from pipecut import Pipe, SplitPoint, pipeline
from pipecut.run import PipelineSchedule, PlannedSchedule
from pipecut.schedule import Plan, plan_for

WIDTH, SAMPLES, MICROBATCHES = 5, 8, 4
STRAIGHT = ("GPipe", "1F1B", "ZB-H1", "ZB-H2")
LOOPED = ("Interleaved1F1B", "LoopedBFS")


@dataclass(frozen=True)
class Shape:
    """Layers of a model: for each in the order in which they run."""

    defined: tuple[int, ...]  # the order of definition
    tied_to: tuple[int | None, ...]  # an earlier layer whose weight it has
    frozen: tuple[bool, ...]
    skip_from: tuple[int | None, ...]  # a value from before, added to its input
    activates: tuple[bool, ...]

    @classmethod
    def random(cls, random: Random) -> Shape:
        count = random.randint(4, 8)
        order = list(range(count))
        random.shuffle(order)

        def earlier(likely: float) -> tuple[int | None, ...]:
            return tuple(
                random.randrange(index) if index and random.random() < likely else None for index in range(count)
            )

        return cls(
            tuple(order),
            earlier(0.35),
            tuple(random.random() < 0.25 for _ in range(count - 1)) + (False,),
            earlier(0.4),
            tuple(random.random() < 0.5 for _ in range(count)),
        )


class ExactNet(nn.Module):
    """The model of a shape."""

    def __init__(self, shape: Shape, random: Random) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleDict({f"layer{index}": nn.Linear(WIDTH, WIDTH) for index in shape.defined})
        self.unused = nn.Linear(2, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                values = [random.choice((-1.0, 0.0, 0.0, 1.0)) for _ in range(parameter.numel())]
                parameter.copy_(torch.tensor(values).reshape(parameter.shape))
        for index, (other, frozen) in enumerate(zip(shape.tied_to, shape.frozen, strict=True)):
            if frozen:
                self.layer(index).requires_grad_(False)
            if other is not None:
                self.layer(index).weight = self.layer(other).weight

    def layer(self, index: int) -> nn.Linear:
        return self.layers[f"layer{index}"]  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for index in range(len(self.layers)):
            source = self.shape.skip_from[index]
            given = values[-1] if source is None else values[-1] + values[source]
            made = self.layer(index)(given)
            values.append(made.relu() if self.shape.activates[index] else made)
        return values[-1]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Sums whole numbers; a mean over an even number of samples is exact too."""
    return (output * target).sum() / len(output)


@dataclass(frozen=True)
class Case:
    """A model, the same one uncut, and a plan."""

    number: int
    model: ExactNet
    uncut: ExactNet
    pipe: Pipe
    plan: Plan
    x: Tensor
    target: Tensor
    norm_type: float
    max_norm: float
    foreach: bool | None

    @classmethod
    def random(cls, number: int, ranks: int | None = None) -> Case:
        random = Random(number)
        model = ExactNet(Shape.random(random), random)
        count = len(model.layers)
        stages = random.choice((2, 3, 4)) if ranks is None else random.choice((ranks, 2 * ranks))
        cuts = sorted(random.sample(range(1, count), stages - 1))
        x, target = (
            torch.tensor([[random.randint(-2, 2) for _ in range(WIDTH)] for _ in range(SAMPLES)]) for _ in "xy"
        )
        x, target = x.float(), target.float()
        uncut = copy.deepcopy(model)
        spec = {f"layers.layer{index}": SplitPoint.BEGINNING for index in cuts}
        pipe = pipeline(model, (x,), split_spec=spec)
        used = ranks or random.choice([each for each in range(1, stages + 1) if stages % each == 0])
        name = random.choice(STRAIGHT if used == stages else LOOPED)
        plan = plan_for(name, ranks=used, chunks=stages // used, microbatches=MICROBATCHES)
        norm_type = random.choice((2.0, 2.0, 2.0, 1.0, 3.0, 0.5, float("inf")))
        return cls(
            number, model, uncut, pipe, plan, x, target, norm_type, random.choice((0.5, 3.0, 1e6)),
            random.choice((None, True, False)),
        )  # fmt: skip

    def schedule(self, rank: int | None = None) -> PipelineSchedule:
        """The schedule of a rank, or of all in this process."""
        mine = range(self.plan.stages) if rank is None else self.plan.placement.stages_of[rank]
        return PlannedSchedule([self.pipe.build_stage(index, "cpu") for index in mine], self.plan, loss_fn)

    def step_uncut(self) -> None:
        """Run the uncut model on one microbatch after the other."""
        size = SAMPLES // MICROBATCHES
        for x, target in zip(self.x.split(size), self.target.split(size), strict=True):
            (loss_fn(self.uncut(x), target) / MICROBATCHES).backward()

    def expected(self, **options: Any) -> Tensor:
        """Clip the uncut model."""
        return torch.nn.utils.clip_grad_norm_(
            self.uncut.parameters(), self.max_norm, self.norm_type, foreach=self.foreach, **options
        )

    def change_gradients(self, schedule: PipelineSchedule) -> None:
        """Give both models the same gradients of any size, for which the order of the norms matters."""
        held: dict[str, list[Tensor]] = {}
        for each in schedule.held_parameters():
            held.setdefault(each.name, []).append(each.value)
        numbers = torch.Generator().manual_seed(self.number)
        for name, parameter in self.uncut.named_parameters():
            if parameter.grad is not None:
                scale = 10 ** (torch.rand((), generator=numbers) * 2 - 1)
                parameter.grad.copy_(torch.randn(parameter.shape, generator=numbers) * scale)
                for mine in held.get(name, ()):
                    assert mine.grad is not None
                    mine.grad.copy_(parameter.grad)

    def check_gradients(self, stages: Any) -> None:
        """Compare every gradient of some stages with the uncut model's, bit for bit."""
        wanted = dict(self.uncut.named_parameters(remove_duplicate=False))
        for stage in stages:
            for name, parameter in stage.submod.named_parameters(remove_duplicate=False):
                mine, other = parameter.grad, wanted[name].grad
                assert (mine is None) == (other is None), f"case {self.number}: {name}"
                assert mine is None or torch.equal(mine, other), f"case {self.number}: {name}"
