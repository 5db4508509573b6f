"""Whatever a model returns comes back as it is, from the last stage."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipecut import pipe_split
from tests.support.equality import assert_equals_uncut


@dataclasses.dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    loss: Tensor | None = None
    name: str = "result"


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: Tensor
    parts: dict[str, Tensor]


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


def pack(kind: str, early: Tensor, late: Tensor) -> Any:
    """A result of each kind, of a tensor made before the cut and one made after it."""
    results = {
        "tensor": late,
        "dict": {"late": late, "early": early},
        "ordered dict": OrderedDict(late=late, early=early),
        "dataclass": Result(late, (early, late * 2)),
        "frozen dataclass": Frozen(late, {"early": early}),
        "namedtuple": Pair(late, early),
        "namedtuple with None": Pair(late, None),
        "tuple with None": (None, late, None, early),
        "list": [late, [early, late]],
        "python int": (late, late.shape[0] * 2, early.shape[0] + 1),
        "python values": {"x": late, "name": "name", "flag": True, "number": 1.5, "type": torch.float32},
        "the same tensor twice": (late, late),
        "a view and its base": (late, late[:, :2]),
        "one tensor in a list": [late],
        "empty parts": {"late": late, "none": (), "more": []},
        "a size": (late, late.shape, early.shape[1:]),
        "keys that are not names": {0: late, "a b": early, ("x", 1): late},
    }
    return results[kind]


KINDS = """tensor; dict; ordered dict; dataclass; frozen dataclass; namedtuple; namedtuple with None; tuple with None;
list; python int; python values; the same tensor twice; a view and its base; one tensor in a list; empty parts;
a size; keys that are not names"""


class Packs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        early = self.a(x).sin()
        pipe_split()
        return pack(self.kind, early, self.b(early))


@pytest.mark.parametrize("kind", [kind.strip() for kind in KINDS.split(";")])
def test_outputs_of_every_kind(kind: str) -> None:
    others = [((torch.randn(5, 8),), {})]
    assert_equals_uncut(Packs(kind), (torch.randn(3, 8),), expect_stages=2, other_calls=others)


class ReturnsInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, unused: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x)
        pipe_split()
        return self.b(y), unused, x


def test_inputs_are_returned() -> None:
    assert_equals_uncut(ReturnsInputs(), (torch.randn(3, 8), torch.randint(0, 3, (3,))), expect_stages=2)


class ReturnsItsState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8.0))
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x)
        pipe_split()
        return self.b(y), self.table, self.scale, self.a.weight


def test_parameters_and_buffers_are_returned() -> None:
    pipe = assert_equals_uncut(ReturnsItsState(), (torch.randn(3, 8),), expect_stages=2)
    assert pipe.unused_parameters == ()


class ReturnsConstants(ReturnsItsState):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.arange(3.0)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x) * self.scale + self.table
        pipe_split()
        return self.b(y), torch.tensor([1.0, 2.0]), self.plain


def test_constants_are_returned() -> None:
    assert_equals_uncut(ReturnsConstants(), (torch.randn(3, 8),), expect_stages=2)


class ReturnsWithoutUse(nn.Module):
    """The last stage makes nothing of its own for the result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        early = self.a(x)
        pipe_split()
        self.b(early)
        return early


def test_the_last_stage_only_updates_a_buffer_and_passes_a_value_on() -> None:
    assert_equals_uncut(ReturnsWithoutUse(), (torch.randn(3, 8),), expect_stages=2)


class ReturnsNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, int, tuple[int, ...], float]:
        batch, width = x.shape
        x = self.a(x)
        pipe_split()
        return self.b(x).view(batch * 2, width // 2), batch * width, (batch, 2 * batch), batch / 2


def test_numbers_that_follow_from_sizes_are_returned() -> None:
    others = [((torch.randn(5, 8),), {}), ((torch.randn(1, 8),), {})]
    assert_equals_uncut(ReturnsNumbers(), (torch.randn(3, 8),), expect_stages=2, other_calls=others)
