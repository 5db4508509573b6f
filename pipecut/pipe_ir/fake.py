"""Stand-ins for tensors on the meta device: fake tensors that say they are on the CPU.

On the meta device a tensor that the forward makes from Python values would lose them, and mix with no other device.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def stand_in_for_meta(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], mode: FakeTensorMode | None = None
) -> tuple[torch.Tensor, ...]:
    """Replace all parameters and buffers of a module tree by stand-ins; the stand-ins of the inputs."""
    with mode or FakeTensorMode(allow_non_fake_inputs=True):
        made: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = made.setdefault(id(tensor), _stand_in(tensor))  # type: ignore[assignment]
        return tuple(_stand_in(tensor) for tensor in inputs)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)
