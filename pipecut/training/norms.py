"""Norm of the gradients of a whole pipeline, and clipping by it: the numbers that torch has for the uncut model."""

from __future__ import annotations

import json
import math
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DisagreementError, InputError, NonFiniteNormError, PipeError
from ..run import CLIP, NORM, HeldTensor, PipelineSchedule
from ..stage import is_distributed
from ..text import counted, did_you_mean, listed, numbered, tensor_text
from ..torch_internals import norm_of_each
from .sharded_norms import sharded_norms

_Selection = Tensor | Iterable[Any] | Mapping[str, Any] | None

# The dtypes of norms, by number in a message; 0 stands for no gradient.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SHOWN = 4


def clip_grad_norm_(
    schedule: PipelineSchedule,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    parameters: _Selection = None,
) -> Tensor:
    """Clip the gradients of a pipeline by the norm of all of them, and return that norm, on every rank.

    It is torch.nn.utils.clip_grad_norm_ of the whole model, to the bit: the norms of all parameters, wherever they
    are, in the model's order. A tied parameter counts once, one that is sharded (fully_shard, DTensor) counts whole,
    and copies of the pipeline are not added up. Every rank calls this after `step` and before the optimizer's step.

    `parameters` are those to clip, by a norm of their own: parameters, names in the model, or a group of an
    optimizer. Each rank passes those of its own stages; an empty list if there are none.

    >>> from torch import nn
    >>> from pipecut import Schedule1F1B, clip_grad_norm_, pipeline
    >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4)
    >>> pipe = pipeline(model, (x,), num_stages=2)
    >>> schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2, lambda output: output.sum())
    >>> output = schedule.step(x)
    >>> expected = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
    >>> torch.equal(clip_grad_norm_(schedule, max_norm=1.0), expected)
    True
    >>> clip_grad_norm_(schedule, max_norm=1.0)
    tensor(1.0000)
    """
    if not isinstance(max_norm, int | float) or math.isnan(max_norm):
        raise InputError(f"max_norm must be a number, got {max_norm!r}")
    call = _Call("clip_grad_norm_", CLIP, float(max_norm), _checked_order(norm_type), foreach)
    chosen, total = _norm_of(schedule, call, parameters, error_if_nonfinite)
    for together in _by_mesh(chosen).values():
        torch.nn.utils.clip_grads_with_norm_(together, max_norm, total, foreach)
    return total


def get_total_norm(
    schedule: PipelineSchedule,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    parameters: _Selection = None,
) -> Tensor:
    """Return the norm of the gradients of a pipeline, on every rank; all of them call this.

    It is the norm by which `clip_grad_norm_` clips.
    """
    call = _Call("get_total_norm", NORM, 0.0, _checked_order(norm_type), foreach)
    return _norm_of(schedule, call, parameters, error_if_nonfinite)[1]


@dataclass(frozen=True)
class _Call:
    """The options of a call, which are the same on every rank."""

    name: str
    kind: int
    max_norm: float
    norm_type: float
    foreach: bool | None

    @property
    def options(self) -> Mapping[str, float]:
        return {"max_norm": self.max_norm, "norm_type": self.norm_type}


def _checked_order(norm_type: Any) -> float:
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if math.isnan(order):
        raise InputError(f"norm_type must be a number, or 'inf', got {norm_type!r}")
    return order


@torch.no_grad()
def _norm_of(
    schedule: PipelineSchedule, call: _Call, parameters: _Selection, error_if_nonfinite: bool
) -> tuple[list[Tensor], Tensor]:
    """Return the chosen parameters of this process that have a gradient, and the norm over all ranks."""
    if not isinstance(schedule, PipelineSchedule):
        raise InputError(
            f"{call.name}() takes the schedule first, and got {type(schedule).__name__}: a rank has the parameters of "
            f"its own stages only; for a model that is not cut there is torch.nn.utils.{call.name}"
        )
    held = schedule.held_parameters()
    chosen = _Chosen(schedule, held, parameters)
    message = _Message(schedule, _known_order(schedule) or _find_order(schedule, held, call.kind), call)
    numbers = message.exchange(held, chosen)
    if message.is_outdated(numbers):
        message = _Message(schedule, _find_order(schedule, held, call.kind), call, is_new=True)
        numbers = message.exchange(held, chosen)
    norms = message.read(numbers)
    values = _tensors_of(list(norms.values()), schedule.stages[0].device)
    total = torch.nn.utils.get_total_norm(values, call.norm_type, foreach=False)
    if error_if_nonfinite and not math.isfinite(total):
        culprits = [name for name, (value, _) in norms.items() if not math.isfinite(value)]
        raise NonFiniteNormError(
            f"the norm of order {call.norm_type:g} of the gradients is {float(total)}"
            + (f": that of {listed(culprits, _SHOWN)} is not finite" if culprits else "")
            + ". Nothing was clipped; error_if_nonfinite=False clips by it anyway"
        )
    return [each.value for each in chosen.held if each.value.grad is not None], total


# The order of all parameters: the model's own, known to every rank, wherever each parameter is.

_Key = tuple[int, str]  # the stage and the name there


@dataclass(frozen=True)
class _ParameterOrder:
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


_orders: weakref.WeakKeyDictionary[PipelineSchedule, _ParameterOrder] = weakref.WeakKeyDictionary()


def _known_order(schedule: PipelineSchedule) -> _ParameterOrder | None:
    """Return the order that the ranks have found last; None before the first time, on all of them."""
    return _orders.get(schedule)


def _find_order(schedule: PipelineSchedule, held: Sequence[HeldTensor], call: int) -> _ParameterOrder:
    """Exchange with all ranks which parameters there are; they do so in the same call."""
    own = [[*each.order, each.stage, each.local_name, each.name] for each in held if each.counts]
    facts = schedule.agreement.exchange(call, {"parameters": json.dumps(own)})
    every = sorted(tuple(entry) for fact in facts for entry in json.loads(fact["parameters"]))
    names = Counter(name for *_, name in every)
    titles = [name if names[name] == 1 else f"{name} of stage {stage}" for *_, stage, _, name in every]
    keys = [(stage, local) for *_, stage, local, _ in every]
    _orders[schedule] = _ParameterOrder(tuple(keys), tuple(titles))
    return _orders[schedule]


def _key_of(held: HeldTensor) -> _Key:
    """Return the key of a parameter in `places`."""
    return held.stage, held.local_name


def _keys_of(held: Iterable[HeldTensor]) -> list[_Key]:
    return [_key_of(each) for each in held if each.counts]


# What each rank takes part with.


class _Chosen:
    """The parameters of this process that a call is about; what does not fit is raised when they are asked for."""

    def __init__(self, schedule: PipelineSchedule, held: Sequence[HeldTensor], parameters: _Selection) -> None:
        if isinstance(parameters, Mapping):
            parameters = parameters.get("params", parameters)
        one = isinstance(parameters, Tensor | str)
        self._given: list[Any] = [parameters] if one else list(parameters or ())
        self._schedule = schedule
        self._all = held
        ids, names = {id(each) for each in self._given}, {each for each in self._given if isinstance(each, str)}
        self.held = [
            each
            for each in held
            if parameters is None or id(each.value) in ids or not names.isdisjoint(self._names_of(each))
        ]

    def _names_of(self, held: HeldTensor) -> set[str]:
        ties = [tie.names for tie in self._schedule.ties if held.local_name in tie.names.get(held.stage, ())]
        return {held.name, held.local_name, *(name for names in ties for each in names.values() for name in each)}

    def fits(self, order: _ParameterOrder) -> bool:
        """Return True if all names that were given are known."""
        return all(each in self._known(order) for each in self._given if isinstance(each, str))

    def _known(self, order: _ParameterOrder) -> set[str]:
        known = {*order.names, *(name for each in self._all for name in self._names_of(each))}
        return known | {name for tie in self._schedule.ties for names in tie.names.values() for name in names}

    def check(self, order: _ParameterOrder) -> None:
        """Raise on what is no parameter of the pipeline."""
        own = {id(each.value) for each in self._all}
        for each in self._given:
            if isinstance(each, str):
                known = self._known(order)
                if each not in known:
                    raise InputError(f"no parameter of the pipeline is named '{each}'.{did_you_mean(each, known)}")
            elif id(each) not in own:
                got = tensor_text(each) if isinstance(each, Tensor) else type(each).__name__
                raise InputError(
                    f"parameters= has a {got} that no stage of this rank holds: pass some of schedule.parameters(), "
                    "names, or a group of an optimizer over them"
                )


@dataclass(frozen=True)
class _Own:
    """The numbers of one process before the norms, and the parameters whose norms they get."""

    numbers: list[float]
    counted: Sequence[HeldTensor] | None  # None if the order of all parameters is outdated

    def digest(self) -> int | None:
        """Return a number that follows from the parameters whose shards are reduced together."""
        if self.counted is None:
            return None
        return zlib.crc32(str([_key_of(each) for each in self.counted if is_distributed(each.value.grad)]).encode())


class _Message:
    """The numbers of all ranks: each writes those of its own parameters, and zeros for others; then they are summed."""

    def __init__(
        self, schedule: PipelineSchedule, order: _ParameterOrder, call: _Call, *, is_new: bool = False
    ) -> None:
        self._schedule = schedule
        self._order = order
        self._call = call
        self._is_new = is_new  # True if the order was found just now
        ranks, ties = schedule.plan.ranks, len(schedule.ties)
        self._options = 2  # after: is the order outdated, how many gradients are there
        self._ties = self._options + ranks * len(call.options)
        self._norms = self._ties + 2 * ties
        self.count = self._norms + 2 * len(order.keys)

    def exchange(self, held: Sequence[HeldTensor], chosen: _Chosen) -> list[float]:
        """Return the numbers of all ranks, added up."""
        return self._schedule.agreement.sum(
            self._call.kind, self.count, lambda: self._prepare(held, chosen), self._finish, _Own.digest
        )

    def _prepare(self, held: Sequence[HeldTensor], chosen: _Chosen) -> _Own:
        """Return the numbers of this process but for the norms; raise on what does not fit."""
        numbers = [0.0] * self.count
        stages = [stage.stage_index for stage in self._schedule.stages]
        if not self._is_new and not (self._order.fits(held, stages) and chosen.fits(self._order)):
            numbers[0] = 1.0
            return _Own(numbers, None)
        chosen.check(self._order)
        if self._schedule.loss_scaler is not None:
            self._schedule.loss_scaler.check_unscaled(self._call.name, chosen.held)
        numbers[1] = float(sum(each.value.grad is not None for each in held))
        options = list(self._call.options.values())
        for rank in self._schedule.agreement.ranks:
            begin = self._options + rank * len(options)
            numbers[begin : begin + len(options)] = options
        for place, tie in enumerate(self._schedule.ties):
            holders = [each for each in held if each.local_name in tie.names.get(each.stage, ())]
            of_these = sum(each in chosen.held for each in holders)
            numbers[self._ties + 2 * place] = float(of_these)
            numbers[self._ties + 2 * place + 1] = float(len(holders) - of_these)
        return _Own(numbers, [each for each in chosen.held if each.counts and each.value.grad is not None])

    def _finish(self, own: _Own) -> list[float]:
        """Return the numbers of this process; those that hold shards of its stages reduce norms with it."""
        counted = own.counted or ()
        norms = _norms_of([each.value.grad for each in counted], self._call, self._schedule)
        places = self._order.places
        for each, norm, value in zip(counted, norms, _values_of(norms), strict=True):
            begin = self._norms + 2 * places[_key_of(each)]
            own.numbers[begin : begin + 2] = [1.0 + _DTYPES.index(norm.dtype), value]
        return own.numbers

    def is_outdated(self, numbers: Sequence[float]) -> bool:
        """Return True if a rank has other parameters than when the order was found."""
        return numbers[0] > 0

    def read(self, numbers: Sequence[float]) -> dict[str, tuple[float, torch.dtype]]:
        """Return the norm of each gradient by name, in the model's order; raise, on every rank, if ranks differ."""
        self._check_options(numbers)
        if not numbers[1]:
            raise InputError(
                f"no parameter of the pipeline has a gradient: call {self._call.name}() after schedule.step(), and "
                "before the optimizer's step() and zero_grad()"
            )
        self._check_ties(numbers)
        norms = {}
        for place, name in enumerate(self._order.names):
            kind, value = numbers[self._norms + 2 * place : self._norms + 2 * place + 2]
            if kind != int(kind):
                raise PipeError(f"{name} has a gradient on some copies of the pipeline, and none on others")
            if kind:
                norms[name] = value, _DTYPES[int(kind) - 1]
        return norms

    def _check_options(self, numbers: Sequence[float]) -> None:
        for place, (name, own) in enumerate(self._call.options.items()):
            given = numbers[self._options + place : self._ties : len(self._call.options)]
            # Over copies it is a mean, which may round: 3 x 0.1 / 3 is not 0.1.
            if not all(math.isclose(other, own, rel_tol=1e-12) for other in given):
                raise DisagreementError(
                    f"the ranks call {self._call.name}() with different values of {name}: {listed(given)} on ranks 0 "
                    f"to {len(given) - 1}, and {own} here; pass the same on all ranks and copies of the pipeline"
                )

    def _check_ties(self, numbers: Sequence[float]) -> None:
        for place, tie in enumerate(self._schedule.ties):
            chosen, left_out = numbers[self._ties + 2 * place : self._ties + 2 * place + 2]
            if chosen and left_out:
                raise InputError(
                    f"the tied parameter {tie.title} of {numbered('stage', tie.stages)} is among the parameters= of "
                    f"{counted(int(chosen), 'holder')} of it, and not of the others: let all its holders be in the "
                    "same group, on every rank"
                )


def _norms_of(grads: Sequence[Tensor], call: _Call, schedule: PipelineSchedule) -> list[Tensor]:
    """Return the norm of each gradient, of a sharded one that of the whole."""
    plain = {place: grad for place, grad in enumerate(grads) if not is_distributed(grad)}
    parted = {place: grad for place, grad in enumerate(grads) if is_distributed(grad)}
    norms = dict(zip(plain, norm_of_each(list(plain.values()), call.norm_type, call.foreach), strict=True))
    if parted:
        whole = sharded_norms(list(parted.values()), call.norm_type, call.foreach, schedule.agreement)
        norms.update(zip(parted, whole, strict=True))
    return [norms[place] for place in range(len(grads))]


def _values_of(norms: Sequence[Tensor]) -> list[float]:
    """Return the values of norms; each device is waited for once."""
    values = [0.0] * len(norms)
    for device in dict.fromkeys(norm.device for norm in norms):
        places = [place for place, norm in enumerate(norms) if norm.device == device]
        for place, value in zip(places, torch.stack([norms[place] for place in places]).tolist(), strict=True):
            values[place] = value
    return values


def _tensors_of(norms: Sequence[tuple[float, torch.dtype]], device: torch.device) -> list[Tensor]:
    """Return numbers as the tensors that they were, in one transfer for each dtype."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(dtype for _, dtype in norms):
        places = [place for place, (_, other) in enumerate(norms) if other is dtype]
        together = torch.tensor([norms[place][0] for place in places], dtype=dtype).to(device)
        found.update(zip(places, together.unbind(), strict=True))
    return [found[place] for place in range(len(norms))]


def _by_mesh(parameters: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """Return parameters that torch can scale in one call: those on one mesh, and those on none."""
    found: dict[Any, list[Tensor]] = {}
    for each in parameters:
        mesh = each.grad.device_mesh if is_distributed(each.grad) else None
        found.setdefault(mesh, []).append(each)
    return found
