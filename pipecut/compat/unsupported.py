"""Names of torch.distributed.pipelining that have no meaning here, each with what to use instead.

- Functions and classes can be imported, and raise when they are called: `replaced`.
- Attributes raise when they are read or set: `ReplacedAttributes`.
- Attributes that are decided by the constructor raise when they are set to something else: `FixedAttribute`.
- Methods that the executor never calls raise where a user's class defines them: `check_no_overrides`.
- Values passed to a stage, or declared of it, that are not the executor's own raise too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError, PipeError, StageMetadataError
from ..pipe_ir import flatten
from ..stage import MeshLayout, describe, placement_of

_PACKAGE = __name__.partition(".")[0]


class ReplacedError(PipeError, NotImplementedError):
    """A function or class of upstream that pipecut replaces by something else was called."""


class ReplacedAttributeError(PipeError, AttributeError):
    """An attribute that pipecut replaces was read or set; also an AttributeError, so that hasattr() is False."""


class FixedAttributeError(PipeError, AttributeError):
    """An attribute that the constructor decides was set; also an AttributeError, as for any read-only attribute."""


def replaced(name: str, instead: str) -> Any:
    """Make a stand-in for a function or class.

    >>> replaced("annotate_split_points", "pass split_spec= to pipeline()")(None)
    Traceback (most recent call last):
    pipecut.compat.unsupported.ReplacedError: annotate_split_points is not part of pipecut: pass split_spec= to \
pipeline()
    """

    def raise_error(self: object, *args: Any, **kwargs: Any) -> None:
        raise ReplacedError(f"{name} is not part of pipecut: {instead}")

    return type(name, (), {"__init__": raise_error, "__doc__": f"Not part of pipecut: {instead}."})


class ReplacedAttributes:
    """Base of classes whose `_replaced` maps the names of missing attributes to what to use instead.

    >>> class Engine(ReplacedAttributes):
    ...     _replaced = {"choke": "it starts by itself"}
    >>> hasattr(Engine(), "choke")
    False
    >>> Engine().choke
    Traceback (most recent call last):
    pipecut.compat.unsupported.ReplacedAttributeError: Engine.choke is not part of pipecut: it starts by itself
    >>> Engine().choke = None
    >>> Engine().choke = "half"
    Traceback (most recent call last):
    pipecut.compat.unsupported.ReplacedAttributeError: Engine.choke is set to 'half', and nothing here would use it: \
it starts by itself
    """

    _replaced: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker would take every attribute for one of these

        def __getattr__(self, name: str) -> Any:
            instead = type(self)._replaced.get(name)
            if instead is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise ReplacedAttributeError(f"{type(self).__name__}.{name} is not part of pipecut: {instead}")

        def __setattr__(self, name: str, value: Any) -> None:
            instead = type(self)._replaced.get(name)
            if instead is None:
                super().__setattr__(name, value)
            elif not _says_to_forget(value):
                raise ReplacedAttributeError(
                    f"{type(self).__name__}.{name} is set to {value!r}, and nothing here would use it: {instead}"
                )


def _says_to_forget(value: Any) -> bool:
    """Return True for None, False and what is empty: with upstream, what was prepared is prepared anew then."""
    return value is None or value is False or (isinstance(value, Sized) and not isinstance(value, Tensor) and not value)


class FixedAttribute:
    """Attribute that `read` computes from its object; `instead` says how to get another value.

    What is set before the object is made is ignored, since its constructor decides.

    >>> class Clock:
    ...     hours = 12
    ...     _hours = FixedAttribute(lambda clock: clock.hours, "make another clock")
    >>> clock = Clock()
    >>> clock._hours = 12
    >>> clock._hours = 24
    Traceback (most recent call last):
    pipecut.compat.unsupported.FixedAttributeError: Clock._hours is 12 and cannot be set to 24: make another clock
    """

    def __init__(self, read: Callable[[Any], Any], instead: str) -> None:
        self.read = read
        self.instead = instead
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, made: Any, owner: type | None = None) -> Any:
        return self if made is None else self.read(made)

    def __set__(self, made: Any, value: Any) -> None:
        try:
            current = self.read(made)
        except AttributeError:
            return  # it is not made yet
        if value is not current and value != current:
            raise FixedAttributeError(
                f"{type(made).__name__}.{self.name} is {current!r} and cannot be set to {value!r}: {self.instead}"
            )


def check_no_overrides(made: Any, not_called: Mapping[str, str]) -> None:
    """Raise if the class of an object, or the object itself, has a method of its own that would never be called.

    `not_called` maps the names of such methods to what to do instead. A method that a base class demands is allowed.

    >>> class Mine:
    ...     def choke(self) -> None: ...
    >>> Mine.__module__ = "mine"
    >>> check_no_overrides(Mine(), {"choke": "it starts by itself"})
    Traceback (most recent call last):
    pipecut.errors.InputError: Mine defines choke(), and steps are run by one executor here, which never calls it: it \
starts by itself
    """
    for name, instead in not_called.items():
        if name in getattr(made, "__dict__", {}) or _is_overridden(type(made), name):
            raise InputError(
                f"{type(made).__name__} defines {name}(), and steps are run by one executor here, which never calls "
                f"it: {instead}"
            )


def _is_overridden(cls: type, name: str) -> bool:
    """Return True if a class of the user defines a method, other than to implement an abstract one."""
    definers = [base for base in cls.__mro__ if name in vars(base)]
    own = [base for base in definers if base.__module__.partition(".")[0] == _PACKAGE]
    if not definers or definers[0] in own:
        return False
    return not own or not getattr(vars(own[0])[name], "__isabstractmethod__", False)


# Methods that the executor never calls.

_FORWARD = "put what it does into the forward of the stage's module, or into a hook of that module"
_BACKWARD = "put what it does into hooks of the module or its tensors, or register a custom function for backwards"
_TRANSFERS = "what is sent and received is the work of the schedule's executor"
_SHAPES = "shapes follow from the sizes of each step"
_REDUCTION = "gradients are reduced by the executor, as the wrapper of the module says"
_CHECKS = "the executor checks the order of calls, and what arrives"
_STEPS = "the microbatches of a step are cut, run and merged by step() and eval()"
_LOSS = "make the schedule with loss_fn=, a function of the output and the target of a microbatch"
_READY = "stages are ready when they are made"
_ORDER = "derive from PipelineScheduleMulti, and set self.pipeline_order to the actions of every rank"

STAGE_NOT_CALLED: dict[str, str] = {
    "forward_one_chunk": _FORWARD,
    "forward_maybe_with_nosync": _FORWARD,
    "_compute_outputs": _FORWARD,
    "backward_one_chunk": _BACKWARD,
    "backward_maybe_with_nosync": (
        "gradients are reduced once a step by the executor, also those of fully_shard, as the wrapper of the module "
        "says: leave it out, or put what else it does into hooks of the module or its tensors"
    ),
    "_compute_input_grads": _BACKWARD,
    "backward_weight_one_chunk": "pass dw_builder= to the stage for weight gradients of your own",
    "scale_grads": "make the schedule with scale_grads=False, and scale in loss_fn, or the gradients after step()",
    "perform_reduce_grad": _REDUCTION,
    **dict.fromkeys(("set_local_fwd_input", "set_local_bwd_input", "get_local_bwd_output"), _TRANSFERS),
    **dict.fromkeys(("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"), _TRANSFERS),
    **dict.fromkeys(("_get_recv_ops", "_get_init_p2p_neighbors_ops", "_map_tensor_from_recv_info"), _TRANSFERS),
    **dict.fromkeys(("_retrieve_recv_activations", "_retrieve_recv_grads", "_resolve_peer_global_rank"), _TRANSFERS),
    **dict.fromkeys(("_create_act_recv_info", "_create_act_send_info", "_create_grad_send_info"), _TRANSFERS),
    **dict.fromkeys(("_setup_forward_recv_info", "_setup_forward_send_info", "_is_same_rank"), _TRANSFERS),
    **dict.fromkeys(("_setup_backward_recv_info", "_create_grad_recv_info", "find_dst_rank"), _TRANSFERS),
    **dict.fromkeys(("_prepare_forward_infra", "_prepare_backward_infra", "_get_grad_send_meta"), _SHAPES),
    **dict.fromkeys(("_recv_meta", "_send_meta", "_to_tensor", "_ones_from_metadata"), _SHAPES),
    **dict.fromkeys(("_warmup_forward_vote", "_warmup_backward_result", "_validate_inferred_metadata"), _SHAPES),
    **dict.fromkeys(("_forward_metadata_inference", "_backward_metadata_inference"), _SHAPES),
    **dict.fromkeys(("_post_metadata_inference_cleanup", "get_outputs_meta", "_configure_outputs_meta"), _SHAPES),
    **dict.fromkeys(("_shape_inference", "_get_output_node"), _SHAPES),
    **dict.fromkeys(("_check_chunk_id", "_validate_stage_tensors"), _CHECKS),
    **dict.fromkeys(("_validate_fwd_input", "_validate_fwd_outputs"), _CHECKS),
    "_move_submod_to_device": "move the module before the stage is made",
    "get_stage_index_of_submod": "a stage's number is its stage_index",
}

SCHEDULE_NOT_CALLED: dict[str, str] = {
    "_step_microbatches": (
        "set self.pipeline_order to the actions of every rank instead, or use PlannedSchedule with a plan"
    ),
    **dict.fromkeys(("_compute_loss", "_maybe_compute_loss", "_maybe_get_loss"), _LOSS),
    "_update_losses": "pass losses=, a list, to step()",
    "_split_inputs": f"{_STEPS}; args_chunk_spec= and kwargs_chunk_spec= say how to cut",
    "_merge_outputs": f"{_STEPS}; output_merge_spec= says how to merge",
    "_check_inputs": _STEPS,
    **dict.fromkeys(("_initialize_stages", "_initialize_stage", "_initialize_pp_stages"), _READY),
    "_warmup_p2p": "connections are made by the first step",
    "_assert_unsharded": "a stage waits for its parameters by itself",
    "_validate_adjacent_stage_communication": "the plan is validated before the first step",
}

# A schedule that sets its own order calls these by itself; one whose plan follows from its name does not.
ORDER_NOT_CALLED: dict[str, str] = {
    "_calculate_single_rank_operations": _ORDER,
    "_prepare_schedule_with_comms": _ORDER,
    "_validate_and_set_stage_mapping": _ORDER,
}

# Attributes that are replaced.

STAGE_REPLACED = {
    **STAGE_NOT_CALLED,
    **dict.fromkeys(("args_recv_info", "act_send_info", "grad_recv_info", "grad_send_info"), _TRANSFERS),
    **dict.fromkeys(("_stage_meta", "_user_meta", "inputs_meta", "_outputs_meta", "grads_meta"), _SHAPES),
    **dict.fromkeys(("_inference_mode", "_fwd_outputs_for_bwd_meta"), _SHAPES),
    "_mesh_cache": "a stage finds its meshes by itself, in what it was made with: pass get_mesh= for others",
    "backward_state": "what a backward has left is in stage.flights[microbatch].pending",
}

SCHEDULE_REPLACED = {
    **SCHEDULE_NOT_CALLED,
    **ORDER_NOT_CALLED,
    "_comp_type_to_function_map": "call register_custom_function()",
    **dict.fromkeys(("_stage_initialized", "_stages_initialized", "_stage_forward_initialized"), _READY),
    **dict.fromkeys(("_stages_forward_initialized", "_stages_backward_initialized"), _READY),
    "_should_compute_loss": "the loss is made along with the output of the last stage",
    "_backward_requires_autograd": "register a custom function for backwards of your own",
}


# Checks of what code written for torch.distributed.pipelining passes to a stage, or declares of it.


class StageCallError(PipeError, AssertionError):
    """A call of a stage is out of order; also an AssertionError, as with upstream."""


class GradientsInTransit(tuple[Tensor, ...]):
    """Stands for gradients that the executor hands on by itself: to be passed on, not looked into."""

    def __iter__(self) -> Any:
        raise StageCallError(
            "the gradients of get_local_bwd_output() are already in transit in a step, and cannot be looked into or "
            "changed: pass what it returned to set_local_bwd_input(), and put a hook on a tensor to change its gradient"
        )

    def __getitem__(self, place: Any) -> Any:
        return self.__iter__()


def are_same(given: Any, held: Any) -> bool:
    """Return True if nested values hold the same tensors, by memory and layout, in the same places, and equal rest.

    >>> x = torch.ones(4)
    >>> are_same(([x[:2]], 1), ([x[:2]], 1)), are_same(x * 1, x), are_same((x,), x)
    (True, False, False)
    """
    if given is held:
        return True
    leaves, structure = flatten(given)
    wanted, wanted_structure = flatten(held)
    if list(structure.paths()) != list(wanted_structure.paths()):
        return False
    return all(map(_is_same_leaf, leaves, wanted))


def check_same_factor(call: str, factor: float, wanted: int) -> None:
    """Raise if a call during a step asks for another scale than the one that gradients have from their beginning.

    >>> check_same_factor("scale_grads", 4, 4)
    >>> check_same_factor("scale_grads", 8, 4)
    Traceback (most recent call last):
    pipecut.compat.unsupported.StageCallError: scale_grads(8) in a step whose gradients are scaled already, as if \
divided by 4: pass 4, with which nothing is scaled twice, or make the schedule with scale_grads=False, where it is 1; \
scale in loss_fn, or the gradients after step()
    """
    if factor != wanted:
        other = "pass scale_grads=True to the schedule for the mean over the batch"
        done = "are not scaled, for the schedule has scale_grads=False: pass 1"
        if wanted != 1:
            done = f"are scaled already, as if divided by {wanted}: pass {wanted}, with which nothing is scaled twice"
            other = "make the schedule with scale_grads=False, where it is 1"
        raise StageCallError(
            f"{call}({factor}) in a step whose gradients {done}, or {other}; scale in loss_fn, or the gradients after "
            "step()"
        )


def _is_same_leaf(given: Any, held: Any) -> bool:
    if given is held:
        return True
    if not isinstance(given, Tensor) or not isinstance(held, Tensor):
        return not isinstance(given, Tensor) and not isinstance(held, Tensor) and bool(given == held)
    plain = all(type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided for each in (given, held))
    return plain and _memory(given) == _memory(held)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()


def check_declared(stage_index: int, what: str, declared: Any, got: Any, *, in_part: bool) -> None:
    """Raise unless tensors are as they were declared, number of samples included.

    With `in_part` the last of them may be elsewhere, passed by keyword.
    """
    expected, found = _looks(declared), _looks(got)
    wanted = expected[: len(found)] if in_part else expected
    fault = _difference(f"forward {what.removesuffix('_args')}s", wanted, found)
    if fault:
        raise StageMetadataError(
            f"Stage {stage_index} {fault}: stage {stage_index} was made with {what} {_described(expected)}, and has "
            f"{_described(found) or 'none'} in a microbatch, which _runtime_validate=True forbids: declare what is "
            "passed, or leave it False, with which the number of samples may be another"
        )


class FirstStep:
    """The shapes and dtypes of a stage's tensors in its first step, microbatch by microbatch: later ones must be equal.

    >>> seen = FirstStep(0)
    >>> seen.check("forward inputs", 0, torch.ones(2, 3))
    >>> seen.check("forward inputs", 0, torch.ones(2, 4))
    Traceback (most recent call last):
    pipecut.errors.StageMetadataError: Stage 0 forward inputs[0]: shape mismatch: microbatch 0 has float32[2, 4], and \
had float32[2, 3] in the first step, which counts as declared with _runtime_validate=True: pass the same shapes and \
dtypes in every step, or leave it False
    """

    def __init__(self, stage_index: int) -> None:
        self.stage_index = stage_index
        self._seen: dict[tuple[str, int], list[_Look]] = {}

    def check(self, what: str, microbatch: int, values: Any) -> None:
        """Raise unless the tensors of a microbatch are as they were; remember them in the first step."""
        found = _looks(values)
        expected = self._seen.setdefault((what, microbatch), found)
        fault = _difference(what, expected, found)
        if fault:
            raise StageMetadataError(
                f"Stage {self.stage_index} {fault}: microbatch {microbatch} has {_described(found) or 'none'}, and had "
                f"{_described(expected) or 'none'} in the first step, which counts as declared with "
                "_runtime_validate=True: pass the same shapes and dtypes in every step, or leave it False"
            )


class _Look(NamedTuple):
    """All that is compared of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_mesh: MeshLayout | None

    @property
    def placement(self) -> tuple[Any, ...] | None:
        return placement_of(self.on_mesh)


def _looks(values: Any) -> list[_Look]:
    leaves, _ = flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [_Look(tuple(each.shape), each.dtype, MeshLayout.of(each)) for each in tensors]


def _described(looks: Sequence[_Look]) -> str:
    return ", ".join(itertools.starmap(describe, looks))


def _difference(called: str, expected: Sequence[_Look], found: Sequence[_Look]) -> str:
    """Describe the first difference; an empty text if there is none."""
    if len(expected) != len(found):
        return f"{called}: expected {len(expected)} tensors, got {len(found)}"
    for place, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        for name in ("shape", "dtype", "placement"):
            if getattr(wanted, name) != getattr(got, name):
                return f"{called}[{place}]: {name} mismatch"
    return ""
