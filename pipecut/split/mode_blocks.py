"""The `with` blocks that lead from the modes around some code to those that it was traced in."""

from __future__ import annotations

from dataclasses import replace

from ..pipe_ir.traced import Context


def one_level_in(context: Context, base: Context) -> Context:
    """The modes one `with` block further in on the way from `base` to `context`."""
    depth = len(base.autocast)
    if len(context.autocast) > depth:
        return replace(base, autocast=context.autocast[: depth + 1])
    return replace(base, grad=context.grad, no_grad_block=context.no_grad_block)


def manager(context: Context, base: Context) -> str:
    """The context manager that switches from the modes of `base` to those of `context`, one level further in."""
    if context.grad != base.grad:
        return f"torch.set_grad_enabled({context.grad})"
    entered = context.autocast[-1]
    return f"torch.autocast({entered.device_type!r}, {entered.dtype}, {entered.enabled})"
