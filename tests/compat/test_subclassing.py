"""Schedules and stages that derive from upstream's base classes run through the one executor."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from pipecut import InputError
from pipecut.compat import PipelineStage, schedules
from pipecut.compat.schedules import _Action, _ComputationType, _PipelineScheduleRuntime, _wait_batch_p2p
from pipecut.compat.stage import _PipelineStageBase
from tests.compat import user_schedules
from tests.support.ranks import Ranks
from tests.support.sampling import sampled


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(8, 6), torch.randn(8, 6)


def uncut_gradients(count: int) -> tuple[float, dict[str, Tensor]]:
    model, (x, y) = nn.Sequential(*layers(count)), batch()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss.item(), {name: _gradient(parameter) for name, parameter in model.named_parameters()}


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def gradients_of(stages: list[PipelineStage]) -> dict[str, Tensor]:
    return {
        f"{stage.stage_index}.{name}": _gradient(parameter)
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
    }


def assert_as_uncut(found: dict[str, Tensor], count: int) -> None:
    _, wanted = uncut_gradients(count)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda told, name=name: f"{name}: {told}")


@pytest.mark.parametrize("kind", user_schedules.ALL)
def test_a_users_schedule_runs_in_one_process(kind: Any) -> None:
    stages = [PipelineStage(layer, index, kind.n_stages, "cpu") for index, layer in enumerate(layers(kind.n_stages))]
    schedule = kind(stages, kind.microbatches, loss_fn=nn.functional.mse_loss)
    x, y = batch()
    losses: list[Tensor] = []
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        output = schedule.step(x, target=y, losses=losses)
    assert_as_uncut(gradients_of(stages), kind.n_stages)
    assert len(losses) == kind.microbatches == len(stages[-1].output_chunks)
    assert len(output) == 8
    assert not any(stage.output_chunks for stage in stages[:-1])
    assert not any(len(stage.fwd_cache) for stage in stages)
    schedule.eval(x, target=y, losses=losses)


def run_user_schedule(rank: int, name: str) -> tuple[dict[str, Tensor], list[float], str]:
    kind = next(each for each in user_schedules.ALL if each.__name__ == name)
    order = getattr(kind, "order", None) or {0: [], 1: []}
    mine = sorted({each.stage_index for each in order[rank] if each is not None})
    mine = mine or {"WithW": [[0, 2], [1, 3]]}.get(name, [[0], [1]])[rank]
    made = layers(kind.n_stages)
    stages = [PipelineStage(made[index], index, kind.n_stages, "cpu") for index in mine]
    schedule = kind(stages, kind.microbatches, loss_fn=nn.functional.mse_loss)
    x, y = batch()
    losses: list[Tensor] = []
    schedule.step(x, target=y, losses=losses)  # all ranks may pass the inputs
    return gradients_of(stages), [loss.item() for loss in losses], repr(schedule.pipeline_order_with_comms)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", user_schedules.ALL[:4])
def test_a_users_schedule_runs_on_ranks(kind: Any, two_ranks: Ranks) -> None:
    parts = two_ranks.run(run_user_schedule, kind.__name__)
    assert_as_uncut({name: gradient for found, _, _ in parts for name, gradient in found.items()}, kind.n_stages)
    assert parts[0][2] == parts[1][2]


class Mock(_PipelineStageBase):
    """A stage that only says where it is."""

    def __init__(self, num_stages: int = 4, group_size: int = 2) -> None:
        self.num_stages, self.group_size, self.group_rank, self.group = num_stages, group_size, 0, None
        self.submod: Any = None

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> Any: ...

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any: ...

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any: ...


class Own(_PipelineStageBase):
    """A stage of one's own that runs."""

    _create_grad_recv_info = Mock._create_grad_recv_info
    _prepare_forward_infra = Mock._prepare_forward_infra
    _prepare_backward_infra = Mock._prepare_backward_infra


def test_the_base_of_stages_is_abstract_with_three_methods() -> None:
    wanted = {"_create_grad_recv_info", "_prepare_forward_infra", "_prepare_backward_infra"}
    assert _PipelineStageBase.__abstractmethods__ == wanted
    assert isinstance(PipelineStage(nn.Linear(2, 2), 0, 1, "cpu"), _PipelineStageBase)
    with pytest.raises(TypeError, match="abstract"):
        _PipelineStageBase(nn.Linear(2, 2), 0, 1, "cpu")  # type: ignore[abstract]


def test_a_stage_of_ones_own_runs() -> None:
    stages: list[PipelineStage] = [Own(layer, index, 2, "cpu") for index, layer in enumerate(layers(2))]
    x, y = batch()
    schedules.ScheduleGPipe(stages, 4, loss_fn=nn.functional.mse_loss).step(x, target=y)
    assert_as_uncut(gradients_of(stages), 2)


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_a_schedule_is_made_of_stages_that_only_say_where_they_are(name: str) -> None:
    stages: Any = [Mock(), Mock()]
    schedule: Any = schedules.get_schedule_class(name)(stages, 8)
    wanted = schedules._validate_schedule(schedule.pipeline_order, 2, 4, 8)
    assert stages[0].stage_index_to_group_rank == schedule.stage_index_to_group_rank == wanted
    assert schedule._simulate()
    again = schedule.pipeline_order_with_comms
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    assert schedule.pipeline_order_with_comms == again
    with pytest.raises(InputError, match=r"a Mock has no module to run: its __init__ must call that of PipelineStage"):
        schedule.step(torch.ones(8, 2))


def mocks(count: int, **places: int) -> list[Any]:
    return [MagicMock(submod=None, group_rank=0, group=None, **places) for _ in range(count)]


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_a_schedule_is_made_of_mocks(name: str) -> None:
    """They are no PipelineStages, and have every attribute; their numbers will do to make an order."""
    kind: Any = schedules.get_schedule_class(name)
    for ranks in (1, 2):
        stages = mocks(2, num_stages=2 * ranks, group_size=ranks)
        schedule = kind(stages, 4)
        assert sorted(schedule.pipeline_order) == list(range(ranks))
        assert schedule.pipeline_order == kind([Mock(2 * ranks, ranks) for _ in range(2)], 4).pipeline_order
        assert stages[0].stage_index_to_group_rank == schedule.stage_index_to_group_rank
        assert schedule._simulate()
        assert not schedule.fwd_recv_ops
        with pytest.raises(InputError, match="a MagicMock has no module to run"):
            schedule.step(torch.ones(8, 2))


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_a_schedule_is_made_of_a_mock(name: str) -> None:
    """A MagicMock can be iterated over, and was taken for a list of stages without any."""
    kind: Any = schedules.get_schedule_class(name)
    for ranks in (1, 2):
        (stage,) = mocks(1, num_stages=2, group_size=ranks)
        assert kind(stage, 4).pipeline_order == kind(Mock(2, 2), 4).pipeline_order


def test_a_mock_without_numbers_is_no_stage() -> None:
    with pytest.raises(InputError, match="a schedule takes PipelineStages, got MagicMock"):
        schedules.ScheduleInterleaved1F1B([MagicMock(), MagicMock()], 4)


def test_v_schedules_refuse_other_numbers() -> None:
    for name in ("ZBVZeroBubble", "DualPipeV"):
        for count, total in ((1, 4), (3, 6)):
            with pytest.raises(ValueError, match=f"Schedule{name} has exactly 2 stages on each rank.*got {count} of"):
                schedules.get_schedule_class(name)([Mock(total)] * count, 8)  # type: ignore[arg-type]
        schedules.get_schedule_class(name)([Mock(), Mock()], 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="microbatch"):
        schedules.ScheduleDualPipeV([Mock(), Mock()], 1)


@pytest.mark.parametrize(
    "name", sampled(["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"], lambda name: name == "ZBVZeroBubble")
)
def test_a_compiled_stage_is_refused_by_the_zero_bubble_family(name: str) -> None:
    stages = [PipelineStage(torch.compile(layer), index, 2, "cpu") for index, layer in enumerate(layers(2))]  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=f"Schedule{name} is not supported with a stage that torch.compile made one"):
        schedules.get_schedule_class(name)(stages, 4, ranks=1)  # type: ignore[arg-type]
    schedules.ScheduleInterleaved1F1B(stages, 4, ranks=1)


def test_a_schedule_without_an_order_says_so() -> None:
    stages = [PipelineStage(layer, index, 2, "cpu") for index, layer in enumerate(layers(2))]
    with pytest.raises(
        InputError, match="PipelineScheduleMulti has no plan: set pipeline_order to the actions of every"
    ):
        schedules.PipelineScheduleMulti(stages, 2).step(torch.ones(4, 6))


def test_a_loop_of_ones_own_is_refused() -> None:
    class Loop(schedules.PipelineScheduleMulti):
        def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any: ...

    stages = [PipelineStage(layer, index, 2, "cpu") for index, layer in enumerate(layers(2))]
    with pytest.raises(
        InputError, match=r"Loop defines _step_microbatches\(\), and steps are run by one executor here"
    ):
        Loop(stages, 2)


def test_the_order_may_be_set_anew() -> None:
    stages = [PipelineStage(layer, index, 2, "cpu") for index, layer in enumerate(layers(2))]
    schedule = _PipelineScheduleRuntime(stages, 2, loss_fn=nn.functional.mse_loss)
    x, y = batch()
    for order in ("0F0 0F1 0B0 0B1|1F0 1B0 1F1 1B1", "0F0 0F1 0B1 0B0|1F0 1F1 1B1 1B0"):
        schedule._prepare_schedule_with_comms(user_schedules.rows(*order.split("|")))
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(x, target=y)
        assert_as_uncut(gradients_of(stages), 2)
        assert [repr(action) for action in schedule.pipeline_order[0]] == order.split("|")[0].split()


def written_for_upstream(seen: list[Any]) -> Any:
    """A function for overlaps that waits for its inputs itself, and hands over what stays on its rank."""

    def overlapped(action: Any, ctx: Any) -> None:
        assert isinstance(ctx, schedules._PipelineContext)
        running = ctx.schedule_ref
        by_index = {stage.stage_index: stage for stage in running._stages}
        for part in action.sub_actions:
            stage, number = by_index[part.stage_index], part.microbatch_index
            if part.computation_type == _ComputationType.FORWARD:
                if not stage.is_first and part.stage_index - 1 not in by_index:
                    _wait_batch_p2p(running.fwd_recv_ops.pop((part.stage_index, number)))
                    seen.append("waited")
                args = ctx.arg_mbs[number] if ctx.arg_mbs else ()
                output = stage.forward_one_chunk(number, args, ctx.kwarg_mbs[number] if ctx.kwarg_mbs else {})
                running._maybe_compute_loss(stage, output, ctx.target_mbs, number)
                if part.stage_index + 1 in by_index:
                    by_index[part.stage_index + 1].set_local_fwd_input(output, number)
            else:
                if not stage.is_last and part.stage_index + 1 not in by_index:
                    _wait_batch_p2p(running.bwd_recv_ops.pop((part.stage_index, number)))
                    seen.append("waited")
                loss = running._maybe_get_loss(stage, number)
                assert (loss is not None) is stage.is_last
                running.backward_counter[part.stage_index] += 1
                last = running.backward_counter[part.stage_index] == running._n_microbatches
                stage.backward_one_chunk(number, loss=loss, full_backward=True, last_backward=last)
                if part.stage_index - 1 in by_index:
                    below = by_index[part.stage_index - 1]
                    below.set_local_bwd_input(stage.get_local_bwd_output(number), number)
            seen.append(part)

    return overlapped


def test_a_custom_function_written_for_upstream_runs() -> None:
    stages = [PipelineStage(layer, index, 4, "cpu") for index, layer in enumerate(layers(4))]
    schedule = schedules.ScheduleDualPipeV(stages, 8, loss_fn=nn.functional.mse_loss, ranks=2)
    seen: list[Any] = []
    schedule.register_custom_function(
        computation_type=schedules.OVERLAP_F_B, custom_function=written_for_upstream(seen)
    )
    x, y = batch()
    schedule.step(x, target=y)
    assert seen
    assert "waited" not in seen
    assert_as_uncut(gradients_of(stages), 4)


def overlap_on_ranks(rank: int) -> tuple[dict[str, Tensor], list[float], int]:
    made = layers(4)
    stages = [PipelineStage(made[index], index, 4, "cpu") for index in ([0, 3], [1, 2])[rank]]
    schedule = schedules.ScheduleDualPipeV(stages, 4, loss_fn=nn.functional.mse_loss)
    seen: list[Any] = []
    schedule.register_custom_function(schedules.OVERLAP_F_B, written_for_upstream(seen))
    x, y = batch()
    losses: list[Tensor] = []
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(*((x,) if rank == 0 else ()), target=y, losses=losses)
    return gradients_of(stages), [loss.item() for loss in losses], seen.count("waited")


@pytest.mark.distributed
def test_a_custom_function_may_wait_for_what_arrives(two_ranks: Ranks) -> None:
    """A receive is then waited for twice, once more by the executor."""
    (first, losses, waits), (second, none, more) = two_ranks.run(overlap_on_ranks)
    assert waits > 1
    assert more > 1
    assert_as_uncut({**first, **second}, 4)
    x, y = batch()
    with torch.no_grad():
        wanted = [
            nn.functional.mse_loss(nn.Sequential(*layers(4))(part), target).item()
            for part, target in zip(x.chunk(4), y.chunk(4), strict=True)
        ]
    assert losses == pytest.approx(wanted)
    assert none == []


def test_a_custom_function_gets_an_action_of_upstream() -> None:
    stages = [PipelineStage(layer, index, 2, "cpu") for index, layer in enumerate(layers(2))]
    schedule = schedules.ScheduleGPipe(stages, 2)
    seen: list[Any] = []

    def forward(action: Any, context: Any) -> None:
        seen.append(action)
        context.run(action)

    schedule.register_custom_function(schedules.FORWARD, forward)
    schedule.eval(batch()[0])
    assert sorted(seen) == [_Action.from_str(text) for text in ("0F0", "0F1", "1F0", "1F1")]
    assert (seen[0].stage_index, seen[0].computation_type, seen[0].microbatch_index) == (0, schedules.F, 0)
    assert seen[0].sub_actions is None
    assert seen[0].is_compute_op
