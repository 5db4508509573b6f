"""Batches and sequences of other sizes at every step on two ranks: no retrace, and nothing asked about shapes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipecut import Schedule1F1B, pipeline
from tests.split.test_dynamic_sizes import Attention, mean_of, text
from tests.support.ranks import Ranks
from tests.support.training import Problem, assert_same_gradients, gradients_of, uncut_step

pytestmark = pytest.mark.distributed

SIZES = [(8, 5), (6, 3), (3, 9), (7, 2), (5, 1)]


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often this rank sends, receives and shares numbers."""
    calls: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for name in ("isend", "irecv", "broadcast"):
            real = getattr(dist, name)

            def count(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
                calls[_name] += 1
                return _real(*args, **kwargs)

            stack.enter_context(mock.patch.object(dist, name, count))
        yield calls


def train(rank: int) -> list[dict[str, int]]:
    """Steps of several sizes beside the uncut model; the messages that each took."""
    torch.manual_seed(0)
    model = Attention().double()
    pipe = pipeline(model, text(4, 5), num_stages=2, dynamic={"ids": {1: "seq"}})
    stage = pipe.build_stage(rank, "cpu")
    schedule = Schedule1F1B(stage, 3, mean_of, transport="process_group")
    mine = {name for name, _ in stage.submod.named_parameters()}
    messages = []
    for nth, size in enumerate(SIZES):
        torch.manual_seed(nth)
        problem = Problem(model, text(*size), torch.zeros(size[0]), mean_of)
        expected = uncut_step(problem).gradients
        model.zero_grad(set_to_none=True)
        with counted() as calls:
            schedule.step(*(problem.args if rank == 0 else ()), target=problem.target if rank == 1 else None)
        messages.append(dict(calls))
        actual = gradients_of(model)
        assert_same_gradients({name: actual[name] for name in mine}, {name: expected[name] for name in mine}, 1e-10)
        with torch.no_grad():
            output = schedule.eval(*(problem.args if rank == 0 else ()))
            if rank == 1:
                torch.testing.assert_close(output, model(*problem.args))
    return messages


@pytest.mark.slow
def test_sizes_that_change_at_every_step(two_ranks: Ranks) -> None:
    """A step of a new size takes the messages that the first one took: one to share sizes, the rest are values."""
    for messages in two_ranks.run(train):
        assert messages == [messages[0]] * len(SIZES)
        assert messages[0]["broadcast"] == 1
        assert messages[0]["isend"] > 0
