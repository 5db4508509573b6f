"""The tracer of torch.export shows its modes, operators and decisions about sizes where pipecut looks for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.overrides import TorchFunctionMode

from pipecut.torch_internals import (
    ENTER_AUTOCAST,
    ENTER_VMAP,
    EXIT_AUTOCAST,
    EXIT_VMAP,
    SET_GRAD_ENABLED,
    asks_for_plain_number,
    assume,
    is_transforming,
    let_go,
    makes_higher_order,
    python_text,
    pytree,
    symbol_source,
    traced_operator,
    unwrapped,
    watch_size_decisions,
    wraps_for_vmap,
)


class Traced(nn.Module):
    """Runs a function while torch.export traces, and takes down the targets of the nodes that it makes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result = self.function(x)
        mode: Any = torch.fx.experimental.proxy_tensor.get_proxy_mode()
        self.targets = [node.target for node in mode.tracer.graph.nodes]
        return result


def export(function: Callable[[Tensor], Tensor]) -> list[Any]:
    module = Traced(function)
    torch.export.export(module, (torch.ones(4, 2),), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}}, strict=False)
    return list(module.targets)


def test_changes_of_modes_are_nodes_with_known_targets() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return x + 1

    targets = export(forward)
    assert [targets.count(target) for target in (SET_GRAD_ENABLED, ENTER_AUTOCAST, EXIT_AUTOCAST)] == [2, 1, 1]


def test_vmap_is_known_by_the_names_of_its_nodes() -> None:
    names = [getattr(target, "__name__", "") for target in export(lambda x: torch.vmap(torch.sin)(x))]
    assert ENTER_VMAP in names
    assert EXIT_VMAP in names


def frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def decisions_of(function: Callable[[Tensor], Tensor]) -> list[tuple[str, Any, list[str], bool]]:
    """Return the decisions while a function is traced: expression, answer, operators around it, and if Python asks."""
    found: list[tuple[str, Any, list[str], bool]] = []

    def note(expr: sympy.Basic, answer: Any) -> None:
        operators = [str(op) for op in map(traced_operator, frames()) if op is not None]
        found.append((str(expr), answer, operators, any(map(asks_for_plain_number, frames()))))

    def forward(x: Tensor) -> Tensor:
        watch_size_decisions(x.fake_mode.shape_env, lambda symbol, value: None, note)  # type: ignore[attr-defined]
        result = function(x)
        found.append(("end", None, [], False))
        return result

    export(forward)
    return found[: found.index(("end", None, [], False))]


def test_a_branch_on_a_size_is_a_decision_that_python_asks_for() -> None:
    (decision,) = decisions_of(lambda x: x + 1 if x.shape[0] > 3 else x)
    expr, answer, operators, by_python = decision
    assert (">" in expr or "<" in expr, answer, operators, by_python) == (True, True, [], True)


def test_a_decision_within_an_operator_names_the_operator() -> None:
    inside = [operators for _, _, operators, _ in decisions_of(lambda x: x[:2].expand(2, 2)) if operators]
    assert inside
    assert {name for names in inside for name in names} <= {"aten.slice.Tensor", "aten.expand.default"}


def test_a_size_that_is_fixed_is_reported_as_replaced() -> None:
    replaced: dict[Any, Any] = {}

    def forward(x: Tensor) -> Tensor:
        shape_env = x.fake_mode.shape_env  # type: ignore[attr-defined]
        watch_size_decisions(shape_env, replaced.__setitem__, lambda expr, answer: None)
        assume(x.shape[0] == 4)
        return x + 1

    export(forward)
    assert list(map(int, replaced.values())) == [4]


def test_a_symbol_can_be_made_by_hand() -> None:
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    symbol = env.create_symbol(5, symbol_source("rows"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    assert isinstance(symbol, sympy.Symbol)


def test_sizes_are_written_as_python() -> None:
    rows = sympy.Symbol("rows", integer=True, positive=True)
    division = torch.utils._sympy.functions.FloorDiv(rows, 2)
    assert eval(python_text(division * 3), {"rows": 7}) == 9


def test_autograd_functions_of_operators_on_functions_are_known() -> None:
    from torch._higher_order_ops.cond import CondAutogradOp

    class Own(torch.autograd.Function):
        pass

    assert makes_higher_order(CondAutogradOp)
    assert not makes_higher_order(Own)


def test_registered_containers_are_flattened() -> None:
    class Pair:
        def __init__(self, first: Any, second: Any) -> None:
            self.first, self.second = first, second

    pytree.register_pytree_node(Pair, lambda pair: ([pair.first, pair.second], None), lambda leaves, _: Pair(*leaves))
    leaves, spec = pytree.tree_flatten(Pair(1, 2))
    assert leaves == [1, 2]
    assert pytree.tree_unflatten([3, 4], spec).second == 4


@pytest.fixture(autouse=True)
def _quiet(recwarn: pytest.WarningsRecorder) -> None:
    """torch.export warns of attributes that a forward assigns."""


def test_the_inside_of_a_transform_is_known() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(is_transforming())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.vmap(function)(torch.ones(2, 2))
    function(torch.ones(2))
    assert seen == [True, True, False]


def test_an_environment_that_is_let_go_of_reports_no_more_and_holds_no_inputs() -> None:
    found: list[Any] = []
    environments: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        environments.append(x.fake_mode.shape_env)  # type: ignore[attr-defined]
        watch_size_decisions(environments[0], lambda symbol, value: None, lambda expr, answer: found.append(expr))
        return x + 1 if x.shape[0] > 3 else x

    export(forward)
    assert found
    assert environments[0].tracked_fakes
    let_go(environments[0])
    assert "evaluate_sym_node" not in vars(environments[0])
    assert not environments[0].tracked_fakes


def test_tensors_of_vmap_are_unwrapped_and_its_wrapping_is_seen_in_a_trace_alone() -> None:
    behind, seen = [], []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(wraps_for_vmap(func))
            return func(*args, **(kwargs or {}))

    class Squares(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def square(row: torch.Tensor) -> torch.Tensor:
                behind.append(unwrapped(row) is x)
                return row * row

            with Seen():
                return torch.vmap(square)(x)

    Squares()(torch.ones(3, 2))
    assert behind == [True]
    assert not any(seen)
    torch.export.export(Squares(), (torch.ones(3, 2),), strict=False)
    assert behind == [True, True]
    assert any(seen)
