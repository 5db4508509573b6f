"""Plans written to files and read again, and what is said of files that are none."""

from __future__ import annotations

import tempfile
import tracemalloc
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecut.errors import PlanError
from pipecut.schedule.plan import Plan
from pipecut.schedule.plan_text import load_csv
from tests.schedule.blocking_channels import RAN, execute
from tests.schedule.plan_pictures import picture_of, plan_of
from tests.schedule.random_plans import Shape, random_plan
from tests.support.properties import examples


def test_the_file_has_a_line_for_each_rank_and_a_cell_for_each_step(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    plan_of("""
        0F0 0SEND_F0 ·   0RECV_B0 0B0
        ·   1RECV_F0 1F0 1B0 1SEND_B0 1UNSHARD
    """).save_csv(path)
    assert path.read_bytes() == b"0F0,0SEND_F0,,0RECV_B0,0B0,\n,1RECV_F0,1F0,1B0,1SEND_B0,1UNSHARD\n"


def test_an_overlap_fits_in_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    plan = plan_of("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    plan.save_csv(str(path))
    assert path.read_text(encoding="utf-8") == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"
    assert Plan.load_csv(str(path)).actions == plan.actions


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    stages = draw(st.integers(1, 5))
    ranks, microbatches = draw(st.integers(1, stages)), draw(st.integers(1, 3))
    flags = [draw(st.booleans()) for _ in range(4)]
    return random_plan(Random(draw(st.integers(0, 2**32 - 1))), Shape(stages, ranks, microbatches, *flags))


@settings(max_examples=examples(37))
@given(plans(), st.booleans())
def test_there_and_back_again(plan: Plan, lowered: bool) -> None:
    if lowered:
        plan = plan.lower()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.csv"
        plan.save_csv(path)
        read = Plan.load_csv(path, name="random", dataflow=plan.dataflow)
    trimmed = [line.rstrip(" ·") for line in picture_of(plan).splitlines()]
    assert [line.rstrip() for line in picture_of(read).splitlines()] == trimmed
    assert (read.placement, read.microbatches) == (plan.placement, plan.microbatches)
    assert (read.name, read.dataflow, read.training) == (plan.name, plan.dataflow, plan.training)
    assert execute(read) == RAN


def test_what_is_not_in_the_file_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8")
    plan = Plan.load_csv(path)
    assert plan.name == str(path)
    assert Plan.load_csv(path, name="mine", microbatches=2).microbatches == 2
    assert plan.validate().placement.rank_of == (0, 1)


@pytest.mark.parametrize(
    "content",
    [
        b"0F0,0B0\n1F0,1B0\n",
        b"0F0,0B0\n1F0,1B0",
        b"0F0,0B0\r\n1F0,1B0\r\n",
        b"\xef\xbb\xbf0F0,0B0\n1F0,1B0\n",
        b" 0F0 ,\t0B0\n1F0,1B0 \n\n , \n",
        b'"0F0","0B0"\n"1F0","1B0"\n',
    ],
    ids=["plain", "no end of line", "windows", "byte order mark", "spaces and blank lines", "quotes"],
)
def test_ways_to_write_a_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_bytes(content)
    assert picture_of(Plan.load_csv(path)) == "0F0 0B0\n1F0 1B0"


def test_ragged_lines_are_taken_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_text("0F0,0F1,0F2\n\n1F0\n", encoding="utf-8")
    plan = Plan.load_csv(path, ragged=True)
    assert picture_of(plan) == "0F0 0F1 0F2\n\n1F0"


KNOWN = "Known are F, I, W, B, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD, REDUCE_TIES, OVERLAP_F_B."
NO_ACTION = "{path}, line 1, column 1: the file has no action. Write one line per rank, such as 0F0,0B0."
FILL_UP = "Fill it up with empty cells, or load the file with ragged=True if the rest is meant to be idle."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0F0,0B0\n1F0,1Q0\n", "{path}, line 2, column 2 (rank 1): '1Q0' is not an action: there is no 'Q'. " + KNOWN),
        (
            b"0F0,0F\n",
            "{path}, line 1, column 2 (rank 0): '0F' is not an action: F needs the number of a microbatch, as in 0F0.",
        ),
        (b"0F0,0B0,\n1F0\n", "{path}, line 2: ends after column 1, while the longest line has 3 cells. " + FILL_UP),
        (b"0F0\n1F0,1B0\n", "{path}, line 1: ends after column 1, while the longest line has 2 cells. " + FILL_UP),
        (
            b"0F0,0B0\n\n1F0,1B0\n",
            "{path}, line 2: ends after column 0, while the longest line has 2 cells. " + FILL_UP,
        ),
        (
            b"0F0,0B0\n1F0,\xe9\n",
            "{path}, line 2, character 5: byte 0xe9 is not UTF-8. Save the file as UTF-8.",
        ),
        (
            "0F0,0B0\n".encode("utf-16"),
            "{path}, line 1, character 1: byte 0xff is not UTF-8. Save the file as UTF-8.",
        ),
        (b"", NO_ACTION),
        (b"\n\n\n", NO_ACTION),
        (b" , ,\n,,\n", NO_ACTION),
    ],
)
def test_files_that_are_no_plans(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_bytes(content)
    with pytest.raises(PlanError) as error:
        Plan.load_csv(path)
    assert str(error.value) == message.format(path=path)


@pytest.mark.parametrize(("content", "line"), [(b'0F0,0B0\n"1F0"x,1B0\n', 2), (b'0F0,0B0\n1F0,"1B0\n', 2)])
def test_broken_quotes(content: bytes, line: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_bytes(content)
    with pytest.raises(PlanError) as error:
        Plan.load_csv(path)
    assert str(error.value).startswith(f"{path}, line {line}")
    assert "this is not CSV: " in str(error.value)


def test_the_line_of_a_fault_after_a_cell_of_two_lines(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_bytes(b'"0F0\n",0B0\n1F0,1Q0\n')
    with pytest.raises(PlanError, match=r"line 3, column 2 \(rank 1\): '1Q0' is not an action"):
        Plan.load_csv(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        Plan.load_csv(tmp_path / "missing.csv")
    assert isinstance(error.value, FileNotFoundError)
    assert str(error.value) == f"{tmp_path / 'missing.csv'} cannot be read: there is no such file"
    with pytest.raises(PlanError) as error:
        Plan.load_csv(tmp_path)
    assert str(error.value) == f"{tmp_path} is not a regular file, but a directory: pass the path of a file"


def test_lines_may_end_as_on_old_machines(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_bytes(b"0F0,0B0\r1F0,1B0\r")
    assert Plan.load_csv(path).grid() == Plan.from_actions([["0F0", "0B0"], ["1F0", "1B0"]]).grid()


def test_a_line_that_no_rank_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipecut.schedule.plan_text._LONGEST_LINE", 8)
    path = tmp_path / "plan.csv"
    path.write_bytes(b"0F0,0B0\n0F0,0F0,0F0")
    with pytest.raises(PlanError, match=r"plan.csv, line 2: is longer than 8 B, and a plan has one line per rank"):
        Plan.load_csv(path)


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    """100 MB took 2.6 GB: all text twice, a string for each cell, and an action for each of equal cells."""
    path = tmp_path / "plan.csv"
    cells = ",".join(f"0F{microbatch % 50}" for microbatch in range(5_000))
    path.write_text(f"{cells}\n" * 20)
    tracemalloc.start()
    try:
        rows = load_csv(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(map(len, rows)) == 100_000
    assert peak < 4 * path.stat().st_size  # 8 bytes for each of them are left
