"""The link between the ranks of a group, measured: messages to a neighbour and back."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from .stage_times import wait_for_device

SMALL, LARGE = 8, 2**20  # bytes
ROUNDS = 12


def measure_link(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float] | None:
    """Seconds of latency and bytes in a second, to the neighbour of this rank; None for one that has no neighbour.

    All ranks of the group have to call it.
    """
    rank = dist.get_rank(group)
    other = rank ^ 1
    if other >= dist.get_world_size(group):
        return None
    there = dist.get_global_rank(group, other)
    small = _seconds(SMALL, rank < other, there, group, device)
    large = _seconds(LARGE, rank < other, there, group, device)
    # What disturbs the large message least is still more than what a byte takes.
    return small, (LARGE - SMALL) / max(large - small, LARGE * 1e-12)


def _seconds(size: int, begins: bool, other: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Half of what a message takes to go there and come back."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    ways = (dist.send, dist.recv) if begins else (dist.recv, dist.send)
    times = []
    for _ in range(ROUNDS):
        wait_for_device()
        begin = time.perf_counter()
        for way in ways:
            way(message, other, group)
        wait_for_device()
        times.append((time.perf_counter() - begin) / 2)
    return statistics.median(times[2:])
