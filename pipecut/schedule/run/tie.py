"""A parameter that several stages hold: where, under which names, and whether the holders are alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import PipeError
from ...pipe_ir.pipe import PipeInfo
from ...stage.stage import PipelineStage

Stages = Mapping[int, PipelineStage]
_WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put in front of names
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Tie:
    """One parameter; in each stage that holds it, it has one of the names that are listed for that stage."""

    title: str  # a name that no other tie has
    names: Mapping[int, tuple[str, ...]]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that hold it, in order."""
        return tuple(sorted(self.names))

    def held(self, stages: Stages) -> list[tuple[int, Tensor]]:
        """Those of these stages that hold it, each with its parameter."""
        here = [stage for stage in self.stages if stage in stages]
        return [(stage, self._parameter(stage, stages[stage].submod)) for stage in here]

    def _parameter(self, stage: int, module: nn.Module) -> Tensor:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name in self.names[stage] or unwrapped(name) in self.names[stage]:
                return parameter
        raise PipeError(
            f"stage {stage} does not hold {self.names[stage][0]}, which it shares: do not replace its parameters"
        )


def unwrapped(name: str) -> str:
    """The name of a parameter in the user's own module."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def ties_of_pipe(info: PipeInfo) -> tuple[Tie, ...]:
    """The ties that a trace has found."""
    return tuple(Tie(tie.names[0], dict.fromkeys(tie.stages, tie.names)) for tie in info.tied_parameters)


def refuse_partly_frozen(tie: Tie, frozen: Iterable[int], trained: Iterable[int]) -> None:
    """A gradient of some holders only would pull them apart."""
    frozen, trained = sorted(frozen), sorted(trained)
    if frozen and trained:
        raise PipeError(
            f"the tied parameter {tie.title} is frozen in {_listed(frozen)} and trained in {_listed(trained)}, and the "
            "holders of one parameter have to stay the same: call requires_grad_() on it in all of these stages, with "
            "True or with False"
        )


def _listed(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def shape_of(parameter: Tensor) -> str:
    """The shape and dtype in words."""
    return f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"


def fingerprint(parameter: Tensor) -> str:
    """A number that tells whether two holders have the same values."""
    if parameter.device.type == "meta" or type(parameter) not in (Tensor, nn.Parameter):
        return "not compared"
    numbers = parameter.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, numbers.numel(), _CHUNK):
        part = numbers[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(1, part.numel() + 1, device=part.device) % 65521
        total = (total * 31 + int((part * weights).sum())) % (1 << 61)
    return f"{total:x}"
