"""A split_policy sees the traced model as a GraphModule and marks where to cut."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule

from pipecut import pipe_split, pipeline

X = torch.randn(3, 8)


class Blocks(nn.Module):
    """Four blocks of a layer and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def after_half_of_the_parameters(graph_module: GraphModule) -> GraphModule:
    total = sum(parameter.numel() for parameter in graph_module.parameters())
    seen: set[str] = set()
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function":
            continue
        seen |= {str(user.target) for user in node.all_input_nodes if user.op == "get_attr"}
        if sum(graph_module.get_parameter(name).numel() for name in seen) * 2 > total:
            with graph_module.graph.inserting_before(node):
                graph_module.graph.call_function(pipe_split)
            return graph_module
    return graph_module


def test_a_mark_by_parameter_count_cuts_between_the_blocks() -> None:
    model = Blocks()
    pipe = pipeline(model, (X,), split_policy=after_half_of_the_parameters)
    assert [info.modules for info in pipe.stage_infos] == [("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")]
    torch.testing.assert_close(pipe(X), model(X), rtol=0, atol=0)


def test_a_policy_sees_module_paths_and_shapes() -> None:
    def look(graph_module: GraphModule) -> GraphModule:
        (node,) = (node for node in graph_module.graph.nodes if node.name == "linear_2")
        assert list(node.meta["nn_module_stack"]) == ["", "blocks.2", "blocks.2.0"]
        assert node.meta["val"].shape == (3, 8)
        return graph_module

    assert pipeline(Blocks(), (X,), split_policy=look).num_stages == 1


def test_a_mark_inside_a_block_cuts_the_block() -> None:
    def inside(graph_module: GraphModule) -> GraphModule:
        (node,) = (node for node in graph_module.graph.nodes if node.name == "linear_2")
        with graph_module.graph.inserting_after(node):
            graph_module.graph.call_function(torch.ops.pipecut.pipe_split.default)
        return graph_module

    model = Blocks()
    pipe = pipeline(model, (X,), split_policy=inside)
    assert pipe.stage_infos[0].modules == ("blocks.0", "blocks.1", "blocks.2.0")
    assert pipe.stage_infos[1].modules == ("blocks.2.1", "blocks.3")
    torch.testing.assert_close(pipe(X), model(X), rtol=0, atol=0)
