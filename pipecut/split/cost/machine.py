"""Machine: how fast a device computes and moves bytes, from a data sheet or measured."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

import torch

from ...errors import PipeError
from ...pipe_ir import Operation, operator_of
from ...text import dtype_name
from .operation import ConcreteCosts, CostFinder, operation_flops
from .saved import bytes_of

_MATMUL_SIZE = 512
_BANDWIDTH_BYTES = 2**26
_TIME_FOR_EACH = 0.15


@dataclass(frozen=True)
class Machine:
    """Speed of a device: rates of matrix products by dtype, of memory and of the link to the next device.

    >>> machine = Machine(matmul_flops={torch.float32: 1e10}, memory_bandwidth=1e9, overhead=0.0)
    >>> machine.time(flops=1e10, bytes_moved=4e9, dtype=torch.float32)
    4.0
    """

    matmul_flops: Mapping[torch.dtype, float] = field(default_factory=lambda: MappingProxyType({torch.float32: 4e10}))
    memory_bandwidth: float = 8e9  # bytes in a second
    overhead: float = 4e-6  # seconds for each operation, however small
    link_bandwidth: float = 2e9
    link_latency: float = 5e-5

    def __post_init__(self) -> None:
        rates = {f"matmul_flops[{dtype}]": rate for dtype, rate in self.matmul_flops.items()}
        rates |= {"memory_bandwidth": self.memory_bandwidth, "link_bandwidth": self.link_bandwidth}
        for name, rate in rates.items():
            if not (math.isfinite(rate) and rate > 0):
                raise PipeError(f"Machine({name}={rate}): a rate is what passes in a second, a number above 0")
        for name in ("overhead", "link_latency"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise PipeError(f"Machine({name}={getattr(self, name)}): give seconds, 0 or more")
        if torch.float32 not in self.matmul_flops:
            raise PipeError("Machine(matmul_flops=...) has no rate for torch.float32, which other dtypes fall back to")

    @classmethod
    def nominal(cls, device_type: str) -> Machine:
        """Return a machine of its kind, the same for everybody: what depends on it is the same on every rank.

        >>> Machine.nominal("cpu").memory_bandwidth < Machine.nominal("cuda").memory_bandwidth
        True
        """
        return cls() if device_type == "cpu" else _ACCELERATOR

    @classmethod
    def measure(cls, device: torch.device | str = "cpu", dtypes: Iterable[torch.dtype] = ()) -> Machine:
        """Measure this machine, once for each device of a process; it takes about a second.

        Links are not measured: a process alone has none. They are those of `nominal`.

        >>> Machine.measure("cpu") is Machine.measure("cpu")
        True
        """
        # Only what is asked for: not every machine can multiply in every dtype.
        wanted = frozenset({torch.float32, *(dtype for dtype in dtypes if dtype.is_floating_point)})
        return _measured(str(torch.device(device)), wanted)

    def time(self, flops: float, bytes_moved: float, dtype: torch.dtype) -> float:
        """Return the seconds of one operation: the longer of arithmetic and memory, and the overhead."""
        rate = self.matmul_flops.get(dtype, self.matmul_flops[torch.float32])
        return max(flops / rate, bytes_moved / self.memory_bandwidth) + self.overhead

    def __str__(self) -> str:
        rates = ", ".join(f"{dtype_name(dtype)} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in self.matmul_flops.items())
        return (
            f"matrix products {rates}; memory {self.memory_bandwidth / 1e9:,.1f} GB/s; "
            f"{self.overhead * 1e6:.1f} us per operation; link {self.link_bandwidth / 1e9:,.1f} GB/s, "
            f"{self.link_latency * 1e6:.0f} us"
        )


_ACCELERATOR = Machine(
    matmul_flops=MappingProxyType({torch.float32: 6e13, torch.bfloat16: 2e14, torch.float16: 2e14}),
    memory_bandwidth=1.5e12,
    overhead=6e-6,
    link_bandwidth=2.5e10,
    link_latency=1e-5,
)


@functools.cache
def _measured(name: str, dtypes: frozenset[torch.dtype]) -> Machine:
    device = torch.device(name)
    nominal = Machine.nominal(device.type)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        rates = {dtype: _matmul_rate(device, dtype) for dtype in dtypes}
        return Machine(
            MappingProxyType(rates),
            _bandwidth(device),
            _overhead(device),
            *(getattr(nominal, each.name) for each in fields(Machine)[3:]),
        )


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    left = torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=device).to(dtype)
    return 2.0 * _MATMUL_SIZE**3 / _seconds(lambda: left @ left, device)


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(_BANDWIDTH_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _BANDWIDTH_BYTES / _seconds(lambda: torch.add(source, 1.0, out=target), device)


def _overhead(device: torch.device) -> float:
    """Return the least that an operation costs, with the record that autograd makes of it."""
    tiny = torch.ones(4, device=device, requires_grad=True)
    with torch.enable_grad():
        return _seconds(lambda: tiny * 2.0, device, calls=200)


def _seconds(call: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Return the least time of a call among some: what disturbs it only makes it longer."""
    call()
    wait = torch.accelerator.synchronize if device.type != "cpu" else _no_wait
    best, begin = math.inf, time.perf_counter()
    while time.perf_counter() - begin < _TIME_FOR_EACH:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def _no_wait() -> None:
    """Do nothing: the CPU is done when a call returns."""


# A weight's gradient is added to what earlier microbatches left: two reads and a write.
ACCUMULATION_PASSES = 3


@dataclass(frozen=True)
class Times:
    """Seconds of one microbatch: forward, gradients of the inputs, gradients of the weights.

    >>> Times(1.0, 2.0, 3.0) + Times(0.5, 0.5, 0.5)
    Times(forward=1.5, backward_input=2.5, backward_weight=3.5)
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all three."""
        return self.forward + self.backward_input + self.backward_weight

    def __add__(self, other: Times) -> Times:
        return Times(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def scaled(self, forward: float, backward_input: float, backward_weight: float) -> Times:
        """Multiply each part by a factor of its own."""
        return Times(
            self.forward * forward, self.backward_input * backward_input, self.backward_weight * backward_weight
        )


def mean_of(times: Sequence[Times]) -> Times:
    """Return the mean of each part.

    >>> mean_of([Times(1.0, 2.0, 3.0), Times(3.0, 2.0, 5.0)])
    Times(forward=2.0, backward_input=2.0, backward_weight=4.0)
    """
    return sum(times, Times()).scaled(*[1 / len(times)] * 3)


class OperationTimes:
    """Times of the operations of a trace at given sizes, by roofline: the longer of arithmetic and memory."""

    def __init__(self, finder: CostFinder, machine: Machine, sizes: Mapping[str, int]) -> None:
        self.finder, self.machine = finder, machine
        self.traced = finder.traced
        self._costs = ConcreteCosts(self.traced, sizes)
        self._repeated = {
            op.index
            for span in self.traced.spans("checkpoint")
            for op in self.traced.operations_within(span.begin, span.end)
        }

    def of(self, op: Operation) -> Times:
        """Return the times of one operation."""
        if op.kind != "op":
            return Times()
        flops = self._costs.number(operation_flops(self.traced, op))
        moved = self._costs.number(self.finder.bytes_moved(op))
        dtype = self._dtype(op)
        forward = self.machine.time(flops, moved, dtype)
        if not self.finder.saved.needs_gradient(op):
            return Times(forward)
        values, weights = self._gradients(op)
        again = forward if op.index in self._repeated else 0.0
        operator = operator_of(op.target)
        if flops:
            each = operator.backward_flops
            backward = self.machine.time(flops * each, moved * each, dtype)
            return Times(
                forward, again + backward * len(values), (backward if weights else 0.0) + self._accumulation(weights)
            )
        backward = self.machine.time(0, moved * operator.backward_bytes, dtype)
        if values:
            return Times(forward, again + backward, self._accumulation(weights))
        return Times(forward, again, backward + self._accumulation(weights))

    def _gradients(self, op: Operation) -> tuple[list[int], list[int]]:
        """Return the arguments that get a gradient: activations, and weights or what is made of them alone."""
        needing = [index for index in dict.fromkeys(op.refs) if self.finder.saved.index_needs_gradient(index)]
        if op.spec is not None and not needing:
            needing = [index for index in op.refs if self.traced.operations[index].spec is None]
        is_weight = self.finder.memory.is_weight
        return [each for each in needing if not is_weight[each]], [each for each in needing if is_weight[each]]

    def _accumulation(self, weights: list[int]) -> float:
        size = sum(self._costs.number(bytes_of(self.traced.operations[index])) for index in weights)
        return ACCUMULATION_PASSES * size / self.machine.memory_bandwidth

    def _dtype(self, op: Operation) -> torch.dtype:
        spec = op.spec
        if spec is None:
            spec = next((self.traced.operations[index].spec for index in op.refs), None)
        if op.context.autocast and op.context.autocast[-1].enabled:
            return op.context.autocast[-1].dtype
        return torch.float32 if spec is None else spec.dtype
