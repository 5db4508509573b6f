"""A step is one transaction: it succeeds on all ranks, or raises on all, and leaves gradients as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.distributed import transaction_cases as cases
from tests.support.limits import PATIENCE
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed

AWAY = 1.0 * PATIENCE  # seconds that a rank waits for another that does not come

NAN = "StepError: the step failed: rank 1 failed after its last action: pipecut.errors.PipeError: the loss is NaN for"


@pytest.mark.parametrize("traced", [True, False])
def test_a_loss_that_is_nan_is_an_error_on_all_ranks_and_the_next_step_runs(two_ranks: Ranks, traced: bool) -> None:
    """The last rank raised, and the others returned, and stepped their optimizers into NaN."""
    found = two_ranks.run(cases.has_nan, traced)
    for told, left, loss in found:
        assert told.startswith(f"{NAN} microbatches [2]")
        assert left == 0
        assert loss == found[0][2]


def test_optimizers_stay_together_over_a_step_that_failed(two_ranks: Ranks) -> None:
    assert two_ranks.run(cases.keeps_optimizers_together) == [[True, False, True]] * 2


def test_nothing_of_a_step_that_failed_on_all_ranks_stays_in_memory(two_ranks: Ranks) -> None:
    """Each rank remembered the error, and with its traceback all outputs of the step."""
    assert two_ranks.run(cases.keeps_nothing_of_a_failed_step) == [0, 0]


def test_gradients_that_were_kept_from_earlier_steps_are_said_to_hold_parts_of_a_failed_one(two_ranks: Ranks) -> None:
    for told, kept in two_ranks.run(cases.has_nan_after_good_steps):
        assert told.startswith(NAN)
        assert "this one has added a part of its own to 2 of them on this rank: call zero_grad()" in told
        assert kept == [True, True]


@pytest.mark.parametrize("method", ["step", "eval"])
def test_an_output_that_cannot_be_merged_is_an_error_on_all_ranks(two_ranks: Ranks, method: str) -> None:
    for told in two_ranks.run(cases.cannot_merge, method):
        assert told.startswith("StepError: the step failed: rank 1 failed after its last action: ValueError: cannot be")


def test_a_failure_in_the_last_action_of_all_reaches_ranks_that_are_done() -> None:
    """The first stage has the last backward. The others had returned, and noticed it in the next step."""
    with Ranks(3) as ranks:
        for told, left in ranks.run(cases.fails_last, 3):
            assert told.startswith("StepError: the step failed: rank 0 failed in 0B3 (stage 0, microbatch 3)")
            assert left == 0


def test_a_failure_of_a_custom_function_reaches_all_ranks() -> None:
    with Ranks(2) as ranks:
        for told in ranks.run(cases.observes_badly):
            assert told.startswith("StepError: the step failed: rank 0 failed in 0B3 (stage 0, microbatch 3)")


@pytest.mark.parametrize(
    ("who", "kind", "where", "place"),
    [
        (0, KeyboardInterrupt, "forward", "in 0F2 (stage 0, microbatch 2), in module 'inner'"),
        (1, SystemExit, "loss", "in 1F1 (stage 1, microbatch 1), in loss_fn"),
        (1, GeneratorExit, "begin", "before its first action"),
        pytest.param(1, KeyboardInterrupt, "watch", "before its first action", marks=pytest.mark.slow),
    ],
)
def test_what_is_no_exception_reaches_the_others(who: int, kind: type[BaseException], where: str, place: str) -> None:
    """They waited for the timeout of the group, for only an Exception was reported."""
    with Ranks(2) as ranks:
        found = ranks.run(cases.interrupts, who, kind, where)
    assert found[who] == f"{kind.__name__}: on purpose"
    told = f"StepError: the step failed: rank {who} failed {place}: {kind.__name__}: on purpose"
    assert found[1 - who].startswith(told)


@pytest.mark.slow
def test_a_signal_that_interrupts_one_rank_reaches_the_others() -> None:
    with Ranks(2) as ranks:
        other, interrupted = ranks.run(cases.is_interrupted)
    assert interrupted == "KeyboardInterrupt: "
    assert other.startswith("StepError: the step failed: rank 1 failed in 1F1 (stage 1, microbatch 1)")
    assert "KeyboardInterrupt" in other


def test_after_a_failure_the_group_has_to_be_made_anew(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        found = ranks.run(cases.goes_on_after_a_failure, tmp_path)
    for again, new, loss in found:
        for told in (again, new):
            assert told.startswith("ClosedGroupError: the connections of this process group were closed when a step")
            assert "rank 1 failed in 1F2" in told
            assert "torch.distributed.destroy_process_group(), then init_process_group()" in told
        assert loss == found[0][2]


def test_a_step_without_its_group() -> None:
    with Ranks(2) as ranks:
        for told in ranks.run(cases.steps_without_a_group):
            assert told.startswith("ClosedGroupError: the process group of this schedule has been destroyed")


def test_a_step_from_a_second_thread_is_refused_and_the_first_goes_on(two_ranks: Ranks) -> None:
    for first, second in two_ranks.run(cases.steps_from_two_threads):
        assert first == "none"
        assert second.startswith("PipeError: step() was called while a step or an evaluation over the same ranks was")


def test_one_rank_may_ask_for_the_mean_loss(two_ranks: Ranks) -> None:
    """It waited for the others, which were in step(), and both hung."""
    asked, nothing = two_ranks.run(cases.asks_for_the_loss_alone)
    assert asked[0] == asked[1] != 0
    assert nothing == []


def test_a_rank_alone_in_step_waits_no_longer_than_the_timeout() -> None:
    """The group's timeout is that of these tests: minutes."""
    with Ranks(2) as ranks:
        (told, seconds), (loss, _) = ranks.run(cases.waits_alone, AWAY, "mean_loss")
    assert float(loss) > 0
    assert seconds >= AWAY
    waited = f"rank 0 timed out waiting for rank 1 in 0B0 (stage 0, microbatch 0) for {AWAY:g} s: "
    assert told.startswith(f"StepError: the step failed: {waited}")
    assert "rank 0 is in step() of schedule 1, its call 2; rank 1 does not answer" in told
    assert "pass a larger timeout= to the schedule" in told
    assert "has ended or was killed" not in told


@pytest.mark.slow
def test_a_rank_that_sleeps_in_its_step() -> None:
    with Ranks(2) as ranks:
        found = ranks.run(cases.waits_alone, AWAY, "sleep")
    for told, _ in found:
        assert "rank 0 timed out waiting for rank 1 in 0B1" in told
        assert "has ended or was killed" not in told


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_its_step(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        found = ranks.run(cases.is_stopped, AWAY, tmp_path)
    for told in found:
        assert told.startswith("StepError: the step failed: rank 0 timed out waiting for rank 1 in 0B2")
        assert "rank 1 does not answer" in told


@pytest.mark.slow
def test_the_rank_that_holds_the_store_is_stopped(tmp_path: Path) -> None:
    """The store does not answer either: neither what happened can be written down, nor be read."""
    with Ranks(2) as ranks:
        stopped, other = ranks.run(cases.holds_the_store_and_is_stopped, AWAY, tmp_path)
    waited = (
        f"rank 1 timed out waiting for rank 0 in 1F2 (stage 1, microbatch 2) for {AWAY:g} s: the process group's store"
    )
    assert other.startswith(f"StepError: the step failed: {waited} does not answer")
    assert stopped.startswith("StepError: the step failed: rank ")


@pytest.mark.slow
def test_a_rank_that_came_too_early_may_come_again(two_ranks: Ranks, tmp_path: Path) -> None:
    told, _ = two_ranks.run(cases.comes_too_early, AWAY, tmp_path)
    assert told.startswith("DisagreementError: rank 1 did not come to its first step within")


def test_a_rank_that_has_made_one_call_more() -> None:
    with Ranks(2) as ranks:
        for told in ranks.run(cases.counts_apart):
            assert "rank 0 called step() of schedule 1 as its call 2, and this rank as its call 3" in told
            assert "one of them has skipped a call, or made one more" in told


def test_a_rank_that_skips_a_batch_of_its_loop() -> None:
    """It pairs its next call with the others' current one: as many calls, and a target of another batch."""
    with Ranks(2) as ranks:
        for told in ranks.run(cases.skips_a_batch):
            assert "rank 0 is at step 1 of its loop, and this rank at step 2, by schedule.step_number" in told
            assert "one of them has skipped a step, or made one more" in told
