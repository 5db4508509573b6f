"""What the user is told of modules that cannot be traced: once, which and why, and what to do where nothing helps."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pipecut import InputError, PipeError, PipeWarning, SplitError, SplitPoint, TraceError, pipe_split, pipeline
from tests.split.untraceable_models import WIDTH, Branching, DecidesBetweenBlocks, ThroughNumpy

X = torch.randn(4, WIDTH)


def model_of(block: nn.Module) -> nn.Sequential:
    """A block with a layer before and after it."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, WIDTH))


def test_one_warning_names_the_modules_and_their_lines() -> None:
    model = nn.Sequential(Branching(), nn.Linear(WIDTH, WIDTH), ThroughNumpy(), nn.Dropout())
    with pytest.warns(PipeWarning) as caught:
        pipe = pipeline(model, (X,), num_stages=2)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "torch.export cannot trace all of Sequential. These modules stay as they are" in text
    assert re.search(r"'0' \(Branching\): it decides by the values of tensors, at .*: if x.sum\(\) > 0:", text)
    assert re.search(r"'2' \(ThroughNumpy\): RuntimeError: \.numpy\(\) .*, at .*numpy\(\)\.std\(\)", text)
    assert "pass tracer='fx'" in text
    assert caught[0].filename == __file__
    assert [item.path for item in pipe.traced.fallbacks] == ["0", "2"]
    assert pipe.traced.fallbacks[0].reason.startswith("it decides by the values of tensors, at ")


def test_fx_is_quiet_and_traces_what_export_can_trace() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipeline(model_of(Branching()), (X,), num_stages=2, tracer="fx").traced.fallbacks[0].path == "1"
        assert pipeline(model_of(nn.Tanh()), (X,), num_stages=2, tracer="fx").traced.fallbacks == ()


def test_export_alone() -> None:
    with pytest.raises(TraceError, match=r"Sequential could not be traced(.|\n)*if x\.sum\(\) > 0"):
        pipeline(model_of(Branching()), (X,), num_stages=2, tracer="export")


def test_unknown_tracer() -> None:
    wanted: Any = "jit"
    with pytest.raises(InputError, match="tracer must be one of 'auto', 'export', 'fx', got 'jit'"):
        pipeline(model_of(nn.Tanh()), (X,), num_stages=2, tracer=wanted)


def test_a_branch_between_the_blocks() -> None:
    with pytest.raises(TraceError) as caught:
        pipeline(DecidesBetweenBlocks(), (X,), num_stages=2)
    text = str(caught.value)
    assert "DecidesBetweenBlocks could not be traced, and so cannot be cut" in text
    assert "torch.export alone: it decides by the values of tensors" in text
    assert "around modules that stay as they are: it decides by the values of tensors" in text
    assert re.search(r"at .*untraceable_models.py:\d+, in forward: if h.sum\(\) > 0:", text)
    assert "Move the lines that decide by values of tensors" in text
    assert "torch.where or torch.cond" in text


def test_a_branch_between_the_blocks_and_one_inside() -> None:
    class Both(DecidesBetweenBlocks):
        def __init__(self) -> None:
            super().__init__()
            self.first = Branching()  # type: ignore[assignment]

    with pytest.raises(TraceError, match=r"around modules that stay as they are \('first'\): it decides") as caught:
        pipeline(Both(), (X,), num_stages=2, tracer="fx")
    assert "torch.export alone" not in str(caught.value)


def test_a_model_that_does_not_run_at_all() -> None:
    with pytest.raises(TraceError, match=r"Sequential could not be traced .*, nor does it run with them uncut: Run"):
        pipeline(model_of(Branching()), (torch.randn(4, WIDTH + 1),), num_stages=2)


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = model_of(Branching())
    with pytest.raises(TraceError, match=r"by torch.export \(it decides by .*on the meta device it cannot"):
        pipeline(model, (X,), num_stages=2)


def test_a_result_that_cannot_be_taken_apart_is_no_matter_of_tracers() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x), object()

    with pytest.raises(TraceError, match="Strange returns a object"):
        pipeline(Strange(), (X,), num_stages=1)


class _Marked(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        pipe_split()
        return x


def test_a_mark_inside() -> None:
    with pytest.raises(SplitError, match=r"pipe_split\(\) stands inside '1', which cannot be traced .*move the mark"):
        pipeline(model_of(_Marked()), (X,))


def test_a_cut_inside() -> None:
    with (
        pytest.warns(PipeWarning, match="stay as they are"),
        pytest.raises(SplitError, match=r"split_spec names '1.high', inside '1', which could not be traced \(it dec"),
    ):
        pipeline(model_of(Branching()), (X,), split_spec={"1.high": SplitPoint.BEGINNING})


def test_a_mark_of_a_policy_inside() -> None:
    def policy(module: GraphModule) -> GraphModule:
        call = next(node for node in module.graph.nodes if "eager_call" in str(node.target))
        with module.graph.inserting_after(call):
            module.graph.call_function(pipe_split)
        return module

    with pytest.raises(SplitError, match=r"is inside '1', which could not be traced \(in '1'\)"):
        pipeline(model_of(_TwoResults()), (X,), split_policy=policy, tracer="fx")


class _TwoResults(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(-x)


class _Borrowing(nn.Module):
    """Uses a parameter of another module, which it knows from a list, for values that the example does not have."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.known = [lender.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.known[0] if x.sum() > 1e6 else x


def test_a_module_that_uses_what_is_not_its_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.borrowing = _Borrowing(self.first)

        def forward(self, x: Tensor) -> Tensor:
            return self.borrowing(self.first(x))  # type: ignore[no-any-return]

    with pytest.raises(TraceError) as caught:
        pipeline(Model(), (X,), num_stages=2)
    text = str(caught.value)
    assert "'borrowing' cannot be traced (it decides by the values of tensors" in text
    assert "nor stay as it is: it uses 'first.weight', which is not its own" in text
    assert "pass what the modules share as arguments and results" in text


class _Gossip(nn.Module):
    """Hands a tensor on behind the back of its caller."""

    def __init__(self, board: list[Tensor]) -> None:
        super().__init__()
        self.board = board

    def forward(self, x: Tensor) -> Tensor:
        self.board[:] = [x * 2]
        return x if x.sum() > 0 else -x


class _Listener(nn.Module):
    def __init__(self, board: list[Tensor]) -> None:
        super().__init__()
        self.board = board

    def forward(self, x: Tensor) -> Tensor:
        return x + self.board[0] if x.sum() > 0 else x


class _Village(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.board: list[Tensor] = []
        self.gossip, self.listener = _Gossip(self.board), _Listener(self.board)

    def forward(self, x: Tensor) -> Tensor:
        return self.listener(self.gossip(x))  # type: ignore[no-any-return]


def test_modules_that_share_behind_the_back_stay_together() -> None:
    model = model_of(_Village())
    with pytest.warns(PipeWarning, match="are set while a module runs that stays as it is"):
        pipe = pipeline(model, (X,), num_stages=2, tracer="fx")
    assert [item.path for item in pipe.traced.fallbacks] == ["1"]
    torch.testing.assert_close(pipe(X), model(X), rtol=0, atol=0)


def test_modules_that_share_behind_the_back_of_the_model() -> None:
    with pytest.raises(TraceError, match="makes a tensor that others use and that is not among its results"):
        pipeline(_Village(), (X,), num_stages=2, tracer="fx")


class _SizeByData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = [row for row in x if row.sum().item() > 0]
        return torch.stack(rows) if rows else x[:0]


class _Reduced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.last = nn.Linear(WIDTH, WIDTH), _SizeByData(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.some(self.first(x))).sum(0)  # type: ignore[no-any-return]


def rows_with_positive_sums(model: _Reduced) -> Tensor:
    """An example of which the model keeps the rows 0, 2 and 3, and one more when it is continued from the start."""
    torch.manual_seed(3)
    found = torch.randn(64, WIDTH)
    positive = model.first(found).sum(1) > 0
    high, low = found[positive], found[~positive]
    return torch.stack([low[0], high[0], low[1], high[1]])


def test_sizes_that_depend_on_the_data() -> None:
    model = _Reduced()
    x = rows_with_positive_sums(model)
    for path in ("some", "last"):  # the second cut lets them cross
        pipe = pipeline(model, (x,), split_spec={path: SplitPoint.BEGINNING}, tracer="fx")
        for seed in range(3):
            torch.manual_seed(seed)
            other = torch.randn(5 + seed, WIDTH)
            torch.testing.assert_close(pipe(other), model(other), rtol=0, atol=0)


class _Jumping(nn.Module):
    """Doubles its rows from some value on, which the example does not reach."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x]) if x.max().item() > 100 else x * 1


def test_a_result_that_is_not_what_it_was_on_the_example() -> None:
    model = model_of(_Jumping())
    pipe = pipeline(model, (X,), split_spec={"2": SplitPoint.BEGINNING}, tracer="fx")
    torch.testing.assert_close(pipe(X), model(X))
    with pytest.raises(PipeError, match=r"'1' returned a tensor \[8, 8\], where the trace has \[4, 8\]"):
        pipe(X * 1e6)


class LeavesBehind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.scale = float(x.detach().abs().mean())
        result: Tensor = self.linear(x)
        return result


class ReadsIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.last = LeavesBehind(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.leaf(x) * self.leaf.scale)
        return result


def test_what_a_module_leaves_behind_is_told() -> None:
    """Code outside of it was traced with the number from before, and nobody said so."""
    with pytest.warns(PipeWarning, match="leaf.scale of ReadsIt is set while a module runs that stays as it is"):
        pipeline(ReadsIt(), (torch.randn(2, 4),), split_spec={"last": SplitPoint.BEGINNING}, tracer="fx")
