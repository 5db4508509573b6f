"""DTensors by upstream's names, and stages whose modules are tensor parallel."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipecut.compat import PipelineStage, _utils, microbatch, schedules
from pipecut.compat._utils import _DTensorMeta, _MeshCache, _StageMeta, _TensorMeta
from tests.support.ranks import Ranks


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_what_is_known_of_a_dtensor(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)]).requires_grad_()
    meta = _DTensorMeta.from_dtensor(tensor)
    assert (meta.shape, meta.global_shape, meta.placements) == ((4, 6), (4, 6), (Shard(1),))
    assert (meta.stride, meta.global_stride, meta.dtype, meta.requires_grad) == ((6, 1), (6, 1), torch.float32, True)
    assert meta.mesh_cache_key == (("tp",), mesh._layout)
    made = meta.to_dtensor("cpu", mesh)
    assert isinstance(made, DTensor)
    assert made.requires_grad
    assert _DTensorMeta.from_dtensor(made) == meta
    assert meta.get_diff(meta) == []


def test_differences_of_dtensors(mesh: DeviceMesh) -> None:
    meta = _DTensorMeta.from_dtensor(distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)]))
    other = _DTensorMeta.from_dtensor(distribute_tensor(torch.ones(4, 6), mesh, [Replicate()]))
    assert meta.get_diff(other) == ["placements mismatch: (Shard(dim=1),) vs (Replicate(),)"]
    plain = _TensorMeta.from_tensor(torch.ones(4, 6))
    assert meta.get_diff(plain) == ["type: _DTensorMeta vs _TensorMeta"]
    longer = _TensorMeta.from_tensor(torch.ones(5, 6, dtype=torch.float64))
    assert meta.get_diff(longer) == [
        "shape mismatch: torch.Size([4, 6]) vs torch.Size([5, 6])",
        "dtype mismatch: torch.float32 vs torch.float64",
        "type: _DTensorMeta vs _TensorMeta",
    ]
    with pytest.raises(_utils.PipeliningMetadataError, match=r"x\[0\].*placements mismatch"):
        _utils.validate_tensors_metadata("x", (meta,), (other,))


def test_a_dtensor_is_no_plain_tensor(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()])
    plain, placed = _TensorMeta.from_tensor(torch.ones(4, 6)), _DTensorMeta.from_dtensor(tensor)
    there, back = "type: expected _TensorMeta, got _DTensorMeta", "type: expected _DTensorMeta, got _TensorMeta"
    assert _utils.validate_metadata("d", plain, tensor) == [there]
    assert _utils.validate_metadata("d", placed, torch.ones(4, 6)) == [back]
    with pytest.raises(_utils.PipeliningMetadataError, match=f"d: {there}"):
        _utils.validate_metadata("d", plain, tensor, raise_on_mismatch=True)
    with pytest.warns(UserWarning, match=f"d: Metadata type mismatch. {there}"):
        _utils.validate_metadata("d", plain, tensor, warn_on_mismatch=True)
    with pytest.raises(_utils.PipeliningMetadataError, match="Expected plain tensor, got DTensor .of shape .4, 6"):
        _TensorMeta.from_tensor(tensor)


def test_whole_numbers_in_dtensors_have_no_gradient(mesh: DeviceMesh) -> None:
    meta = _DTensorMeta.from_dtensor(distribute_tensor(torch.ones(4, 6, dtype=torch.int64), mesh, [Replicate()]))
    made = dataclasses.replace(meta, requires_grad=True).to_dtensor("cpu", mesh)
    assert isinstance(made, DTensor)
    assert not made.requires_grad


def test_a_mesh_without_names(mesh: DeviceMesh) -> None:
    unnamed = init_device_mesh("cpu", (1,))
    meta = _DTensorMeta.from_dtensor(distribute_tensor(torch.ones(4), unnamed, [Replicate()]))
    assert meta.mesh_cache_key == ((), unnamed._layout)
    assert _DTensorMeta(torch.Size([4]), (1,), torch.float32, False).mesh_dim_names == ()


def test_gradients_of_dtensors(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.ones(2, 4), mesh, [Replicate()]).requires_grad_()
    _utils.validate_static_arg_grad_correspondence(0, (tensor,), (tensor.detach(),), True)
    told = r"Stage 0: input_args\[0\] is a DTensor, but input_grads\[0\] is a Tensor, expected DTensor or None"
    with pytest.raises(_utils.PipeliningMetadataError, match=told):
        _utils.validate_static_arg_grad_correspondence(0, (tensor,), (torch.ones(2, 4),), True)
    with pytest.raises(_utils.PipeliningMetadataError, match=told.replace("input", "output")):
        PipelineStage(nn.Linear(4, 4), 0, 1, "cpu", output_args=tensor, output_grads=torch.ones(2, 4))
    metas = _utils.extract_tensor_metas((tensor,))
    assert metas is not None
    assert _utils._derive_grad_metas(metas) == (None,)  # its placements are not known
    plain = _TensorMeta.from_tensor(torch.ones(2, 4))
    only_in_gradients = _StageMeta((plain,), (plain,), metas, None)
    assert not only_in_gradients.has_dtensors()
    assert not _utils.InferenceMode.needs_dynamic(only_in_gradients, True)


def test_metas_and_meshes_of_dtensors(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    metas = _utils.extract_tensor_metas((tensor, torch.ones(1)))
    assert metas is not None
    assert [type(meta) for meta in metas] == [_DTensorMeta, _TensorMeta]
    stage = _StageMeta(metas, metas)
    assert stage.has_dtensors()
    assert _utils.InferenceMode.needs_dynamic(stage, True)  # the placements of gradients do not follow from these
    assert not _utils.InferenceMode.needs_dynamic(stage, False)
    cache = _MeshCache()
    cache.update_from_tensors((tensor, None, torch.ones(1)))
    assert len(cache) == 1
    assert cache.get_mesh((("tp",), mesh._layout)) is mesh
    local = _utils.to_local_if_dtensor(tensor.requires_grad_(), detach=True)
    assert not isinstance(local, DTensor)
    assert not local.requires_grad


def test_chunks_of_dtensors(mesh: DeviceMesh) -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    spec = microbatch.TensorChunkSpec(0)
    chunks = microbatch._split_tensor(distribute_tensor(whole, mesh, [Shard(1)]), spec, 2)
    assert isinstance(chunks, list)
    assert all(isinstance(chunk, DTensor) and chunk.placements == (Shard(1),) for chunk in chunks)
    (merged,) = microbatch.merge_chunks([(chunk,) for chunk in chunks], (spec,))
    assert merged.placements == (Shard(1),)
    assert torch.equal(merged.to_local(), whole)
    other = distribute_tensor(whole, mesh, [Replicate()])
    with pytest.raises(AssertionError, match="placement mismatch"):
        microbatch.merge_chunks([(chunks[0],), (other,)], (spec,))
    with pytest.raises(AssertionError, match="mix"):
        microbatch.merge_chunks([(chunks[0],), (whole,)], (spec,))


class Block(nn.Module):
    """Two layers, of which the first can be cut by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


STAGES = {"1F1B": ([0], [1]), "Interleaved1F1B": ([0, 2], [1, 3]), "ZBVZeroBubble": ([0, 3], [1, 2])}


def parallel_stages(name: str, *, local: bool) -> tuple[nn.Sequential, dict[int, nn.Module], list[PipelineStage]]:
    """The whole model, and the modules and stages of this rank, which two ranks share."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(0)
    total = sum(map(len, STAGES[name]))
    whole = nn.Sequential(*(Block() for _ in range(total))).double()
    modules = {}
    for index in STAGES[name][mesh["pp"].get_local_rank()]:
        end = RowwiseParallel(output_layouts=Replicate(), use_local_output=local)
        plan = {"up": ColwiseParallel(), "down": end}
        modules[index] = parallelize_module(copy.deepcopy(whole[index]), mesh["tp"], plan)
    group = mesh["pp"].get_group()
    return whole, modules, [PipelineStage(part, index, total, "cpu", group=group) for index, part in modules.items()]


def mean_squares(output: Tensor, target: Tensor) -> Tensor:
    whole = output.full_tensor() if isinstance(output, DTensor) else output
    return nn.functional.mse_loss(whole, target)


def train(rank: int, name: str, local: bool) -> int:
    whole, modules, stages = parallel_stages(name, local=local)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    schedule = schedules.get_schedule_class(name)(stages, 4, mean_squares)  # type: ignore[arg-type]
    losses: list[Tensor] = []
    schedule.step(*((x,) if 0 in modules else ()), target=y, losses=losses)
    mean_squares(whole(x), y).backward()
    for index, module in modules.items():
        wanted = dict(whole[index].named_parameters())
        for parameter_name, parameter in module.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.shape == parameter.shape
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted[parameter_name].grad, msg=parameter_name)
    return len(losses)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("name", STAGES)
def test_tensor_parallel_stages_have_the_gradients_of_the_uncut_model(
    four_ranks: Ranks, name: str, local: bool
) -> None:
    """Plain tensors go from stage to stage, or DTensors."""
    assert sorted(four_ranks.run(train, name, local)) == [0, 0, 4, 4]


def placements_of_gradients(rank: int) -> None:
    """Compare the gradients of parameters with those of the same parallel model without a pipeline, by placement."""
    whole, modules, stages = parallel_stages("1F1B", local=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
    uncut = nn.Sequential(*copy.deepcopy(list(whole)))
    for block in uncut:
        end = RowwiseParallel(output_layouts=Replicate(), use_local_output=False)
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": end})
    seen: list[Any] = []
    if 0 in modules:
        modules[0].register_full_backward_hook(lambda module, before, after: seen.append(after[0].placements))
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    schedules.Schedule1F1B(stages[0], 2, mean_squares).step(*((x,) if 0 in modules else ()), target=y)
    mean_squares(uncut(x), y).backward()
    for index, module in modules.items():
        wanted = dict(uncut[index].named_parameters())
        for name, parameter in module.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            uncut_grad: Any = wanted[name].grad
            assert parameter.grad.placements == uncut_grad.placements, name
            torch.testing.assert_close(parameter.grad.full_tensor(), uncut_grad.full_tensor(), msg=name)
    assert seen == ([(Partial(),)] * 2 if 0 in modules else [])


@pytest.mark.distributed
def test_gradients_of_replicated_values_go_back_as_partial_sums(four_ranks: Ranks) -> None:
    """They were summed up before they were sent, and parameters got gradients of other placements than uncut ones."""
    four_ranks.run(placements_of_gradients)


def cut_local_parts(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rows = torch.arange(12.0).reshape(6, 2)
    tensor = distribute_tensor(rows, mesh, [Shard(0)]).requires_grad_()
    chunks: Any = microbatch._split_tensor(tensor, microbatch.TensorChunkSpec(0), 2)
    ((first,), _), _ = microbatch.split_args_kwargs_into_chunks((tensor,), None, 2)
    assert torch.equal(first.to_local(), chunks[0].to_local())
    assert torch.equal(torch.cat([chunk.to_local() for chunk in chunks]), tensor.to_local())
    sum((chunk.to_local() * (2 + nth)).sum() for nth, chunk in enumerate(chunks)).backward()  # type: ignore[union-attr]
    assert tensor.grad is not None
    assert tensor.grad.to_local()[:, 0].tolist() == [2.0, 2.0, 3.0]  # type: ignore[attr-defined]
    return [(tuple(chunk.shape), chunk.placements, chunk.to_local().tolist()) for chunk in chunks]


@pytest.mark.distributed
def test_a_dtensor_that_is_sharded_along_the_dim_is_cut_rank_by_rank(two_ranks: Ranks) -> None:
    """It was gathered, and the rows of a microbatch went to other ranks than they came from."""
    first, second = two_ranks.run(cut_local_parts)
    assert first == [((4, 2), (Shard(0),), [[0, 1], [2, 3]]), ((2, 2), (Shard(0),), [[4, 5]])]
    assert second == [((4, 2), (Shard(0),), [[6, 7], [8, 9]]), ((2, 2), (Shard(0),), [[10, 11]])]


def step_on_local_parts(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    layer, x, y = nn.Linear(3, 3), torch.randn(8, 3), torch.randn(8, 3)
    uncut = copy.deepcopy(layer)
    parts = [distribute_tensor(each, mesh, [Shard(0)]) for each in (x, y)]
    group = dist.new_group([0]), dist.new_group([1])
    stage = PipelineStage(Local(layer), 0, 1, "cpu", group=group[rank])
    loss: Any = lambda output, target: mean_squares(output, target.to_local())  # noqa: E731
    schedule = schedules.ScheduleGPipe(stage, 2, loss, output_merge_spec=microbatch.TensorChunkSpec(0))
    output = schedule.step(parts[0], target=parts[1])
    mine = slice(4 * rank, 4 * rank + 4)
    torch.testing.assert_close(output, uncut(x[mine]).detach())
    nn.functional.mse_loss(uncut(x[mine]), y[mine]).backward()
    torch.testing.assert_close(layer.weight.grad, uncut.weight.grad)
    with pytest.raises(ValueError, match="not cut into consecutive samples") as caught:
        schedule.step(parts[0], target=y)  # whose rows would belong to others
    with pytest.raises(ValueError, match=r"the microbatches have \[4, 2\] rows, not \[3, 3\]: pass a number"):
        schedule.step(distribute_tensor(x[:6], mesh, [Shard(0)]), target=parts[1])
    return str(caught.value)


class Local(nn.Module):
    """Works on this rank's part of what it gets."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Tensor:
        return self.layer(x.to_local())  # type: ignore[no-any-return]


@pytest.mark.distributed
def test_a_step_cuts_inputs_and_targets_rank_by_rank(two_ranks: Ranks) -> None:
    two_ranks.run(step_on_local_parts)


class Replicated(nn.Module):
    """Returns DTensors that are replicated."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.layer, self.mesh = nn.Linear(4, 4), mesh

    def forward(self, x: Tensor) -> DTensor:
        return DTensor.from_local(self.layer(x), self.mesh, [Replicate()])


def test_placements_count_under_runtime_validation(mesh: DeviceMesh) -> None:
    x = torch.ones(4, 4)
    example = distribute_tensor(x[:2], mesh, [Shard(1)])
    stage = PipelineStage(Replicated(mesh), 0, 1, "cpu", output_args=example)
    stage._runtime_validate = True
    schedule = schedules.Schedule1F1B(stage, 2, loss_fn=lambda output, target: output.full_tensor().sum())
    text = r"output_args float32\[2, 4\] as \(S\(1\)\) .*, and has .* as \(R\)"
    with pytest.raises(_utils.PipeliningMetadataError, match=text):
        schedule.step(x, target=x)
