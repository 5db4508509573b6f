"""Loop, V and any other map of stages to ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecut.errors import PlanError
from pipecut.schedule import Placement


def test_loop() -> None:
    placement = Placement.loop(ranks=3, chunks=2)
    assert placement.rank_of == (0, 1, 2, 0, 1, 2)
    assert placement.stages_of == ((0, 3), (1, 4), (2, 5))
    assert (placement.stages, placement.ranks) == (6, 3)
    assert Placement.loop(ranks=3).rank_of == (0, 1, 2)


def test_v() -> None:
    placement = Placement.v(ranks=3)
    assert placement.rank_of == (0, 1, 2, 2, 1, 0)
    assert placement.stages_of == ((0, 5), (1, 4), (2, 3))
    assert Placement.v(ranks=2, chunks=3).rank_of == (0, 1, 1, 0, 0, 1)
    assert Placement.v(ranks=2, chunks=1) == Placement.loop(ranks=2)
    assert Placement.v(ranks=1, chunks=2) == Placement.loop(ranks=1, chunks=2)


@given(st.integers(1, 9), st.integers(1, 5))
def test_every_rank_holds_one_stage_of_every_chunk(ranks: int, chunks: int) -> None:
    for make in (Placement.loop, Placement.v):
        placement = make(ranks=ranks, chunks=chunks)
        assert (placement.ranks, placement.stages) == (ranks, ranks * chunks)
        assert all(len(stages) == chunks for stages in placement.stages_of)
        for rank, stages in enumerate(placement.stages_of):
            assert [placement.rank_of[stage] for stage in stages] == [rank] * chunks
            assert [stage // ranks for stage in stages] == list(range(chunks))


@given(st.integers(1, 9), st.integers(2, 5))
def test_where_chunks_meet_a_v_stays_on_its_rank_and_a_loop_goes_back(ranks: int, chunks: int) -> None:
    v, loop = Placement.v(ranks=ranks, chunks=chunks), Placement.loop(ranks=ranks, chunks=chunks)
    for last in range(ranks - 1, ranks * chunks - 1, ranks):
        assert v.rank_of[last] == v.rank_of[last + 1]
        assert (loop.rank_of[last], loop.rank_of[last + 1]) == (ranks - 1, 0)


@pytest.mark.parametrize("given_as", [{2: 1, 0: 0, 1: 0, 3: 1, 4: 0}, [0, 0, 1, 1, 0], (0, 0, 1, 1, 0)])
def test_explicit(given_as: Mapping[int, int] | Sequence[int]) -> None:
    placement = Placement.explicit(given_as)
    assert placement.rank_of == (0, 0, 1, 1, 0)
    assert placement.stages_of == ((0, 1, 4), (2, 3))


@pytest.mark.parametrize(
    ("given_as", "wrong"),
    [
        ({0: 0, 2: 1}, "no stage 1: number the stages"),
        ({1: 0}, "no stage 0: number the stages"),
        ({-1: 0, 0: 0}, "stage -1: number the stages"),
        ([0, 2], "no rank 1: number the ranks"),
        ([1, 1], "no rank 0: number the ranks"),
        ([0, -1], "rank -1: number the ranks"),
        ({}, "no stage 0: number the stages"),
        ([], "no stage 0: number the stages"),
    ],
)
def test_an_explicit_placement_has_no_gaps(given_as: Mapping[int, int] | Sequence[int], wrong: str) -> None:
    with pytest.raises(PlanError) as error:
        Placement.explicit(given_as)
    assert str(error.value) == f"The placement has {wrong} 0, 1, 2... without gaps."


@pytest.mark.parametrize("make", [Placement.loop, Placement.v])
@pytest.mark.parametrize(
    ("ranks", "chunks", "message"),
    [
        (0, 1, "ranks=0: give an integer number of ranks, 1 or more."),
        (-2, 1, "ranks=-2: give an integer number of ranks, 1 or more."),
        (2.0, 1, "ranks=2.0: give an integer number of ranks, 1 or more."),
        (True, 1, "ranks=True: give an integer number of ranks, 1 or more."),
        ("4", 1, "ranks='4': give an integer number of ranks, 1 or more."),
        (2, 0, "chunks=0: give an integer number of chunks, 1 or more."),
        (2, None, "chunks=None: give an integer number of chunks, 1 or more."),
    ],
)
def test_sizes_are_whole_numbers_from_1_up(
    make: Callable[[object, object], Placement], ranks: object, chunks: object, message: str
) -> None:
    with pytest.raises(PlanError) as error:
        make(ranks, chunks)
    assert str(error.value) == message


@pytest.mark.parametrize("rank_of", [{0: "a"}, {"a": 0}, {0: 0.5}, ["0"], [True]])
def test_stages_and_ranks_are_whole_numbers(rank_of: Any) -> None:
    with pytest.raises(PlanError, match="stages and ranks are integers, as in"):
        Placement.explicit(rank_of)


@pytest.mark.parametrize("rank_of", [(), (0, -1)])
def test_a_placement_has_stages_on_ranks_from_0_up(rank_of: tuple[int, ...]) -> None:
    with pytest.raises(PlanError) as error:
        Placement(rank_of)
    assert str(error.value) == (
        f"A placement gives every stage a rank, 0 or more, and has at least one stage; got {rank_of}."
    )
