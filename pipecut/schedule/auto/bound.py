"""What no plan can beat, whatever its order and its memory."""

from __future__ import annotations

from .problem import FORWARD, FULL, INPUT, WEIGHT, Problem


def lower_bound(problem: Problem, objective: str) -> float:
    """The least that the time of a plan can be: its longest span, or its makespan.

    From the first pass of a rank r, a rank q below it cannot start before a microbatch has come there. q then has all
    its forwards and input gradients to do before the last gradient goes back to r, which ends with a weight gradient.
    And every rank computes at least its work, in a makespan after its first microbatch has come.
    """
    time, last = problem.time, problem.stages - 1
    inputs = [min(time[INPUT][stage], time[FULL][stage]) for stage in range(last + 1)]
    both = [
        min(time[FULL][stage], time[INPUT][stage] + time[WEIGHT][stage]) - inputs[stage] for stage in range(last + 1)
    ]
    # The first stage of rank r is stage r in each placement here, so that a way down leads along these.
    way_down, way_up = [0.0], [0.0]
    for stage in range(problem.ranks - 1):
        way_down.append(way_down[-1] + time[FORWARD][stage] + problem.down[stage])
        way_up.append(way_up[-1] + problem.up[stage + 1] + inputs[stage])
    chain = _chains(problem, inputs)
    best = 0.0
    for rank in range(problem.ranks) if objective == "span" else (0,):
        for below in range(rank, problem.ranks):
            stages = problem.placement.stages_of[below]
            turn = problem.microbatches * sum(time[FORWARD][stage] + inputs[stage] for stage in stages)
            through = max(turn, chain[below])
            there, back = way_down[below] - way_down[rank], way_up[below] - way_up[rank]
            best = max(best, there + through + back + both[rank])
    heads = way_down if objective == "makespan" else [0.0] * problem.ranks
    return max(best, *(head + work for head, work in zip(heads, problem.work, strict=True)))


def _chains(problem: Problem, inputs: list[float]) -> list[float]:
    """By rank: one microbatch from its first stage's forward to that stage's input gradient, alone in the pipeline."""
    chains = [0.0] * problem.ranks
    way = 0.0
    for stage in reversed(range(problem.stages)):
        if stage < problem.stages - 1:
            way += problem.down[stage] + problem.up[stage + 1]
        way += problem.time[FORWARD][stage] + inputs[stage]
        if stage < problem.ranks:
            chains[stage] = way
    return chains
