"""Dropout in a pipelined step follows from the seed, not from the schedule; and on request it is the uncut model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipecut import (
    InputError,
    PipelineStage,
    PlannedSchedule,
    Schedule1F1B,
    ScheduleGPipe,
    StepError,
    pipe_split,
    pipeline,
    random_streams,
)
from pipecut.run.schedule import PipelineSchedule
from pipecut.schedule import Plan, plan_for
from pipecut.schedule.registry import FAMILIES
from tests.run.random_models import (
    NoisyChain,
    by_microbatches,
    largest_difference,
    noisy_loss,
    noisy_model,
    noisy_problem,
    noisy_stages,
)
from tests.support.sampling import sampled
from tests.support.training import TIGHT, Problem, assert_same_gradients, cut_step

STAGES = 4
SAMPLES, SIZES = 10, (2, 2, 2, 1, 1, 1, 1)
SCHEDULES = [name for name in FAMILIES if name != "ForwardOnly"]
both_kinds = pytest.mark.parametrize("traced", [True, False], ids=["traced", "by hand"])


def plan_of(name: str) -> Plan:
    """Over as many ranks as the schedule wants for four stages."""
    chunks = FAMILIES[name].chunks
    return plan_for(name, ranks=STAGES // chunks, chunks=chunks, microbatches=len(SIZES))


def schedule_of(name: str, traced: bool, random_numbers: str) -> tuple[PipelineSchedule, Problem]:
    plan = plan_of(name)
    problem = noisy_problem(noisy_model(STAGES, traced), SAMPLES)
    stages = noisy_stages(plan, traced)
    return PlannedSchedule(stages, plan, noisy_loss, random_numbers=random_numbers), problem


@both_kinds
@pytest.mark.parametrize(
    "name", sampled(SCHEDULES, lambda name: name in ("GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "DualPipeV"))
)
def test_the_schedule_makes_no_difference(name: str, traced: bool) -> None:
    results = []
    for each in ("GPipe", name):
        schedule, problem = schedule_of(each, traced, "per_stage")
        torch.manual_seed(5)
        results.append(cut_step(schedule, problem, times=2))
        results.append(cut_step(schedule, problem, times=2))
    for first, second in zip(results[:2], results[2:], strict=True):
        assert_same_gradients(second.gradients, first.gradients, TIGHT)
        assert torch.equal(first.output, second.output)
        assert first.loss == second.loss
    assert largest_difference(results[0].gradients, results[1].gradients) > 1e-3  # steps differ


@both_kinds
@pytest.mark.parametrize("name", SCHEDULES)
def test_as_uncut_gives_what_the_uncut_model_gives_microbatch_by_microbatch(name: str, traced: bool) -> None:
    schedule, problem = schedule_of(name, traced, "as_uncut")
    torch.manual_seed(5)
    cut = cut_step(schedule, problem, times=2)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    uncut = by_microbatches(problem, SIZES, times=2)
    assert torch.equal(torch.get_rng_state(), after)
    assert_same_gradients(cut.gradients, uncut.gradients, TIGHT)
    torch.testing.assert_close(cut.output, uncut.output, rtol=0, atol=0)
    assert abs(cut.loss - uncut.loss) < TIGHT


def test_per_stage_is_not_what_the_uncut_model_draws() -> None:
    schedule, problem = schedule_of("1F1B", True, "per_stage")
    torch.manual_seed(5)
    cut = cut_step(schedule, problem)
    torch.manual_seed(5)
    assert largest_difference(cut.gradients, by_microbatches(problem, SIZES).gradients) > 1e-3


def test_per_process_draws_in_the_order_of_execution() -> None:
    """GPipe runs stage by stage, with one microbatch as the model does."""
    model = noisy_model(STAGES, True)
    problem = noisy_problem(model, SAMPLES)
    plan = plan_for("GPipe", ranks=STAGES, microbatches=1)
    schedule = PlannedSchedule(noisy_stages(plan, True), plan, noisy_loss, random_numbers="per_process")
    torch.manual_seed(5)
    output = schedule.step(*problem.args, target=problem.target)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    expected = model(*problem.args)
    noisy_loss(expected, problem.target)
    assert torch.equal(output, expected)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("random_numbers", ["per_stage", "as_uncut"])
def test_seeds_matter(random_numbers: str) -> None:
    schedule, problem = schedule_of("1F1B", True, random_numbers)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(cut_step(schedule, problem).gradients)
    assert largest_difference(results[0], results[1]) == 0
    assert largest_difference(results[0], results[2]) > 1e-3


@pytest.mark.parametrize("random_numbers", ["per_stage", "as_uncut"])
def test_a_step_takes_one_number_from_the_default_generator(random_numbers: str) -> None:
    schedule, problem = schedule_of("ZBVZeroBubble", True, random_numbers)
    torch.manual_seed(5)
    cut_step(schedule, problem)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)


def test_evaluations_draw_others_each_time_and_leave_training_alone() -> None:
    """Dropout that is left on in an evaluation, to see how sure a model is."""
    schedule, problem = schedule_of("1F1B", True, "per_stage")
    before = torch.get_rng_state()
    first, second = (schedule.eval(*problem.args) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)


def test_a_microbatch_and_a_stage_have_numbers_of_their_own() -> None:
    class Drawing(nn.Module):
        def forward(self, *rows: Tensor) -> tuple[Tensor, ...]:
            return *rows, torch.rand(rows[0].shape)

    stages = [PipelineStage(Drawing(), index, 3, "cpu") for index in range(3)]
    drawn = ScheduleGPipe(stages, 4).eval(torch.zeros(4, 1))
    assert len({value.item() for column in drawn[1:] for value in column}) == 12


class Towers(nn.Module):
    """Nothing goes from the first stage to the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = NoisyChain(1), NoisyChain(1), NoisyChain(1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left = self.left(x)
        pipe_split()
        right = self.right(y)
        pipe_split()
        return self.head(left * right)


@pytest.mark.parametrize("placement", [[0, 1, 2], [0, 0, 1], [0, 1, 1], [1, 0, 1], [0, 0, 0]])
def test_states_go_to_the_next_stage_even_if_no_value_does(placement: list[int]) -> None:
    torch.manual_seed(0)
    model = Towers().double()
    x, y, target = (torch.randn(4, 6, dtype=torch.float64) for _ in range(3))
    pipe = pipeline(model, (x, y))
    assert (0, 1) not in {(edge.source, edge.target) for edge in pipe.edges if edge.kind == "activation"}
    rows: dict[int, list[str]] = {rank: [] for rank in placement}
    for step, order in (("F", placement), ("B", placement)):
        for stage, rank in sorted(enumerate(order), reverse=step == "B"):
            rows[rank] += [f"{stage}{step}{microbatch}" for microbatch in range(2)]
    stages = [pipe.build_stage(index, "cpu") for index in range(3)]
    schedule = PlannedSchedule(stages, Plan.from_actions(rows), F.mse_loss, random_numbers="as_uncut")
    torch.manual_seed(1)
    output = schedule.step(x, y, target=target)
    torch.manual_seed(1)
    streams = random_streams(2)
    expected = []
    for stream, left, right in zip(streams, x.chunk(2), y.chunk(2), strict=True):
        with stream:
            expected.append(model(left, right))
    assert torch.equal(output, torch.cat(expected))


class Recomputed(nn.Module):
    """A block that runs again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


@pytest.mark.parametrize("random_numbers", ["per_stage", "as_uncut"])
@pytest.mark.parametrize("name", ["GPipe", "ZB-H1"])
def test_what_is_computed_again_draws_what_it_drew(name: str, random_numbers: str) -> None:
    gradients = []
    for wrap in (lambda block: block, Recomputed):
        plan = plan_of(name)
        chain = noisy_model(STAGES, False)
        stages = [PipelineStage(wrap(block), index, STAGES, "cpu") for index, block in enumerate(chain.children())]
        schedule = PlannedSchedule(stages, plan, noisy_loss, random_numbers=random_numbers)
        torch.manual_seed(5)
        gradients.append(cut_step(schedule, noisy_problem(chain, SAMPLES)).gradients)
    assert_same_gradients(gradients[1], gradients[0], TIGHT)


def test_a_step_that_fails_leaves_the_generator_as_it_was() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            raise RuntimeError("out of luck")

    schedule = Schedule1F1B([PipelineStage(Fails(), 0, 1, "cpu")], 1, F.mse_loss)
    torch.manual_seed(5)
    with pytest.raises(StepError, match="out of luck"):
        schedule.step(torch.ones(2), target=torch.ones(2))
    after = torch.get_rng_state()
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)


def test_a_kind_of_random_numbers_that_there_is_not() -> None:
    stages = noisy_stages(plan_of("1F1B"), False)
    with pytest.raises(InputError) as caught:
        Schedule1F1B(stages, 2, noisy_loss, random_numbers="per_stages")
    assert str(caught.value) == (
        "random_numbers='per_stages' is not known: it is one of 'per_stage', 'as_uncut', 'per_process'. "
        "Did you mean 'per_stage'?"
    )


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
def test_by_default_the_cut_makes_no_difference(name: str) -> None:
    """The same seed gave other losses for another number of stages."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Dropout(0.3))]
    model, x, y = nn.Sequential(*layers), torch.randn(6, 6), torch.randn(6, 6)
    found = []
    for count in (1, 2, 4):
        pipe = pipeline(model, (x,), num_stages=count)
        stages = [pipe.build_stage(index, "cpu") for index in range(count)]
        schedule = PlannedSchedule(stages, plan_for(name, ranks=count, microbatches=3), F.mse_loss)
        torch.manual_seed(7)
        losses: list[list[Tensor]] = [[], []]
        for each in losses:
            schedule.step(x, target=y, losses=each)
        found.append([loss.item() for each in losses for loss in each])
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 6


def test_a_model_that_draws_nothing_sends_no_state() -> None:
    pipe = pipeline(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)), (torch.ones(2, 4),), num_stages=2)
    stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    assert Schedule1F1B(stages, 2, F.mse_loss).random_numbers == "per_stage"


def test_dropout_in_a_forward_hook_is_the_same_for_any_cut() -> None:
    """A hook of a module that is not cut was not traced, and the model was taken for one that draws nothing."""
    losses = []
    for stages in (1, 2, 3):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for layer in model:
            layer.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.5, module.training))
        pipe = pipeline(model, (torch.ones(2, 4),), num_stages=stages)
        built = [pipe.build_stage(index, "cpu") for index in range(stages)]
        schedule = Schedule1F1B(built, 4, F.mse_loss)
        schedule.step(torch.ones(8, 4), target=torch.zeros(8, 4))
        losses.append(schedule.mean_loss())
    assert losses[0] == losses[1] == losses[2]
