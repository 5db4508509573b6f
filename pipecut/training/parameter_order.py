"""Order of the parameters of a whole pipeline: the model's own, known to every rank, wherever each parameter is."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..run import HeldTensor, PipelineSchedule

_Key = tuple[int, str]  # the stage and the name there


@dataclass(frozen=True)
class ParameterOrder:
    """All parameters of a pipeline, each once, in the model's order."""

    keys: tuple[_Key, ...]
    names: tuple[str, ...]  # in the model; of modules cut by hand that have the same names, with their stages

    @property
    def places(self) -> Mapping[_Key, int]:
        """The place of each parameter."""
        return {key: place for place, key in enumerate(self.keys)}

    def fits(self, held: Iterable[HeldTensor], own: Iterable[int]) -> bool:
        """Return True if those of some stages are the ones that are held now."""
        stages = set(own)
        return {key for key in self.keys if key[0] in stages} == set(_keys_of(held))


_known: weakref.WeakKeyDictionary[PipelineSchedule, ParameterOrder] = weakref.WeakKeyDictionary()


def known_order(schedule: PipelineSchedule) -> ParameterOrder | None:
    """Return the order that the ranks have found last; None before the first time, on all of them."""
    return _known.get(schedule)


def find_order(schedule: PipelineSchedule, held: Sequence[HeldTensor], call: int) -> ParameterOrder:
    """Exchange with all ranks which parameters there are; they do so in the same call."""
    own = [[*each.order, each.stage, each.local_name, each.name] for each in held if each.counts]
    facts = schedule.agreement.exchange(call, {"parameters": json.dumps(own)})
    every = sorted(tuple(entry) for fact in facts for entry in json.loads(fact["parameters"]))
    names = Counter(name for *_, name in every)
    titles = [name if names[name] == 1 else f"{name} of stage {stage}" for *_, stage, _, name in every]
    keys = [(stage, local) for *_, stage, local, _ in every]
    _known[schedule] = ParameterOrder(tuple(keys), tuple(titles))
    return _known[schedule]


def key_of(held: HeldTensor) -> _Key:
    """Return the key of a parameter in `places`."""
    return held.stage, held.local_name


def _keys_of(held: Iterable[HeldTensor]) -> list[_Key]:
    return [key_of(each) for each in held if each.counts]
