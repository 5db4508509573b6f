"""DTensors that go from one stage to the next, in one process: on a mesh of this process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipecut import PipelineStage, get_schedule_class, pipeline
from pipecut.errors import InputError, PipeError, StageMetadataError, StepError
from pipecut.run.parcels import receive_description, send_description
from pipecut.run.transport.base import InProcessTransport, Meta, ParcelQueues
from pipecut.stage.dtensor import MeshKey, ready_to_send

WIDTH = 4


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


class Block(nn.Module):
    """Two layers, of which the first can be cut by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Returns(nn.Module):
    """A stage that ends with a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def parallel(module: nn.Module, mesh: DeviceMesh, placement: Any = Replicate()) -> nn.Module:  # noqa: B008
    """A block that takes and gives DTensors."""
    plan = {
        "up": ColwiseParallel(input_layouts=placement),
        "down": RowwiseParallel(output_layouts=placement, use_local_output=False),
    }
    return parallelize_module(module, mesh, plan)


def scheduled(*stages: PipelineStage, name: str = "1F1B", loss: Callable[..., Tensor] | None = None) -> Any:
    return get_schedule_class(name)(list(stages), 2, loss or squares)


def squares(output: Tensor, target: Tensor) -> Tensor:
    if isinstance(output, DTensor) and not isinstance(target, DTensor):
        target = distribute_tensor(target, output.device_mesh, output.placements)
    return ((output - target) ** 2).mean()


def placed(mesh: DeviceMesh, placement: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: DTensor.from_local(x, mesh, [placement])


def full(x: Any) -> Tensor:
    return x.full_tensor()  # type: ignore[no-any-return]


def ends(mesh: DeviceMesh, first: Callable[[Any], Any], **options: Any) -> Any:
    """Two stages: what the first one returns goes through the function, and the second one wants it plain."""
    module = nn.Module()
    module.forward = full  # type: ignore[method-assign]
    stages = (
        PipelineStage(Returns(first), 0, 2, "cpu", output_args=options.pop("output_args", None)),
        PipelineStage(module, 1, 2, "cpu", **options),
    )
    return scheduled(*stages)


X, Y = torch.ones(4, WIDTH), torch.zeros(4, WIDTH)


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_gradients_are_those_of_the_uncut_model(mesh: DeviceMesh, name: str) -> None:
    whole = nn.Sequential(*(Block() for _ in range(4))).double()
    x = torch.randn(8, 3, WIDTH, dtype=torch.float64)
    y = torch.randn_like(x)
    losses: list[Tensor] = []
    modules = [parallel(Block().double(), mesh, Shard(1)) for _ in range(4)]
    for module, original in zip(modules, whole, strict=True):
        for parameter, value in zip(module.parameters(), original.parameters(), strict=True):
            parameter.data.copy_(distribute_tensor(value.data, mesh, parameter.placements))  # type: ignore[attr-defined]
    schedule = get_schedule_class(name)(
        [PipelineStage(module, index, 4, "cpu") for index, module in enumerate(modules)],  # type: ignore[arg-type]
        4,
        squares,
        **{} if name == "1F1B" else {"ranks": 2},
    )
    given, target = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(y, mesh, [Shard(1)])
    output = schedule.step(given, target=target, losses=losses)
    expected = squares(whole(x), y)
    expected.backward()
    assert isinstance(output, DTensor)
    assert output.placements == (Shard(1),)
    torch.testing.assert_close(output.full_tensor(), whole(x))
    for module, original in zip(modules, whole, strict=True):
        wanted = dict(original.named_parameters())
        for parameter_name, parameter in module.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted[parameter_name].grad, msg=parameter_name)
    assert all(type(loss) is Tensor and not loss.requires_grad for loss in losses)
    assert schedule.mean_loss() == pytest.approx(expected.item())


def as_plain(output: Any, target: Any) -> Tensor:
    return squares(output.full_tensor(), target.full_tensor())


def in_part(output: Any, target: Any) -> Tensor:
    whole = squares(output, target)
    return DTensor.from_local(full(whole), output.device_mesh, [Partial()])


@pytest.mark.parametrize("loss", [as_plain, in_part, squares])
def test_losses_are_plain_whatever_the_loss_fn_returns(mesh: DeviceMesh, loss: Callable[..., Tensor]) -> None:
    modules = [parallel(Block(), mesh) for _ in range(2)]
    schedule = scheduled(*(PipelineStage(part, nth, 2, "cpu") for nth, part in enumerate(modules)), loss=loss)
    losses: list[Tensor] = []
    schedule.step(X, target=distribute_tensor(Y, mesh, [Replicate()]), losses=losses)
    assert [type(value) for value in losses] == [Tensor, Tensor]
    assert schedule.mean_loss() == pytest.approx(sum(losses).item() / 2)  # type: ignore[union-attr]
    gradients = [parameter.grad for module in modules for parameter in module.parameters()]
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        parameter.grad = None
    squares(modules[1](modules[0](X)), Y).backward()
    for parameter, gradient in zip(
        (parameter for module in modules for parameter in module.parameters()), gradients, strict=True
    ):
        torch.testing.assert_close(full(gradient), full(parameter.grad))


# ---------------------------------------------------------------------- meshes


def test_a_mesh_that_the_stage_does_not_know_is_named_with_the_remedy(mesh: DeviceMesh) -> None:
    with pytest.raises(StageMetadataError) as caught:
        ends(mesh, placed(mesh, Replicate())).step(X, target=Y)
    text = str(caught.value)
    assert "failed in 1RECV_F0 (stage 1, microbatch 0)" in text
    assert f"stage 1 gets a DTensor on the mesh (tp=1), dim names ('tp',) and layout {mesh._layout}, and " in text
    assert "knows no such mesh: make the stage with get_mesh=, a function of dim names and layout" in text


def test_get_mesh_is_asked_once_with_the_names_and_the_layout(mesh: DeviceMesh) -> None:
    asked = []

    def get_mesh(*args: Any) -> DeviceMesh:
        asked.append(args)
        return mesh

    schedule = ends(mesh, placed(mesh, Shard(1)), get_mesh=get_mesh)
    for _ in range(2):
        schedule.step(X, target=Y)
    assert asked == [(("tp",), mesh._layout)]


@pytest.mark.parametrize("wrong", [None, "tp"])
def test_get_mesh_returns_something_else(mesh: DeviceMesh, wrong: Any) -> None:
    text = rf"get_mesh= of stage 1 returned {wrong!r} for dim names .*: it must return a mesh of sizes \[1\]"
    with pytest.raises(StageMetadataError, match=text):
        ends(mesh, placed(mesh, Replicate()), get_mesh=lambda *_: wrong).step(X, target=Y)


def test_a_mesh_of_input_args_is_known(mesh: DeviceMesh) -> None:
    example = distribute_tensor(X, mesh, [Replicate()])
    ends(mesh, placed(mesh, Replicate()), input_args=example).step(X, target=Y)


def test_a_mesh_without_names(mesh: DeviceMesh) -> None:
    unnamed = DeviceMesh("cpu", [0])
    asked = []

    def get_mesh(*args: Any) -> DeviceMesh:
        asked.append(args)
        return unnamed

    ends(mesh, placed(unnamed, Replicate()), get_mesh=get_mesh).step(X, target=Y)
    assert asked == [((), unnamed._layout)]
    assert str(MeshKey.of(unnamed)) == "mesh (1)"


# ---------------------------------------------------------------------- what was declared


def test_input_args_with_other_placements(mesh: DeviceMesh) -> None:
    example = distribute_tensor(X, mesh, [Shard(1)])
    text = (
        r"stage 1 was made for input_args float32\[4, 4\] as \(S\(1\)\) on the mesh \(tp=1\), and gets "
        r"float32\[2, 4\] as \(R\) on the mesh \(tp=1\) from stage 0"
    )
    with pytest.raises(StageMetadataError, match=text):
        ends(mesh, placed(mesh, Replicate()), input_args=example).step(X, target=Y)
    with pytest.raises(StageMetadataError, match=r"was made for input_args float32\[4, 4\], and gets .* as \(R\)"):
        ends(mesh, placed(mesh, Replicate()), input_args=X, get_mesh=lambda *_: mesh).step(X, target=Y)


def test_output_args_with_other_placements(mesh: DeviceMesh) -> None:
    example = distribute_tensor(X, mesh, [Shard(1)])
    text = (
        r"stage 0 was made for output_args float32\[4, 4\] as \(S\(1\)\) on the mesh \(tp=1\), samples aside, and "
        r"returned float32\[2, 4\] as \(R\) on the mesh \(tp=1\): check output_args"
    )
    with pytest.raises(StageMetadataError, match=text):
        ends(mesh, placed(mesh, Replicate()), output_args=example, input_args=example).step(X, target=Y)
    ends(mesh, placed(mesh, Shard(1)), output_args=example, input_args=example).step(X, target=Y)


def test_what_step_gets_is_compared_with_its_placements(mesh: DeviceMesh) -> None:
    example = distribute_tensor(X, mesh, [Shard(1)])
    schedule = scheduled(PipelineStage(parallel(Block(), mesh), 0, 1, "cpu", input_args=example))
    text = r"made for input_args float32\[4, 4\] as \(S\(1\)\) on the mesh \(tp=1\), .* are float32\[2, 4\] in a"
    with pytest.raises(InputError, match=text):
        schedule.step(X, target=Y)


# ---------------------------------------------------------------------- what cannot go


def test_outputs_that_lie_now_so_and_now_so(mesh: DeviceMesh) -> None:
    turns = iter([placed(mesh, Replicate()), placed(mesh, Shard(1)), lambda x: x])
    schedule = ends(mesh, lambda x: next(turns)(x), get_mesh=lambda *_: mesh)
    text = r"is float32\[2, 4\] as \(S\(1\)\) .* here, and stage 1 expects float32\[2, 4\] as \(R\) .*must lie alike"
    with pytest.raises(PipeError, match=text):
        schedule.step(X, target=Y)


def test_inputs_that_lie_otherwise_in_another_step(mesh: DeviceMesh) -> None:
    """They are another kind of microbatch, with a description of its own."""
    module = parallel(Block(), mesh)
    schedule = scheduled(PipelineStage(nn.Identity(), 0, 2, "cpu"), PipelineStage(module, 1, 2, "cpu"))
    for placement in (Replicate(), Shard(1)):
        output = schedule.step(distribute_tensor(X, mesh, [placement]), target=Y)
        torch.testing.assert_close(full(output), full(module(X)))


def test_a_gradient_that_a_hook_makes_plain(mesh: DeviceMesh) -> None:
    class Hooked(nn.Module):
        def forward(self, x: Any) -> Tensor:
            x.register_hook(lambda gradient: gradient.full_tensor())
            return x.full_tensor()  # type: ignore[no-any-return]

    stages = (
        PipelineStage(Returns(placed(mesh, Replicate())), 0, 2, "cpu"),
        PipelineStage(Hooked(), 1, 2, "cpu", get_mesh=lambda *_: mesh),
    )
    text = (
        r"the gradient that stage 1 gives back for a value of stage 0 is float32\[2, 4\], and the value is "
        r"float32\[2, 4\] as \(R\) on the mesh \(tp=1\): .*look for a hook"
    )
    with pytest.raises(StepError, match=text):
        scheduled(*stages).step(X, target=Y)


def test_a_plain_gradient_is_given_for_a_dtensor(mesh: DeviceMesh) -> None:
    stage = PipelineStage(Returns(placed(mesh, Replicate())), 0, 2, "cpu")
    stage.forward(0, [X], {}, training=True)
    text = r"output 0 that requires a gradient is float32\[4, 4\] as \(R\) .*, and its gradient is float32\[4, 4\]: "
    with pytest.raises(InputError, match=text):
        stage.backward(0, [Y], weights=True)


def test_a_gradient_on_another_mesh_is_refused(mesh: DeviceMesh) -> None:
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))

    class Hooked(nn.Module):
        def forward(self, x: Any) -> Tensor:
            x.register_hook(lambda gradient: DTensor.from_local(gradient.to_local(), other, [Replicate()]))
            return x.full_tensor()  # type: ignore[no-any-return]

    stages = (
        PipelineStage(Returns(placed(mesh, Replicate())), 0, 2, "cpu"),
        PipelineStage(Hooked(), 1, 2, "cpu", get_mesh=lambda *_: mesh),
    )
    with pytest.raises(StepError, match=r"is float32\[2, 4\] as \(R\) on the mesh \(cp=1\), and the value is .*tp=1"):
        scheduled(*stages).step(X, target=Y)


def test_traced_stages_send_plain_tensors_only(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pipe = pipeline(model, (X,), num_stages=2)
    stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    parallelize_module(stages[0].submod, mesh, {"0": ColwiseParallel(use_local_output=False)})
    text = "stages of a traced model send plain tensors only: end this one with use_local_output=True or to_local()"
    with pytest.raises(StepError, match=text):
        scheduled(*stages).step(X, target=Y)


# ---------------------------------------------------------------------- on the way


def test_a_description_may_be_longer_than_its_first_message(mesh: DeviceMesh) -> None:
    """More than some forty tensors, or fewer DTensors, were refused: they did not fit into one message."""
    queues = ParcelQueues()
    tensors = [distribute_tensor(torch.ones(2, nth), mesh, [Shard(1)]) for nth in range(1, 30)] + [X]
    metas = [Meta.of(tensor) for tensor in tensors]
    for some in (metas, metas[:1], metas[-1:]):
        send_description(InProcessTransport(queues, 0, 2), 1, (0, 1), some, None)
        assert list(receive_description(InProcessTransport(queues, 1, 2), 0)) == some
    assert not queues.parcels[0, 1]


def test_what_is_sent_is_in_order(mesh: DeviceMesh) -> None:
    """contiguous() of a DTensor would have summed it up."""
    tensor = DTensor.from_local(torch.ones(2, 3).T, mesh, [Partial()]).requires_grad_()
    ready = ready_to_send(tensor)
    assert isinstance(ready, DTensor)
    assert (ready.placements, ready.stride(), ready.requires_grad) == ((Partial(),), (2, 1), True)
    assert ready.to_local().is_contiguous()
    assert ready_to_send(ready) is ready


def test_outputs_of_other_sizes_are_no_matter_of_placement(mesh: DeviceMesh) -> None:
    turns = iter([2, 3])
    schedule = ends(mesh, lambda x: placed(mesh, Shard(1))(x.repeat(1, next(turns))), get_mesh=lambda *_: mesh)
    text = (
        r"is float32\[2, 12\] as \(S\(1\)\) .* expects float32\[2, 8\] as .*: check what the module of stage 0 returns"
    )
    with pytest.raises(StepError, match=text):
        schedule.step(X, target=torch.zeros(4, 2 * WIDTH))
