"""Changes of torch itself that last for a `with` block.

Hooks and modes do not reach these places: `Function.apply` that users keep in a variable, the generator behind
non-reentrant checkpoints, `copy.deepcopy` of tensors, the registration of parameters.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.forward_ad
import torch.autograd.graph
import torch.fx.experimental._config as symbolic_config
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from torch.utils.hooks import RemovableHandle


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a class or module for a block; one that `owner` inherits is inherited again afterwards.

    >>> with replaced(torch, "pi", 3):
    ...     torch.pi
    3
    >>> torch.pi > 3
    True
    """
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def intercepted_functions(on_apply: Callable[..., Any]) -> Iterator[None]:
    """Route `Function.apply` of every class through `on_apply(cls, run, args, kwargs)`.

    Users keep `relu6 = MyRelu6.apply` in a global, so replacing the attribute is not enough: the code of the one
    function behind all of them is exchanged, and put back.
    """
    function = Function.apply.__func__  # type: ignore[attr-defined]
    code = function.__code__
    original = types.FunctionType(code, function.__globals__, "apply", function.__defaults__, function.__closure__)

    def route(cls: type[Function], args: Any, kwargs: Any) -> Any:
        return on_apply(cls, lambda *a, **k: original(cls, *a, **k), args, kwargs)

    function.__code__ = _routed_code(len(_ROUTES), code.co_freevars)
    _ROUTES.append(route)
    try:
        yield
    finally:
        function.__code__ = code
        _ROUTES.pop()


_ROUTES: list[Callable[..., Any]] = []


def _routed_code(depth: int, free_names: tuple[str, ...]) -> types.CodeType:
    """Return code that calls one of the routes, with the free variables of the closure of the exchanged function."""
    lines = [
        "def outer():",
        *[f"    {name} = None" for name in free_names],
        "    def apply(cls, *args, **kwargs):",
        *[f"        {name}" for name in free_names],
        f"        from {__name__} import _ROUTES",
        f"        return _ROUTES[{depth}](cls, args, kwargs)",
        "    return apply",
    ]
    namespace: dict[str, Any] = {}
    exec("\n".join(lines), namespace)
    code: types.CodeType = namespace["outer"]().__code__
    return code


@contextlib.contextmanager
def intercepted_checkpoints(on_checkpoint: Callable[..., Iterator[None]]) -> Iterator[None]:
    """Route non-reentrant `checkpoint` calls through the generator `on_checkpoint(arguments, options)`.

    The reentrant ones are autograd functions.
    """

    def generator(
        function: Any, preserve: bool, context_fn: Any, determinism: str, debug: bool, early_stop: bool,
        *args: Any, **kwargs: Any,
    ) -> Iterator[None]:  # fmt: skip
        options = {
            "use_reentrant": False,
            "preserve_rng_state": preserve,
            "context_fn": context_fn,
            "determinism_check": determinism,
        }
        return on_checkpoint((*args, *kwargs.values()), options)

    with replaced(torch_checkpoint, "_checkpoint_without_reentrant_generator", generator):
        yield


@contextlib.contextmanager
def intercepted_differentiation(on_start: Callable[[], None]) -> Iterator[None]:
    """Call `on_start` before autograd runs, backward or forward, whoever asks for it.

    `torch.autograd.grad`, `backward()` and the transforms of torch.func all come through these functions; no hook or
    mode says that an operation is part of a backward.
    """

    def reporting(run: Callable[..., Any]) -> Callable[..., Any]:
        def reported(*args: Any, **kwargs: Any) -> Any:
            on_start()
            return run(*args, **kwargs)

        return reported

    with contextlib.ExitStack() as stack:
        for owner, name in _DIFFERENTIATES:
            stack.enter_context(replaced(owner, name, reporting(getattr(owner, name))))
        yield


_DIFFERENTIATES = (
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.graph, "_engine_run_backward"),
    (torch.autograd.forward_ad, "enter_dual_level"),
)


@contextlib.contextmanager
def tensors_not_copied() -> Iterator[None]:
    """Let `copy.deepcopy` keep all tensors that it meets, wherever they are."""
    with contextlib.ExitStack() as stack:
        for cls in (torch.Tensor, nn.Parameter):
            stack.enter_context(replaced(cls, "__deepcopy__", lambda tensor, memo: tensor))
        yield


@contextlib.contextmanager
def parameters_prepared(prepare: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Call `prepare` with each parameter just before a module registers it."""
    register = nn.Module.register_parameter

    def prepare_and_register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            prepare(param)
        register(module, name, param)

    with replaced(nn.Module, "register_parameter", prepare_and_register):
        yield


def sizes_of_one_traced() -> contextlib.AbstractContextManager[Any]:
    """Trace the sizes 0 and 1 as sizes like others: by default torch.export fixes them."""
    return symbolic_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined, no-any-return]


@contextlib.contextmanager
def stand_ins_reported(note: Callable[[Any], None]) -> Iterator[None]:
    """Call `note` with each fake tensor and symbolic number that is made; there is no list of those that are alive."""
    make, start = FakeTensor.__new__, torch.SymInt.__init__

    def make_and_report(cls: type[FakeTensor], *args: Any, **kwargs: Any) -> Any:
        made = make(cls, *args, **kwargs)
        note(made)
        return made

    def start_and_report(number: torch.SymInt, *args: Any) -> None:
        start(number, *args)  # type: ignore[no-untyped-call]
        note(number)

    with (
        replaced(FakeTensor, "__new__", staticmethod(make_and_report)),
        replaced(torch.SymInt, "__init__", start_and_report),
    ):
        yield


@contextlib.contextmanager
def reported_conditions(
    on_branch: Callable[[Any, types.FrameType], bool | None], on_check: Callable[[Any, str, types.FrameType], None]
) -> Iterator[None]:
    """Call `on_branch` with a condition on numbers from tensors that code branches by, for an answer if it has one.

    `on_check` gets those of torch._check and the like, with the name of the error. Numbers pass no mode of torch
    functions, and a tracer holds no more of torch._check than that it may rely on it.
    """
    decide, check = torch.SymBool.__bool__, torch._check_with

    def decide_or_ask(condition: torch.SymBool) -> bool:
        try:
            return bool(decide(condition))  # type: ignore[no-untyped-call]
        except GuardOnDataDependentSymNode:
            answer = on_branch(condition, sys._getframe(1))
            if answer is None:
                raise
            return answer

    def check_and_report(error: type[Exception], condition: Any, message: Any) -> None:
        if isinstance(condition, torch.SymBool) and free_unbacked_symbols(condition):
            on_check(condition, error.__name__, sys._getframe(1))
        check(error, condition, message)

    with replaced(torch.SymBool, "__bool__", decide_or_ask), replaced(torch, "_check_with", check_and_report):
        yield


@contextlib.contextmanager
def sizes_from_data_known() -> Iterator[None]:
    """Let operators be traced of which torch does not say what they return where a size depends on the data.

    Of those that public torch marks so, a loss of sequences is the one without a rule. No public function takes a rule
    back.
    """
    with torch.library._scoped_library("aten", "FRAGMENT") as rules:
        torch.library.register_fake("aten::_ctc_loss.Tensor", _sequence_loss, lib=rules)
        yield


def _sequence_loss(scores: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stand-ins for the loss of each sequence, and for what its gradient needs, at its largest.

    The second never leaves the operator around this one, `ctc_loss`, which is what a trace has.
    """
    length, samples = scores.shape[0], scores.shape[1:-1]
    return scores.new_empty(samples), scores.new_empty((*(samples or (1,)), length, 2 * targets.shape[-1] + 1))


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Run operators for real, past all dispatch modes; public modes can only be added."""
    return torch._C._DisableTorchDispatch()


def unproxied() -> contextlib.AbstractContextManager[Any]:
    """Keep the tracer from recording the operators of a block; no public function takes its mode off the stack."""
    return disable_proxy_modes_tracing()


def ambient_modes() -> tuple[Any, ...]:
    """Return the modes that decide what an operator makes of its arguments, and the number of dispatch modes.

    >>> with torch.no_grad():
    ...     ambient_modes() == ambient_modes()
    True
    >>> with torch.no_grad():
    ...     inside = ambient_modes()
    >>> inside == ambient_modes()
    False
    """
    casts = tuple(
        (kind, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)) for kind in _cast_devices()
    )
    inference = torch.is_inference_mode_enabled()
    modes = torch._C._len_torch_dispatch_stack()
    return torch.is_grad_enabled(), inference, torch.get_default_dtype(), modes, casts


def _cast_devices() -> tuple[str, ...]:
    if not torch._C._is_any_autocast_enabled():
        return ()
    return ("cpu", torch._C._get_accelerator().type)


@contextlib.contextmanager
def seen_as_export() -> Iterator[None]:
    """Let code that asks `torch.compiler.is_exporting()` or `is_compiling()` do what it does under torch.export."""
    with contextlib.ExitStack() as stack:
        for name in ("_is_compiling_flag", "_is_exporting_flag"):
            stack.enter_context(replaced(torch.compiler, name, True))
        yield


@contextlib.contextmanager
def reported_hooks(on_hook: Callable[[Any], None]) -> Iterator[None]:
    """Call `on_hook` with the dict of each hook that is put on a tensor, a node of autograd or a module.

    All ways to do so, in Python and in C++, make a handle with which the hook can be taken away.
    """
    init = RemovableHandle.__init__

    def report(handle: RemovableHandle, hooks_dict: Any, **options: Any) -> None:
        init(handle, hooks_dict, **options)
        on_hook(hooks_dict)

    with replaced(RemovableHandle, "__init__", report):
        yield


def torch_functions_off() -> contextlib.AbstractContextManager[None]:
    """Keep modes of torch functions from seeing what happens in a block: the public switch is that of a subclass."""
    return torch._C.DisableTorchFunction()
