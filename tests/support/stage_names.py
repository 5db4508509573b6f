"""What a stage is to its model: the same tensors under the same names; and the model is left as it was."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pipecut.pipe import Pipe
from tests.support.nested_values import assert_same


def assert_same_names(pipe: Pipe, model: nn.Module) -> None:
    """The stages hold the model's own parameters, under the model's own names, in modules of its own classes."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    holders: dict[str, set[int]] = {name: set() for name in parameters}
    saved: set[str] = set()
    for index, stage in enumerate(pipe.stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            assert parameter is parameters.get(name), f"stage {index} has a parameter {name} that is not the model's"
            holders[name].add(index)
        saved |= stage.state_dict().keys()
        for path, module in stage.named_modules(remove_duplicate=False):
            original = model.get_submodule(path)
            # Every GraphModule has a class of its own, made for it alone.
            expected = GraphModule if isinstance(original, GraphModule) else type(original)
            assert isinstance(module, expected), f"stage {index} has a {type(module)} as {path}"
            assert module.training == original.training, f"stage {index} has {path} in the other mode"
    assert saved == model.state_dict().keys()
    assert all(holders.values()), f"in no stage: {[name for name, stages in holders.items() if not stages]}"
    listed = {name: set(tie.stages) for tie in pipe.tied_parameters for name in tie.names}
    together: dict[int, set[int]] = {}
    for name, parameter in parameters.items():
        together.setdefault(id(parameter), set()).update(holders[name])
    tied = {name: stages for name in parameters if len(stages := together[id(parameters[name])]) > 1}
    assert listed == tied


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """All of a model that pipeline() must leave alone."""

    modules: dict[str, Any]
    objects: dict[str, Tensor]
    values: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        objects = dict(named_tensors(model))
        return cls(
            {path: _describe(module) for path, module in model.named_modules(remove_duplicate=False)},
            objects,
            {name: tensor.detach().clone() for name, tensor in objects.items()},
        )

    def assert_same_as(self, after: Fingerprint) -> None:
        assert self.modules == after.modules
        assert self.objects.keys() == after.objects.keys()
        for name, tensor in self.objects.items():
            assert tensor is after.objects[name], f"pipeline() replaced {name}"
            assert_same(after.values[name], self.values[name], f"after pipeline() {name}")
            assert tensor.grad is None or not tensor.is_leaf

    def restore(self) -> None:
        """Undo what the runs of a pipe wrote to the model's own buffers."""
        with torch.no_grad():
            for name, tensor in self.objects.items():
                tensor.copy_(self.values[name])


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _describe(module: nn.Module) -> tuple[Any, ...]:
    hooks = {name: copy.copy(value) for name, value in vars(module).items() if name.endswith("_hooks")}
    flags = [parameter.requires_grad for parameter in module._parameters.values() if parameter is not None]
    return id(module), type(module), module.training, set(vars(module)), hooks, flags
