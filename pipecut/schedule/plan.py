"""Plans: the actions of every rank, in order, in one training step."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ParamSpec, TypeVar

from ..errors import PlanError
from ..text import plural
from .action import BACKWARD, COMPUTE, TRANSFERS, Action, CodedRow, Op, Rows, parse_action, transfer
from .plan_text import FilePath, grid, load_csv, save_csv
from .rules import Dataflow, Placement, check_positive, first_missing

_Given = Action | str | None  # an action as a user may write it


_BIG, _MANY = 1 << 16, 32  # actions and ranks from which on arrays are quicker


@dataclass(frozen=True)
class Plan:
    """The actions of every rank, in order; None is a bubble.

    >>> plan = Plan.from_actions({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]})
    >>> print(plan.grid())
    rank 0 │ 0F0 ·   ·   0B0
    rank 1 │ ·   1F0 1B0 ·
    """

    name: str
    placement: Placement
    microbatches: int
    actions: Rows = field(repr=False)
    dataflow: Dataflow = field(repr=False)
    training: bool = True  # False: forward only

    def __post_init__(self) -> None:
        for what, value, kind in (("placement", self.placement, Placement), ("dataflow", self.dataflow, Dataflow)):
            if not isinstance(value, kind):
                raise PlanError(f"The {what} of a plan is a {kind.__name__}, got {value!r}.")
        check_positive(microbatches=self.microbatches)
        if self.dataflow.stages != self.stages:
            raise PlanError(
                f"The dataflow has {self.dataflow.stages} stages, the plan '{self.name}' has {self.stages}."
            )
        if len(self.actions) != self.ranks:
            raise PlanError(
                f"The plan '{self.name}' has actions for {len(self.actions)} ranks, and its placement puts stages on "
                f"{self.ranks}: give every rank a stage and a list of actions."
            )

    @classmethod
    def from_actions(
        cls,
        actions: Mapping[int, Iterable[_Given]] | Sequence[Iterable[_Given]],
        *,
        name: str = "custom",
        placement: Placement | Mapping[int, int] | Sequence[int] | None = None,
        microbatches: int | None = None,
        dataflow: Dataflow | None = None,
        training: bool | None = None,
    ) -> Plan:
        """Make a plan from actions, or their text, of each rank. Arguments that are left out are read from the actions.

        Without `placement` a stage belongs to the rank that runs its forwards; without `dataflow` every stage feeds the
        next, and the skips are those that the plan's transfers name; without `training` a plan without any backward is
        forward only.
        """
        rows = _rows(actions)
        leaves = [leaf for row in rows for action in row if action is not None for leaf in action.leaves]
        if not leaves:
            raise PlanError("The plan has no action: give each rank a list such as ['0F0', '0B0'].")
        if placement is None:
            placement = _placement_of(rows)
        elif not isinstance(placement, Placement):
            placement = Placement.explicit(placement)
        if len(rows) < placement.ranks:
            rows += ((),) * (placement.ranks - len(rows))
        return cls(
            name=name,
            placement=placement,
            microbatches=_count_microbatches(leaves) if microbatches is None else microbatches,
            actions=rows,
            dataflow=_dataflow_of(leaves, placement.stages) if dataflow is None else dataflow,
            training=any(leaf.op in BACKWARD for leaf in leaves) if training is None else training,
        )

    @cached_property
    def has_transfers(self) -> bool:
        """True if the plan names its messages. A plan that does not gets them from `lower`."""
        return not self.ops.isdisjoint(TRANSFERS)

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The kinds of action in the plan."""
        found: set[Op] = set()
        for row in self.actions:
            found.update(row.ops if isinstance(row, CodedRow) else (action.op for action in row if action is not None))
        return frozenset(found)

    @cached_property
    def is_big(self) -> bool:
        """True if the plan is looked at in arrays, all ranks together, and not action after action."""
        if sum(map(len, self.actions)) < _BIG or self.ranks < _MANY:
            return False
        from .lockstep import goes_together  # imports numpy, which small plans do without

        return goes_together(self)

    @cached_property
    def is_proven(self) -> bool:
        """True if a big plan with its messages was found to be right; one that was not may be so nevertheless."""
        from .lockstep import is_proven

        return self.is_big and is_proven(self)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    def ranks_of_tie(self, number: int) -> tuple[int, ...]:
        """Return the ranks that hold a tied parameter."""
        return tuple(sorted({self.placement.rank_of[stage] for stage in self.dataflow.ties[number]}))

    def with_actions(self, rows: Iterable[Iterable[Action | None]]) -> Plan:
        """Return the same plan with other actions."""
        return replace(self, actions=tuple(row if isinstance(row, CodedRow) else tuple(row) for row in rows))

    def with_dataflow(self, dataflow: Dataflow) -> Plan:
        """Return the same actions for a model whose stages use each other's values in another way."""
        return replace(self, dataflow=dataflow)

    def grid(self, *, width: int | None = None) -> str:
        """Return the plan as text: a row per rank, a column per slot. `width` wraps it at that many characters.

        Every action stands in the first slot in which it can run if each takes one; a plan that cannot run to its end
        is shown as it is written.
        """
        from .lower import add_bubbles

        return grid(add_bubbles(self, allow_stuck=True).actions, width=width)

    def validate(self) -> Plan:
        """Prove the plan complete, in order and free of deadlock, and return it; raise a PlanError with every fault."""
        from .validate import validate

        validate(self)
        return self

    def lower(self, *, max_held: int | None = None, receives: str = "as_sent") -> Plan:
        """Add all that running the plan takes: transfers, sums of tied gradients, and sharding if asked for."""
        from .lower import lower

        return lower(self, max_held=max_held, receives=receives)

    def save_csv(self, path: FilePath) -> None:
        """Write one line per rank, one cell per slot; a bubble is an empty cell.

        A file has the actions only: give a placement and a dataflow that cannot be read from them to `load_csv` again.
        """
        save_csv(self.actions, path)

    @classmethod
    def load_csv(
        cls,
        path: FilePath,
        *,
        name: str | None = None,
        placement: Placement | Mapping[int, int] | Sequence[int] | None = None,
        microbatches: int | None = None,
        dataflow: Dataflow | None = None,
        training: bool | None = None,
        ragged: bool = False,
    ) -> Plan:
        """Read what `save_csv` wrote, like `from_actions`; skips, ties and model inputs are not in the file.

        `ragged=True` takes lines of different lengths: the short ones end in bubbles.
        """
        rows = load_csv(path, ragged=ragged)
        name = name if name is not None else str(path)
        return cls.from_actions(
            rows, name=name, placement=placement, microbatches=microbatches, dataflow=dataflow, training=training
        )


def _rows(actions: Mapping[int, Iterable[_Given]] | Sequence[Iterable[_Given]]) -> Rows:
    by_rank = dict(actions) if isinstance(actions, Mapping) else dict(enumerate(actions))
    wrong = [rank for rank in by_rank if not isinstance(rank, int) or rank < 0]
    if wrong:
        raise PlanError(f"The plan has a rank {wrong[0]!r}: ranks are numbered 0, 1, 2...")
    rows = []
    for rank in range(max(by_rank, default=-1) + 1):
        row = []
        for slot, given in enumerate(by_rank.get(rank, ())):
            if given is not None and not isinstance(given, Action | str):
                raise PlanError(
                    f"Rank {rank}, slot {slot}: {given!r} is not an action; give an Action, its text, or None."
                )
            try:
                row.append(parse_action(given) if isinstance(given, str) else _normal(given))
            except PlanError as error:
                raise PlanError(f"Rank {rank}, slot {slot}: {error}") from None
        rows.append(tuple(row))
    return tuple(rows)


def _normal(action: Action | None) -> Action | None:
    """Leave out a peer that is the neighbour, so that equal actions compare equal."""
    if action is None or action.op not in TRANSFERS or action.peer is None:
        return action
    return transfer(action.op, action.stage, action.microbatch, action.peer)


def _placement_of(rows: Rows) -> Placement:
    """Put a stage where its forwards are, otherwise where anything of it is computed."""
    rank_of: dict[int, int] = {}
    for ops in ({Op.FORWARD}, COMPUTE):
        for rank, row in enumerate(rows):
            for leaf in (leaf for action in row if action is not None for leaf in action.leaves):
                if leaf.op in ops:
                    rank_of.setdefault(leaf.stage, rank)
    _check_none_left_out("stage", rank_of)
    return Placement(tuple(rank_of[stage] for stage in range(len(rank_of))))


def _count_microbatches(leaves: Sequence[Action]) -> int:
    numbers = {leaf.microbatch for leaf in leaves if leaf.op in COMPUTE and leaf.microbatch is not None}
    _check_none_left_out("microbatch", numbers)
    return len(numbers)


def _check_none_left_out(what: str, numbers: Collection[int]) -> None:
    """Raise if a number is left out: they are counted from the actions, and the plan would be another one."""
    missing = first_missing(numbers)
    if not numbers or missing < len(numbers):
        there = f"has {what} {max(numbers)}, but nothing of" if numbers else "computes nothing of"
        raise PlanError(
            f"The plan {there} {what} {missing}: add its actions, or number the {plural(what, 2)} 0, 1, 2... without "
            "gaps."
        )


def _dataflow_of(leaves: Sequence[Action], stages: int) -> Dataflow:
    """Return the chain with the skips that the transfers name."""
    sent = {(leaf.stage, leaf.other_stage) for leaf in leaves if leaf.op is Op.SEND_F and leaf.peer is not None}
    back = {(leaf.other_stage, leaf.stage) for leaf in leaves if leaf.op is Op.SEND_B and leaf.peer is not None}
    inside = {(maker, user) for maker, user in sent | back if 0 <= maker < user < stages}
    chain = Dataflow.chain(stages)
    return replace(chain, activations=chain.activations | inside, gradients=chain.gradients | (back & inside))


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def collector_paused(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run a function that makes or reads plans with the garbage collector off.

    Actions hold no reference cycles, but there are many of them: left on, the collector looks through all of them again
    and again, and takes as long as the work itself.
    """

    @functools.wraps(function)
    def paused(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return paused
