"""Gradient scaler of a pipeline: all ranks have one scale, and skip a step together if a gradient of any overflows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..errors import DisagreementError, InputError
from ..run import UNSCALE, HeldTensor, PipelineSchedule
from ..stage import is_distributed, local_part
from ..text import listed
from ..torch_internals import FoundInf, OpenGradScaler, scales_by_itself


class _StandIn:
    """Stands for the optimizer of a rank that has nothing to train, or for one with other tensors."""

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.param_groups = [{"params": parameters}]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Change nothing."""


class GradScaler(OpenGradScaler):
    """torch.amp.GradScaler for a pipeline, made for its schedule on every rank. It is for float16 autocast.

    The steps of the schedule scale their own loss from then on, so there is no `scaler.scale(loss)`; the losses that
    they report are not scaled. All else is as in torch: `step(optimizer)`, `update()`, `unscale_(optimizer)` before
    `pipecut.clip_grad_norm_`, `state_dict()`. An infinity or a NaN on any rank lets all of them skip the optimizer's
    step and reduce the scale. Every rank makes the same calls; one without parameters to train passes None as its
    optimizer.

    A model that enters torch.autocast in its own forward needs none around the step: pass `check_autocast=False`.

    >>> from torch import nn
    >>> from pipecut import GradScaler, Schedule1F1B, clip_grad_norm_, pipeline
    >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4)
    >>> with torch.autocast("cpu", torch.float16):
    ...     pipe = pipeline(model, (x,), num_stages=2)
    >>> stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    >>> schedule = Schedule1F1B(stages, 2, loss_fn=lambda output: output.float().square().mean())
    >>> optimizer, scaler = torch.optim.AdamW(schedule.parameters()), GradScaler(schedule)
    >>> with torch.autocast("cpu", torch.float16):
    ...     output = schedule.step(x)
    >>> scaler.unscale_(optimizer)
    >>> norm = clip_grad_norm_(schedule, 1.0)
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.get_scale()
    65536.0
    """

    def __init__(
        self,
        schedule: PipelineSchedule | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        check_autocast: bool = True,
    ) -> None:
        if not isinstance(schedule, PipelineSchedule):
            raise InputError(
                f"GradScaler takes the schedule whose loss it scales, and got {schedule!r}: GradScaler(schedule). For "
                "a model that is not cut there is torch.amp.GradScaler"
            )
        device = schedule.stages[0].device
        super().__init__(device.type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._check_autocast = check_autocast
        self._schedule = weakref.ref(schedule)  # which has this
        self._unscaled: set[int] | None = None  # ids of parameters whose gradients were divided since the last step
        self._nothing = _StandIn()
        schedule.loss_scaler = self if self.is_enabled() else None

    def begin_step(self) -> Tensor:
        """Return the scale of a training step; its schedule calls this."""
        device = self._owner().stages[0].device
        if self._check_autocast and not torch.is_autocast_enabled(device.type):
            raise InputError(
                "this schedule has a GradScaler, which is for float16, and torch.autocast is off here: call step() "
                f'under torch.autocast("{device.type}", torch.float16) on every rank; make the scaler with '
                "enabled=False to train in full precision or bfloat16, or with check_autocast=False if the model "
                "enters autocast by itself"
            )
        self._unscaled = set()
        return super().scale(torch.ones((), device=device))

    def scale(self, outputs: Any) -> NoReturn:
        """Raise: the loss is made in the step, which scales it."""
        raise InputError(
            "the steps of the schedule scale their loss by themselves: leave scaler.scale(loss).backward() out, and "
            "call schedule.step(), scaler.step(optimizer), scaler.update()"
        )

    def unscale_(self, optimizer: Optimizer | None) -> None:
        """Divide the gradients of an optimizer by the scale, on every rank, and find out if any is not finite."""
        self._check_can("unscale_")
        super().unscale_(self._given(optimizer))
        self._note_unscaled(optimizer)

    def step(self, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """Run the optimizer's step on every rank, or on none if a gradient of any is not finite."""
        self._check_can("step")
        result = super().step(self._given(optimizer), *args, **kwargs)
        if not scales_by_itself(optimizer):
            self._note_unscaled(optimizer)
        return result

    def _note_unscaled(self, optimizer: Optimizer | None) -> None:
        if self._unscaled is not None and optimizer is not None:
            self._unscaled.update(id(each) for group in optimizer.param_groups for each in group["params"])

    def check_unscaled(self, call: str, held: Iterable[HeldTensor]) -> None:
        """Raise if gradients of some parameters were scaled and not yet unscaled."""
        if self._unscaled is None:
            return
        names = [each.name for each in held if each.value.grad is not None and id(each.value) not in self._unscaled]
        if names:
            which = f"the optimizer of {listed(names, 4)}" if self._unscaled else "optimizer"
            raise InputError(
                f"the gradients {f'of {listed(names, 4)} ' if self._unscaled else ''}are multiplied by the scale of "
                f"the GradScaler, {self.get_scale():g}: call scaler.unscale_({which}) before {call}()"
            )

    def found_by(self, check: Callable[[], FoundInf]) -> FoundInf:
        """Run the check for infinities on every rank, and return that there is one if any has found one."""
        schedule = self._owner()
        ranks, agreement, found = schedule.plan.ranks, schedule.agreement, FoundInf()

        def numbers(own: FoundInf) -> list[float]:
            found.update(own)
            made = [float(self._found_by_parts(own)), *[0.0] * ranks]
            for rank in agreement.ranks:
                made[1 + rank] = self.get_scale()
            return made

        total, *scales = agreement.sum(UNSCALE, 1 + ranks, check, numbers)
        if any(scale != self.get_scale() for scale in scales):
            raise DisagreementError(
                f"the scalers of the ranks have different scales: {listed(scales)} on ranks 0 to {ranks - 1}, and "
                f"{self.get_scale()} here; make them alike, load the same state_dict() and call update() on every rank"
            )
        devices = [*found] or [schedule.stages[0].device]
        return {device: torch.full((), float(total > 0), device=device) for device in devices}

    def parts_of(self, optimizer: Any) -> Any:
        """Return a stand-in with the local parts of DTensors.

        torch cannot check them together with plain tensors, and would wait for the ranks that hold the other parts.
        """
        return _StandIn([_local(each) for group in optimizer.param_groups for each in group["params"]])

    def _found_by_parts(self, found: FoundInf) -> bool:
        """Return True if one of the ranks that hold parts of this rank's parameters has found an infinity."""
        schedule = self._owner()
        device = schedule.stages[0].device
        total = torch.full((), float(sum(float(each) for each in found.values()) > 0), device=device)
        meshes = {each.device_mesh: None for each in schedule.parameters() if is_distributed(each)}
        for mesh in meshes:
            for dim in range(mesh.ndim):
                schedule.agreement.reduce(total, mesh.get_group(dim), dist.ReduceOp.MAX)
        return bool(total)

    def _given(self, optimizer: Optimizer | None) -> Any:
        return self._nothing if optimizer is None else optimizer

    def _check_can(self, call: str) -> None:
        if self.is_enabled() and self._owner().loss_scaler is not self:
            raise InputError(f"{call}() of a GradScaler whose schedule has got another one since: use that one")

    def _owner(self) -> PipelineSchedule:
        schedule = self._schedule()
        if schedule is None:
            raise InputError("the schedule of this GradScaler is gone: keep it, or make a scaler for the new one")
        return schedule


def _local(parameter: Tensor) -> Tensor:
    """Return a tensor whose gradient is the local part of a parameter's; a parameter with a plain one as it is."""
    if not is_distributed(parameter.grad):
        return parameter
    grad = local_part(parameter.grad).detach()
    stand_in = grad.detach()
    stand_in.grad = grad
    return stand_in
