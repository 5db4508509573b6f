"""DTensors: chunks stay on their mesh and keep their placements, and so does what is merged from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from pipecut.errors import InputError, PlacementError
from pipecut.stage.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks, split_tensor
from tests.support.ranks import Ranks


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def placed(mesh: DeviceMesh, placement: Placement, x: Tensor) -> DTensor:
    if isinstance(placement, Partial):
        return DTensor.from_local(x, mesh, [placement])
    return distribute_tensor(x, mesh, [placement])


PLACEMENTS = [Replicate(), Shard(0), Shard(1), Partial()]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_keep_mesh_and_placements(mesh: DeviceMesh, placement: Placement, dim: int) -> None:
    x = torch.randn(5, 7)
    chunks = split_tensor(placed(mesh, placement, x), TensorChunkSpec(dim), 3)
    for chunk, rows in zip(chunks, x.tensor_split(3, dim), strict=True):
        assert isinstance(chunk, DTensor)
        assert (chunk.placements, chunk.device_mesh) == ((placement,), mesh)
        assert torch.equal(chunk.to_local(), rows)
    merged = merge_chunks([{"y": chunk} for chunk in chunks], {"y": TensorChunkSpec(dim)})["y"]
    assert isinstance(merged, DTensor)
    assert merged.placements == (placement,)
    assert torch.equal(merged.to_local(), x)


def test_distributed_and_plain_arguments_are_cut_together(mesh: DeviceMesh) -> None:
    x = torch.randn(5, 2)
    args, _ = split_args_kwargs_into_chunks((placed(mesh, Shard(1), x), x), None, 2)
    assert [each[0].shape for each in args] == [each[1].shape for each in args] == [(3, 2), (2, 2)]


def test_gradients_of_chunks_reach_the_whole(mesh: DeviceMesh) -> None:
    x = placed(mesh, Shard(1), torch.randn(5, 2)).requires_grad_()
    for chunk in split_tensor(x, TensorChunkSpec(0), 2):
        (chunk * chunk).sum().to_local().backward()
    assert isinstance(x.grad, DTensor)
    torch.testing.assert_close(x.grad.to_local(), 2 * x.to_local())


def test_losses_are_averaged(mesh: DeviceMesh) -> None:
    losses = [placed(mesh, Replicate(), torch.tensor(value)) for value in (1.0, 4.0)]
    assert merge_chunks(losses, None, sizes=(2, 1)).to_local() == torch.tensor(2.0)


def refusal(chunks: list[Any]) -> str:
    with pytest.raises(PlacementError) as caught:
        merge_chunks(chunks, None)
    assert isinstance(caught.value, InputError)
    assert isinstance(caught.value, AssertionError)
    return str(caught.value)


def test_a_placement_mismatch(mesh: DeviceMesh) -> None:
    chunks = [(placed(mesh, placement, torch.zeros(2, 2)),) for placement in (Replicate(), Replicate(), Shard(1))]
    message = refusal(chunks)
    assert message.startswith("placement mismatch in output[0]: (Replicate(),) on DeviceMesh(")
    assert ") in microbatch 0 and (Shard(dim=1),) on DeviceMesh(" in message
    assert message.endswith(") in microbatch 2: redistribute() them alike before they are returned")


@pytest.mark.parametrize("shape", [(2,), ()], ids=["joined", "averaged"])
def test_a_mix_of_distributed_and_plain(mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    assert refusal([{"y": placed(mesh, Replicate(), x)}, {"y": x}]) == (
        "output['y'] is a mix of DTensors and plain tensors (plain in microbatch 1), which cannot be joined: "
        "return one or the other from every microbatch, with DTensor.from_local or .to_local()"
    )


# On two ranks a shard is a part


def rows_stay_rows(rank: int) -> None:
    """Every chunk has the same rows as that of a plain tensor, also where those rows are on other ranks."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(20.0).reshape(10, 2)
    for placement in (Replicate(), Shard(0), Shard(1)):
        whole = distribute_tensor(x, mesh, [placement])
        for dim, chunks in ((0, 1), (0, 3), (0, 10), (1, 2)):
            parts = split_tensor(whole, TensorChunkSpec(dim), chunks)
            for part, rows in zip(parts, x.tensor_split(chunks, dim), strict=True):
                assert isinstance(part, DTensor)
                assert part.placements == (placement,)
                assert torch.equal(part.full_tensor(), rows), (placement, dim, chunks)
            merged = merge_chunks(parts, TensorChunkSpec(dim))
            assert merged.placements == (placement,)
            assert torch.equal(merged.to_local(), whole.to_local()), (placement, dim, chunks)
        leaf = whole.detach().requires_grad_()
        for part in split_tensor(leaf, TensorChunkSpec(0), 3):
            (part * part).sum().full_tensor().backward()
        assert torch.equal(leaf.grad.full_tensor(), 2 * x), placement


@pytest.mark.distributed
def test_a_sharded_dim_is_cut_into_the_rows_of_the_global_tensor(two_ranks: Ranks) -> None:
    two_ranks.run(rows_stay_rows)
