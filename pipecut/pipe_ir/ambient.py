"""The torch.autocast that a call is made under: a trace holds for the dtypes that it gives."""

from __future__ import annotations

import torch


def ambient_autocast() -> str:
    """In words, '' if it is off.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     ambient_autocast()
    'bfloat16 on cpu'
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    on = [device for device in devices if torch.is_autocast_enabled(device)]
    return ", ".join(f"{str(torch.get_autocast_dtype(device)).removeprefix('torch.')} on {device}" for device in on)
