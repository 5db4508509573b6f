"""Pictures are parsed and measured: every action in its place, told apart, and nothing fetched from elsewhere."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecut.errors import PlanError
from pipecut.schedule import Placement, render
from pipecut.schedule.action import Action, Op, parse_action
from pipecut.schedule.costs import Costs
from pipecut.schedule.plan import Plan
from pipecut.schedule.render.palette import HATCH, HUE, contrast, look
from pipecut.schedule.render.rows import Sources, group_narrow
from pipecut.schedule.report import Span, Timeline
from pipecut.schedule.simulate import simulate
from tests.support.properties import examples

NAMESPACE = "http://www.w3.org/2000/svg"
NASTY = '<b>&"</script>\x1b[2J\x00\u202e\ud800]]>'
RENDERERS: dict[str, Callable[..., str]] = {
    "text": render.text,
    "svg": render.svg,
    "html": render.html,
    "chrome_trace": render.chrome_trace,
}
FILES = {name: draw for name, draw in RENDERERS.items() if name != "text"}


def plan_of(*rows: str, **given: Any) -> Plan:
    """A plan from one text per rank."""
    return Plan.from_actions([row.split() for row in rows], **given)


def timeline_of(*rows: str, name: str = "executed", unit: str = "ms") -> Timeline:
    """A timeline from one text per rank, each action with its times: "0F0@0-1.5"."""
    spans = []
    for rank, row in enumerate(rows):
        for each in row.split():
            text, times = each.split("@")
            action = parse_action(text)
            assert action is not None
            start, end = map(float, times.split("-"))
            spans.append(Span(rank, action, start, end))
    return Timeline(name, len(rows), tuple(spans), unit)


def big(ranks: int, each: int) -> Timeline:
    """Many actions: forwards, then both gradients in turn, all of one time."""
    ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    spans = [
        Span(
            rank,
            Action(rank + ranks * (at // 8 % 2), ops[0] if at < each // 3 else ops[1 + at % 2], at),
            start,
            start + 1,
        )
        for rank in range(ranks)
        for at in range(each)
        for start in [float(rank + at)]
    ]
    return Timeline("big", ranks, tuple(spans), "ms")


TWO = plan_of("0F0 0B0", "1F0 1B0", name="two")
ONE_F_ONE_B = plan_of("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2", name="1F1B")
V_SHAPE = plan_of(
    "0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0B0 0B1",
    "1F0 1F1 2F0 2F1 2I0 2W0 2I1 2W1 1B0 1B1",
    name="V",
    placement=Placement.v(ranks=2),
)
OVERLAPPED = plan_of("0F0 (0F1;0B0)OVERLAP_F_B 0B1", name="overlapped")
ASYNC = timeline_of(
    "0UNSHARD@0-1 0F0@1-3 0SEND_F0@2-5 0F1@3-5 0RECV_B0@5-5 0B0@8-12 0RESHARD@12-12 0REDUCE_GRAD@12-14",
    "1F0@4-6 1B0@6-8 1SEND_B0@8-8",
)


# ---- what is drawn ----


@dataclass(frozen=True)
class Result:
    """Looks like a simulation's report."""

    timeline: Timeline
    makespan: float = 14.0
    bubble_rate: float = 0.25


@pytest.mark.parametrize("draw", RENDERERS.values(), ids=RENDERERS)
@pytest.mark.parametrize("source", [TWO, ASYNC, Result(ASYNC), [TWO, ASYNC], (TWO, Result(ASYNC))])
def test_plans_timelines_and_reports_are_drawn(draw: Callable[..., str], source: Any) -> None:
    picture = draw(source)
    assert "F0" in picture or '"op":"F"' in picture
    assert picture == draw(source), "the same picture every time"


@pytest.mark.parametrize("draw", RENDERERS.values(), ids=RENDERERS)
@pytest.mark.parametrize("time", [0.0, 5e-324, 1e-90, 1e290])
def test_times_of_any_size_are_drawn(draw: Callable[..., str], time: float) -> None:
    picture = draw(Timeline("odd", 1, (Span(0, Action(0, Op.FORWARD, 7), 3 * time, 4 * time),)))
    assert not re.search(r"\b(nan|inf|NaN)\b", picture.split("<script>")[0])


@pytest.mark.parametrize("draw", RENDERERS.values(), ids=RENDERERS)
def test_a_real_report_is_drawn_with_its_rates(draw: Callable[..., str]) -> None:
    report = simulate(ONE_F_ONE_B, Costs(forward=2, backward_input=2, backward_weight=2))
    picture = draw(report)
    assert f"makespan {report.makespan:g}" in picture
    assert f"bubble rate {report.bubble_rate:.2%}" in picture
    assert "1F1B" in picture


def test_a_plan_takes_a_step_for_each_action_and_knows_no_bubble_rate() -> None:
    picture = render.svg(ONE_F_ONE_B)
    assert "makespan 8 slots" in picture
    assert "bubble rate" not in picture


def test_sources_of_one_name_are_numbered() -> None:
    assert "two — makespan" in render.text([TWO, TWO], width=60)
    assert "two (2) — makespan" in render.text([TWO, TWO], width=60)


def test_every_public_renderer_has_an_example() -> None:
    assert sorted(RENDERERS) == sorted(render.__all__)
    assert all(">>>" in (draw.__doc__ or "") for draw in RENDERERS.values())


# ---- errors ----


@pytest.mark.parametrize("draw", RENDERERS.values(), ids=RENDERERS)
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Timeline("none", 2, ()), "'none' has nothing to draw: it has no spans. Give a plan or a timeline with"),
        (Plan("bare", TWO.placement, 1, ((), ()), TWO.dataflow), "'bare' has nothing to draw: it has no spans."),
        ([], "nothing to draw: the list is empty. Give a Plan, a Timeline or a simulation's report."),
        ("p.csv", "'p.csv' cannot be drawn: give a Plan, a Timeline or a simulation's report."),
        ([TWO, None], "None cannot be drawn: give a Plan, a Timeline or a simulation's report."),
        (timeline_of("0F0@2-1"), "0F0 is on rank 0 of 1 from 2.0 to 1.0. A span needs a rank below"),
        (timeline_of("0F0@0-nan"), "from 0.0 to nan. A span needs a rank below the number of ranks, and two finite"),
        (timeline_of("0F0@0-1e308"), "from 0.0 to 1e+308. A span needs"),
        (timeline_of("0F0@0-inf"), "from 0.0 to inf. A span needs"),
        (
            Timeline("far", 2, (Span(2, Action(0, Op.FORWARD, 0), 0, 1),)),
            "'far' cannot be drawn: 0F0 is on rank 2 of 2",
        ),
        (
            plan_of("0F0 0B0", "1B0 1F0", name="stuck"),
            "'stuck' cannot run past 0B0 on rank 0. Call plan.validate() for the reason.",
        ),
        (
            [timeline_of("0F0@0-1"), timeline_of("0F0@0-1", unit="h")],
            "unit 'h' of a timeline is not known: use one of ''",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Callable[..., str], source: Any, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        draw(source)


def test_a_trace_needs_a_known_unit_and_a_picture_does_not() -> None:
    laps = timeline_of("0F0@0-1", unit="laps")
    assert "time (laps)" in render.svg(laps)
    with pytest.raises(PlanError, match="The unit 'laps' of a timeline is not known: use one of '', 'slots', 'ns'"):
        render.chrome_trace(laps)


@pytest.mark.parametrize("width", [15, 0, -3])
def test_a_width_that_holds_no_picture_is_refused(width: int) -> None:
    with pytest.raises(PlanError, match=f"width={width}: the picture needs 16 characters per line, or more."):
        render.text(TWO, width=width)


@pytest.mark.parametrize("draw", FILES.values(), ids=FILES)
def test_a_file_has_what_is_returned(draw: Callable[..., str], tmp_path: Path) -> None:
    source = plan_of("0F0", name="größer ▶")
    picture = draw(source, tmp_path / "picture")
    assert (tmp_path / "picture").read_text(encoding="utf-8") == picture == draw(source)
    assert draw(source, str(tmp_path / "other")) == picture


@pytest.mark.parametrize("draw", FILES.values(), ids=FILES)
def test_a_path_that_cannot_be_written_is_named_with_the_remedy(draw: Callable[..., str], tmp_path: Path) -> None:
    missing = tmp_path / "none" / "p.svg"
    message = f"Cannot write '{missing}' (No such file or directory): there is no directory '{missing.parent}'; create"
    with pytest.raises(PlanError, match=re.escape(message)):
        draw(TWO, missing)
    message = f"Cannot write '{tmp_path}' (Is a directory): that is a directory; give a file in it"
    with pytest.raises(PlanError, match=re.escape(message)):
        draw(TWO, tmp_path)
    with pytest.raises(PlanError, match="a path has no null character; give another one."):
        draw(TWO, "p\0.svg")
    long = tmp_path / ("p" * 300)
    with pytest.raises(PlanError, match=re.escape("(File name too long): give a path that you may write to.")):
        draw(TWO, long)


# ---- text ----


def drawn_as(picture: str, expected: str) -> bool:
    """Whether the lines of the ranks are as expected."""
    lines = [line for line in picture.splitlines() if "│" in line]
    assert lines == [line.strip() for line in expected.strip().splitlines()], "\n" + picture
    return True


def test_a_plan_as_text() -> None:
    assert drawn_as(
        render.text(ONE_F_ONE_B, width=60),
        """
        rank 0 │F0────F1────······B0────F2────B1────······B2────
        rank 1 │······F0────B0────F1────B1────F2────B2────······
        """,
    )
    assert drawn_as(
        render.text(ONE_F_ONE_B, width=16),
        """
        rank 0 │FF·BFB·B
        rank 1 │·FBFBFB·
        """,
    )


def test_later_stages_of_a_rank_are_in_small_letters() -> None:
    picture = render.text(V_SHAPE, width=40)
    assert drawn_as(
        picture,
        """
        rank 0 │F0F1····f0i0w0f1i1w1····B0B1
        rank 1 │··F0F1f0f1··i0w0··i1w1B0B1··
        """,
    )
    assert "small letters: a rank's later stages" in " ".join(picture.split())
    assert "small letters" not in render.text(TWO, width=40)


def test_times_are_to_scale() -> None:
    assert drawn_as(
        render.text(timeline_of("0F0@0-2 0F1@2-4 0B0@8-12", "1F0@2-4 1B0@4-8"), width=60),
        """
        rank 0 │F0────F1────············B0──────────
        rank 1 │······F0────B0──────────············
        """,
    )


def test_transfers_show_where_no_computation_runs_and_moments_show_where_nothing_does() -> None:
    picture = render.text(ASYNC, width=36)
    assert drawn_as(
        picture,
        """
        rank 0 │UUF0──F1──<·····B0──────GGGG
        rank 1 │········F0──B0──>···········
        """,
    )
    assert "U unshard, R reshard, G reduce gradients, > send, < receive" in " ".join(picture.split())


def test_an_overlap_as_text() -> None:
    assert drawn_as(render.text(OVERLAPPED, width=30), "rank 0 │F0────X1/0──B1────")


def test_sources_share_one_scale() -> None:
    assert drawn_as(
        render.text([TWO, timeline_of("0F0@100-102 0B0@104-108", "1F0@101-102 1B0@102-104", name="late")], width=24),
        """
        rank 0 │F0····B0········
        rank 1 │··F0B0··········
        rank 0 │F0──····B0──────
        rank 1 │··F0B0──········
        """,
    )


def test_the_default_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert render.text(V_SHAPE) == render.text(V_SHAPE, width=50) != render.text(V_SHAPE, width=90)


times = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 9), st.sampled_from(sorted(HUE))), min_size=1, max_size=30)


@given(rows=st.lists(times, min_size=1, max_size=4), width=st.integers(20, 200))
@settings(max_examples=examples(10))
def test_a_character_stands_for_what_its_time_is_spent_on(
    rows: list[list[tuple[float, float, Op]]], width: int
) -> None:
    spans = []
    for rank, row in enumerate(rows):
        now = 0.0
        for number, (gap, time, op) in enumerate(row):
            spans.append(Span(rank, Action(rank, op, number), now + gap, now + gap + time))
            now += gap + time
    timeline = Timeline("random", len(rows), tuple(spans))
    lines = render.text(timeline, width=width).splitlines()
    assert all(len(line) <= width for line in lines)
    for rank, line in enumerate(line for line in lines if "│" in line):
        cells = line.split("│")[1]
        step = max(timeline.end - timeline.start, 1e-100) / len(cells)
        of_rank = [(s.start - timeline.start, s.end - timeline.start, str(s.action.op)) for s in timeline.by_rank[rank]]
        for cell, letter in enumerate(cells):
            left, right = cell * step, (cell + 1) * step
            slack = 1e-4 * (right + 1e-9)
            here = [(min(end, right) - max(start, left), op) for start, end, op in of_rank if start <= right + slack]
            busy = sum(max(time, 0.0) for time, _ in here)
            if letter == "·":
                assert busy <= step / 2 + slack
            elif letter in "FIWB":
                assert any(time >= -slack and op == letter for time, op in here)


# ---- SVG ----


@dataclass(frozen=True)
class Box:
    """One action, or a column of several, as it stands in a picture."""

    title: str
    x: float
    y: float
    width: float
    height: float
    fills: tuple[str, ...]
    labels: tuple[str, ...]

    @property
    def action(self) -> str:
        return self.title.split(":")[0]


def tag(name: str) -> str:
    return f"{{{NAMESPACE}}}{name}"


def parsed(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def boxes(picture: str) -> list[Box]:
    """All that has a tooltip, in the order in which it is drawn."""
    found = []
    for group in parsed(picture).iter(tag("g")):
        title = group.find(tag("title"))
        if title is None:
            continue
        rects = group.findall(tag("rect"))
        sides = [[float(rect.attrib[side]) for side in ("x", "y", "width", "height")] for rect in rects]
        assert len({(x, width) for x, _, width, _ in sides}) == 1, "the parts of a box are above each other"
        fills = tuple(rect.attrib["fill"] for rect in rects)
        labels = tuple(label.text or "" for label in group.findall(tag("text")))
        height = sum(side[3] for side in sides)
        found.append(Box(title.text or "", sides[0][0], sides[0][1], sides[0][2], height, fills, labels))
    return found


def colours(picture: str) -> dict[str, str]:
    """The colour of every hatched fill."""
    return {
        f"url(#{pattern.attrib['id']})": pattern.findall(tag("rect"))[0].attrib["fill"]
        for pattern in parsed(picture).iter(tag("pattern"))
    }


@pytest.mark.parametrize("plan", [TWO, ONE_F_ONE_B, V_SHAPE, ONE_F_ONE_B.lower(max_held=1), OVERLAPPED])
def test_there_is_one_box_for_each_action(plan: Plan) -> None:
    drawn = boxes(render.svg(plan))
    assert sorted(box.action for box in drawn) == sorted(
        repr(action) for row in plan.actions for action in row if action is not None
    )


def test_boxes_are_to_scale_and_in_the_lane_of_their_rank() -> None:
    drawn = {box.action: box for box in boxes(render.svg(ASYNC))}
    scale = drawn["0B0"].width / 4
    origin = drawn["0UNSHARD"].x
    for span in ASYNC:
        box = drawn[repr(span.action)]
        assert box.x == pytest.approx(origin + span.start * scale, abs=0.02)
        if span.end > span.start:
            assert box.width == pytest.approx((span.end - span.start) * scale, abs=0.02)
    tops = {rank: {drawn[repr(span.action)].y for span in ASYNC.by_rank[rank]} for rank in (0, 1)}
    assert max(tops[0]) < min(tops[1])


def test_a_transfer_is_a_thin_mark_below_the_computations_and_hides_none() -> None:
    drawn = {box.action: box for box in boxes(render.svg(ASYNC))}
    send, forward = drawn["0SEND_F0"], drawn["0F1"]
    assert send.y >= forward.y + forward.height
    assert send.height < forward.height / 3
    assert drawn["0UNSHARD"].height > forward.height


def test_what_takes_no_time_can_be_seen() -> None:
    drawn = {box.action: box for box in boxes(render.svg(ASYNC))}
    for name in ("0RESHARD", "0RECV_B0", "1SEND_B0"):
        assert 0.5 < drawn[name].width < 3


def test_an_overlap_is_one_box_in_two_colours() -> None:
    picture = render.svg(OVERLAPPED)
    drawn = {box.action: box for box in boxes(picture)}
    overlap = drawn["(0F1;0B0)OVERLAP_F_B"]
    assert overlap.fills == drawn["0F0"].fills + drawn["0B1"].fills
    assert overlap.labels == ("1", "0")
    assert overlap.height == pytest.approx(drawn["0F0"].height, abs=0.02)
    assert "stages 0 and 0, microbatches 1 and 0" in overlap.title


def test_a_tooltip_tells_action_stage_microbatch_start_and_end() -> None:
    drawn = {box.action: box.title for box in boxes(render.svg(ASYNC))}
    assert drawn["1B0"] == "1B0: stage 1, microbatch 0, rank 1, start 6, end 8 ms"
    assert drawn["0UNSHARD"] == "0UNSHARD: stage 0, rank 0, start 0, end 1 ms"
    ties = boxes(render.svg(timeline_of("0F0@0-1 0REDUCE_TIES3@1-2")))
    assert ties[0].title == "0REDUCE_TIES3: stage 0, tie 3, rank 0, start 1, end 2 ms"


def test_a_box_has_the_number_of_its_microbatch_where_it_fits() -> None:
    drawn = boxes(render.svg(timeline_of("0F1234@0-1 0F1235@1-1000")))
    assert [box.labels for box in drawn] == [(), ("1235",)]


def test_every_op_and_every_stage_of_a_rank_has_its_own_fill() -> None:
    rows = [" ".join(f"{stage}{op}0" for stage in (0, 1, 2, 3) for op in "FIWB")]
    spans = [
        Span(0, parse_action(text) or Action(0, Op.FORWARD, 0), at, at + 1) for at, text in enumerate(rows[0].split())
    ]
    picture = render.svg(Timeline("all", 1, tuple(spans)))
    hatched = colours(picture)
    fills = [box.fills[0] for box in boxes(picture)]
    assert len(set(fills)) == 16
    assert len({hatched.get(fill, fill) for fill in fills}) == 16


def test_a_legend_says_what_is_there_and_no_more() -> None:
    def words(picture: str) -> str:
        return " ".join(text.text or "" for text in parsed(picture).iter(tag("text")))

    assert "F forward B full backward" in words(render.svg(TWO))
    assert "stages of a rank" not in words(render.svg(TWO))
    assert "W weight gradient stages of a rank, first to last" not in words(render.svg(TWO))
    assert "input gradient" in words(render.svg(V_SHAPE))
    assert "stages of a rank, first to last" in words(render.svg(V_SHAPE))
    assert "forward and backward at once" in words(render.svg(OVERLAPPED))
    assert "U UNSHARD, R RESHARD, G REDUCE_GRAD send receive" in words(render.svg(ASYNC))


def test_the_axis_has_round_times_at_their_places() -> None:
    picture = render.svg(ASYNC)
    drawn = {box.action: box for box in boxes(picture)}
    scale, origin = drawn["0B0"].width / 4, drawn["0UNSHARD"].x
    times = [text for text in parsed(picture).iter(tag("text")) if text.get("class") == "a"]
    assert [text.text for text in times[:3]] == ["0", "2", "4"]
    for text in times:
        assert float(text.attrib["x"]) == pytest.approx(origin + float(text.text or "") * scale, abs=0.02)


def test_all_stands_inside_the_picture() -> None:
    sources: list[Sources] = [TWO, ASYNC, [V_SHAPE, ASYNC], big(100, 4)]
    for source in sources:
        root = parsed(render.svg(source))
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for rect in root.iter(tag("rect")):
            if "x" in rect.attrib:
                assert 0 <= float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
                assert 0 <= float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height
        for text in root.iter(tag("text")):
            assert 0 <= float(text.attrib["x"]) <= width
            assert 0 <= float(text.attrib["y"]) <= height


def test_planned_and_executed_share_one_time_scale() -> None:
    planned = timeline_of("0F0@0-2 0B0@2-6", name="planned")
    executed = timeline_of("0F0@0.5-0.503 0B0@0.503-0.508", name="executed", unit="s")
    picture = render.svg([planned, executed])
    plan_f, plan_b, run_f, run_b = boxes(picture)
    assert plan_f.x == run_f.x
    assert run_f.width == pytest.approx(plan_f.width * 3 / 2, abs=0.02)
    assert run_b.x + run_b.width == pytest.approx(plan_f.x + plan_f.width * 4, abs=0.02)
    assert plan_b.y < run_f.y
    headings = [text for text in parsed(picture).iter(tag("text")) if text.get("class") == "h"]
    assert ["".join(text.itertext()) for text in headings] == [
        "planned — makespan 6 ms",
        "executed — makespan 8 ms",
    ]


def test_slots_beside_real_times_are_drawn_as_milliseconds_and_the_picture_says_so() -> None:
    picture = render.svg([TWO, timeline_of("0F0@0-4000", unit="us")])
    assert "two — makespan 4000 us, slots, 1 drawn as 1000 us" in "".join(parsed(picture).itertext())


def test_a_stage_has_one_colour_in_all_charts_of_a_picture() -> None:
    drawn = boxes(render.svg([plan_of("0F0 0B0", name="one stage"), plan_of("0F0 1F0 2F0 2B0 1B0 0B0", name="three")]))
    fills = [{box.fills for box in drawn if box.action == name} for name in ("0F0", "1F0", "2F0")]
    assert [len(each) for each in fills] == [1, 1, 1]
    assert len(set.union(*fills)) == 3


def test_an_svg_names_no_resource() -> None:
    sources: list[Sources] = [TWO, ASYNC, [V_SHAPE, ASYNC]]
    for source in sources:
        picture = render.svg(source).replace(f'xmlns="{NAMESPACE}"', "")
        assert "://" not in picture
        assert "href" not in picture
        used = set(re.findall(r"url\(#(.*?)\)", picture))
        assert used <= set(re.findall(r'id="(.*?)"', picture))


def test_names_are_escaped_in_svg() -> None:
    root = parsed(render.svg(timeline_of("0F0@0-1", name=NASTY, unit="<m>&")))
    text = "".join(root.itertext())
    assert r'<b>&"</script>\x1b[2J\x00\u202e\ud800]]>' in text
    assert "time (<m>&)" in text
    assert not list(root.iter(tag("b")))


def test_a_long_name_is_cut_off() -> None:
    root = parsed(render.svg(plan_of("0F0", name="n" * 5000)))
    heading = next(text for text in root.iter(tag("text")) if text.get("class") == "h")
    assert 20 < len("".join(heading.itertext())) < 150


def _count(box: Box) -> int:
    """How many actions a tooltip speaks of."""
    match = re.match(r"(\d+) actions, ", box.title)
    return int(match[1]) if match else box.action.count(",") + 1


@pytest.mark.slow
def test_a_big_picture_stays_small_and_leaves_out_no_action() -> None:
    picture = render.svg(big(64, 3125))
    assert len(picture) < 5_000_000
    counts = [_count(box) for box in boxes(picture)]
    assert sum(counts) == 200_000
    together = [count for count in counts if count > 1]
    note = next(text for text in re.findall(">(.*?)</text>", picture) if "columns" in text)
    assert note.startswith(f"{sum(together)} actions narrower than ")
    assert f" pixels share {len(together)} columns: each has a band" in note
    assert "share of the time" not in render.svg(TWO)


def test_the_bands_of_a_column_are_as_high_as_their_shares_of_the_time() -> None:
    ops = [Op.FORWARD] * 3 + [Op.BACKWARD_INPUT]
    spans = [Span(0, Action(0, ops[at % 4], at), at, at + 1.0) for at in range(40_000)]
    picture = render.svg(Timeline("fine", 1, tuple(spans)))
    groups = [group for group in parsed(picture).iter(tag("g")) if group.find(tag("title")) is not None]
    heights: dict[str, float] = {}
    for group in groups:
        for rect in group.findall(tag("rect")):
            fill = rect.attrib["fill"]
            heights[fill] = heights.get(fill, 0.0) + float(rect.attrib["height"]) * float(rect.attrib["width"])
    assert heights[look(Op.FORWARD).fill] / heights[look(Op.BACKWARD_INPUT).fill] == pytest.approx(3, rel=0.02)


@given(times=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), max_size=60), least=st.floats(0.01, 5))
def test_gathering_keeps_every_span_and_leaves_no_crowd(times: list[tuple[float, float]], least: float) -> None:
    spans, now = [], 0.0
    for number, (gap, time) in enumerate(times):
        spans.append(Span(0, Action(0, Op.FORWARD, number), now + gap, now + gap + time))
        now += gap + time
    groups = list(group_narrow(spans, least))
    assert [span for group in groups for span in group] == spans
    assert all(len(group) == 1 or all(s.end - s.start < least for s in group) for group in groups)
    assert len(groups) <= 2 * now / least + 2


# ---- colours ----

# What people without red or without green cones see, in linear light (Viénot, Brettel and Mollon, 1999).
WITHOUT_RED = ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0))
WITHOUT_GREEN = ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0))


def seen(colour: str, cones: tuple[tuple[float, float, float], ...]) -> tuple[float, ...]:
    """A colour as such a reader sees it, each part from 0 to 1."""
    linear = [(int(colour[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5)]
    mixed = (sum(weight * part for weight, part in zip(row, linear, strict=True)) for row in cones)
    return tuple(min(max(part, 0.0), 1.0) ** (1 / 2.2) for part in mixed)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(HUE, 2)))
def test_ops_differ_in_hue_luminance_and_hatch(one: Op, other: Op) -> None:
    assert contrast(look(one).fill, look(other).fill) > 1.4
    assert look(one).hatch != look(other).hatch
    for cones in (WITHOUT_RED, WITHOUT_GREEN):
        parts = zip(seen(look(one).fill, cones), seen(look(other).fill, cones), strict=True)
        assert sum((a - b) ** 2 for a, b in parts) ** 0.5 > 0.2


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_ops_keep_their_order_of_luminance_on_every_stage_of_a_rank(chunks: int) -> None:
    for chunk in range(chunks):
        order = [
            look(op, chunk, chunks).fill for op in (Op.FORWARD, Op.FULL_BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
        ]
        assert all(
            contrast(high, "#000000") / contrast(low, "#000000") > 1.1 for low, high in itertools.pairwise(order)
        )


@pytest.mark.parametrize("op", HUE)
def test_stages_of_a_rank_differ_in_lightness_and_text_can_be_read_on_all(op: Op) -> None:
    fills = [look(op, chunk, 4) for chunk in range(4)]
    assert all(contrast(low.fill, high.fill) > 1.04 for low, high in itertools.pairwise(fills))
    assert all(contrast(each.fill, each.ink) > 4.5 for each in fills)


def test_input_and_weight_gradient_are_hatched_against_each_other_and_the_full_backward_both_ways() -> None:
    assert set(HATCH[Op.FULL_BACKWARD]) == set(HATCH[Op.BACKWARD_INPUT]) | set(HATCH[Op.BACKWARD_WEIGHT])
    lines = {p.attrib["id"]: p.find(tag("path")) for p in parsed(render.svg(V_SHAPE)).iter(tag("pattern"))}
    paths = {name: "" if path is None else path.attrib["d"] for name, path in lines.items()}
    assert paths["B0of2"] == paths["I0of2"] + paths["W0of2"]


# ---- HTML ----


class Page(HTMLParser):
    """The tags, the texts by tag, and the ids of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, "tags are nested"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    @property
    def data(self) -> dict[str, Any]:
        """What the script draws."""
        found: dict[str, Any] = json.loads(self.texts["script"][0])
        return found

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def decoded(chart: dict[str, Any]) -> list[tuple[int, str, float, float]]:
    """The spans of a chart, read as the script reads them."""
    spans = []
    for rank, numbers in enumerate(chart["rows"]):
        at, end = 0, 0.0
        while at < len(numbers):
            kind = chart["kinds"][numbers[at + 2]]
            parts = kind["parts"]
            start = end + numbers[at]
            end = start + numbers[at + 1]
            given = ("" if number < 0 else str(number) for number in numbers[at + 3 : at + 3 + len(parts)])
            names = [f"{p['stage']}{p['op']}{number}{p['peer']}" for p, number in zip(parts, given, strict=True)]
            spans.append((rank, f"({';'.join(names)}){kind['overlap']}" if "overlap" in kind else names[0], start, end))
            at += 3 + len(parts)
    return spans


@pytest.mark.parametrize(
    "source", [ASYNC, big(3, 500), timeline_of("0F0@0-0.1 0B0@0.1-0.3333333333 1F0@5000-5000.00001", unit="s")]
)
def test_a_page_holds_every_span(source: Timeline) -> None:
    found = decoded(Page(render.html(source)).data["charts"][0])
    extent = source.end - source.start
    for (rank, action, start, end), span in zip(found, source, strict=True):
        assert (rank, action) == (span.rank, repr(span.action))
        assert start == pytest.approx(span.start - source.start, abs=extent * 2e-7)
        assert end == pytest.approx(span.end - source.start, abs=extent * 2e-7)


def test_rounding_does_not_add_up() -> None:
    spans = tuple(Span(0, Action(0, Op.FORWARD, at), at / 3, (at + 1) / 3) for at in range(30_000))
    found = decoded(Page(render.html(Timeline("thirds", 1, spans))).data["charts"][0])
    assert found[-1][3] == pytest.approx(10_000, abs=0.002)


def test_a_page_names_overlaps_and_ties() -> None:
    chart = Page(render.html(OVERLAPPED)).data["charts"][0]
    assert [action for _, action, _, _ in decoded(chart)] == ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]
    kinds = Page(render.html(timeline_of("0F0@0-1 0REDUCE_TIES3@1-2"))).data["charts"][0]["kinds"]
    assert [kind.get("numbered") for kind in kinds] == [None, "tie"]


def test_a_page_needs_nothing_but_itself() -> None:
    page = render.html([V_SHAPE, ASYNC])
    assert "://" not in page
    assert not {"src", "href", "action", "srcset"} & {name for _, attributes in Page(page).tags for name in attributes}
    policy = [
        meta["content"] for meta in Page(page).named("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == ["default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"]
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(", page)


def test_a_page_has_a_canvas_for_each_source_and_can_be_used_by_keys() -> None:
    page = Page(render.html([V_SHAPE, ASYNC]))
    canvases = page.named("canvas")
    assert len(canvases) == len(page.data["charts"]) == 2
    assert all(canvas["tabindex"] == "0" and "0 shows all" in (canvas["aria-label"] or "") for canvas in canvases)
    assert (canvases[1]["aria-label"] or "").startswith("executed: 2 ranks, makespan 14 ms.")
    assert len(page.named("button")) == 5
    assert all(button["aria-label"] for button in page.named("button"))
    script = page.texts["script"][1]
    for key in ('"+"', '"-"', '"0"', "ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"):
        assert f"{key}:" in script
    used = set(re.findall(r'getElementById\("(\w+)"\)', script))
    assert used == {"data", "tip", "in", "out", "left", "right", "whole"}
    assert used <= {attributes.get("id") for _, attributes in page.tags}


def test_a_page_follows_the_readers_scheme_prints_and_has_text_without_scripts() -> None:
    source = render.html(TWO)
    page = Page(source)
    assert "@media (prefers-color-scheme:dark)" in source
    assert "@media print" in source
    assert page.texts["pre"] == [render.text(TWO, width=110)]


def test_names_are_escaped_in_html() -> None:
    source = render.html(timeline_of("0F0@0-1", name=NASTY, unit="</script>&"))
    page = Page(source)
    assert page.texts["title"][0].startswith('<b>&"</script>')
    assert page.data["unit"] == "</script>&"
    assert not page.named("b")
    assert source.count("</script>") == 2
    source.encode("utf-8")


@pytest.mark.slow
def test_a_big_page_stays_small() -> None:
    page = render.html(big(64, 3125))
    assert len(page) < 5_000_000
    assert sum(len(row) for row in Page(page).data["charts"][0]["rows"]) == 4 * 200_000


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to read the script")
def test_the_script_is_sound_javascript(tmp_path: Path) -> None:
    (tmp_path / "page.js").write_text(Page(render.html(TWO)).texts["script"][1], encoding="utf-8")
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True, capture_output=True)


# ---- traces ----


def events(trace: str, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize(
    ("unit", "microseconds"), [("", 1e3), ("ms", 1e3), ("us", 1.0), ("µs", 1.0), ("s", 1e6), ("ns", 1e-3)]
)
def test_a_trace_is_in_microseconds(unit: str, microseconds: float) -> None:
    forward, backward = events(render.chrome_trace(timeline_of("0F0@10-12 0B0@15-20", unit=unit)))
    assert (forward["name"], forward["ts"], forward["dur"]) == ("0F0", 0, pytest.approx(2 * microseconds))
    assert (backward["ts"], backward["dur"]) == (pytest.approx(5 * microseconds), pytest.approx(5 * microseconds))


def test_a_trace_has_every_span_also_those_without_time() -> None:
    found = events(render.chrome_trace(ASYNC))
    assert sorted(event["name"] for event in found) == sorted(repr(span.action) for span in ASYNC)
    assert [event["name"] for event in found if event["dur"] == 0] == ["0RECV_B0", "0RESHARD", "1SEND_B0"]


def test_a_trace_has_a_process_for_each_source_and_a_thread_for_each_rank() -> None:
    trace = render.chrome_trace([ONE_F_ONE_B, timeline_of("0F0@0-1", name="executed")])
    assert {(event["pid"], event["tid"]) for event in events(trace)} == {(0, 0), (0, 1), (1, 0)}
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events(trace, "M") if "name" in e["args"]}
    assert names == {
        ("process_name", 0, 0): "1F1B (makespan 8 ms, slots, 1 drawn as 1 ms)",
        ("thread_name", 0, 0): "rank 0",
        ("thread_name", 0, 1): "rank 1",
        ("process_name", 1, 0): "executed (makespan 1 ms)",
        ("thread_name", 1, 0): "rank 0",
    }


def test_a_trace_tells_stage_microbatch_and_peer() -> None:
    found = {event["name"]: event["args"] for event in events(render.chrome_trace([ASYNC, OVERLAPPED]))}
    assert found["1B0"] == {"op": "B", "stage": 1, "microbatch": 0}
    assert found["0UNSHARD"] == {"op": "UNSHARD", "stage": 0}
    assert found["0SEND_F0"] == {"op": "SEND_F", "stage": 0, "microbatch": 0, "peer": 1}
    assert found["(0F1;0B0)OVERLAP_F_B"]["parts"] == [
        {"action": "0F1", "op": "F", "stage": 0, "microbatch": 1},
        {"action": "0B0", "op": "B", "stage": 0, "microbatch": 0},
    ]


def test_transfers_that_run_beside_computations_have_a_thread_of_their_own() -> None:
    trace = render.chrome_trace(ASYNC)
    threads = {event["name"]: event["tid"] for event in events(trace)}
    assert threads["0SEND_F0"] == threads["0RECV_B0"] == 2
    assert threads["0F0"] == threads["0UNSHARD"] == 0
    assert threads["1SEND_B0"] == 1
    assert [e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name" and e["tid"] == 2] == [
        "rank 0 transfers"
    ]


def test_spans_that_touch_do_not_overlap_in_a_trace() -> None:
    spans = tuple(Span(0, Action(0, Op.FORWARD, at), at / 3, (at + 1) / 3) for at in range(1000))
    found = events(render.chrome_trace(Timeline("thirds", 1, spans)))
    for before, after in itertools.pairwise(found):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    assert {event["tid"] for event in found} == {0}
