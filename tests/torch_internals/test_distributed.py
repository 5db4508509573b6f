"""Wrappers of torch.distributed have the parts that pipecut drives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from pipecut.torch_internals import (
    LOST_CONNECTION,
    REPLICATE_CLASS,
    ReplicateState,
    abort_connections,
    average_static_graph,
    averaged_parameters,
    forget_meshes,
    fsdp_mesh_infos,
    group_timeout,
    hold_static_graph,
    hook_based_options,
    mark_ready,
    mesh_layout,
    number_of_groups,
    static_graph_has_run,
)


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_wrapper_tells_what_it_averages() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    wrapper = DistributedDataParallel(module)
    assert averaged_parameters(wrapper) == 1
    assert set(hook_based_options(wrapper).values()) == {False}


def test_a_group_tells_how_long_it_waits() -> None:
    group = dist.new_group([0], timeout=timedelta(seconds=77))
    assert isinstance(group, dist.ProcessGroup)
    assert group_timeout(group, torch.device("cpu")) == timedelta(seconds=77)


def test_a_reducer_can_be_told_that_gradients_are_there() -> None:
    wrapper = DistributedDataParallel(nn.Linear(2, 2))
    with wrapper.no_sync():
        wrapper(torch.ones(1, 2)).sum().backward()
    reducer: Any = wrapper.reducer
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])

    class Ready(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, start: torch.Tensor) -> torch.Tensor:
            return start.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            for number in range(2):
                mark_ready(reducer, number)
            return gradient

    Ready.apply(torch.zeros(1, requires_grad=True)).backward()
    assert all(parameter.grad is not None for parameter in wrapper.parameters())


def test_a_static_graph_waits_for_its_first_step() -> None:
    wrapper = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    assert not static_graph_has_run(wrapper)
    hold_static_graph(wrapper)
    assert static_graph_has_run(wrapper)
    for _ in range(2):
        wrapper(torch.ones(1, 2)).sum().backward()
    average_static_graph(wrapper)


def test_the_state_of_replicate_has_group_wrapper_and_parameters() -> None:
    from torch.distributed._composable.replicate import replicate

    module = replicate(nn.Linear(2, 2))
    source, name = REPLICATE_CLASS
    state = ReplicateState(module)
    assert isinstance(module, getattr(sys.modules[source], name))
    assert (state.group, state.averages) == (dist.group.WORLD, True)
    assert isinstance(state.wrapper, DistributedDataParallel)
    assert state.group is state.wrapper.process_group
    assert [name for name, _ in state.named_parameters()] == ["weight", "bias"]
    with state.without_average():
        assert not state.averages
    assert state.averages


def test_fully_shard_tells_its_mesh() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    (info,) = fsdp_mesh_infos(fully_shard(nn.Linear(2, 2), mesh=mesh))
    assert info.shard_mesh_dim == 0
    assert [group.group_name for group in info.mesh.get_all_groups()]


def test_meshes_of_one_shape_have_one_layout() -> None:
    first, second = (init_device_mesh("cpu", (1, 1), mesh_dim_names=names) for names in (("a", "b"), ("c", "d")))
    assert mesh_layout(first) == mesh_layout(second) is not None
    assert mesh_layout(object(), "none") == "none"


def doubled(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of a result, which torch takes from its cache if it has seen an equal one."""
    return (distribute_tensor(torch.ones(2), mesh, [Replicate()]) * 2).device_mesh  # type: ignore[no-any-return, attr-defined]


def test_a_mesh_of_a_group_that_was_destroyed_is_forgotten() -> None:
    """torch gives results the mesh of its cache, which may be of a process group that is gone."""
    first, second = (init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)) for _ in range(2))
    assert doubled(first) is first
    assert doubled(second) is first
    forget_meshes()
    assert doubled(second) is second


def test_groups_are_counted() -> None:
    assert number_of_groups() == 1
    group = dist.new_group([0])
    assert number_of_groups() == 2
    dist.destroy_process_group(group)
    assert number_of_groups() == 1


def test_the_connections_of_a_group_can_be_aborted() -> None:
    assert dist.group.WORLD is not None
    abort_connections(dist.group.WORLD, torch.device("cpu"))


def test_a_rank_that_does_not_answer_is_told_in_known_words(tmp_path: Path) -> None:
    store = dist.FileStore(f"{tmp_path}/unanswered", 2)  # type: ignore[attr-defined]  # torch has no stub
    store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(RuntimeError) as told:
        store.get("never set")
    assert any(words in str(told.value) for words in LOST_CONNECTION)
