"""When computations start and end: small plans drawn in time, and random plans against a slow simulator."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecut.errors import PlanError
from pipecut.schedule import Placement
from pipecut.schedule.action import SENDS, Action, Op, overlap
from pipecut.schedule.costs import Costs, Link
from pipecut.schedule.plan import Plan
from pipecut.schedule.plan_text import table
from pipecut.schedule.registry import plan_for, schedule_names
from pipecut.schedule.report import Idle, Report, Span
from pipecut.schedule.rules import GIVES, Dataflow, dependencies
from pipecut.schedule.simulate import simulate
from tests.schedule.mutations import mutated
from tests.schedule.random_plans import Shape, random_plan
from tests.support.properties import examples


def plan_of(*rows: str, **given: Any) -> Plan:
    """A plan from one text per rank."""
    return Plan.from_actions([row.split() for row in rows], **given)


def drawn(report: Report) -> str:
    """The timeline, one column a unit of time: the action where it starts, then dashes."""
    rows = []
    for spans in report.timeline.by_rank:
        row = ["·"] * int(report.makespan)
        for _, action, start, end in spans:
            for time in range(int(start), int(end)):
                row[time] = "-"
            row[int(start)] = repr(action)
        rows.append(row)
    return table(rows)


def looks(report: Report, picture: str) -> bool:
    """Whether a report is drawn as in the picture, whatever the widths of its columns."""
    expected = [line.split() for line in picture.strip().splitlines()]
    assert [line.split() for line in drawn(report).splitlines()] == expected, "\n" + drawn(report)
    return True


def chain(report: Report) -> str:
    """The actions of the critical path."""
    return " ".join(repr(span.action) for span in report.critical_path)


ONE_F_ONE_B = plan_of("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2", name="small 1F1B")


# ---------------------------------------------------------------- drawn in time


def test_a_rank_runs_in_order_and_waits_for_the_other() -> None:
    assert looks(
        simulate(ONE_F_ONE_B),
        """
        rank 0 │ 0F0 0F1 ·   ·   0B0 -   0F2 0B1 -   ·   0B2 -
        rank 1 │ ·   1F0 1B0 -   1F1 1B1 -   1F2 1B2 -   ·   ·
        """,
    )


def test_messages_travel_while_both_ranks_go_on() -> None:
    assert looks(
        simulate(ONE_F_ONE_B, Costs(transfer=1)),
        """
        rank 0 │ 0F0 0F1 · ·   ·   ·   0B0 -   0F2 0B1 - ·   ·   ·   0B2 -
        rank 1 │ ·   ·   1F0 1B0 - 1F1 1B1 - · · 1F2 1B2 - ·   ·   ·
        """,
    )


def test_a_message_between_stages_of_one_rank_takes_nothing() -> None:
    plan = plan_of("0F0 3F0", "1F0 2F0", placement=Placement.v(ranks=2))
    assert looks(
        simulate(plan, Costs(forward=2, transfer=2)),
        """
        rank 0 │ 0F0 ·   ·   ·   ·   ·   ·   3F0
        rank 1 │ ·   ·   ·   1F0 2F0 ·   ·   ·
        """,
    )


def test_each_stage_takes_its_own_time() -> None:
    plan = plan_of("0F0 0F1 0I0 0W0 0B1", "1F0 1B0 1F1 1I1 1W1")
    costs = Costs(forward=[1, 2], backward_input=[1, 2], backward_weight=[2, 1], full_backward=[4, 2])
    assert looks(
        simulate(plan, costs),
        """
        rank 0 │ 0F0 0F1 · · · 0I0 0W0 - · 0B1 - - -
        rank 1 │ · 1F0 - 1B0 - 1F1 - 1I1 - 1W1 · · ·
        """,
    )


def test_the_parts_of_an_overlap_run_one_after_the_other_and_their_values_leave_together() -> None:
    plan = Plan.from_actions(
        {0: ["0F0", "0F1", "0B0", "0B1"], 1: ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"]}, name="overlapped"
    )
    report = simulate(plan)
    assert looks(
        report,
        """
        rank 0 │ 0F0 0F1 · · · 0B0 - 0B1 -
        rank 1 │ · 1F0 (1F1;1B0)OVERLAP_F_B - - 1B1 - · ·
        """,
    )
    assert report.peak_memory == (2, 2)


def test_a_skip_is_waited_for_as_well_and_may_come_last() -> None:
    plan = plan_of("0F0", "1F0", "2F0", dataflow=Dataflow.chain(3, skips=[(0, 2)]))
    slow_skip = {(0, 1): 0, (1, 2): 0, (0, 2): 4}
    assert looks(
        simulate(plan, Costs(transfer=slow_skip)),
        """
        rank 0 │ 0F0 · · · · ·
        rank 1 │ · 1F0 · · · ·
        rank 2 │ · · · · · 2F0
        """,
    )


def test_an_input_of_the_model_leaves_at_the_start() -> None:
    two_towers = Dataflow(3, frozenset({(0, 2), (1, 2)}), frozenset(), root_inputs=frozenset({1}))
    plan = plan_of("0F0 0F1", "1F0 1F1", "2F0 2F1", dataflow=two_towers)
    assert looks(
        simulate(plan, Costs(forward=[4, 1, 1], transfer={(0, 1): 1, (0, 2): 0, (1, 2): 0})),
        """
        rank 0 │ 0F0 - - - 0F1 - - - ·
        rank 1 │ · 1F0 1F1 · · · · · ·
        rank 2 │ · · · · 2F0 · · · 2F1
        """,
    )


def test_an_input_of_the_model_with_a_send_of_its_own_leaves_at_the_turn_of_the_send() -> None:
    two_towers = Dataflow(3, frozenset({(0, 2), (1, 2)}), frozenset(), root_inputs=frozenset({1}))
    sends = "0F0 0SEND_F0 0SEND_F0->2", "1RECV_F0 1F0 1SEND_F0", "2RECV_F0<-0 2RECV_F0 2F0"
    plan = plan_of(*sends, placement=Placement.loop(3), dataflow=two_towers).validate()
    assert looks(
        simulate(plan, Costs(forward=[4, 1, 1])),
        """
        rank 0 │ 0F0 - - - · ·
        rank 1 │ · · · · 1F0 ·
        rank 2 │ · · · · · 2F0
        """,
    )


def test_a_send_that_is_put_off_leaves_at_its_turn() -> None:
    plan = plan_of("0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1")
    assert looks(
        simulate(plan),
        """
        rank 0 │ 0F0 0F1 · ·
        rank 1 │ · · 1F0 1F1
        """,
    )


def test_receives_stand_anywhere_before_their_use() -> None:
    early = plan_of("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1")
    late = plan_of("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1")
    assert simulate(early).timeline.spans == simulate(late).timeline.spans


def test_the_sum_of_a_tie_takes_as_long_as_its_messages() -> None:
    """Rank 1 ends at 5 and waits for rank 0. Each way a word (1) and the gradient (1 + 10 / 2), and the same back."""
    flow = Dataflow.chain(2, ties=[{0, 1}])
    plan = plan_of("0F0 0B0 0REDUCE_TIES0", "1F0 1B0 1REDUCE_TIES0", dataflow=flow)
    report = simulate(plan, Costs(transfer=Link(1, 2), message_bytes=0, tie_bytes=[10]))
    sums = [(span.rank, span.start, span.end) for span in report.timeline if span.action.op is Op.REDUCE_TIES]
    assert sums == [(0, 8.0, 22.0), (1, 8.0, 22.0)]
    assert report.makespan == 22
    assert report.critical_path[-1].action.op is Op.REDUCE_TIES
    assert report.peak_memory == (1, 1)
    assert [busy + idle.total for busy, idle in zip(report.busy, report.idle, strict=True)] == [22, 22]


def test_tie_bytes_are_checked() -> None:
    plan = plan_of("0F0 0B0", "1F0 1B0", dataflow=Dataflow.chain(2, ties=[{0, 1}]))
    with pytest.raises(PlanError, match=r"tie_bytes has no value for tie 0: the plan 'custom' has 1 ties; give one"):
        simulate(plan, Costs(tie_bytes=[]))
    with pytest.raises(PlanError, match=r"tie_bytes\[0\]=-1 is negative: give 0 or more"):
        Costs(tie_bytes=[-1])


def test_the_sum_of_a_tie_waits_for_all_its_ranks() -> None:
    flow = Dataflow.chain(3, ties=[{0, 1}])
    rows = "0F0 0B0 0REDUCE_TIES0", "1F0 1B0 1REDUCE_TIES0 2F0 2B0"
    plan = plan_of(*rows, placement=Placement.explicit([0, 1, 1]), dataflow=replace(flow, gradients=frozenset()))
    report = simulate(plan, Costs(forward=[1, 1, 1], backward_input=[3, 1, 1], backward_weight=[3, 0, 0]))
    assert looks(
        report,
        """
        rank 0 │ 0F0 0B0 - - - - - · ·
        rank 1 │ · 1F0 1B0 · · · · 2F0 2B0
        """,
    )
    assert report.idle[1] == Idle(start=1, forward=0, backward=4, transfer=0, end=0)
    assert chain(report) == "0F0 0B0 2F0 2B0"


def test_sharding_takes_no_time_and_bubbles_neither() -> None:
    plain = simulate(ONE_F_ONE_B)
    bubbles = simulate(ONE_F_ONE_B.with_actions([[None, *row, None] for row in ONE_F_ONE_B.actions]))
    assert simulate(ONE_F_ONE_B.lower(max_held=1)).timeline.spans == plain.timeline.spans == bubbles.timeline.spans


def test_links_and_bytes() -> None:
    plan = plan_of("0F0 0B0", "1F0 1B0")
    report = simulate(plan, Costs(transfer=Link(latency=1, bandwidth=2), message_bytes={(0, 1): 4}))
    assert report.makespan == 1 + 3 + 1 + 2 + 3 + 2


# ---------------------------------------------------------------- the report


def test_what_a_report_says() -> None:
    report = simulate(ONE_F_ONE_B)
    assert report.plan is ONE_F_ONE_B
    assert report.costs == Costs()
    assert report.makespan == 12
    assert report.busy == (9, 9)
    assert report.bubble_rate == report.bubble_rate_makespan == 0.25
    assert report.peak_memory == (2, 1)
    assert report.idle == (Idle(0, 0, 3, 0, 0), Idle(1, 0, 0, 0, 2))
    assert report.timeline.name == "small 1F1B"


def test_the_bubble_rate_by_own_span_is_smaller_when_ranks_start_late_and_end_early() -> None:
    report = simulate(plan_of("0F0 0F1", "1F0 1F1"))
    assert report.makespan == 3
    assert report.bubble_rate == 0
    assert report.bubble_rate_makespan == pytest.approx(1 / 3)


def test_the_bubble_rate_counts_the_mean_work_of_unequal_ranks() -> None:
    report = simulate(plan_of("0F0", "1F0"), Costs(forward=[1, 3]))
    assert report.bubble_rate == pytest.approx(1 - 2 / 3)
    assert report.bubble_rate_makespan == pytest.approx(1 - 2 / 4)


def test_idle_time_by_cause() -> None:
    """Rank 0 waits 2 while the gradient is on the wire and 4 while it is computed; rank 1 waits for 0F1."""
    plan = plan_of("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    report = simulate(plan, Costs(forward=[3, 1], full_backward=[1, 2], transfer=2))
    assert looks(
        report,
        """
        rank 0 │ 0F0 - - 0F1 - - · · · · · · · 0B0 · 0B1
        rank 1 │ · · · · · 1F0 · · 1F1 1B0 - 1B1 - · · ·
        """,
    )
    assert report.idle[0] == Idle(start=0, forward=0, backward=5 + 0, transfer=2 + 1, end=0)
    assert report.idle[1] == Idle(start=5, forward=0, backward=0, transfer=2, end=3)


def test_the_longest_chain() -> None:
    report = simulate(ONE_F_ONE_B, Costs(transfer=1))
    assert chain(report) == "0F0 1F0 1B0 0B0 0F2 1F2 1B2 0B2"


def test_a_report_for_a_person() -> None:
    report = simulate(ONE_F_ONE_B, Costs(transfer=0.5))
    assert str(report) == dedent(PRINTED).strip()


PRINTED = """
    small 1F1B: 2 ranks, 2 stages, 3 microbatches
    makespan 14
    bubble rate 35.71% by each rank's own span, 35.71% by the makespan
    critical path of 8 computations, from 0F0 on rank 0 to 0B2 on rank 0
         │      │              idle by cause               │
    rank │ busy │ start  forward  backward  transfer   end │ peak memory
       0 │    9 │     0        0         4         1     0 │           2
       1 │    9 │   1.5      0.5         0       0.5   2.5 │           1
    mean │    9 │  0.75     0.25         2      0.75  1.25 │         1.5
"""


def test_an_empty_rank_is_idle_to_the_end() -> None:
    report = simulate(plan_of("0F0", "", "1F0", placement=Placement((0, 2))))
    assert report.busy == (1, 0, 1)
    assert report.idle[1] == Idle(0, 0, 0, 0, end=2)
    assert report.peak_memory == (1, 0, 1)


def test_work_that_takes_no_time_at_all() -> None:
    report = simulate(ONE_F_ONE_B, Costs(forward=0, backward_input=0, backward_weight=0))
    assert (report.makespan, report.bubble_rate, report.bubble_rate_makespan) == (0, 0, 0)
    assert len(report.timeline) == 12
    assert report.critical_path[-1].end == 0
    assert str(report).startswith("small 1F1B")


def test_memory_goes_up_at_the_start_of_a_forward_and_down_at_the_end_of_a_backward() -> None:
    plan = plan_of("0F0 0F1 0I0 0F2 0W0 0I1 0I2 0W1 0W2")
    costs = Costs(memory_forward=10, memory_backward_input=-4, memory_backward_weight=-6)
    assert simulate(plan, costs).peak_memory == (10 + 10 - 4 + 10,)


def test_memory_of_stages_that_share_a_rank() -> None:
    plan = plan_of("0F0 1F0 1B0 0B0")
    assert simulate(plan).peak_memory == (1,), "a rank's stages share what a plain number says"
    assert simulate(plan, Costs(memory_forward=[2, 5], memory_backward_weight=[-2, -5])).peak_memory == (7,)


# ---------------------------------------------------------------- what is refused


def refused(plan: Plan, costs: Any = None) -> str:
    with pytest.raises(PlanError) as error:
        simulate(plan, costs)
    return str(error.value)


def test_a_plan_that_waits_for_itself() -> None:
    assert refused(plan_of("0B0 0F0", "1F0 1B0", name="circle")) == (
        "The plan 'circle' cannot run past 0B0 on rank 0 (slot 0). Call plan.validate() for the reason."
    )


def test_messages_that_never_meet() -> None:
    plan = plan_of("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1", name="crossed")
    assert refused(plan) == (
        "The plan 'crossed' cannot run past 0SEND_F0 on rank 0 (slot 1). Call plan.validate() for the reason."
    )


LOOP = Placement.loop(2)


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        (["0F0 2F0", "1F0"], "rank 0 cannot do 2F0"),
        (["0F0 1F0", ""], "rank 0 cannot do 1F0"),
        (["0F0 0F1", "1F0"], "rank 0 cannot do 0F1"),
        (["0F0 2UNSHARD", "1F0"], "rank 0 cannot do 2UNSHARD"),
        (["0F0 1UNSHARD", "1F0"], "rank 0 cannot do 1UNSHARD"),
        (["0F0 0REDUCE_TIES0", "1F0"], "rank 0 cannot do 0REDUCE_TIES0"),
        (["0F0 0SEND_F0->3", "1F0"], "rank 0 cannot do 0SEND_F0->3"),
        (["0F0 0SEND_B0->1", "1F0"], "rank 0 cannot do 0SEND_B0->1"),
        (["0F0", "1F0 (1B0;1F3)OVERLAP_F_B"], "rank 1 cannot do (1B0;1F3)OVERLAP_F_B"),
    ],
)
def test_actions_that_the_plan_does_not_have(rows: list[str], where: str) -> None:
    plan = Plan.from_actions([row.split() for row in rows], placement=LOOP, microbatches=1, dataflow=Dataflow.chain(2))
    assert refused(plan) == f"The plan 'custom' cannot run: {where} (slot 1). Call plan.validate() for the reason."


@pytest.mark.parametrize(
    "action",
    [
        Action(0, Op.FORWARD),
        Action(0, Op.FORWARD, -1),
        Action(-1, Op.FORWARD, 0),
        Action(0, Op.FORWARD, 0, peer=1),
        Action(-1, Op.OVERLAP_F_B),
        overlap(Action(0, Op.UNSHARD), Action(0, Op.RESHARD)),
        overlap(Action(0, Op.FORWARD, 0), Action(0, Op.SEND_F, 0)),
    ],
)
def test_actions_that_have_no_text(action: Action) -> None:
    plan = plan_of("0F0 0SEND_F0", "1RECV_F0 1F0")
    plan = plan.with_actions([[action], plan.actions[1]])
    assert refused(plan).startswith(f"The plan 'custom' cannot run: rank 0 cannot do {action} (slot 0).")


def test_costs_that_are_none() -> None:
    assert refused(ONE_F_ONE_B, 18.5) == (
        "costs=18.5: give Costs, as in simulate(plan, Costs(forward=18.5, transfer=0.6))."
    )


def test_costs_that_do_not_fit_the_plan() -> None:
    assert refused(ONE_F_ONE_B, Costs(forward=[1])).startswith("forward has no value for stage 1: ")
    assert refused(ONE_F_ONE_B, Costs(transfer={(0, 1): 1})) == (
        "transfer has no value for messages from rank 1 to rank 0: add transfer[(1, 0)]."
    )


# ---------------------------------------------------------------- random plans


def slow_times(plan: Plan, costs: Costs) -> list[list[tuple[Action, float, float]]]:
    """The computations of every rank with start and end: the same sum over and over, until nothing changes any more."""
    time, rank_of, flow = costs.table(plan).time, plan.placement.rank_of, plan.dataflow
    there: dict[Action, float] = {}  # when a value is made, or a message has come
    at_tie: dict[tuple[int | None, int], float] = {}
    spans: list[list[tuple[Action, float, float]]] = []

    def arrival(need: Action, stage: int) -> float:
        if rank_of[need.stage] == rank_of[stage]:
            return there.get(need, 0.0)
        send = Op.SEND_F if need.op is Op.FORWARD else Op.SEND_B
        return there.get(need, 0.0) + costs.message_time(plan.placement, send, need.stage, stage)

    def wait(leaf: Action) -> float:
        needs = dependencies(leaf, flow, plan.placement if plan.has_transfers else None)
        return max([input_arrival(leaf), *(arrival(need, leaf.stage) for need in needs)])

    def input_arrival(leaf: Action) -> float:
        if leaf.op is not Op.FORWARD or plan.has_transfers or rank_of[0] == rank_of[leaf.stage]:
            return 0.0
        alone = leaf.stage in flow.root_inputs and (0, leaf.stage) not in flow.activations
        return costs.message_time(plan.placement, Op.SEND_F, 0, leaf.stage) if alone else 0.0

    def send(action: Action, clock: float) -> None:
        travel = costs.message_time(plan.placement, action.op, action.stage, action.other_stage)
        there[action.counterpart] = clock + travel

    while True:
        before, spans = spans, []
        for rank, row in enumerate(plan.actions):
            clock, done = 0.0, []
            for action in filter(None, row):
                if action.op in SENDS:
                    send(action, clock)
                elif action.op is Op.REDUCE_TIES:
                    at_tie[action.microbatch, rank] = clock
                    clock = max(each for (tie, _), each in at_tie.items() if tie == action.microbatch)
                elif action.is_compute:
                    inside = {leaf._replace(op=gift) for leaf in action.leaves for gift in GIVES[leaf.op]}
                    for gift in inside:
                        there.pop(gift, None)
                    start = max([clock, *map(wait, action.leaves)])
                    clock = start + sum(time[leaf.op][leaf.stage] for leaf in action.leaves)
                    there.update(dict.fromkeys(inside, clock))
                    done.append((action, start, clock))
            spans.append(done)
        if spans == before:
            return spans


def random_costs(random: Random, plan: Plan) -> Costs:
    """Whole numbers, so that sums are exact; zeros too."""

    def numbers(least: int = 0) -> list[float]:
        return [random.randint(least, 9) for _ in range(plan.stages)]

    pairs = [(one, two) for one in range(plan.ranks) for two in range(plan.ranks)]
    transfers: list[Any] = [0, 2, Link(1, 2), {pair: random.randint(0, 9) for pair in pairs}]
    return Costs(
        forward=numbers(),
        backward_input=numbers(),
        backward_weight=numbers(),
        full_backward=random.choice([None, numbers()]),
        transfer=random.choice(transfers),
        message_bytes=2 * random.randint(0, 5),
        memory_forward=numbers(),
        memory_backward_input=numbers(-9),
        memory_backward_weight=numbers(-9),
    )


RANDOMS = st.builds(Random, st.integers(0, 2**32 - 1))
SHAPES = st.integers(1, 6).flatmap(
    lambda stages: st.builds(
        Shape,
        stages=st.just(stages),
        ranks=st.integers(1, min(stages, 4)),
        microbatches=st.integers(1, 3),
        training=st.sampled_from([True, True, False]),
        transfers=st.booleans(),
        upkeep=st.booleans(),
        overlaps=st.booleans(),
        straight=st.booleans(),
    )
)


@settings(max_examples=examples(100))
@given(RANDOMS, SHAPES)
def test_the_times_are_those_of_a_slow_simulator(random: Random, shape: Shape) -> None:
    plan = random_plan(random, shape)
    costs = random_costs(random, plan)
    rows = simulate(plan, costs).timeline.by_rank
    assert [[(span.action, span.start, span.end) for span in row] for row in rows] == slow_times(plan, costs)


@pytest.mark.parametrize("name", schedule_names())
def test_a_lowered_schedule_takes_the_same_times(name: str) -> None:
    plan = plan_for(name, ranks=4, microbatches=8)
    costs = Costs(forward=18.5, backward_input=18.1, backward_weight=9.3, transfer=0.6)
    assert simulate(plan.lower(max_held=1), costs).timeline.spans == simulate(plan, costs).timeline.spans


@settings(max_examples=examples(75))
@given(RANDOMS, SHAPES, st.sampled_from(["as_sent", "early", "late"]), st.sampled_from([None, 1, 2]))
def test_a_lowered_plan_takes_the_same_times(random: Random, shape: Shape, receives: str, held: int | None) -> None:
    """Inputs of the model apart: stage 0's rank sends those at a turn, not at the start."""
    plan = random_plan(random, replace(shape, transfers=False, upkeep=False))
    plan = plan.with_dataflow(replace(plan.dataflow, root_inputs=frozenset()))
    costs = random_costs(random, plan)
    lowered, plain = simulate(plan.lower(receives=receives, max_held=held), costs), simulate(plan, costs)
    assert lowered.timeline.spans == plain.timeline.spans
    assert lowered.idle == plain.idle


@settings(max_examples=examples(75))
@given(RANDOMS, SHAPES)
def test_busy_and_idle_time_make_up_the_makespan(random: Random, shape: Shape) -> None:
    plan = random_plan(random, shape)
    report = simulate(plan, random_costs(random, plan))
    for busy, idle in zip(report.busy, report.idle, strict=True):
        assert busy + idle.total == report.makespan
        assert min(idle) >= 0
    assert 0 <= report.bubble_rate <= report.bubble_rate_makespan <= 1


@settings(max_examples=examples(75))
@given(RANDOMS, SHAPES)
def test_the_longest_chain_has_no_gap_but_messages(random: Random, shape: Shape) -> None:
    plan = random_plan(random, replace(shape, upkeep=False))
    costs = random_costs(random, plan)
    report = simulate(plan, costs)
    path = report.critical_path
    assert path[-1].end == report.makespan
    assert path[0].start in first_starts(plan, costs, path[0])
    for before, after in zip(path, path[1:], strict=False):
        assert after.start - before.end in travel_times(plan, costs, before, after)


def first_starts(plan: Plan, costs: Costs, first: Span) -> set[float]:
    """When a chain may start: at once, or when an input of the model has come from the rank of stage 0."""
    inputs = {leaf.stage for leaf in first.action.leaves} & plan.dataflow.root_inputs
    return {0.0} | {costs.message_time(plan.placement, Op.SEND_F, 0, stage) for stage in inputs}


def travel_times(plan: Plan, costs: Costs, before: Span, after: Span) -> set[float]:
    """How long it may take from one computation to the next of a chain: nothing on a rank, a message between two."""
    if before.rank == after.rank:
        return {0.0}
    return {
        costs.message_time(plan.placement, op, source.stage, target.stage)
        for source in (Action(stage, Op.FORWARD, 0) for stage in plan.placement.stages_of[before.rank])
        for target in after.action.leaves
        for op in SENDS
    }


@settings(max_examples=examples(75))
@given(RANDOMS, SHAPES)
def test_the_peak_of_memory_is_the_highest_sum(random: Random, shape: Shape) -> None:
    plan = random_plan(random, shape)
    costs = random_costs(random, plan)
    memory = costs.table(plan).memory
    for rank, row in enumerate(plan.actions):
        held, peak = 0.0, 0.0
        for action in row:
            if action is not None and action.is_compute:
                changes = [memory[leaf.op][leaf.stage] for leaf in action.leaves]
                peak = max(peak, held + sum(change for change in changes if change > 0))
                held += sum(changes) if plan.training else 0
        assert simulate(plan, costs).peak_memory[rank] == peak


@pytest.mark.parametrize("overlapped", ["(0B0;0F1)OVERLAP_F_B", "(0F1;0B0)OVERLAP_F_B"])
def test_the_parts_of_an_overlap_hold_their_memory_at_the_same_time(overlapped: str) -> None:
    """The peak depended on the order in which the parts were written."""
    assert simulate(plan_of(f"0F0 {overlapped} 0B1")).peak_memory == (2.0,)


def test_a_forward_that_has_no_backward_holds_nothing_for_it() -> None:
    assert simulate(plan_of("0F0 0F1 0F2", "1F0 1F1 1F2")).peak_memory == (1.0, 1.0)


def test_rates_are_never_below_zero() -> None:
    report = simulate(plan_for("ZB-H2", ranks=2, microbatches=8), Costs(0.1, 0.1, 0.1))
    assert 0 <= report.bubble_rate < 1e-9


@settings(max_examples=examples(200))
@given(RANDOMS, SHAPES)
def test_a_broken_plan_is_simulated_or_refused_in_words(random: Random, shape: Shape) -> None:
    """A plan that validates can be simulated; one that cannot be simulated does not validate."""
    plan = mutated(random, random_plan(random, shape))
    try:
        report = simulate(plan)
    except PlanError:
        with pytest.raises(PlanError):
            plan.validate()
    else:
        written = [action for row in plan.actions for action in row if action is not None and action.is_compute]
        assert sorted(map(repr, written)) == sorted(repr(span.action) for span in report.timeline)
