"""Temporary changes of torch reach what they are meant for, and are gone afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from pipecut.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    ambient_modes,
    fake_mode_with_numbers,
    intercepted_checkpoints,
    intercepted_differentiation,
    intercepted_functions,
    parameters_prepared,
    references_to,
    reported_conditions,
    reported_hooks,
    seen_as_export,
    sizes_from_data_known,
    sizes_of_one_traced,
    stand_ins_reported,
    tensors_not_copied,
    torch_functions_off,
    unproxied,
    without_modes,
)
from pipecut.torch_internals.patches import replaced


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int = 2) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


kept_by_the_user: Callable[..., Tensor] = Double.apply


def test_autograd_functions_kept_in_a_variable_are_intercepted() -> None:
    seen = []

    def on_apply(cls: type, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seen.append((cls, args[1:], kwargs))
        return run(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with intercepted_functions(on_apply):
        kept_by_the_user(x, 3).sum().backward()
    kept_by_the_user(x)
    assert seen == [(Double, (3,), {})]
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


def test_interceptions_nest() -> None:
    seen = []

    def outer(cls: type, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seen.append("outer")
        return run(*args, **kwargs)

    def inner(cls: type, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seen.append("inner")
        return run(*args, **kwargs)

    with intercepted_functions(outer):
        with intercepted_functions(inner):
            kept_by_the_user(torch.ones(1))
        kept_by_the_user(torch.ones(1))
    assert seen == ["inner", "outer", "outer"]


def test_non_reentrant_checkpoints_are_intercepted() -> None:
    seen = []

    def on_checkpoint(args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[None]:
        seen.append((len(args), options["use_reentrant"], options["preserve_rng_state"], options["determinism_check"]))
        yield
        seen.append("done")

    x = torch.ones(1, requires_grad=True)
    with intercepted_checkpoints(on_checkpoint):
        checkpoint(torch.sin, x, use_reentrant=False, preserve_rng_state=False)
    checkpoint(torch.sin, x, use_reentrant=False)
    assert seen == [(1, False, False, "default"), "done"]


def test_deepcopy_keeps_tensors_inside_the_block_only() -> None:
    value = {"plain": torch.ones(1), "parameter": nn.Parameter(torch.ones(1))}
    with tensors_not_copied():
        same = copy.deepcopy(value)
    other = copy.deepcopy(value)
    assert all(same[name] is value[name] for name in value)
    assert all(other[name] is not value[name] for name in value)


def test_parameters_are_prepared_before_they_are_registered() -> None:
    shapes: list[list[int]] = []
    with parameters_prepared(lambda parameter: shapes.append(list(parameter.shape))):
        nn.Linear(2, 3)
        nn.Linear(2, 3, bias=False)
    nn.Linear(1, 1)
    assert shapes == [[3, 2], [3], [3, 2]]


def test_a_replaced_attribute_is_back_after_an_error() -> None:
    class Base:
        value = 1

    class Derived(Base):
        pass

    def fail() -> None:
        with replaced(Derived, "value", 2):
            assert Derived.value == 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "value" not in vars(Derived)
    assert Derived.value == 1


def test_a_size_of_one_stays_symbolic() -> None:
    dims = {"input": {0: torch.export.Dim.AUTO}}
    with sizes_of_one_traced():
        exported = torch.export.export(nn.ReLU(), (torch.ones(1, 2),), dynamic_shapes=dims, strict=False)
    (size, _) = next(node for node in exported.graph.nodes if node.op == "placeholder").meta["val"].shape
    assert isinstance(size, torch.SymInt)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_every_way_to_take_derivatives_is_intercepted() -> None:
    x = torch.ones(2, requires_grad=True)
    ways: list[Callable[[], Any]] = [
        lambda: x.sum().backward(),  # type: ignore[no-untyped-call]
        lambda: torch.autograd.grad(x.sum(), x),
        lambda: torch.func.grad(torch.sum)(x),
        lambda: torch.func.vjp(torch.sin, x)[1](x),
        lambda: torch.func.jvp(torch.sin, (x,), (x,)),
        lambda: torch.func.jacrev(torch.sin)(x),
        lambda: torch.autograd.functional.hessian(torch.sum, x),
    ]
    for way in ways:
        seen: list[None] = []
        with intercepted_differentiation(lambda seen=seen: seen.append(None)):  # type: ignore[misc]
            way()
        assert seen
        count = len(seen)
        way()
        assert len(seen) == count


def test_fake_tensors_and_symbolic_sizes_are_reported_when_they_are_made() -> None:
    made: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        made.clear()
        made.append(x.shape[0])
        return x + 1

    class Entry(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    dynamic = {"x": {0: torch.export.Dim.AUTO}}
    with stand_ins_reported(made.append):
        torch.export.export(Entry(), (torch.ones(4, 2),), dynamic_shapes=dynamic, strict=False)
    assert {type(each) for each in made} >= {FakeTensor, torch.SymInt}
    made.clear()
    with FakeTensorMode():
        torch.ones(2)
    assert made == []


def test_operators_run_for_real_past_all_modes() -> None:
    x = torch.ones(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(x + 1, FakeTensor)
        with without_modes():
            assert (x + 1).tolist() == [2, 2]


def test_code_in_the_block_thinks_that_it_is_exported() -> None:
    with seen_as_export():
        assert torch.compiler.is_exporting()
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()
    assert not torch.compiler.is_compiling()


def test_every_way_to_put_a_hook_on_something_is_reported() -> None:
    leaf, layer = torch.ones(2, requires_grad=True), nn.Linear(2, 2)
    y = leaf * 2
    assert y.grad_fn is not None
    ways: list[Callable[[], Any]] = [
        lambda: y.register_hook(lambda gradient: None),
        lambda: leaf.register_post_accumulate_grad_hook(lambda tensor: None),
        lambda: y.grad_fn.register_hook(lambda into, out: None),  # type: ignore[union-attr]
        lambda: y.grad_fn.register_prehook(lambda out: None),  # type: ignore[union-attr]
        lambda: torch.autograd.graph.register_multi_grad_hook((y, leaf), lambda gradients: None),
        lambda: layer.register_forward_hook(lambda module, args, result: None),
    ]
    for way in ways:
        seen: list[Any] = []
        with reported_hooks(seen.append):
            way()
        assert seen, way
        assert way is not ways[-1] or seen == [layer._forward_hooks]
    with reported_hooks(seen.append):
        pass
    before = len(seen)
    y.register_hook(lambda gradient: None)
    assert len(seen) == before


def test_modes_do_not_see_what_happens_with_torch_functions_off() -> None:
    class Seen(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Seen() as seen:
        with torch_functions_off():
            _ = x + 1
        assert seen.calls == 0
        _ = x + 1
    assert seen.calls == 1


def test_a_tracer_does_not_record_what_happens_without_its_mode() -> None:
    def forward(x: Tensor) -> Tensor:
        with unproxied():
            x.tanh()
        return x.relu()

    graph = make_fx(forward, pre_dispatch=True)(torch.ones(2)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.relu.default]


@pytest.mark.parametrize(
    "mode", [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), FakeTensorMode()]
)
def test_each_mode_that_decides_about_results_is_seen(mode: Any) -> None:
    before = ambient_modes()
    with mode:
        assert ambient_modes() != before
    assert ambient_modes() == before


def test_references_from_python_are_counted_and_those_of_autograd_are_not() -> None:
    tensors = {0: torch.ones(2, requires_grad=True) * 2}
    counts = [references_to(tensors[0])]  # in an assert pytest would hold on to it
    square, view = tensors[0] * tensors[0], tensors[0].view(2, 1)
    counts.append(references_to(tensors[0]))
    held = [tensors[0], tensors[0]]
    counts.append(references_to(tensors[0]))
    del square, view
    counts.append(references_to(tensors[0]))
    assert [count - counts[0] for count in counts] == [0, 0, len(held), len(held)]


def test_conditions_on_numbers_from_tensors_are_reported() -> None:
    asked: list[str] = []

    def answer(condition: Any, frame: Any) -> bool | None:
        asked.append(frame.f_code.co_name)
        return None if len(asked) > 1 else True

    checked: list[str] = []
    with fake_mode_with_numbers(), reported_conditions(answer, lambda *found: checked.append(found[1])):
        number = torch.ones(3).max().item()
        assert bool(number > 2)
        with pytest.raises(Exception, match="data-dependent"):
            bool(number > 3)
        torch._check(number > 4)
        torch._check(len(asked) == 2)  # not from a tensor
    assert asked == ["test_conditions_on_numbers_from_tensors_are_reported"] * 2
    assert checked == ["RuntimeError"]


def test_a_loss_of_sequences_can_be_traced_for_a_while() -> None:
    def loss() -> Tensor:
        scores = torch.ones(7, 2, 5, requires_grad=True).log_softmax(-1)
        return nn.functional.ctc_loss(scores, torch.ones(2, 3).long(), torch.tensor([7, 7]), torch.tensor([3, 2]))

    with fake_mode_with_numbers():
        with sizes_from_data_known():
            assert loss().shape == ()
        with pytest.raises(Exception, match="ctc_loss"):
            loss()
    assert loss().isfinite()
