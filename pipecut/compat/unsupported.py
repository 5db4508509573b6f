"""Names of torch.distributed.pipelining that have no meaning here, each with what to use instead.

- Functions and classes can be imported, and raise when they are called: `replaced`.
- Attributes raise when they are read: `ReplacedAttributes`.
- Attributes that are decided by the constructor raise when they are set to something else: `FixedAttribute`.
- Methods that the executor never calls raise where a user's class defines them: `refuse_overrides`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import InputError, PipeError

_PACKAGE = __name__.partition(".")[0]


class ReplacedError(PipeError, NotImplementedError):
    """A function or class of upstream that pipecut replaces by something else was called."""


class ReplacedAttributeError(PipeError, AttributeError):
    """An attribute that pipecut replaces was read; also an AttributeError, so that hasattr() is False."""


class FixedAttributeError(PipeError, AttributeError):
    """An attribute that the constructor decides was set; also an AttributeError, as for any read-only attribute."""


def replaced(name: str, instead: str) -> Any:
    """Make a stand-in for a function or class.

    >>> replaced("annotate_split_points", "pass split_spec= to pipeline()")(None)
    Traceback (most recent call last):
    pipecut.compat.unsupported.ReplacedError: annotate_split_points is not part of pipecut: pass split_spec= to \
pipeline()
    """

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise ReplacedError(f"{name} is not part of pipecut: {instead}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Not part of pipecut: {instead}."})


class ReplacedAttributes:
    """Base of classes whose `_replaced` maps the names of missing attributes to what to use instead.

    >>> class Engine(ReplacedAttributes):
    ...     _replaced = {"choke": "it starts by itself"}
    >>> hasattr(Engine(), "choke")
    False
    >>> Engine().choke
    Traceback (most recent call last):
    pipecut.compat.unsupported.ReplacedAttributeError: Engine.choke is not part of pipecut: it starts by itself
    """

    _replaced: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker would take every attribute for one of these

        def __getattr__(self, name: str) -> Any:
            instead = type(self)._replaced.get(name)
            if instead is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise ReplacedAttributeError(f"{type(self).__name__}.{name} is not part of pipecut: {instead}")


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


def refuse_overrides(made: Any, not_called: Mapping[str, str]) -> None:
    """Raise if the class of an object, or the object itself, has a method of its own that would never be called.

    `not_called` maps the names of such methods to what to do instead. A method that a base class demands is allowed.

    >>> class Mine:
    ...     def choke(self) -> None: ...
    >>> Mine.__module__ = "mine"
    >>> refuse_overrides(Mine(), {"choke": "it starts by itself"})
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


# ---------------------------------------------------------------------- methods that the executor never calls

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
    "backward_maybe_with_nosync": _BACKWARD,
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

# ---------------------------------------------------------------------- attributes that are replaced

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
