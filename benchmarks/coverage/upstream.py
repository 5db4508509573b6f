"""The same model cut by torch.distributed.pipelining: before the middle one of its layers, into two stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch.distributed.pipelining as upstream
from torch import Tensor, nn
from torch.fx import Interpreter


def middle_layer(model: nn.Module) -> str:
    """Return the path of the middle module of the longest list of layers, the shortest path of several."""
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not any(len(layers) > 1 for _, layers in lists):
        raise ValueError("there is no list of layers to cut in the middle")
    path, layers = max(lists, key=lambda each: (len(each[1]), -each[0].count(".")))
    return f"{path}.{len(layers) // 2}"


def gradients_by_upstream(
    model: nn.Module, microbatches: list[Mapping[str, Any]], share: float
) -> dict[str, list[Tensor | None]]:
    """Return the gradients of each parameter, one for each stage that holds it.

    The stages run one after the other in this process, in one autograd graph. That is kinder than ranks are: a value
    that a stage needs and did not get from the one before it would fail there.
    """
    copied = copy.deepcopy(model)  # it is changed by being cut
    cut = {middle_layer(copied): upstream.SplitPoint.BEGINNING}
    pipe = upstream.pipeline(copied, mb_args=(), mb_kwargs=dict(microbatches[0]), split_spec=cut)
    if pipe.num_stages != 2:
        raise ValueError(f"{pipe.num_stages} stages came of one cut")
    stages = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    graph = pipe.split_gm.graph
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    for microbatch in microbatches:
        output = Interpreter(pipe.split_gm).run(*(microbatch[name] for name in inputs))
        (output[0] * share).backward()
    first_name = {id(parameter): name for name, parameter in model.named_parameters()}
    known = {name: first_name[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    found: dict[str, list[Tensor | None]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():  # a tied one may have any of its names here
            found.setdefault(known[name], []).append(parameter.grad)
    return found
