"""How much memory a run of blocks needs, and where it may begin at the earliest to fit."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .problem import Array, Blocks, Shared

Positions = npt.NDArray[np.int64]

# So few shared things are looked at one by one for all ends at once; more of them are counted on the way.
FEW = 8


class Memory:
    """The memory of runs of blocks, for a number of microbatches in flight."""

    def __init__(self, blocks: Blocks, in_flight: float) -> None:
        self.blocks, self.in_flight = blocks, in_flight
        self._before = blocks.kept_before + in_flight * blocks.saved_before
        self._bytes = [(np.array(sorted(item.blocks)), self._size(item)) for item in blocks.shared]

    def of(self, begin: int, end: int) -> float:
        """The memory of the blocks from `begin` up to, not including, `end`."""
        return float(self.from_begin(begin, np.array([end]))[0])

    def from_begin(self, begin: int, ends: Positions) -> Array:
        """The memory of the runs that begin here, for each of some ends."""
        needed: Array = self._before[ends] - self._before[begin]
        for users, size in self._bytes:
            place = np.searchsorted(users, begin)
            if place < len(users):
                needed = needed + size * (users[place] < ends)
        return needed

    def to_end(self, begins: Positions, end: int) -> Array:
        """The memory of the runs that end here, for each of some begins."""
        needed: Array = self._before[end] - self._before[begins]
        for users, size in self._bytes:
            place = np.searchsorted(users, end) - 1
            if place >= 0:
                needed = needed + size * (users[place] >= begins)
        return needed

    def earliest(self, limit: float) -> Positions:
        """For each end the first begin from which the run fits; the end itself if not even one block does."""
        count = self.blocks.count
        if math.isinf(limit):
            return np.zeros(count + 1, dtype=np.int64)
        slack = 1e-9 * max(limit, 1.0)
        if not self._bytes:
            found = np.searchsorted(self._before, self._before - limit - slack)
            return np.minimum(found, np.arange(count + 1))
        return self._halve(limit + slack) if len(self._bytes) <= FEW else self._slide(limit + slack)

    def _halve(self, limit: float) -> Positions:
        """The same for all ends at once, halving the range of the begin."""
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
        """Two bounds that only go forward; what is shared is counted by how many of its blocks are between them."""
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
