"""Every schedule drawn as its grid; the names, the defaults and the errors of plan_for; bubbles that are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pipecut.errors import PlanError
from pipecut.schedule import Placement
from pipecut.schedule.action import Action, Op, Rows
from pipecut.schedule.families.building import fill_early, fill_late
from pipecut.schedule.lower import add_bubbles
from pipecut.schedule.plan import Plan
from pipecut.schedule.registry import FAMILIES, known_name, plan_for, schedule, schedule_names
from tests.support.sampling import sampled

ONE_CHUNK = ("GPipe", "1F1B", "ZB-H1", "ZB-H2")
ANY_CHUNKS = ("LoopedBFS", "ForwardOnly", "Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV", "V-Half", "V-Min")
ALL_NAMES = (
    "GPipe, LoopedBFS, ForwardOnly, 1F1B, Interleaved1F1B, V-Half, V-Min, ZB-H1, ZB-H2, InterleavedZeroBubble, "
    "ZBVZeroBubble, DualPipeV"
)

PICTURES = """
GPipe ranks=3 microbatches=3
rank 0 │ 0F0 0F1 0F2 ·   ·   ·   ·   0B0 0B1 0B2
rank 1 │ ·   1F0 1F1 1F2 ·   ·   1B0 1B1 1B2 ·
rank 2 │ ·   ·   2F0 2F1 2F2 2B0 2B1 2B2 ·   ·

GPipe ranks=1 microbatches=2
rank 0 │ 0F0 0F1 0B0 0B1

1F1B ranks=4 microbatches=5
rank 0 │ 0F0 0F1 0F2 0F3 ·   ·   ·   0B0 0F4 0B1 ·   0B2 ·   0B3 ·   0B4
rank 1 │ ·   1F0 1F1 1F2 ·   ·   1B0 1F3 1B1 1F4 1B2 ·   1B3 ·   1B4 ·
rank 2 │ ·   ·   2F0 2F1 ·   2B0 2F2 2B1 2F3 2B2 2F4 2B3 ·   2B4 ·   ·
rank 3 │ ·   ·   ·   3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 ·   ·   ·

1F1B ranks=3 microbatches=2
rank 0 │ 0F0 0F1 ·   ·   ·   0B0 ·   0B1
rank 1 │ ·   1F0 1F1 ·   1B0 ·   1B1 ·
rank 2 │ ·   ·   2F0 2B0 2F1 2B1 ·   ·

LoopedBFS ranks=2 microbatches=3 chunks=2
rank 0 │ 0F0 0F1 0F2 2F0 2F1 2F2 ·   ·   2B2 2B1 2B0 0B2 0B1 0B0
rank 1 │ ·   1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0 ·

Interleaved1F1B ranks=2 microbatches=4 chunks=2
rank 0 │ 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ·   2B2 ·   2B3 0B2 0B3
rank 1 │ ·   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ·

Interleaved1F1B ranks=2 microbatches=5 chunks=2
rank 0 │ 0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 ·   0B2 ·   2B3 2B4 0B3 0B4
rank 1 │ ·   1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4 ·

Interleaved1F1B ranks=2 microbatches=2 chunks=3
rank 0 │ 0F0 0F1 2F0 2F1 4F0 4F1 ·   4B0 ·   4B1 2B0 2B1 0B0 0B1
rank 1 │ ·   1F0 1F1 3F0 3F1 5F0 5B0 5F1 5B1 3B0 3B1 1B0 1B1 ·

InterleavedZeroBubble ranks=2 microbatches=4 chunks=2
rank 0 │ 0F0 0F1 2F0 2F1 ·   2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
rank 1 │ ·   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

InterleavedZeroBubble ranks=2 microbatches=3 chunks=2
rank 0 │ 0F0 0F1 0F2 2F0 2F1 ·   2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
rank 1 │ ·   1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2

ZBVZeroBubble ranks=2 microbatches=4
rank 0 │ 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 ·
rank 1 │ ·   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

ZBVZeroBubble ranks=3 microbatches=2
rank 0 │ 0F0 0F1 ·   ·   ·   5F0 5I0 5W0 5F1 5I1 5W1 ·   ·   0I0 0W0 ·   0I1 0W1
rank 1 │ ·   1F0 1F1 ·   4F0 ·   4F1 4I0 4W0 ·   4I1 4W1 1I0 1W0 ·   1I1 1W1 ·
rank 2 │ ·   ·   2F0 3F0 2F1 3F1 ·   ·   3I0 3W0 2I0 2W0 3I1 3W1 2I1 2W1 ·   ·

DualPipeV ranks=1 microbatches=2
rank 0 │ 0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1

ForwardOnly ranks=3 microbatches=2
rank 0 │ 0F0 0F1 ·   ·
rank 1 │ ·   1F0 1F1 ·
rank 2 │ ·   ·   2F0 2F1

ForwardOnly ranks=2 microbatches=2 chunks=2
rank 0 │ 0F0 0F1 2F0 2F1 ·
rank 1 │ ·   1F0 1F1 3F0 3F1

ZB-H1 ranks=3 microbatches=5
rank 0 │ 0F0 0F1 0F2 ·   ·   0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0I3 0W3 0I4 0W4
rank 1 │ ·   1F0 1F1 ·   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1I4 1W3 1W4
rank 2 │ ·   ·   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2F4 2I4 2W2 2W3 2W4

ZB-H1 ranks=3 microbatches=2
rank 0 │ 0F0 0F1 ·   ·   ·   0I0 0W0 0I1 0W1
rank 1 │ ·   1F0 1F1 ·   1I0 ·   1I1 1W0 1W1
rank 2 │ ·   ·   2F0 2I0 2F1 2I1 2W0 2W1 ·

ZB-H2 ranks=3 microbatches=6
rank 0 │ 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 ·   ·
rank 1 │ ·   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5 ·
rank 2 │ ·   ·   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5

ZB-H2 ranks=3 microbatches=2
rank 0 │ 0F0 0F1 ·   ·   ·   0I0 0W0 0I1 0W1
rank 1 │ ·   1F0 1F1 ·   1I0 ·   1I1 1W0 1W1
rank 2 │ ·   ·   2F0 2I0 2F1 2I1 2W0 2W1 ·

V-Half ranks=1 microbatches=2
rank 0 │ 0F0 1F0 1I0 0I0 1W0 0F1 0W0 1F1 1I1 0I1 1W1 0W1

V-Half ranks=2 microbatches=3
rank 0 │ 0F0 0F1 ·   3F0 3I0 3W0 3F1 0F2 0I0 0W0 3I1 3W1 3F2 0I1 3I2 0W1 3W2 0I2 0W2
rank 1 │ ·   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1W1 2I2 1I2 2W2 1W2

V-Min ranks=2 microbatches=2
rank 0 │ 0F0 0F1 ·   3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1
rank 1 │ ·   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1

V-Min ranks=4 microbatches=2
rank 0 │ 0F0 0F1 ·   ·   ·   ·   ·   7F0 7I0 7F1 7I1 7W0 7W1 ·   ·   0I0 0W0 0I1 0W1
rank 1 │ ·   1F0 1F1 ·   ·   ·   6F0 ·   6F1 6I0 6W0 6I1 6W1 ·   1I0 1W0 1I1 1W1 ·
rank 2 │ ·   ·   2F0 2F1 ·   5F0 ·   5F1 ·   ·   5I0 5W0 5I1 2I0 2W0 2I1 5W1 2W1 ·
rank 3 │ ·   ·   ·   3F0 4F0 3F1 4F1 ·   ·   ·   ·   4I0 3I0 4I1 3I1 4W0 3W0 4W1 3W1
"""
DUALPIPE_V = """
rank 0 │ 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2
rank 1 │ ·   1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B (2F3;1B1)OVERLAP_F_B

rank 0 │ (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3
rank 1 │ 2B2                  1B2 2I3 1I3 2W3 1W3
"""


def _pictures() -> list[tuple[str, str]]:
    return [(head, grid) for head, _, grid in (part.partition("\n") for part in PICTURES.strip().split("\n\n"))]


@pytest.mark.parametrize(("head", "grid"), _pictures())
def test_grid(head: str, grid: str) -> None:
    name, *sizes = head.split()
    plan = plan_for(name, **{size: int(number) for size, number in (each.split("=") for each in sizes)})
    assert plan.grid() == grid
    assert plan.validate() is plan


def test_grid_with_pairs_that_overlap() -> None:
    plan = plan_for("DualPipeV", ranks=2, microbatches=4)
    assert plan.grid(width=100) == DUALPIPE_V.strip()
    assert plan.validate() is plan


def test_every_schedule_is_drawn() -> None:
    assert {head.split()[0] for head, _ in _pictures()} == set(schedule_names())


@pytest.mark.parametrize("name", schedule_names())
def test_a_plan_comes_from_integers(name: str) -> None:
    plan = plan_for(name, ranks=3, microbatches=8)
    assert plan == FAMILIES[name].plan(3, 8)
    assert (plan.name, plan.ranks, plan.microbatches) == (name, 3, 8)
    assert plan.training is (name != "ForwardOnly")
    assert not plan.has_transfers
    assert all(isinstance(action, Action) for row in plan.actions for action in row), "a bubble"


@pytest.mark.parametrize("name", schedule_names())
def test_the_same_integers_give_the_same_plan(name: str) -> None:
    assert FAMILIES[name].plan(4, 9).actions == FAMILIES[name].plan(4, 9).actions


def test_names() -> None:
    assert ", ".join(schedule_names()) == ALL_NAMES
    assert all(FAMILIES[name].name == name for name in schedule_names())


def test_default_chunks() -> None:
    for name in schedule_names():
        chunks = 1 if name in (*ONE_CHUNK, "ForwardOnly") else 2
        placement = Placement.v(3) if name in V_SHAPED else Placement.loop(3, chunks)
        assert plan_for(name, ranks=3, microbatches=6).placement == placement
        assert plan_for(name, ranks=3, microbatches=6, chunks=chunks) == plan_for(name, ranks=3, microbatches=6)


@pytest.mark.parametrize("name", ANY_CHUNKS)
@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_any_chunks(name: str, chunks: int) -> None:
    assert plan_for(name, ranks=2, microbatches=3, chunks=chunks).placement == Placement.loop(2, chunks)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("gpipe", "GPipe"),
        ("1f1b", "1F1B"),
        ("ScheduleGPipe", "GPipe"),
        ("Schedule1F1B", "1F1B"),
        ("ScheduleInterleaved1F1B", "Interleaved1F1B"),
        ("ScheduleLoopedBFS", "LoopedBFS"),
        ("ScheduleInterleavedZeroBubble", "InterleavedZeroBubble"),
        ("schedulezbvzerobubble", "ZBVZeroBubble"),
        ("ScheduleDualPipeV", "DualPipeV"),
        ("ScheduleForwardOnly", "ForwardOnly"),
        ("zb-h1", "ZB-H1"),
        ("ZBH2", "ZB-H2"),
        ("v_half", "V-Half"),
        ("VMin", "V-Min"),
    ],
)
def test_ways_to_write_a_name(written: str, name: str) -> None:
    assert plan_for(written, ranks=2, microbatches=4).name == name


@pytest.mark.parametrize(
    ("name", "offer"),
    [
        ("GPip", " Did you mean 'GPipe'?"),
        ("gpip", " Did you mean 'GPipe'?"),
        ("ZB-V", " Did you mean 'ZBVZeroBubble'?"),
        ("zb", " Did you mean 'ZB-H1' or 'ZB-H2' or 'ZBVZeroBubble'?"),
        ("Interleave1F1B", " Did you mean 'Interleaved1F1B' or 'InterleavedZeroBubble'?"),
        ("_ScheduleForwardOnly", " Did you mean 'ForwardOnly'?"),
        ("Hanayo", ""),
        ("", ""),
        (7, ""),
    ],
)
def test_unknown_name(name: str, offer: str) -> None:
    with pytest.raises(PlanError) as error:
        plan_for(name, ranks=2, microbatches=2)
    assert str(error.value) == f"Unknown schedule name {name!r}.{offer} Known are {ALL_NAMES}."


@pytest.mark.parametrize("size", ["ranks", "microbatches", "chunks"])
@pytest.mark.parametrize("value", [0, -2, 2.5, "4", True])
@pytest.mark.parametrize("name", schedule_names())
def test_sizes_that_are_none(name: str, size: str, value: int) -> None:
    sizes = {"ranks": 2, "microbatches": 4, size: value}
    with pytest.raises(PlanError) as error:
        plan_for(name, **sizes)
    assert str(error.value) == f"{size}={value!r}: give an integer number of {size}, 1 or more."


@pytest.mark.parametrize("name", schedule_names())
def test_sizes_that_are_none_without_a_name(name: str) -> None:
    make = FAMILIES[name].plan
    with pytest.raises(PlanError, match=r"^ranks='4': give an integer number of ranks, 1 or more\.$"):
        make("4", 8)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^microbatches=0: give an integer number of microbatches, 1 or more\.$"):
        make(4, 0)


@pytest.mark.parametrize(
    ("name", "fits", "chunks"), [(name, 1, 2) for name in ONE_CHUNK] + [(name, 2, 3) for name in V_SHAPED]
)
def test_chunks_that_do_not_fit(name: str, fits: int, chunks: int) -> None:
    with pytest.raises(PlanError) as error:
        plan_for(name, ranks=2, microbatches=4, chunks=chunks)
    assert str(error.value) == (
        f"chunks={chunks} does not fit {name}, which has {fits} on each rank: leave chunks out, or take a "
        "schedule with any number of chunks (LoopedBFS, ForwardOnly, Interleaved1F1B, InterleavedZeroBubble)."
    )


def test_too_few_microbatches_for_dualpipe_v() -> None:
    with pytest.raises(ValueError, match="DualPipeV") as error:
        plan_for("DualPipeV", ranks=4, microbatches=7)
    assert isinstance(error.value, PlanError)
    assert str(error.value) == (
        "DualPipeV on 4 ranks cannot run 7 microbatches: give 8 or more, at least one for each of its stages, or take "
        "ZBVZeroBubble, which runs any number."
    )


@pytest.fixture
def registry() -> Iterator[None]:
    """The registry, without what a test adds afterwards."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


def _one_at_a_time(placement: Placement, microbatches: int) -> Rows:
    """Run one microbatch after the other."""
    ops = (Op.FORWARD, Op.FULL_BACKWARD)
    return tuple(
        tuple(Action(rank, op, microbatch) for microbatch in range(microbatches) for op in ops)
        for rank in range(placement.ranks)
    )


@pytest.mark.usefixtures("registry")
def test_a_family_is_one_decorated_function() -> None:
    assert schedule("One-at-a-time")(_one_at_a_time) is _one_at_a_time
    for name in ("One-at-a-time", "one at a time", "ScheduleOneatatime"):
        plan = plan_for(name, ranks=2, microbatches=2).validate()
        assert plan.name == "One-at-a-time"
        assert plan.grid() == ("rank 0 │ 0F0 ·   ·   0B0 0F1 ·   ·   0B1\nrank 1 │ ·   1F0 1B0 ·   ·   1F1 1B1 ·")
    assert schedule_names()[-1] == "One-at-a-time"
    family = FAMILIES[known_name("oneatatime")]
    assert (family.class_name, family.summary) == ("ScheduleOneatatime", "Run one microbatch after the other.")
    assert (family.chunks, family.any_chunks, family.training, family.forbids_compiled) == (1, False, True, False)


@pytest.mark.usefixtures("registry")
def test_a_name_is_registered_once() -> None:
    schedule("One-at-a-time")(_one_at_a_time)
    schedule("One-at-a-time", chunks=2)(_one_at_a_time)  # a cell of a notebook that is run again
    for name, known in (("ScheduleZBH1", "ZB-H1"), ("oneatatime", "One-at-a-time")):
        with pytest.raises(PlanError) as error:
            schedule(name)(lambda placement, microbatches: ())
        assert str(error.value) == f"There is a schedule named '{known}' already: give '{name}' another name."


@pytest.mark.parametrize("fill", [fill_early, fill_late])
def test_a_plan_that_cannot_run_is_not_filled(fill: Callable[[Plan, int], Plan]) -> None:
    plan = Plan.from_actions([["0I0", "0F0", "0W0"], ["1F0", "1W0", "1I0"]], name="backwards first")
    with pytest.raises(PlanError) as error:
        fill(plan, 0)
    assert str(error.value).startswith("The plan 'backwards first' cannot run: no rank can proceed at slot ")
    assert str(error.value).endswith(". Call plan.validate() for the reason.")


# Bubbles with every pass one step long. A B counts one step too, so only schedules with F, I and W are asked.


def _steps(plan: Plan) -> int:
    return max(map(len, add_bubbles(plan).actions))


def _waits(plan: Plan) -> int:
    """The most steps that a rank waits between its first pass and its last."""
    found = 0
    for row in add_bubbles(plan).actions:
        busy = [step for step, action in enumerate(row) if action is not None]
        found = max(found, busy[-1] - busy[0] + 1 - len(busy))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_bubbles_of_the_zero_bubble_schedules(ranks: int, rounds: int) -> None:
    for microbatches in (rounds * ranks, rounds * ranks + 1):
        h1, h2, v = (FAMILIES[name].plan(ranks, microbatches) for name in ("ZB-H1", "ZB-H2", "ZBVZeroBubble"))
        assert _steps(h1) == _steps(h2) == 3 * microbatches + ranks - 1
        if microbatches >= 2 * ranks - 1:
            assert _waits(h2) == 0
            assert _waits(v) == 0


@pytest.mark.parametrize("ranks", sampled([*range(1, 13), 16, 24], lambda ranks: ranks in (1, 2, 3, 7, 12)))
def test_no_plan_with_the_memory_of_v_half_or_v_min_is_shorter(ranks: int) -> None:
    """The last rank waits for its first forward, then for the first gradient, and at the end for the last one."""
    for name, limit in (("V-Half", 2 * ((ranks + 2) // 2)), ("V-Min", 2 * ((ranks + 4) // 3))):
        idle = ranks - 1 + max(0, 2 * ranks - limit) + max(0, 3 * ranks - 2 * limit)
        for microbatches in (ranks, ranks + 1, 2 * ranks, 3 * ranks + 1):
            plan = plan_for(name, ranks=ranks, microbatches=microbatches)
            assert _steps(plan) == 6 * microbatches + idle


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize("rounds", [2, 4])
def test_v_half_and_v_min_wait_less_than_1f1b(ranks: int, rounds: int) -> None:
    microbatches = rounds * ranks
    of_1f1b = 6 * (ranks - 1)  # a forward of a whole rank is two steps, a backward four
    for name, part in (("V-Half", 1 / 2), ("V-Min", 2 / 3)):
        plan = plan_for(name, ranks=ranks, microbatches=microbatches)
        assert _steps(plan) - 6 * microbatches < of_1f1b * part


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_uneven_rounds_cost_nothing(ranks: int, chunks: int) -> None:
    """Any number of microbatches from one per rank on: the pipeline fills and drains in one slot per rank."""
    for microbatches in range(ranks, 4 * ranks):
        plan = plan_for("InterleavedZeroBubble", ranks=ranks, microbatches=microbatches, chunks=chunks)
        assert _steps(plan) == 3 * chunks * microbatches + ranks - 1
