"""Calls of other forms on two ranks: all of them trace the model for what only the first one sees, and agree on it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from pipecut import InputError, Schedule1F1B, SplitPoint, pipeline
from pipecut.run import connection
from tests.run.form_models import Tagger, batch
from tests.support.ranks import Ranks
from tests.support.training import TIGHT, Problem, assert_same_gradients, gradients_of, uncut_step

pytestmark = pytest.mark.distributed

AT = {"blocks.2": SplitPoint.BEGINNING}


class OnRank:
    """A rank with its stage of a Tagger, and the uncut model."""

    def __init__(self, rank: int, example: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = Tagger().double()
        self.pipe = pipeline(self.model, mb_kwargs=example, split_spec=AT)
        self.stage = self.pipe.build_stage(rank, "cpu")
        self.schedule = Schedule1F1B(self.stage, 2)

    def given(self, call: dict[str, Any]) -> dict[str, Any]:
        return call if self.rank == 0 else {}

    def assert_trains(self, **call: Any) -> None:
        expected = uncut_step(Problem(self.model, (), None, lambda output, _: output["loss"], call))
        self.model.zero_grad(set_to_none=True)
        output = self.schedule.step(**self.given(call))
        mine = {name for name, _ in self.stage.submod.named_parameters()}
        actual = gradients_of(self.model)
        assert_same_gradients(
            {name: actual[name] for name in mine}, {name: expected.gradients[name] for name in mine}, TIGHT
        )
        if self.rank == 1:
            torch.testing.assert_close(output["logits"], expected.output["logits"].detach())

    def assert_evaluates(self, **call: Any) -> None:
        output = self.schedule.eval(**self.given(call))
        if self.rank == 1:
            expected = self.model(**call)
            assert list(output) == list(expected)
            torch.testing.assert_close(output["logits"], expected["logits"].detach())


def train_and_evaluate(rank: int) -> int:
    here = OnRank(rank, batch())
    words = batch()["ids"]
    for _ in range(2):
        here.assert_trains(**batch())
        here.assert_evaluates(ids=words)
        here.assert_trains(**batch(), inside=True, options={"factor": torch.full((6, 1, 1), 0.5).double()})
        here.assert_evaluates(ids=batch(5)["ids"], scale=0.5)
    exchanges = mock.Mock(wraps=connection.Exchange)
    with mock.patch.object(connection, "Exchange", exchanges):
        here.assert_trains(**batch())
        here.assert_evaluates(ids=words)
    assert not exchanges.called  # what is known needs no agreement
    return len(here.pipe.variants)


def test_labels_flags_and_numbers(two_ranks: Ranks) -> None:
    assert two_ranks.run(train_and_evaluate) == [4, 4]


def fail_on_all(rank: int) -> list[str]:
    here = OnRank(rank, batch())
    here.assert_trains(**batch())
    told = []
    for call in ({"early": True}, {"scale": "much"}):
        with pytest.raises(InputError) as error:
            here.schedule.step(**here.given({**batch(), **call}))
        told.append(str(error.value))
        here.assert_trains(**batch())
    return told


def test_a_form_that_cannot_be_traced_is_an_error_on_all_ranks_and_they_go_on(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(fail_on_all)
    assert one == other
    assert "for this call stage 0 needs extra.weight" in one[0]
    assert "scale was 1.0 when the model was traced" in one[1]
    assert "(on rank 0)" in one[1]


def drop_a_pipe(rank: int) -> str:
    here = OnRank(rank, batch())
    here.assert_trains(**batch())
    if rank == 1:
        del here.pipe
    with pytest.raises(InputError) as error:
        here.schedule.eval(**here.given({"ids": batch()["ids"]}))
    here.assert_trains(**batch())
    return str(error.value)


@pytest.mark.slow
def test_a_rank_that_cannot_trace_its_model(two_ranks: Ranks) -> None:
    for told in two_ranks.run(drop_a_pipe):
        assert "a rank has a stage without its pipe" in told
        assert "keep the pipe" in told
        assert "(on rank 1)" in told


def trace_differently(rank: int) -> str:
    here = OnRank(rank, batch())
    here.assert_trains(**batch())
    if rank == 1:
        here.model.embed.weight.requires_grad_(False)
        here.model.blocks[0].requires_grad_(False)
        here.model.blocks[1].requires_grad_(False)
    with pytest.raises(InputError) as error:
        here.schedule.step(**here.given({**batch(), "scale": 2.0}))
    return str(error.value)


@pytest.mark.slow
def test_ranks_that_trace_different_things_disagree(two_ranks: Ranks) -> None:
    for told in two_ranks.run(trace_differently):
        assert "the ranks traced the model for a call of another form, and disagree" in told
        assert "grad on rank 0" in told
