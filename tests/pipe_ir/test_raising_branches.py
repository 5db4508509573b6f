"""A branch on values of which one side only raises is a check of the cut model: it raises when the model would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import PipeError, PipeWarning, Schedule1F1B, SplitPoint, StepError, TraceError, pipeline
from pipecut.pipe_ir.tracing.branches import AnsweredBranches
from pipecut.torch_internals import fake_mode_with_numbers
from tests.support.ranks import Ranks

SIZE = 10
CUT = {"inner": SplitPoint.BEGINNING}


def branches(labels: Tensor) -> None:
    if labels is not None and labels.max() >= SIZE:
        raise ValueError(f"labels must be < {SIZE}")


def asserts(labels: Tensor) -> None:
    assert (labels < SIZE).all(), "too large"


def takes_a_number(labels: Tensor) -> None:
    if not labels.max().item() < SIZE:
        raise IndexError(f"{labels.shape} of {labels.max()}")


def raises_its_own(labels: Tensor) -> None:
    for row in labels.unbind(1):
        if (row < 0).any() or (row >= SIZE).any():
            raise OwnError(row)


class OwnError(Exception):
    """An error that Python does not have."""


class Guarded(nn.Module):
    def __init__(self, check: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.check = check
        self.embed, self.inner, self.head = nn.Embedding(SIZE, 4), nn.Linear(4, 4), nn.Linear(4, SIZE)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.check(labels)
        scores = self.head(self.inner(self.embed(x)).relu())
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=SIZE)


def problem(check: Callable[[Tensor], None]) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, labels = torch.randint(SIZE, (4, 3)), torch.randint(SIZE, (4, 3))
    wrong = labels.clone()
    wrong[3, 1] = SIZE
    return Guarded(check).double(), x, labels, wrong


def on_one_line(labels: Tensor) -> None:
    # fmt: off
    if labels.max() >= SIZE: raise ValueError("large")  # noqa: E701
    # fmt: on


def one_of_two(labels: Tensor) -> None:
    if labels.max() >= SIZE:
        if labels.dim() == 2:
            raise ValueError("of two dims")
        raise IndexError("of others")


def names_it_before(labels: Tensor) -> None:
    text = "stale"
    if labels.max() >= SIZE:
        text = "too large"
        raise ValueError(text)


def passes_other_errors(labels: Tensor) -> None:
    try:
        with torch.no_grad():
            branches(labels)
    except (TypeError, KeyError):
        pass
    finally:
        labels.dim()


CHECKS = {
    on_one_line: ("ValueError: large", "in on_one_line: if labels.max() >= SIZE:"),
    one_of_two: ("RuntimeError: one of several errors", "in one_of_two: if labels.max() >= SIZE:"),
    names_it_before: ("ValueError: raise ValueError(text)", "in names_it_before: if labels.max() >= SIZE:"),
    passes_other_errors: ("ValueError: labels must be < 10", "in branches: if"),
    branches: ("ValueError: labels must be < 10", "in branches: if labels is not None and labels.max() >= SIZE:"),
    asserts: ("AssertionError: too large", 'in asserts: assert (labels < SIZE).all(), "too large"'),
    takes_a_number: ('IndexError: raise IndexError(f"{labels.shape} of {labels.max()}")', "if not labels.max().item()"),
    raises_its_own: ("RuntimeError: raise OwnError(row)", "in raises_its_own: if (row < 0).any() or"),
    lambda labels: torch._check(labels.max().item() < SIZE): ("RuntimeError: a condition", "torch._check(labels.max()"),
    lambda labels: torch._check_tensor_all(labels < SIZE): (
        "RuntimeError: a condition",
        "torch._check_tensor_all(labels",
    ),
}


@pytest.mark.parametrize("check", CHECKS)
def test_it_trains_as_uncut_and_raises_in_a_later_step(check: Callable[[Tensor], None]) -> None:
    model, x, labels, wrong = problem(check)
    uncut = copy.deepcopy(model)
    uncut(x, labels).backward()
    pipe = pipeline(model, (x, labels), split_spec=CUT)
    schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2)
    schedule.step(x, labels)
    expected = dict(uncut.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-12, msg=name)
    with pytest.raises(StepError) as raised:
        schedule.step(x, wrong)
    for text in ("0F1 (stage 0, microbatch 1)", *CHECKS[check], "raised by the model's own check at "):
        assert text in str(raised.value)


def test_the_error_is_that_of_the_model() -> None:
    model, x, labels, wrong = problem(branches)
    with pytest.raises(ValueError, match="labels must be < 10"):
        model(x, wrong)
    pipe = pipeline(model, (x, labels), split_spec=CUT)
    with pytest.raises(ValueError, match="labels must be < 10\n  raised by the model's own check at .*branches: if"):
        pipe(x, wrong)


def fails_on_ranks(rank: int) -> None:
    model, x, labels, wrong = problem(branches)
    stage = pipeline(model, (x, labels), split_spec=CUT).build_stage(rank, "cpu")
    schedule = Schedule1F1B(stage, 2)
    schedule.step(*([x, labels] if rank == 0 else []))
    schedule.step(*([x, wrong] if rank == 0 else []))


def test_the_step_raises_on_all_ranks(two_ranks: Ranks) -> None:
    for outcome in two_ranks.outcomes(fails_on_ranks):
        assert outcome.error == "StepError", outcome
        assert "rank 0 failed in 0F1 (stage 0, microbatch 1): ValueError: labels must be < 10" in outcome.text


class Holder:
    """Something that a branch leaves a value in."""

    last: Any = None


def leaves_a_value(labels: Tensor) -> None:
    if labels.max() >= SIZE:
        Holder.last = labels
        raise ValueError("too large")


def goes_on(labels: Tensor) -> None:
    if labels.max() >= SIZE and labels.dim() > 2:
        raise ValueError("too large")


def does_something(labels: Tensor) -> None:
    if labels.max() >= SIZE:
        KEPT.append(labels)
        raise ValueError("too large")


KEPT: list[Tensor] = []


def catches_it(labels: Tensor) -> None:
    try:
        if labels.max() >= 0:
            raise ValueError("too large")
    except ValueError:
        labels.dim()


def catches_that_of_another(labels: Tensor) -> None:
    try:
        branches(labels)
    except Exception:
        labels.dim()


def catches_its_own(labels: Tensor) -> None:
    """An error that Python does not have may be of any kind."""
    try:
        raises_its_own(labels)
    except KeyError:
        labels.dim()


@pytest.mark.parametrize(
    "check", [leaves_a_value, goes_on, does_something, catches_it, catches_that_of_another, catches_its_own]
)
def test_a_side_that_does_more_than_raise_is_no_check(check: Callable[[Tensor], None]) -> None:
    model, x, labels, _ = problem(check)
    with pytest.raises(TraceError, match="it decides by the values of tensors"):
        pipeline(model, (x, labels), split_spec=CUT)


def without_gradients(labels: Tensor) -> None:
    if not torch.is_grad_enabled() and labels.max() >= SIZE:
        raise ValueError("too large")


def test_a_check_in_another_mode_is_a_difference() -> None:
    """Only results were compared: under no_grad the cut model lost the check without a word."""
    model, x, labels, wrong = problem(without_gradients)
    pipe = pipeline(model, (x, labels), split_spec=CUT)
    torch.testing.assert_close(pipe(x, labels), model(x, labels))
    with torch.no_grad(), pytest.raises(PipeError, match="does other operations under torch.no_grad"):
        pipe(x, wrong)


def test_a_module_that_is_not_cut_runs_its_own_check() -> None:
    guarded, x, labels, wrong = problem(branches)
    model = Ends(guarded)
    pipe = pipeline(model, (x, labels), split_spec={"scale": SplitPoint.BEGINNING})
    assert "raise_if" not in str(pipe.stage_infos[0].code)
    with pytest.raises(ValueError, match="^labels must be < 10$"):
        pipe(x, wrong)


class Ends(nn.Module):
    def __init__(self, guarded: nn.Module) -> None:
        super().__init__()
        self.guarded, self.scale = guarded, nn.Linear(1, 1).double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.scale(self.guarded(x, labels).view(1, 1)).sum()


def test_values_that_are_known_decide() -> None:
    with fake_mode_with_numbers(), AnsweredBranches():
        branches(torch.tensor(2))
        with pytest.raises(ValueError, match="labels must be"):
            branches(torch.tensor(12))


@pytest.mark.slow
def test_a_published_model_with_a_loss_of_sequences() -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(4, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.0, mask_time_prob=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
    )  # fmt: skip
    model = Wav2Vec2ForCTC(config).train()
    batch = {"input_values": torch.randn(4, 400), "labels": torch.randint(1, 12, (4, 5))}
    uncut = copy.deepcopy(model)
    for start in (0, 2):  # the loss is a sum over samples, and that of a step the mean over microbatches
        (uncut(**{name: value[start : start + 2] for name, value in batch.items()}).loss / 2).backward()
    pipe = pipeline(model, (), {name: value[:2] for name, value in batch.items()}, num_stages=2)
    schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2)
    with pytest.warns(PipeWarning, match="labels is cut into microbatches together with the other inputs"):
        schedule.step(**batch)
    expected = dict(uncut.named_parameters())
    for name, parameter in model.named_parameters():
        if expected[name].grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6, msg=name)
    batch["labels"][3, 2] = 12
    with pytest.raises(StepError, match="ValueError: Label values must be <= vocab_size: 12"):
        schedule.step(**batch)
