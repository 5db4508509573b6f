"""Runs a model once under torch.export and freezes what happened as a TracedModel."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_config
from torch import nn

from ..errors import TraceError
from .clone import clone
from .fake import stand_in_for_meta
from .freeze import freeze
from .inputs import Example, read_example
from .recorder import Recorder
from .structure import flatten
from .traced import Opaque, Template, TracedModel

_OWN_FOLDERS = (Path(torch.__file__).parent, Path(__file__).parent.parent)


class _Entry(nn.Module):
    """What torch.export sees: a module that takes tensors only, so that any structure passes in and out."""

    def __init__(self, model: nn.Module, example: Example, recorder: Recorder) -> None:
        super().__init__()
        self.model = model
        self._example = example
        self._recorder = recorder

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._recorder.note_inputs(tensors)
        args, kwargs = self._example.call_with(tensors)
        output = self.model(*args, **kwargs)
        # What torch.export does to the graph after this line (wrapping regions, renaming) is of no use here.
        self._recorder.note_output(output)
        return tuple(leaf for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor))


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    live_hooks: Iterable[str] = (),
    training: bool | None = None,
) -> TracedModel:
    """Trace one run of `model` with torch.export (non-strict). The model itself is not touched: a copy runs.

    Forward hooks do not run during the trace, except those of the modules at `live_hooks`: a module that is not
    cut keeps its hooks, and they run whenever it does. `training` puts all modules of the copy in that mode.
    """
    example = read_example(model, args, kwargs)
    runner = clone(model)
    if training is not None:
        runner.train(training)
    _silence_hooks(runner, set(live_hooks))
    recorder = Recorder(runner)
    entry = _Entry(runner, example, recorder)
    tensors = example.tensors
    if _is_without_memory(model):
        tensors = stand_in_for_meta(runner, tensors)
    _export(entry, tensors)
    _check_output(model, recorder.output)
    return freeze(model, example, recorder, model.training if training is None else training)


def _check_output(model: nn.Module, output: Template) -> None:
    unknown = sorted({leaf.type_name for leaf in output.leaves if isinstance(leaf, Opaque)})
    if unknown:
        raise TraceError(
            f"{type(model).__name__} returns a {' and a '.join(unknown)}, which cannot be taken apart and put together "
            "again; return tensors in tuples, lists, dicts or dataclasses, or register the type with "
            "torch.utils._pytree.register_pytree_node"
        )


def _silence_hooks(model: nn.Module, live: set[str]) -> None:
    for path, module in model.named_modules():
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
        if path in live:
            continue
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if not is_part_of_the_forward(hook)]:
                del hooks[key]


def is_part_of_the_forward(hook: object) -> bool:
    """torch's own weight_norm, spectral_norm and pruning compute the weights of a module in a hook."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.startswith("torch.nn.utils")


def _is_without_memory(model: nn.Module) -> bool:
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


def _export(entry: _Entry, tensors: tuple[torch.Tensor, ...]) -> None:
    # One row beside others of several is there to be broadcast, like a mask of shape [1, T]: not a batch of one.
    batched = any(tensor.dim() and tensor.shape[0] > 1 for tensor in tensors)
    dynamic = tuple(
        {0: torch.export.Dim.AUTO} if tensor.dim() and not (batched and tensor.shape[0] == 1) else None
        for tensor in tensors
    )
    try:
        with (
            warnings.catch_warnings(),
            # Sizes 0 and 1 are sizes like others: what the code decides about them becomes a condition of the trace.
            symbolic_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
            entry._recorder.watch(),
        ):
            # What the forward assigns to itself, it assigns to a copy.
            warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")
            torch.export.export(entry, tensors, dynamic_shapes={"tensors": dynamic}, strict=False)
    except Exception as error:
        raise TraceError(_explain(entry.model, error)) from error


def _explain(model: nn.Module, error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    where = (
        f"\n  at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line}" if frames else ""
    )
    reason = str(error).strip().split("\n\n")[0].strip() or type(error).__name__
    return (
        f"{type(model).__name__} could not be traced with these example inputs.{where}\n"
        f"  reason: {type(error).__name__}: {reason}\n"
        "  what to try: check that the model runs with these inputs; replace branches on the values of tensors "
        "(`if x.sum() > 0`, `.item()`) by torch.where or torch.cond; turn off features that keep Python state"
    )


def _is_machinery(filename: str) -> bool:
    path = Path(filename)
    return not path.exists() or any(folder in path.parents for folder in _OWN_FOLDERS)
