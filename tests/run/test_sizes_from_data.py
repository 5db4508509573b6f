"""Values whose sizes depend on the data, and numbers out of tensors, cross cuts: the sizes travel with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import Pipe, PipeError, PlannedSchedule, SplitPoint, pipe_split, pipeline
from pipecut.schedule import plan_for
from tests.support.training import TIGHT, Gradients, assert_same_gradients, gradients_of

WIDTH = 4
loss_fn = nn.functional.mse_loss


class Experts(nn.Module):
    """A mixture of experts that is cut between the lists of rows, one for each expert, and the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weight, chosen = self.router(x).softmax(-1).max(-1)
        rows = [(chosen == expert).nonzero().squeeze(-1) for expert in range(2)]
        rows.append((chosen > 99).nonzero().squeeze(-1))  # nobody's
        parts = [x[row].t() for row in rows]  # has a gradient, and lies in memory in another order
        pipe_split()
        out = x.clone()
        for row, part, expert in zip(rows, parts, self.experts, strict=True):
            out = out.index_add(0, row, expert(part.t()) * weight[row, None])
        return out


class Masked(nn.Module):
    """A boolean mask chooses elements; stage 1 hands them on to stage 2, and stage 0 to both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        large = x[x > 0]
        pipe_split()
        x = self.layers[1](x) + large.sum()
        pipe_split()
        x = self.layers[2](x) * large.mean()
        pipe_split()
        return self.layers[3](x)  # type: ignore[no-any-return]


class Counts(nn.Module):
    """Numbers of three kinds out of tensors, which later stages need as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        count, largest, some = (x > 0).sum().item(), x.abs().max().item(), (x > 1).any().item()
        x = self.a(x)
        pipe_split()
        return self.b(x)[:, : x.shape[1]] * largest + x.new_ones(count).sum() * some  # type: ignore[no-any-return]


class Whole(nn.Module):
    """A module that takes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        return self.linear(x) * rows  # type: ignore[no-any-return]


class Passes(nn.Module):
    """The size of what was chosen goes to modules of two stages as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), Whole(), Whole()

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.a(x)[x.sum(-1) > 0]
        x = self.b(x, chosen.shape[0])
        pipe_split()
        return self.c(x, chosen.shape[0] * 2) + chosen.sum()  # type: ignore[no-any-return]


MODELS: list[type[nn.Module]] = [Experts, Masked, Counts, Passes]


def cut(model: type[nn.Module]) -> tuple[nn.Module, Pipe]:
    torch.manual_seed(0)
    dtype = getattr(model, "dtype", torch.double)
    made = model().to(dtype)
    return made, pipeline(made, (torch.randn(6, WIDTH).to(dtype),))


def by_microbatches(model: nn.Module, x: Tensor, y: Tensor, count: int) -> Gradients:
    """The gradients of a copy of the uncut model: what depends on the data, depends on that of a microbatch."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    for part, target in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        (loss_fn(model(part), target) * (len(part) / len(x))).backward()
    return gradients_of(model)


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_training_and_evaluation(kind: type[nn.Module]) -> None:
    model, pipe = cut(kind)
    stages = pipe.num_stages
    assert "sizes" in pipe.explain()  # nothing there trips over such a size
    for name, ranks in {"GPipe": stages, "1F1B": stages, "ZB-H1": stages, "Interleaved1F1B": stages // 2}.items():
        plan = plan_for(name, ranks=ranks, chunks=stages // ranks, microbatches=4)
        schedule = PlannedSchedule([pipe.build_stage(index, "cpu") for index in range(stages)], plan, loss_fn)
        for seed in range(2):  # other sizes in every step
            torch.manual_seed(seed)
            x, y = torch.randn(2, 10, WIDTH, dtype=torch.double)
            expected = by_microbatches(model, x, y, 4)
            model.zero_grad(set_to_none=True)
            schedule.step(x, target=y)
            assert_same_gradients(gradients_of(model), expected, TIGHT)
            with torch.no_grad():
                parts = torch.cat([model(part) for part in x.tensor_split(4)])
            torch.testing.assert_close(schedule.eval(x), parts)


class Counting(nn.Module):
    """Cannot be traced, and returns a number that is another one for other rows."""

    def forward(self, x: Tensor) -> tuple[int, Tensor]:
        return int((x > 0).sum()), x * 2


def test_a_number_of_a_module_that_stays_as_it_is() -> None:
    """The number of the example became part of the generated code, which refused any other."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.counting, self.b = nn.Linear(WIDTH, WIDTH), Counting(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            count, x = self.counting(self.a(x))
            return self.b(x) * count  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Model(), torch.randn(6, WIDTH)
    pipe = pipeline(model, (x,), split_spec={"b": SplitPoint.BEGINNING}, tracer="fx")
    assert [item.path for item in pipe.traced.fallbacks] == ["counting"]
    for seed in range(3):
        torch.manual_seed(seed)
        other = torch.randn(5, WIDTH)
        torch.testing.assert_close(pipe(other), model(other))


def test_int_has_a_remedy() -> None:
    """`int()` of a tensor cannot be traced; `.item()` can."""

    class Model(nn.Module):
        def __init__(self, number: Any) -> None:
            super().__init__()
            self.number, self.a, self.b = number, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            count = self.number((x > 0).sum())
            x = self.a(x)
            pipe_split()
            return self.b(x) * count  # type: ignore[no-any-return]

    x = torch.randn(6, WIDTH)
    with pytest.raises(PipeError, match=r"write x.item\(\) in place of int\(x\)"):
        pipeline(Model(int), (x,))
    model = Model(Tensor.item)
    torch.testing.assert_close(pipeline(model, (x,))(x + 0.3), model(x + 0.3))
