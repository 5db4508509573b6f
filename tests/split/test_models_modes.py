"""train() and eval() on a stage: dropout and batch norm follow, also where the cut went through."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipecut import Pipe, SplitPoint, pipe_split, pipeline
from tests.support.nested_values import assert_same
from tests.support.sampling import sampled

X = torch.linspace(-1, 1, 32).view(4, 8)


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, self.training)


class AttentionDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query = self.linear(x).view(1, 1, -1, 8)
        probability = 0.5 if self.training else 0.0
        return F.scaled_dot_product_attention(query, query, query, dropout_p=probability).view(x.shape)


class ModuleDropout(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))


class DropoutInTheCutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.a(x), 0.5, self.training)
        pipe_split()
        return F.dropout(self.b(x), p=0.25, training=self.training)


class AttentionInTheCutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query = self.a(x).view(1, 1, -1, 8)
        pipe_split()
        attended = F.scaled_dot_product_attention(query, query, query, dropout_p=0.5 if self.training else 0.0)
        return self.b(attended.view(x.shape))


class BatchNormInTheCutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.a(x), self.mean, self.var, training=self.training)
        pipe_split()
        return self.b(x)


class DropoutBesideTheCut(nn.Module):
    """The cut goes through a block in which dropout is a module, and through one in which it is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ModuleDropout(), FunctionalDropout(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


CASES = {
    "modules": (lambda: nn.Sequential(ModuleDropout(), ModuleDropout()), "1"),
    "a function in a block": (lambda: nn.Sequential(FunctionalDropout(), FunctionalDropout()), "1"),
    "attention in a block": (lambda: nn.Sequential(AttentionDropout(), AttentionDropout()), "1"),
    "a function in the cut forward": (DropoutInTheCutForward, None),
    "attention in the cut forward": (AttentionInTheCutForward, None),
    "batch norm in the cut forward": (BatchNormInTheCutForward, None),
    "a block that is cut": (DropoutBesideTheCut, "blocks.0.1"),
    "a block with a function that is cut": (lambda: nn.Sequential(FunctionalDropout(), nn.Linear(8, 8)), "0.linear"),
}


def cut(case: str, *, training: bool) -> tuple[Pipe, nn.Module]:
    """The pipe, and an uncut copy of the model."""
    make, path = CASES[case]
    model = make().train(training)
    point = SplitPoint.END if path == "0.linear" else SplitPoint.BEGINNING
    pipe = pipeline(copy.deepcopy(model), (X,), split_spec=None if path is None else {path: point})
    assert pipe.num_stages == 2
    return pipe, model


def assert_same_outputs(pipe: Pipe, model: nn.Module) -> None:
    torch.manual_seed(1)
    expected = model(X)
    torch.manual_seed(1)
    assert_same(pipe(X), expected, "output")


@pytest.mark.parametrize("training", [True, False], ids=["cut in train mode", "cut in eval mode"])
@pytest.mark.parametrize("case", sampled(CASES, lambda case: "attention" not in case and case != "modules"))
def test_stages_follow_train_and_eval(case: str, training: bool) -> None:
    pipe, model = cut(case, training=training)
    for mode in (not training, training, not training):
        pipe.train(mode)
        assert all(stage.training is mode for stage in pipe.stages)
        assert_same_outputs(pipe, model.train(mode))


def test_the_two_modes_give_different_outputs() -> None:
    for case in CASES:
        _, model = cut(case, training=True)
        torch.manual_seed(1)
        trained = model(X)
        assert not torch.equal(trained, model.eval()(X)), f"{case} does not depend on the mode"


def test_stages_switch_one_by_one() -> None:
    pipe, model = cut("modules", training=True)
    pipe.stages[1].eval()
    model[1].eval()
    assert_same_outputs(pipe, model)
    assert pipe.stages[0].training
    assert not pipe.stages[1][1][1].training


def test_a_block_of_a_stage_switches_alone() -> None:
    pipe, model = cut("modules", training=True)
    pipe.stages[0][0][1].eval()
    model[0][1].eval()
    assert_same_outputs(pipe, model)


def test_frozen_batch_norm_stays_in_eval_mode() -> None:
    model = nn.Sequential(ModuleDropout(), ModuleDropout())
    model[0][2].eval()
    pipe = pipeline(copy.deepcopy(model), (X,), split_spec={"0.1": SplitPoint.BEGINNING})
    assert_same_outputs(pipe, model)
