"""device_mesh(): which rank does what, and errors on every rank for what cannot be a mesh."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pipecut
from pipecut import device_mesh
from pipecut.errors import DisagreementError, InputError, PipeError
from pipecut.schedule import plan_for, schedule_names
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed


def place(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> tuple[Any, ...]:
    mesh = device_mesh(**sizes, **options)
    assert mesh.device == torch.device("cpu")
    return mesh.dims, mesh.rank("pp"), mesh.data_rank, mesh.rank("tp"), dist.get_process_group_ranks(mesh.pp_group)


def test_pipelines_go_across_and_tensor_parallel_ranks_are_neighbours(four_ranks: Ranks) -> None:
    assert four_ranks.run(place, {"tp": 2, "pp": 2}, {}) == [
        (("pp", "tp"), 0, 0, 0, [0, 2]),
        (("pp", "tp"), 0, 0, 1, [1, 3]),
        (("pp", "tp"), 1, 0, 0, [0, 2]),
        (("pp", "tp"), 1, 0, 1, [1, 3]),
    ]


def test_an_order_of_the_user(four_ranks: Ranks) -> None:
    assert four_ranks.run(place, {"pp": 2, "dp": -1}, {"order": ("dp", "pp")}) == [
        (("dp", "pp"), 0, 0, 0, [0, 1]),
        (("dp", "pp"), 1, 0, 0, [0, 1]),
        (("dp", "pp"), 0, 1, 0, [2, 3]),
        (("dp", "pp"), 1, 1, 0, [2, 3]),
    ]


def data_parts(rank: int) -> tuple[Any, ...]:
    mesh = device_mesh(pp=1, dp=2, fsdp=2)
    return mesh.data_rank, mesh.data_size, tuple(mesh["dp", "fsdp"].shape), mesh.size("tp")


def test_copies_and_shards_both_divide_the_batch(four_ranks: Ranks) -> None:
    assert four_ranks.run(data_parts) == [(rank, 4, (2, 2), 1) for rank in range(4)]


def show(rank: int) -> tuple[str, str]:
    mesh = device_mesh(pp=2, fsdp=2)
    return str(mesh), repr(mesh)


def test_a_table_says_which_rank_does_what(four_ranks: Ranks) -> None:
    *_, (text, short) = four_ranks.run(show)
    assert text == (
        "4 ranks on cpu\n"
        "  pp=2: the stages of one pipeline\n"
        "  fsdp=2: shards of the same stages, for parts of the batch\n"
        "rank   pp fsdp\n"
        "   0    0    0\n"
        "   1    0    1\n"
        "   2    1    0\n"
        "   3    1    1  this process"
    )
    assert short == "TrainingMesh(rank 3: pp 1 of 2, fsdp 1 of 2, on cpu)"


def stages(rank: int) -> dict[str, tuple[int, ...]]:
    mesh = device_mesh(pp=2, tp=2)
    return {name: mesh.stages(name) for name in schedule_names()}


def test_the_stages_of_a_rank_are_those_of_the_plan(four_ranks: Ranks) -> None:
    for rank, found in enumerate(four_ranks.run(stages)):
        for name, here in found.items():
            plan = plan_for(name, ranks=2, microbatches=4)
            assert here == tuple(plan.placement.stages_of[rank // 2]), name
    assert found["1F1B"] == (1,)
    assert found["ZBVZeroBubble"] == (1, 2)


# ------------------------------------------------------------------------------------------------------------ bad input


def refuse(rank: int, sizes: dict[str, Any], options: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        device_mesh(**sizes, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "options", "told"),
    [
        (
            {"pp": 2, "dp": 3},
            {},
            "pp=2 x dp=3 is 6 ranks, and the process group has 4: change the sizes (one of them may be -1, for the "
            "ranks that are left), or start 6 processes: torchrun --nproc-per-node 6",
        ),
        ({"pp": 3, "dp": -1}, {}, "4 ranks cannot be divided by 3, which pp=3 x dp=-1 needs: start a multiple of 3"),
        ({"pp": -1, "dp": -1}, {}, "device_mesh(pp=-1, dp=-1): only one size can be -1"),
        ({"pp": 0}, {}, "pp=0 is no number of ranks: give 1 or more, or -1"),
        ({"pp": 2, "tp": True}, {}, "tp=True is no number of ranks"),
        ({"pp": 2, "ddp": 2}, {}, "device_mesh() knows no 'ddp'. Did you mean 'dp'"),
        ({"pp": 2, "dp": 2}, {"order": ("pp", "tp")}, "order=('pp', 'tp') has to name each dim once"),
        ({"pp": 2, "dp": 2}, {"order": ("pp", "dp", "pp")}, "has to name each dim once"),
    ],
)
def test_what_cannot_be_a_mesh(four_ranks: Ranks, sizes: dict[str, Any], options: dict[str, Any], told: str) -> None:
    for message in four_ranks.run(refuse, sizes, options):
        assert told in message


def differ(rank: int) -> str:
    with pytest.raises(DisagreementError) as caught:
        device_mesh(pp=2, dp=3 if rank == 2 else 2)
    return str(caught.value)


def test_ranks_that_ask_for_different_meshes(four_ranks: Ranks) -> None:
    """A size that fits on no rank but this one raised there alone, and the others waited for it."""
    for message in four_ranks.run(differ):
        assert message == (
            "the ranks ask for different meshes: sizes: pp=2, dp=2 on ranks 0, 1, 3; pp=2, dp=3 on rank 2. Call "
            "device_mesh() alike on all of them"
        )


def ask_for_more(rank: int) -> list[str]:
    mesh = device_mesh(pp=2, dp=2)
    messages = []
    for call in (
        lambda: mesh["tp"],
        lambda: mesh["pipeline"],
        lambda: mesh.rank("dpp"),
        lambda: mesh.stages("1F1B", 3),
        lambda: mesh.stages("1F2B"),
    ):
        with pytest.raises(PipeError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_dims_and_stages_that_a_mesh_has_not(four_ranks: Ranks) -> None:
    for missing, unknown, misspelt, uneven, schedule in four_ranks.run(ask_for_more):
        assert missing == ("this mesh has the dims pp, dp, and no 'tp'. Give device_mesh() a size for it, such as tp=1")
        assert "no 'pipeline'. Take one of them" in unknown
        assert "no 'dpp'. Did you mean 'pp' or 'dp'? Take one of them" in misspelt
        assert uneven == (
            "3 stages cannot be spread over 2 ranks evenly: cut the model into a multiple of 2 stages, or change pp="
        )
        assert "Unknown schedule name '1F2B'" in schedule


def test_without_a_process_group() -> None:
    with pytest.raises(InputError, match=r"needs a process group: call torch.distributed.init_process_group\(\)"):
        device_mesh(pp=2)


def test_joining_ranks_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set\. Start"):
        pipecut.init_process_group()


@pytest.mark.distributed
def test_joining_twice(two_ranks: Ranks) -> None:
    for told in two_ranks.run(joins_again):
        assert "torch.distributed is initialized already: call pipecut.init_process_group() in its place" in told


def joins_again(rank: int) -> str:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29500")
    try:
        pipecut.init_process_group()
    except InputError as error:
        return str(error)
    finally:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)
    return "joined"
