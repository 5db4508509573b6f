"""BlockMasks cut along the batch: a chunk acts as the rows of the whole mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from pipecut.errors import InputError
from pipecut.stage.microbatch import Replicate, TensorChunkSpec, split_args_kwargs_into_chunks

LENGTHS = torch.tensor([40, 256, 130, 7, 200])
BATCH, HEADS, LENGTH = 5, 2, 256


def padding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Differs from sample to sample and from head to head."""
    return (k < LENGTHS[b]) & (q + 64 * h >= k)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def masks_of(mask: BlockMask, chunks: int, spec: Any = None) -> list[BlockMask]:
    """The chunks of a mask deep inside the arguments, beside a tensor of as many samples."""
    kwargs = {"attention": {"mask": [mask, None], "x": torch.zeros(BATCH)}}
    _, made = split_args_kwargs_into_chunks((), kwargs, chunks, None, spec and {"attention": {"mask": spec}})
    assert all(each["attention"]["mask"][1] is None for each in made)
    return [each["attention"]["mask"][0] for each in made]


@pytest.fixture(params=[1, HEADS], ids=lambda heads: f"{heads} heads")
def mask(request: pytest.FixtureRequest) -> BlockMask:
    return create_block_mask(padding, BATCH, request.param, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=64)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_a_chunk_is_the_rows_of_the_dense_mask(mask: BlockMask, chunks: int) -> None:
    heads = mask.shape[1]
    dense = create_mask(padding, BATCH, heads, LENGTH, LENGTH, device="cpu")
    parts = masks_of(mask, chunks)
    assert len(parts) == chunks
    assert [part.shape[0] for part in parts] == [len(rows) for rows in torch.zeros(BATCH).tensor_split(chunks)]
    exact = [create_mask(part.mask_mod, part.shape[0], heads, LENGTH, LENGTH, device="cpu") for part in parts]
    assert torch.equal(torch.cat(exact), dense)
    assert torch.equal(torch.cat([part.to_dense() for part in parts]), mask.to_dense())


def test_every_tensor_of_a_chunk_is_a_view_of_the_rows(mask: BlockMask) -> None:
    _, second = masks_of(mask, 2)
    tensors = {name: value for name, value in vars(mask).items() if isinstance(value, Tensor)}
    assert {"kv_indices", "full_kv_indices", "q_indices", "full_q_num_blocks"} <= tensors.keys()
    for name, whole in tensors.items():
        part = getattr(second, name)
        assert torch.equal(part, whole[3:]), name
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), name
    assert (second.BLOCK_SIZE, second.seq_lengths) == (mask.BLOCK_SIZE, mask.seq_lengths)


def test_the_whole_mask_stays_as_it_was(mask: BlockMask) -> None:
    before = dict(vars(mask))
    masks_of(mask, 2)
    assert all(getattr(mask, name) is value for name, value in before.items())


def attention(query: Tensor, mask: BlockMask) -> Tensor:
    result = flex_attention(query, query * 0.5, query + 1, block_mask=mask)
    assert isinstance(result, Tensor)
    return result


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_is_that_of_the_rows() -> None:
    mask = create_block_mask(padding, BATCH, HEADS, LENGTH, LENGTH, device="cpu")
    query = torch.randn(BATCH, HEADS, LENGTH, 16)
    args, _ = split_args_kwargs_into_chunks((query, mask), None, 2)
    torch.testing.assert_close(torch.cat([attention(*part) for part in args]), attention(query, mask))


def test_a_mask_for_all_samples_goes_to_every_microbatch() -> None:
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    assert all(part is mask for part in masks_of(mask, 3))
    assert all(part is mask for part in masks_of(mask, 3, TensorChunkSpec(0)))


def test_a_mask_can_be_replicated(mask: BlockMask) -> None:
    assert all(part is mask for part in masks_of(mask, 3, Replicate()))


def test_a_mask_is_cut_along_its_batch_only(mask: BlockMask) -> None:
    with pytest.raises(InputError) as caught:
        masks_of(mask, 2, TensorChunkSpec(1))
    assert str(caught.value) == (
        "attention['mask'][0] is a BlockMask, whose samples are along dim 0: "
        "write TensorChunkSpec(0), not TensorChunkSpec(1)"
    )


def test_a_mask_of_another_batch_is_refused(mask: BlockMask) -> None:
    with pytest.raises(InputError) as caught:
        split_args_kwargs_into_chunks((torch.zeros(8), torch.zeros(8), mask), None, 2)
    assert f"args[2] of shape [5, {mask.shape[1]}, 256, 256] has 5 along dim 0" in str(caught.value)
    assert "args_chunk_spec=(TensorChunkSpec(0), TensorChunkSpec(0), Replicate())" in str(caught.value)


def test_the_spec_that_is_offered_leaves_a_mask_for_all_samples_alone() -> None:
    """TensorChunkSpec(1) for the whole dict would be refused for the mask in it."""
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    args = ({"x": torch.zeros(3, 8), "mask": mask}, torch.zeros(6))
    with pytest.raises(InputError) as caught:
        split_args_kwargs_into_chunks(args, None, 2, ({"x": TensorChunkSpec(1)}, None))
    offered = "({'x': TensorChunkSpec(1), 'mask': Replicate()}, Replicate())"
    assert f"\n  args_chunk_spec={offered}\n" in str(caught.value)
    spec = ({"x": TensorChunkSpec(1), "mask": Replicate()}, Replicate())
    made, _ = split_args_kwargs_into_chunks(args, None, 2, spec)
    assert [each[0]["x"].shape for each in made] == [(3, 4), (3, 4)]


@pytest.fixture
def registered() -> Iterator[None]:
    """BlockMask as a pytree, as some training code registers it."""
    names = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]

    def unflatten(leaves: Any, mask: Any) -> BlockMask:
        return BlockMask.from_kv_blocks(*leaves, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod)

    pytree.register_pytree_node(
        BlockMask,
        lambda mask: ([getattr(mask, name) for name in names], mask),
        unflatten,
        flatten_with_keys_fn=lambda mask: ([(pytree.GetAttrKey(name), getattr(mask, name)) for name in names], mask),
    )
    yield
    pytree._deregister_pytree_node(BlockMask)


@pytest.mark.usefixtures("registered")
def test_a_mask_that_is_registered_as_a_pytree_is_still_cut_as_a_mask(mask: BlockMask) -> None:
    dense = create_mask(padding, BATCH, mask.shape[1], LENGTH, LENGTH, device="cpu")
    _, second = masks_of(mask, 2)
    assert torch.equal(create_mask(second.mask_mod, 2, mask.shape[1], LENGTH, LENGTH, device="cpu"), dense[3:])
    assert torch.equal(second.to_dense(), mask.to_dense()[3:])
