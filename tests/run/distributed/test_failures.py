"""A rank that fails, dies, differs or stays away: a clear error on all others, in time, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.distributed import failure_cases as cases
from tests.support.limits import PATIENCE
from tests.support.ranks import GROUP_TIMEOUT, Outcome, Ranks
from tests.support.sampling import sampled

pytestmark = pytest.mark.distributed

SHORT = 6.0 * PATIENCE  # seconds that two tests wait for a rank that does not come, and that a good step may take


def outcomes(world: int, case: Callable[..., Any], *args: Any, group_timeout: float = GROUP_TIMEOUT) -> list[Outcome]:
    """Return the outcomes of a case on new ranks. One that waits for the group's timeout does not return in time."""
    with Ranks(world, group_timeout) as ranks:
        return ranks.outcomes(case, *args)


def assert_all_fail(found: list[Outcome], error: str, *texts: str) -> None:
    """The same error on every rank, at once, with all of these texts."""
    for outcome in found:
        assert outcome.error == error, outcome
        for text in texts:
            assert text in outcome.text, f"{text!r} is not in the error of rank {outcome.rank}: {outcome.text}"


@pytest.mark.parametrize(("stage", "traced"), [(0, False), (1, True), (2, False)])
def test_an_exception_in_a_forward(stage: int, traced: bool) -> None:
    module = f"layers.{stage}.inner" if traced else "inner"
    where = f"rank {stage} failed in {stage}F2 (stage {stage}, microbatch 2), in module '{module}'"
    found = outcomes(3, cases.fails_in_forward, 3, traced, stage, "1F1B")
    assert_all_fail(found, "StepError", where, "ValueError: this layer fails on purpose")
    assert ", in fail\n" in found[stage].traceback


def test_an_exception_in_the_forward_of_an_overlap() -> None:
    found = outcomes(2, cases.fails_in_forward, 2, False, 1, "DualPipeV")
    assert_all_fail(found, "StepError", "rank 1 failed in 1F2 (stage 1, microbatch 2), in module 'inner'")


@pytest.mark.parametrize(("stage", "traced"), [(0, True), (1, False), (2, False)])
def test_an_exception_in_a_backward(stage: int, traced: bool) -> None:
    found = outcomes(3, cases.fails_in_backward, 3, traced, stage)
    where = f"rank {stage} failed in {stage}B2 (stage {stage}, microbatch 2)"
    assert_all_fail(found, "StepError", where, "ValueError: this layer fails on purpose")


@pytest.mark.parametrize("stage", [0, 2])
def test_an_exception_in_a_weight_gradient(stage: int) -> None:
    found = outcomes(3, cases.fails_in_weight_gradient, 3, False, stage)
    assert_all_fail(found, "StepError", f"rank {stage} failed in {stage}W2 (stage {stage}, microbatch 2)")


def test_an_exception_in_the_loss() -> None:
    found = outcomes(3, cases.fails_in_loss, 3, False)
    assert_all_fail(found, "StepError", "rank 2 failed in 2F2 (stage 2, microbatch 2), in loss_fn: ValueError")


@pytest.mark.parametrize(
    ("victim", "trap", "traced"),
    sampled(
        [
            (0, "forward_trap", True),
            (0, "backward_trap", False),
            (1, "backward_trap", False),
            (2, "forward_trap", False),
        ],
        lambda case: case[0] == 0,
    ),
)
def test_a_rank_that_is_killed_in_a_step(victim: int, trap: str, traced: bool) -> None:
    found = outcomes(3, cases.is_killed, 3, traced, victim, trap)
    assert found[victim].died.startswith("it was killed by SIGKILL before")
    survivors = [outcome for outcome in found if outcome.rank != victim]
    assert_all_fail(survivors, "StepError", "lost its connection to rank", "has ended or was killed")
    assert any(f"lost its connection to rank {victim}" in outcome.text for outcome in survivors)


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_ends_between_steps(who: int) -> None:
    found = outcomes(3, cases.ends, 3, False, who)
    survivors = [outcome for outcome in found if outcome.rank != who]
    assert_all_fail(survivors, "StepError", "lost its connection to", "see that process's output")


@pytest.mark.parametrize(
    ("traced", "what", "told"),
    [
        (False, "schedule", "schedule: 1F1B on rank 0; GPipe on rank 1"),
        (True, "microbatches", "microbatches: 4 on rank 0; 6 on rank 1"),
        (False, "scale_grads", "scale_grads: True on rank 0; False on rank 1"),
    ],
)
def test_ranks_that_differ(traced: bool, what: str, told: str) -> None:
    found = outcomes(2, cases.differs, 2, traced, what)
    assert_all_fail(found, "DisagreementError", "the ranks disagree", told)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("width", "from stage 0 to stage 1: float32[batch, 8] grad on rank 0; float32[batch, 6] grad on rank 1"),
        ("dtype", "from stage 0 to stage 1: float32[batch, 8] grad on rank 0; float64[batch, 8] grad on rank 1"),
        ("class", "model: Narrow on rank 0; Other on rank 1"),
        ("layer", "stage 1: 2 modules and 2 tensors"),
    ],
)
def test_ranks_with_different_models(what: str, told: str) -> None:
    assert_all_fail(outcomes(2, cases.has_another_model, what), "DisagreementError", told)


@pytest.mark.parametrize(("what", "got"), [("width", "float32[2, 6]"), ("dtype", "float64[2, 8]")])
def test_stages_cut_by_hand_that_do_not_fit(what: str, got: str) -> None:
    found = outcomes(2, cases.has_another_shape_by_hand, what)
    assert_all_fail(found, "StepError", "rank 1 failed in 1F0 (stage 1, microbatch 0)", f"was called with {got}")


def test_tied_parameters_with_different_values() -> None:
    found = outcomes(2, cases.has_another_seed)
    assert_all_fail(found, "DisagreementError", "values of the tied parameter embed.weight", "seed the model")


@pytest.mark.parametrize("who", sampled([0, 2], lambda who: who == 2))
def test_a_rank_that_never_comes(who: int) -> None:
    found = outcomes(3, cases.stays_away, 3, False, who)
    assert found[who].value == "stayed away"
    others = [outcome for outcome in found if outcome.rank != who]
    assert_all_fail(others, "DisagreementError", f"rank {who} did not come to its first step within {cases.AWAY:g} s")


def test_a_rank_that_comes_no_more() -> None:
    _, *others = outcomes(3, cases.stays_away_later, 3, False, 0, group_timeout=SHORT)
    told = (
        "rank 1 is in step() of schedule 1, its call 2; rank 2 is in step() of schedule 1, its call 2; rank 0 does not"
    )
    assert_all_fail(others, "StepError", f"timed out waiting for rank 0 before its first action for {SHORT:g} s", told)


def test_a_rank_that_takes_too_long(tmp_path: Path) -> None:
    found = outcomes(3, cases.is_too_slow, 3, tmp_path, group_timeout=SHORT)
    assert_all_fail(
        found,
        "StepError",
        "timed out waiting for rank 1",
        "pass a larger timeout= to the schedule, and to init_process_group()",
    )


@pytest.mark.parametrize(
    ("traced", "what", "told"),
    [
        (
            True,
            "NaN",
            "rank 1 failed after its last action: pipecut.errors.PipeError: the loss is NaN for",
        ),
        (False, "loss of rows", "loss_fn returned a tensor of shape [2, 4] for microbatch 0"),
        (
            True,
            "no target",
            "rank 1 failed before its first action: pipecut.errors.MissingTargetError: step() got no target",
        ),
        (False, "no input", "rank 0 failed before its first action: pipecut.errors.InputError: step() got no input"),
        (True, "no input", "rank 0 failed before its first action: pipecut.errors.InputError: step() got no input"),
        (
            False,
            "no samples",
            "rank 0 failed before its first action: pipecut.errors.TooFewSamplesError: 0 samples cannot",
        ),
        (False, "other target", "the target has 7 rows, and the batch 8 samples"),
        (False, "eval on the first", "rank 0 called eval() of schedule 1, and this rank step() of schedule 1"),
        (True, "eval on the last", "rank 0 called step() of schedule 1, and this rank eval() of schedule 1"),
    ],
)
def test_a_call_that_is_wrong_on_one_rank(traced: bool, what: str, told: str) -> None:
    assert_all_fail(outcomes(2, cases.calls, 2, traced, what), "StepError", told)


@pytest.mark.parametrize(("traced", "told"), [(True, "too many positional arguments"), (False, "3 were given")])
def test_too_many_arguments(traced: bool, told: str) -> None:
    assert_all_fail(outcomes(2, cases.calls, 2, traced, "two inputs"), "StepError", "rank 0 failed", told)


def test_a_mean_loss_without_a_loss() -> None:
    assert_all_fail(outcomes(2, cases.calls, 2, False, "no loss"), "InputError", "there is no loss yet")


def test_two_schedules_called_in_another_order() -> None:
    """The numbers of 100 microbatches were a longer message, and gloo ended the process that expected a shorter one."""
    found = outcomes(2, cases.swaps_schedules, 2, False)
    assert_all_fail(found, "StepError", "rank 0 called step() of schedule 1, and this rank step() of schedule 2")


def test_outputs_that_cannot_be_merged() -> None:
    found = outcomes(2, cases.returns_no_rows)
    assert_all_fail(found, "StepError", "rank 1 failed in 1F0 (stage 1", "output_merge_spec")


def test_keywords_of_another_size_on_a_later_rank() -> None:
    found = outcomes(2, cases.passes_other_keywords)
    assert_all_fail(found, "StepError", "the keyword arguments of rank 1 have 12 samples, and the batch has 8")
