"""V-Half and V-Min: a half and a third of the memory of 1F1B, with a smaller bubble (arXiv 2405.15362).

The six passes of one microbatch on every rank form a block, which is repeated every six slots. F0 and I1 go down the V,
F1 and I0 up; the passes of one rank stand in six different slots modulo six, so that the blocks fit into each other.

      V-Min, 4 ranks
      slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17
      rank 0 F0  .  .  .  .  .  . F1 I1  . W1  .  .  .  . I0  . W0
      rank 1  . F0  .  .  .  . F1  .  . I1 W1  .  .  . I0  .  . W0
      rank 2  .  . F0  .  . F1  .  .  .  . I1  . W1 I0  . W0  .  .
      rank 3  .  .  . F0 F1  .  .  .  .  .  . I1 I0 W1 W0  .  .  .

The slower a pass goes from rank to rank, the longer activations are held and the less the ranks wait for each other:
with one slot everywhere a microbatch is under way for 4p slots, and a rank holds 4p / 6 chunks, p / 3 microbatches;
with two slots on the way down it holds p / 2. Because of the V it is the same on all ranks.

The blocks in a row are already a plan; the idle slots at its start and at its end are then filled as far as the memory
goes. If F, I and W take equally long and transfers no time, no plan on this V with this memory is shorter, once there
are microbatches enough to fill the pipeline. With M chunks on each of p ranks the last rank waits p - 1 slots for its
first forward, and can then fill only M of the 2p slots until the first gradient comes back; after its last forward 3p
slots are left for 2M passes at most. So it waits at least 6p - 1 - 3M slots, and here it waits no longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

from ..action import Action, Op, Rows
from ..plan import Plan
from ..registry import schedule
from ..rules import Dataflow, Placement
from .building import fill_early, fill_late

_PERIOD = 6  # passes of a rank for one microbatch: F, I and W of two chunks


@dataclass(frozen=True)
class _Block:
    """Distances, in slots, between the passes of one microbatch."""

    from_rank_to_rank: tuple[int, int, int, int]  # F0, F1, I1, I0
    at_turns: tuple[int, int, int]  # F0 to F1 on the last rank, F1 to I1 on the first, I1 to I0 on the last

    def times(self, rank: int, ranks: int) -> tuple[int, int, int, int, int, int]:
        """Return the slots of F0, F1, I1, I0, W1 and W0 of microbatch 0 on a rank."""
        down, up, back_down, back_up = self.from_rank_to_rank
        last, below = ranks - 1, ranks - 1 - rank
        F1_on_last = down * last + self.at_turns[0]
        I1_on_first = F1_on_last + up * last + self.at_turns[1]
        I0_on_last = I1_on_first + back_down * last + self.at_turns[2]
        F0, F1 = down * rank, F1_on_last + up * below
        I1, I0 = I1_on_first + back_down * rank, I0_on_last + back_up * below
        W1 = _next_free(I1, F0, F1, I1, I0)
        return F0, F1, I1, I0, W1, _next_free(I0, F0, F1, I1, I0, W1)


def _next_free(after: int, *times: int) -> int:
    """Return the first slot after a pass in which no other pass of any microbatch stands."""
    taken = {time % _PERIOD for time in times}
    return next(slot for slot in range(after + 1, after + _PERIOD) if slot % _PERIOD not in taken)


@schedule("V-Half", placement=Placement.v, chunks=2)
def _v_half(placement: Placement, microbatches: int) -> Rows:
    """Run two stages on each rank, in a V, with half of the memory of 1F1B.

    No rank holds more than (ranks + 2) // 2 microbatches.

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("V-Half", ranks=3, microbatches=3).grid())
    rank 0 │ 0F0 0F1 ·   ·   ·   5F0 5I0 0F2 5W0 ·   5F1 5I1 0I0 5W1 ·   5F2 5I2 0W0 0I1 5W2 0W1 0I2 0W2
    rank 1 │ ·   1F0 ·   ·   4F0 1F1 ·   4I0 4W0 4F1 1F2 1I0 1W0 4I1 4F2 ·   1I1 4I2 4W1 1W1 1I2 4W2 1W2
    rank 2 │ ·   ·   2F0 3F0 ·   ·   2F1 3F1 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 ·   3I2 2I2 2W1 3W2 2W2
    """
    ranks = placement.ranks
    # With an even number of ranks the backwards start three slots later, so that they do not meet the forwards.
    block = _Block((2, 1, 2, 1), (2, 1 if ranks % 2 else 4, 1))
    return fill_late(_repeated(block, placement, microbatches), limit=2 * ((ranks + 2) // 2)).actions


@schedule("V-Min", placement=Placement.v, chunks=2)
def _v_min(placement: Placement, microbatches: int) -> Rows:
    """Run two stages on each rank, in a V, with a third of the memory of 1F1B.

    No rank holds more than (ranks + 4) // 3 microbatches.

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("V-Min", ranks=3, microbatches=3).grid())
    rank 0 │ 0F0 0F1 0F2 ·   ·   5F0 5I0 5W0 ·   ·   5F1 5I1 0I0 5W1 0W0 5F2 5I2 0I1 5W2 0W1 ·   0I2 0W2
    rank 1 │ ·   1F0 1F1 1F2 4F0 ·   ·   4I0 4W0 4F1 ·   1I0 4I1 4W1 4F2 1W0 1I1 4I2 4W2 1W1 1I2 1W2 ·
    rank 2 │ ·   ·   2F0 3F0 2F1 3F1 ·   ·   3I0 3W0 2I0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 ·
    """
    ranks = placement.ranks
    # With a multiple of three the passes would meet; two slots more at the last rank's turns keep them apart.
    block = _Block((1, 1, 1, 1), (1, 1, 1) if ranks % 3 else (3, 1, 3))
    limit = 2 * ((ranks + 4) // 3)
    return fill_early(fill_late(_repeated(block, placement, microbatches), limit), limit).actions


def _repeated(block: _Block, placement: Placement, microbatches: int) -> Plan:
    rows = tuple(_row(block, rank, placement.ranks, microbatches) for rank in range(placement.ranks))
    return Plan("repeated blocks", placement, microbatches, rows, Dataflow.chain(placement.stages))


def _row(block: _Block, rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    first, second = rank, 2 * ranks - 1 - rank
    stages = (first, second, second, first, second, first)
    ops = (Op.FORWARD,) * 2 + (Op.BACKWARD_INPUT,) * 2 + (Op.BACKWARD_WEIGHT,) * 2
    timed = [
        (time + _PERIOD * microbatch, Action(stage, op, microbatch))
        for stage, op, time in zip(stages, ops, block.times(rank, ranks), strict=True)
        for microbatch in range(microbatches)
    ]
    return tuple(action for _, action in sorted(timed, key=itemgetter(0)))
