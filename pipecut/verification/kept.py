"""What a run changes besides its results: set back before each run, and as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Kept:
    """The gradients, buffers and random numbers of some modules as they were at first."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = list({id(part): part for module in modules for part in module.modules()}.values())
        parameters = [parameter for part in parts for parameter in part.parameters(recurse=False)]
        self._gradients = {id(parameter): (parameter, parameter.grad) for parameter in parameters}
        self._buffers = [
            (part, name, buffer, buffer.clone()) for part in parts for name, buffer in part.named_buffers(recurse=False)
        ]
        tensors = [*parameters, *(buffer for _, _, buffer, _ in self._buffers)]
        self._devices = sorted(
            {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}, key=str
        )
        self._random = self._random_states()

    def begin(self) -> None:
        """Start a run: no gradients, all else as at first."""
        for parameter, _ in self._gradients.values():
            parameter.grad = None
        self._reset()

    def restore(self) -> None:
        """Leave everything as it was."""
        for parameter, gradient in self._gradients.values():
            parameter.grad = gradient
        self._reset()

    def drew_random_numbers(self) -> bool:
        """Whether a run has, since it began."""
        return any(not torch.equal(*states) for states in zip(self._random, self._random_states(), strict=True))

    @torch.no_grad()
    def _reset(self) -> None:
        for part, name, buffer, value in self._buffers:
            setattr(part, name, buffer.copy_(value))
        torch.set_rng_state(self._random[0])
        for device, state in zip(self._devices, self._random[1:], strict=True):
            _generators_of(device).set_rng_state(state, device)

    def _random_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(_generators_of(device).get_rng_state(device) for device in self._devices)]


def _generators_of(device: torch.device) -> Any:
    return torch.get_device_module(device)
