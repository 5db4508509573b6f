"""Time of the passes over orders of actions, by upstream's names, beside upstream's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import schedules as upstream
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from pipecut.compat import schedules as ours

from .measure import Goal, in_turn, median_ratio, milliseconds, seconds, show_goals, show_table

SCHEDULE, CHUNKS = "InterleavedZeroBubble", 2
RANKS, MICROBATCHES_OF_A_RANK = (4, 16, 64), 2
SIDES = {"pipecut": ours, "upstream": upstream}
Order = dict[int, list[Any]]
Pass = Callable[[Any, dict[str, Order], int], object]


def run(rounds: int) -> list[Goal]:
    """Measure both sides and print the table and the goals."""
    cases = {(name, ranks): _inputs(ranks) for name in PASSES for ranks in RANKS}
    sides = {
        (*case, side): functools.partial(_time, module, PASSES[case[0]], inputs[side], case[1])
        for case, inputs in cases.items()
        for side, module in SIDES.items()
    }
    times = in_turn(sides, min(rounds, 5), "passes")
    ratios = {
        (name, ranks): median_ratio(times[name, ranks, "pipecut"], times[name, ranks, "upstream"])
        for name, ranks in cases
    }
    show_table(
        f"Passes over orders of {SCHEDULE}, {CHUNKS} chunks, {MICROBATCHES_OF_A_RANK} microbatches a rank (CPU time)",
        ["pass", *(f"{ranks} ranks: pipecut, ms | upstream" for ranks in RANKS)],
        [
            [name, *(" | ".join(milliseconds(times[name, ranks, side]) for side in SIDES) for ranks in RANKS)]
            for name in PASSES
        ],
    )
    return show_goals(
        [
            Goal(f"{name}, of upstream's time, worst of {RANKS} ranks", max(ratios[name, r] for r in RANKS), 1.0)
            for name in PASSES
        ]
    )


@functools.cache
def _inputs(ranks: int) -> dict[str, dict[str, Order]]:
    """Return, for each side, the computations of an order and the same with messages, in its own actions."""
    microbatches = ranks * MICROBATCHES_OF_A_RANK
    rows = get_schedule_ops(SCHEDULE, ranks, microbatches, CHUNKS)
    bare: Order = {rank: [action for action in row if action is not None] for rank, row in enumerate(rows)}
    lowered = upstream._add_send_recv(_copy(bare), lambda stage: stage % ranks, ranks * CHUNKS)
    orders = {"bare": bare, "lowered": lowered}
    return {
        side: {
            name: {rank: [module._Action.from_str(str(each)) for each in row] for rank, row in order.items()}
            for name, order in orders.items()
        }
        for side, module in SIDES.items()
    }


def _copy(order: Order) -> Order:
    # Upstream's passes empty the lists that they get.
    return {rank: list(row) for rank, row in order.items()}


def _each_row(name: str, *further: Any) -> Pass:
    def run(module: Any, orders: dict[str, Order], ranks: int) -> object:
        return [getattr(module, name)(row, *further) for row in _copy(orders["bare"]).values()]

    return run


def _whole(name: str, order: str, arguments: Callable[[int], tuple[Any, ...]]) -> Pass:
    def run(module: Any, orders: dict[str, Order], ranks: int) -> object:
        return getattr(module, name)(_copy(orders[order]), *arguments(ranks))

    return run


def _where(ranks: int) -> Callable[[int], int]:
    return lambda stage: stage % ranks


PASSES: dict[str, Pass] = {
    "_add_unshard_reshard": _each_row("_add_unshard_reshard"),
    "_add_reduce_grad": _each_row("_add_reduce_grad", 1),
    "_merge_bw": _each_row("_merge_bw"),
    "_add_send_recv": _whole("_add_send_recv", "bare", lambda ranks: (_where(ranks), ranks * CHUNKS)),
    "_defer_recv_ops": _whole("_defer_recv_ops", "lowered", lambda ranks: (_where(ranks),)),
    "_simulate_comms_compute": _whole(
        "_simulate_comms_compute", "lowered", lambda ranks: (_where(ranks), ranks * CHUNKS)
    ),
    "_validate_schedule": _whole(
        "_validate_schedule", "bare", lambda ranks: (ranks, ranks * CHUNKS, ranks * MICROBATCHES_OF_A_RANK)
    ),
    "_format_pipeline_order": _whole("_format_pipeline_order", "bare", lambda ranks: ()),
}


def _time(module: Any, run: Pass, orders: dict[str, Order], ranks: int) -> float:
    repeats = max(1, 16 // ranks)  # a small order takes milliseconds
    return seconds(lambda: [run(module, orders, ranks) for _ in range(repeats)]) / repeats
