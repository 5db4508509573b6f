"""The balancing problem in plain numbers, checked: blocks, ranks, their memory, and the costs of a cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...errors import SplitError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shared:
    """Memory that several blocks need, such as a tied weight: a stage with any of them holds it once."""

    blocks: tuple[int, ...]
    kept: float = 0.0
    saved: float = 0.0


@dataclass(frozen=True)
class Blocks:
    """A chain of blocks that stay whole. Between block i and block i + 1 is place i, where a cut is allowed.

    `times` are those of the blocks, `transfers` what a cut at each place costs the ranks on both sides. `kept` is
    memory that is held all the time (parameters, gradients, optimizer state, buffers), `saved` that of each microbatch
    in flight; `shared` memory comes on top. `prices` say which of equally good cuts is preferred: the cheapest sum.
    Whatever is left out is 0.

    >>> Blocks(times=(3, 1, 4), transfers=(1, 1)).count
    3
    """

    times: tuple[float, ...]
    transfers: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()
    saved: tuple[float, ...] = ()
    shared: tuple[Shared, ...] = ()
    prices: tuple[float, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.times:
            raise SplitError("there is no block to put into stages: times is empty")
        for name, wanted in (
            ("transfers", self.count - 1),
            ("prices", self.count - 1),
            ("kept", self.count),
            ("saved", self.count),
        ):
            given = getattr(self, name)
            if given and len(given) != wanted:
                raise SplitError(f"{name} has {len(given)} numbers, and {self.count} blocks need {wanted}")
            object.__setattr__(self, name, tuple(given) or (0.0,) * wanted)
        for name in ("times", "transfers", "kept", "saved"):
            _check_amounts(name, getattr(self, name))
        for item in self.shared:
            _check_amounts("shared.kept", (item.kept,))
            _check_amounts("shared.saved", (item.saved,))

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.times)

    def name(self, block: int) -> str:
        """Return the name that a user knows a block by."""
        return self.names[block] if self.names else f"block {block}"

    @cached_property
    def work(self) -> Array:
        """The time of all blocks before each bound."""
        return _sums(self.times)

    @cached_property
    def crossing(self) -> Array:
        """The transfer at each bound; none at the ends of the chain."""
        return np.array([0.0, *self.transfers, 0.0])

    @cached_property
    def kept_before(self) -> Array:
        """The kept memory of all blocks before each bound."""
        return _sums(self.kept)

    @cached_property
    def saved_before(self) -> Array:
        """The saved memory of all blocks before each bound."""
        return _sums(self.saved)


@dataclass(frozen=True)
class Ranks:
    """Placement of the stages: the rank of each stage, the speed and the memory of each rank, microbatches in flight.

    >>> Ranks.of(2, speeds=[1, 2]).speeds
    (1.0, 2.0)
    >>> Ranks.of([0, 1, 1, 0]).ranks
    2
    """

    rank_of: tuple[int, ...]
    speeds: tuple[float, ...]
    memory: tuple[float, ...]
    in_flight: tuple[float, ...]

    @classmethod
    def of(
        cls,
        stages: int | Sequence[int],
        speeds: Sequence[float] | None = None,
        memory_limit: float | Sequence[float] | None = None,
        in_flight: Sequence[float] | Callable[[int], float] | None = None,
    ) -> Ranks:
        """Check what a caller says. `stages` is their number, or the rank of each; `in_flight` is by stage."""
        rank_of = tuple(range(stages)) if isinstance(stages, int) else tuple(stages)
        ranks = max(rank_of, default=-1) + 1
        if ranks < 1 or set(rank_of) != set(range(ranks)):
            raise SplitError(f"stages={stages!r}: give their number, or the rank of each, 0 to the last without gaps")
        speed_of = _by_rank("speeds", 1.0 if speeds is None else speeds, ranks)
        for rank, speed in enumerate(speed_of):
            if not (math.isfinite(speed) and speed > 0):
                raise SplitError(
                    f"speeds[{rank}] is {speed}: rank {rank} would never finish; give a speed above 0, or leave the "
                    "rank out"
                )
        memory = _by_rank("memory_limit", math.inf if memory_limit is None else memory_limit, ranks)
        for rank, limit in enumerate(memory):
            if math.isnan(limit) or limit <= 0:
                raise SplitError(f"memory_limit of rank {rank} is {limit}: give the bytes that it has, above 0")
        counts = [in_flight(stage) for stage in range(len(rank_of))] if callable(in_flight) else in_flight
        flying = tuple(map(float, counts if counts is not None else [1] * len(rank_of)))
        if len(flying) != len(rank_of):
            raise SplitError(f"in_flight has {len(flying)} numbers, and there are {len(rank_of)} stages")
        _check_amounts("in_flight", flying)
        return cls(rank_of, speed_of, memory, flying)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.speeds)

    @property
    def one_stage_each(self) -> bool:
        """True if no rank has two stages."""
        return self.stages == self.ranks

    @property
    def limited(self) -> bool:
        """True if memory is limited at all."""
        return any(map(math.isfinite, self.memory))

    def with_memory(self, factor: float) -> Ranks:
        """Return the same ranks with another memory."""
        return Ranks(self.rank_of, self.speeds, tuple(limit * factor for limit in self.memory), self.in_flight)

    def crosses_ranks(self, stage: int) -> bool:
        """Return True if what passes from a stage to the next one goes to another rank."""
        return stage + 1 < self.stages and self.rank_of[stage] != self.rank_of[stage + 1]


def one_rank_per_stage(ranks: Ranks) -> Ranks:
    """Return every stage as a rank of its own, with its part of the speed and the memory of its rank."""
    held = [ranks.rank_of.count(rank) for rank in ranks.rank_of]
    return Ranks(
        tuple(range(ranks.stages)),
        tuple(ranks.speeds[rank] / number for rank, number in zip(ranks.rank_of, held, strict=True)),
        tuple(ranks.memory[rank] / number for rank, number in zip(ranks.rank_of, held, strict=True)),
        ranks.in_flight,
    )


def _sums(numbers: Iterable[float]) -> Array:
    return np.concatenate(([0.0], np.cumsum(np.array(tuple(numbers), dtype=np.float64))))


def _check_amounts(name: str, numbers: Sequence[float]) -> None:
    for place, number in enumerate(numbers):
        if not math.isfinite(number) or number < 0:
            what = "not a finite number" if not math.isfinite(number) else "negative"
            raise SplitError(f"{name}[{place}] is {number}, {what}: costs are finite numbers, 0 or more")


def _by_rank(name: str, given: float | Sequence[float], ranks: int) -> tuple[float, ...]:
    if isinstance(given, int | float):
        return (float(given),) * ranks
    if len(given) != ranks:
        raise SplitError(f"{name} has {len(given)} numbers, and there are {ranks} ranks: give one for each")
    return tuple(map(float, given))


Positions = npt.NDArray[np.int64]

# So few shared things are looked at one by one for all ends at once; more of them are counted on the way.
_FEW = 8


class Memory:
    """The memory of runs of blocks, for a number of microbatches in flight."""

    def __init__(self, blocks: Blocks, in_flight: float) -> None:
        self.blocks, self.in_flight = blocks, in_flight
        self._before = blocks.kept_before + in_flight * blocks.saved_before
        self._bytes = [(np.array(sorted(item.blocks)), self._size(item)) for item in blocks.shared]

    def of(self, begin: int, end: int) -> float:
        """Return the memory of the blocks from `begin` up to, not including, `end`."""
        return float(self.from_begin(begin, np.array([end]))[0])

    def from_begin(self, begin: int, ends: Positions) -> Array:
        """Return the memory of the runs that begin here, for each of some ends."""
        needed: Array = self._before[ends] - self._before[begin]
        for users, size in self._bytes:
            place = np.searchsorted(users, begin)
            if place < len(users):
                needed = needed + size * (users[place] < ends)
        return needed

    def to_end(self, begins: Positions, end: int) -> Array:
        """Return the memory of the runs that end here, for each of some begins."""
        needed: Array = self._before[end] - self._before[begins]
        for users, size in self._bytes:
            place = np.searchsorted(users, end) - 1
            if place >= 0:
                needed = needed + size * (users[place] >= begins)
        return needed

    def earliest(self, limit: float) -> Positions:
        """Return for each end the first begin from which the run fits; the end itself if not even one block does."""
        count = self.blocks.count
        if math.isinf(limit):
            return np.zeros(count + 1, dtype=np.int64)
        slack = 1e-9 * max(limit, 1.0)
        if not self._bytes:
            found = np.searchsorted(self._before, self._before - limit - slack)
            return np.minimum(found, np.arange(count + 1))
        return self._halve(limit + slack) if len(self._bytes) <= _FEW else self._slide(limit + slack)

    def _halve(self, limit: float) -> Positions:
        """Find the earliest begins for all ends at once, by bisection."""
        ends = np.arange(self.blocks.count + 1)
        low, high = np.zeros_like(ends), ends.copy()
        while (low < high).any():
            middle = (low + high) // 2
            needed = self._before[ends] - self._before[middle]
            for users, size in self._bytes:
                following = np.append(users, self.blocks.count)[np.searchsorted(users, middle)]
                needed = needed + size * (following < ends)
            fits = needed <= limit
            low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
        return low

    def _slide(self, limit: float) -> Positions:
        """Move two bounds forward; what is shared is counted by how many of its blocks are between them."""
        uses: list[list[int]] = [[] for _ in self.blocks.times]
        for number, (users, _) in enumerate(self._bytes):
            for block in users:
                uses[block].append(number)
        sizes = [size for _, size in self._bytes]
        inside = [0] * len(sizes)
        before = self._before.tolist()
        shared, begin = 0.0, 0
        found = [0]
        for end in range(1, self.blocks.count + 1):
            for number in uses[end - 1]:
                inside[number] += 1
                shared += sizes[number] if inside[number] == 1 else 0.0
            while begin < end and before[end] - before[begin] + shared > limit:
                for number in uses[begin]:
                    inside[number] -= 1
                    shared -= sizes[number] if inside[number] == 0 else 0.0
                begin += 1
            found.append(begin)
        return np.array(found)

    def _size(self, item: Shared) -> float:
        return item.kept + self.in_flight * item.saved


class CutCosts:
    """The time and the memory that cuts of the blocks cost the ranks."""

    def __init__(self, blocks: Blocks, ranks: Ranks) -> None:
        self.blocks, self.ranks = blocks, ranks
        self.memories = [Memory(blocks, number) for number in ranks.in_flight]

    def loads(self, cuts: list[int]) -> list[float]:
        """Return the time of each rank."""
        loads = [0.0] * self.ranks.ranks
        bounds = [0, *cuts, self.blocks.count]
        for stage, rank in enumerate(self.ranks.rank_of):
            loads[rank] += float(self.stage_time(stage, np.array(bounds[stage]), np.array(bounds[stage + 1])))
        return loads

    def memory(self, cuts: list[int]) -> list[float]:
        """Return the memory of each rank."""
        needed = [0.0] * self.ranks.ranks
        bounds = [0, *cuts, self.blocks.count]
        for stage, rank in enumerate(self.ranks.rank_of):
            needed[rank] += self.stage_memory(stage, bounds[stage], bounds[stage + 1])
        return needed

    def stage_memory(self, stage: int, begin: int, end: int) -> float:
        """Return the memory of one stage."""
        return self.memories[stage].of(begin, end)

    def share(self, cuts: list[int]) -> float:
        """Return the greatest part that a rank needs of the memory that it has; more than 1 if that is too little."""
        return max(need / limit for need, limit in zip(self.memory(cuts), self.ranks.memory, strict=True))

    def lower_bound(self) -> float:
        """Return a time that no cut is below: all work divided at will, or the longest block on the fastest rank."""
        return max(
            float(self.blocks.work[-1]) / sum(self.ranks.speeds), max(self.blocks.times) / max(self.ranks.speeds)
        )

    def stage_time(self, stage: int, begin: Positions, end: Positions) -> Array:
        """Return the time of one stage with its transfers, for some begins or ends."""
        blocks, speed = self.blocks, self.ranks.speeds[self.ranks.rank_of[stage]]
        time: Array = (blocks.work[end] - blocks.work[begin]) / speed
        if stage and self.ranks.crosses_ranks(stage - 1):
            time = time + blocks.crossing[begin]
        return time + blocks.crossing[end] if self.ranks.crosses_ranks(stage) else time
