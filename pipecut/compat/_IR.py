"""torch.distributed.pipelining._IR over pipecut's pipes."""  # noqa: N999 (upstream's name)

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..api import RequestedCuts
from ..errors import InputError
from ..pipe import Pipe as OwnPipe
from ..pipe_ir import ModelTracer, flatten, pipe_split, warn_of_fixed_dims
from ..split import SplitPoint, SplitPolicy, cut_model
from ..text import listed
from . import _backward, _unflatten
from . import stage as _stage
from ._utils import FlatOutput
from ._utils import PipeInfo as PipeInfo
from .imported_names import imported_by
from .unsupported import ReplacedAttributes, replaced

__all__ = ["Pipe", "SplitPoint", "pipe_split", "pipeline"]

PP_SUBMOD_PREFIX = "submod_pp"


class Pipe(OwnPipe, ReplacedAttributes):
    """A cut model whose call returns a flat tuple, and also takes by position what was traced by keyword."""

    has_loss_and_backward: ClassVar[bool] = False

    _replaced = dict.fromkeys(
        ("split_gm", "executor", "named_modules", "modules", "named_children", "children", "apply"),
        "a Pipe is not an nn.Module; its stages are: see pipe.stages and pipe.get_stage_module()",
    )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters = self.traced.call.signature.parameters.values()
        if not any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
            places = sum(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in parameters)
            named = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
            kwargs = dict(zip(named, args[places:], strict=False)) | kwargs
            args = args[:places]
        leaves, _ = flatten(super().__call__(*args, **kwargs))
        return tuple(leaves)

    forward = __call__

    def info(self) -> PipeInfo:
        """Return what is known of the stages and edges, without the modules.

        Stages that are built with it hand over tensors, as upstream does: loss_fn and the caller of step() get no dict
        or dataclass, but the tensors in it.
        """
        return PipeInfo.of(super().info(), FlatOutput.of(self.traced.output))

    def build_stage(
        self, stage_index: int, device: torch.device | str, group: dist.ProcessGroup | None = None, **options: Any
    ) -> _stage._PipelineStage:
        """Build one stage for a schedule; `options` are those of pipecut.Pipe.build_stage."""
        own = super().build_stage(stage_index, device, group, **options)
        stage = _stage._PipelineStage(own.submod, stage_index, self.info(), device, group)
        stage.origin = own.origin
        return stage

    def print_readable(self) -> None:  # type: ignore[override]
        """Print the code that was generated for each stage."""
        super().print_readable()

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all stages by the model's names, without upstream's `split_gm.submod_pp_0.`."""
        yield from _once(prefix, (pair for stage in self.stages for pair in stage.named_parameters(recurse=recurse)))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of all stages."""
        yield from (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of all stages, by the model's names."""
        yield from _once(prefix, (pair for stage in self.stages for pair in stage.named_buffers(recurse=recurse)))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield the buffers of all stages."""
        yield from (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the state of all stages by the model's names, as the state dict of the model."""
        found: dict[str, Any] = {}
        for stage in self.stages:
            found |= stage.state_dict(prefix=prefix, keep_vars=keep_vars)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Give the stages the values of a state dict of the model."""
        known = set(self.state_dict())
        odd = sorted(known ^ set(state_dict))
        if strict and odd:
            raise InputError(
                f"the state dict and the model differ in {listed(odd, at_most=5)}: give the model's own names, or "
                "strict=False"
            )
        for stage in self.stages:
            stage.load_state_dict(
                {name: value for name, value in state_dict.items() if name in known}, strict=False, assign=assign
            )

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """Return the module of one stage."""
        return super().get_stage_module(stage_idx)

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: SplitPolicy | None = None,
    ) -> Pipe:
        """Cut a model at its marks, or where a policy puts them."""
        return pipeline(mod, example_args, example_kwargs, split_policy=split_policy)


T = TypeVar("T")


def _once(prefix: str, pairs: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield each value once, also if several stages hold it."""
    seen: set[int] = set()
    for name, value in pairs:
        if id(value) not in seen:
            seen.add(id(value))
            yield f"{prefix}.{name}" if prefix else name, value


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
) -> Pipe:
    """Cut a model into stages; see pipecut.pipeline.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> type(pipeline(model, (torch.ones(3, 2),), split_spec={"1": SplitPoint.BEGINNING})(torch.ones(3, 2)))
    <class 'tuple'>
    """
    cuts = RequestedCuts(module, mb_args, mb_kwargs, split_spec, split_policy)
    pipe = cut_model(ModelTracer("auto", module, mb_args, mb_kwargs), cuts, Pipe)
    warn_of_fixed_dims(pipe.traced)
    return pipe


def get_submod_name(stage_idx: int) -> str:
    """Return upstream's name for the module of a stage."""
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"


class MultiUseParameterConfig(Enum):
    """Treatment of a parameter of several stages by upstream; here it is one parameter, whose gradients are summed."""

    TRANSMIT = 1
    REPLICATE = 2


MultiUseParamSpec: TypeAlias = MultiUseParameterConfig | dict[str, MultiUseParameterConfig]


class PipeSequential(nn.Sequential):
    """A Sequential with a mark between any two of its modules."""

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """Make one of the same modules."""
        return PipeSequential(*sequential_instance)

    def forward(self, input: Any) -> Any:
        for place, module in enumerate(self):
            if place:
                pipe_split()
            input = module(input)
        return input


class LossWrapper(nn.Module):
    """A model and its loss in one."""

    def __init__(self, module: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("derive from LossWrapper and define forward(), or pass loss_fn= to the schedule")


class TrivialLossWrapper(LossWrapper):
    """Returns the loss of the output and the targets."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        return self.loss_fn(self.module(x), targets)


_IN_PLACE = "pass split_spec= to pipeline(), which leaves the model as it is"
_STAGES = "a stage is an nn.Module with generated code; see pipe.get_stage_module() and pipe.print_readable()"
annotate_split_points = replaced("annotate_split_points", _IN_PLACE)
PipeSplitWrapper = replaced("PipeSplitWrapper", _IN_PLACE)
DetachExecutor = replaced("DetachExecutor", _STAGES)
_LinearNodeList = replaced("_LinearNodeList", _STAGES)
_NodeReference = replaced("_NodeReference", _STAGES)
_insert_stage_symbolic_backward = replaced("_insert_stage_symbolic_backward", "backwards are run by the schedule")
_modify_graph_op_device = replaced("_modify_graph_op_device", "pipe.to(device) and stages move the devices in them too")
_TRACED = "the model is traced and cut by pipecut.pipeline(), and its stages are modules of their own"
_move_placeholders_to_front = replaced("_move_placeholders_to_front", _TRACED)
_split_after_forward = replaced("_split_after_forward", _IN_PLACE)
_split_before_forward = replaced("_split_before_forward", _IN_PLACE)
_find_loss_from_output_and_spec = replaced("_find_loss_from_output_and_spec", "pass loss_fn= to the schedule")
_find_loss_output = replaced("_find_loss_output", "pass loss_fn= to the schedule")
_direct_serialization_deserialize = replaced("_direct_serialization_deserialize", _TRACED)
_direct_serialization_reduce = replaced("_direct_serialization_reduce", _TRACED)
_pipe_split = replaced("_pipe_split", "call pipe_split()")
aten_pipe_split_alias = replaced("aten_pipe_split_alias", "call pipe_split()")

# Names that upstream's module has by its imports.
logger = logging.getLogger(__name__)
_PipelineStage = _stage._PipelineStage
_outline_submodules = _unflatten._outline_submodules
_null_coalesce_accumulate = _backward._null_coalesce_accumulate
stage_backward = _backward.stage_backward

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = imported_by(__name__)
