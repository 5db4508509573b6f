"""Reproducible random numbers: each forward draws from a stream of its own, whatever ran before it.

torch draws from one generator per device, in the order in which operations run, which differs between schedules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

_WITHOUT_GENERATOR = ("cpu", "meta")  # the CPU's is always there


class Generators:
    """The default generators that modules on a device draw from: the CPU's and, if it is another one, the device's.

    `seed(number)` starts the stream of a seed, `state()` returns bytes on the CPU, and `set_state(bytes)` continues
    from there. For the CPU alone they are the generator's own methods, for every forward of a stage calls them.

    >>> generators = Generators("cpu")
    >>> _ = generators.seed(7)
    >>> before, drawn = generators.state(), torch.rand(3)
    >>> _ = generators.set_state(before)
    >>> torch.equal(torch.rand(3), drawn)
    True
    """

    def __init__(self, device: torch.device | str) -> None:
        place = torch.device(device)
        alone = place.type in _WITHOUT_GENERATOR
        source: Any = torch.default_generator if alone else _TwoGenerators(_DeviceGenerator(place))
        self.seed: Callable[[int], object] = source.manual_seed
        self.state: Callable[[], Tensor] = source.get_state
        self.set_state: Callable[[Tensor], object] = source.set_state


class _TwoGenerators:
    """The CPU's default generator and that of an accelerator, as one."""

    def __init__(self, other: _DeviceGenerator) -> None:
        self._cpu = torch.default_generator
        self._cpu_bytes = self._cpu.get_state().numel()
        self._other = other

    def manual_seed(self, number: int) -> None:
        self._cpu.manual_seed(number)
        self._other.seed(number)

    def get_state(self) -> Tensor:
        return torch.cat([self._cpu.get_state(), self._other.state()])

    def set_state(self, state: Tensor) -> None:
        self._cpu.set_state(state[: self._cpu_bytes].clone())
        self._other.set_state(state[self._cpu_bytes :].clone())


class _DeviceGenerator:
    """The default generator of an accelerator, through the functions that all device modules have."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._where = () if device.type == "mps" else (device,)  # there is only one of them
        self._fresh = torch.Generator(device=device)

    def seed(self, number: int) -> None:
        self._fresh.manual_seed(number)
        self.set_state(self._fresh.get_state())

    def state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(*self._where)
        return state

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state, *self._where)


class RandomStream:
    """A context in which modules draw from another stream; afterwards the generators are as they were before.

    `begin` is the seed of a stream, or a state in the middle of one. With `keep_end`, `end` is the state in which the
    last draw left the stream, for another context that continues from there.

    >>> generators = Generators("cpu")
    >>> with RandomStream(generators, 7, keep_end=True) as stream:
    ...     first = torch.rand(2)
    >>> with RandomStream(generators, stream.end):
    ...     second = torch.rand(2)
    >>> with RandomStream(generators, 7):
    ...     torch.equal(torch.cat([torch.rand(2), torch.rand(2)]), torch.cat([first, second]))
    True
    """

    end: Tensor

    def __init__(self, generators: Generators, begin: int | Tensor, *, keep_end: bool = False) -> None:
        self._generators = generators
        self._begin = begin
        self._keep_end = keep_end

    def __enter__(self) -> RandomStream:
        self._outside = self._generators.state()
        if isinstance(self._begin, Tensor):
            self._generators.set_state(self._begin)
        else:
            self._generators.seed(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keep_end:
            self.end = self._generators.state()
        self._generators.set_state(self._outside)


def derive_seed(*numbers: int) -> int:
    """Hash some numbers to a seed, the same on every machine. Similar numbers have unrelated seeds.

    >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0), 0 <= derive_seed(0, 1) < 2**63
    (True, False, True)
    """
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _draw_seed() -> int:
    """Draw a number from torch's default generator.

    >>> _ = torch.manual_seed(0)
    >>> first, second = _draw_seed(), _draw_seed()
    >>> _ = torch.manual_seed(0)
    >>> first == _draw_seed(), first == second
    (True, False)
    """
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator).item())


class StepSeeds:
    """The seeds of the steps and evaluations of one schedule, from torch's default generator.

    A training step draws a number from it, so that training can be resumed from the state of the generator alone. An
    evaluation leaves the generator as it is, for training must not depend on how often a model is evaluated; yet two
    evaluations in a row draw different numbers.

    >>> seeds = StepSeeds()
    >>> state = torch.get_rng_state()
    >>> len({seeds.next(training=False) for _ in range(3)}), torch.equal(torch.get_rng_state(), state)
    (3, True)
    >>> len({seeds.next(training=True) for _ in range(3)}), torch.equal(torch.get_rng_state(), state)
    (3, False)
    """

    def __init__(self) -> None:
        self.evaluations = 0  # so far; a checkpoint has it

    def next(self, *, training: bool) -> int:
        """Return the seed of the next step or evaluation."""
        if training:
            return _draw_seed()
        self.evaluations += 1
        state = torch.default_generator.get_state()
        seed = _draw_seed()
        torch.default_generator.set_state(state)
        return derive_seed(seed, self.evaluations)


def random_streams(microbatches: int, device: torch.device | str = "cpu") -> list[RandomStream]:
    """Return the random streams of the next step's microbatches under `random_numbers="as_uncut"`, as contexts.

    Like a step it draws a number from torch's default generator. So after the same seed, the uncut model that runs one
    microbatch after the other draws the numbers that the stages draw. `device` is that of the model.

    >>> from pipecut import ScheduleGPipe, SplitPoint, pipeline
    >>> Linear, Dropout = torch.nn.Linear, torch.nn.Dropout
    >>> model = torch.nn.Sequential(Linear(4, 4), Dropout(), Linear(4, 4), Dropout())
    >>> x, y = torch.ones(6, 4), torch.ones(6, 4)
    >>> pipe = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
    >>> stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    >>> schedule = ScheduleGPipe(stages, 3, torch.nn.functional.mse_loss, random_numbers="as_uncut")
    >>> _ = torch.manual_seed(0)
    >>> cut = schedule.step(x, target=y)
    >>> _ = torch.manual_seed(0)
    >>> uncut = []
    >>> for stream, part in zip(random_streams(3), x.chunk(3)):
    ...     with stream:
    ...         uncut.append(model(part))
    >>> torch.equal(cut, torch.cat(uncut))
    True
    """
    if microbatches < 1:
        raise InputError(f"random_streams() got microbatches={microbatches}: give as many as the schedule has")
    seed, generators = _draw_seed(), Generators(device)
    return [RandomStream(generators, derive_seed(seed, number)) for number in range(microbatches)]
