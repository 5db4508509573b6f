"""Machine: how fast a device computes and moves bytes, from a data sheet, from a file, or measured."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from ...errors import InputError, PipeError
from ...files import read_json
from ...text import did_you_mean, dtype_name, format_bytes, listed

_MATMUL_SIZE = 512
_BANDWIDTH_BYTES = 2**26
_TIME_FOR_EACH = 0.15

# Large matrix products reach about this much of the rates of a data sheet; an assumption, the same for all of them.
_REACHED = 0.6
# The machine that a model on the meta device is cut for, which is on no machine yet.
_FOR_META = "h100"


@dataclass(frozen=True)
class Machine:
    """Speed of a device: rates of matrix products by dtype, of memory and of the link to the next device.

    `network_bandwidth` is that of the link to a device on another host, if it differs; `ranks_per_host` devices are on
    one host. `memory` are the bytes of a device, `source` says where the figures are from.

    >>> machine = Machine(matmul_flops={torch.float32: 1e10}, memory_bandwidth=1e9, overhead=0.0)
    >>> machine.time(flops=1e10, bytes_moved=4e9, dtype=torch.float32)
    4.0
    >>> Machine.named("a100").memory
    80000000000.0
    """

    matmul_flops: Mapping[torch.dtype, float] = field(default_factory=lambda: MappingProxyType({torch.float32: 4e10}))
    memory_bandwidth: float = 8e9  # bytes in a second
    overhead: float = 4e-6  # seconds for each operation, however small
    link_bandwidth: float = 2e9
    link_latency: float = 5e-5
    network_bandwidth: float | None = None
    ranks_per_host: int = 8
    memory: float | None = None
    name: str = "custom"
    source: str = ""

    def __post_init__(self) -> None:
        rates = {f"matmul_flops[{dtype}]": rate for dtype, rate in self.matmul_flops.items()}
        rates |= {"memory_bandwidth": self.memory_bandwidth, "link_bandwidth": self.link_bandwidth}
        if self.network_bandwidth is not None:
            rates["network_bandwidth"] = self.network_bandwidth
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
        return _CPU if device_type == "cpu" else _ACCELERATOR

    @classmethod
    def named(cls, name: str) -> Machine:
        """Return a machine from the table of public figures: "h100", "a100"... or "cpu".

        Rates of matrix products are 0.6 of those of the data sheet, as large ones reach it.

        >>> print(Machine.named("h100").name)
        h100
        """
        if name.lower() == "cpu":
            return _CPU
        entry = _table().get(name.lower())
        if entry is None:
            known = ["cpu", *_table()]
            raise InputError(
                f"machine={name!r} is not known.{did_you_mean(name, known)} Give one of {listed(known)}, a file of "
                "machines (.json), or a pipecut.Machine"
            )
        return _from_entry(name.lower(), entry, "the table of machines")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """Read a machine from a JSON file, which has entries by name as the package's `machines.json` has.

        "file.json#name" names one of several.
        """
        text, _, name = str(path).partition("#")
        entries = _read_table(Path(text))
        if not name and len(entries) > 1:
            raise InputError(f"{text} has {len(entries)} machines: say which, as '{text}#{next(iter(entries))}'")
        name = name or next(iter(entries), "")
        if name not in entries:
            raise InputError(f"{text} has no machine {name!r}: it has {listed(entries) or 'none'}")
        return _from_entry(name, entries[name], text)

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """Return the machine that a device is, by its name; for the meta device a current accelerator."""
        if device.type == "meta":
            return cls.named(_FOR_META)
        if device.type == "cpu":
            return _CPU
        module = torch.get_device_module(device)
        label = module.get_device_name(device) if hasattr(module, "get_device_name") else ""
        for name, entry in _table().items():
            if any(each in label for each in entry["device_names"]):
                return cls.named(name)
        return _ACCELERATOR

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

    def linking(self, ranks: int) -> Machine:
        """Return the machine with the link between this many ranks: where they are on several hosts, the network."""
        if self.network_bandwidth is None or ranks <= self.ranks_per_host:
            return self
        return replace(self, link_bandwidth=self.network_bandwidth, network_bandwidth=None)

    def __str__(self) -> str:
        rates = ", ".join(f"{dtype_name(dtype)} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in self.matmul_flops.items())
        network = "" if self.network_bandwidth is None else f", to other hosts {self.network_bandwidth / 1e9:,.1f} GB/s"
        memory = "" if self.memory is None else f" of {format_bytes(self.memory)}"
        return (
            f"{self.name}: matrix products {rates}; memory{memory} {self.memory_bandwidth / 1e9:,.1f} GB/s; "
            f"{self.overhead * 1e6:.1f} us per operation; link {self.link_bandwidth / 1e9:,.1f} GB/s, "
            f"{self.link_latency * 1e6:.0f} us{network}"
        )


MachineLike: TypeAlias = Machine | str | os.PathLike[str]


def machine_of(given: MachineLike | None) -> Machine | None:
    """Return the machine that a user names: itself, by name, or from a file; None if none is given."""
    if given is None or isinstance(given, Machine):
        return given
    if not isinstance(given, str | os.PathLike):
        raise InputError(
            f"machine= is a {type(given).__name__}: give a name such as 'h100', a file of machines, or a Machine"
        )
    text = os.fspath(given)
    return Machine.load(text) if ".json" in text or os.sep in text else Machine.named(text)


_CPU = Machine(name="cpu")
_ACCELERATOR = Machine(
    matmul_flops=MappingProxyType({torch.float32: 6e13, torch.bfloat16: 2e14, torch.float16: 2e14}),
    memory_bandwidth=1.5e12,
    overhead=6e-6,
    link_bandwidth=2.5e10,
    link_latency=1e-5,
    name="accelerator",
)


# The table of machines.

_FIGURES = ("memory_gb", "memory_gb_per_s", "link_gb_per_s", "network_gb_per_s", "ranks_per_host")


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(resources.files(__package__).joinpath("machines.json").read_text())
    return found


def _read_table(path: Path) -> dict[str, Any]:
    found = read_json(path, InputError, "a JSON file of machines")
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise InputError(f"{path} is not a file of machines: it should hold an entry per name, such as {_EXAMPLE}")
    return found


_EXAMPLE = '{"mine": {"peak_tflops": {"float32": 20, "bfloat16": 300}, "memory_gb_per_s": 2000, "link_gb_per_s": 50}}'


def _from_entry(name: str, entry: Mapping[str, Any], where: str) -> Machine:
    """Make a machine of an entry; raise InputError that names the figure that is missing or wrong."""
    rates = {dtype: 1e12 * _REACHED * peak for dtype, peak in _rates(name, entry, where).items()}
    figures = {key: _figure(name, key, entry[key], where) for key in _FIGURES if key in entry}
    for key in ("memory_gb_per_s", "link_gb_per_s"):
        if key not in figures:
            raise InputError(f"{where}: machine {name!r} has no {key}; an entry looks like {_EXAMPLE}")
    return Machine(
        matmul_flops=MappingProxyType(rates),
        memory_bandwidth=1e9 * figures["memory_gb_per_s"],
        overhead=_ACCELERATOR.overhead,
        link_bandwidth=1e9 * figures["link_gb_per_s"],
        link_latency=_ACCELERATOR.link_latency,
        network_bandwidth=1e9 * figures["network_gb_per_s"] if "network_gb_per_s" in figures else None,
        ranks_per_host=int(figures.get("ranks_per_host", 8)),
        memory=1e9 * figures["memory_gb"] if "memory_gb" in figures else None,
        name=name,
        source=str(entry.get("source", where)),
    )


def _rates(name: str, entry: Mapping[str, Any], where: str) -> dict[torch.dtype, float]:
    peaks = entry.get("peak_tflops")
    if not isinstance(peaks, dict) or "float32" not in peaks:
        raise InputError(f"{where}: machine {name!r} has no peak_tflops with a rate for float32, as in {_EXAMPLE}")
    unknown = [key for key in peaks if not isinstance(getattr(torch, key, None), torch.dtype)]
    if unknown:
        raise InputError(f"{where}: machine {name!r} has a rate for {unknown[0]!r}, which is not a dtype of torch")
    return {getattr(torch, key): _figure(name, f"peak_tflops[{key}]", peak, where) for key, peak in peaks.items()}


def _figure(name: str, key: str, value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{where}: machine {name!r} has {key} = {value!r}; it should be a number above 0")
    return float(value)


# Measuring.


@functools.cache
def _measured(name: str, dtypes: frozenset[torch.dtype]) -> Machine:
    device = torch.device(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        rates = {dtype: _matmul_rate(device, dtype) for dtype in dtypes}
        return replace(
            Machine.nominal(device.type),
            matmul_flops=MappingProxyType(rates),
            memory_bandwidth=_bandwidth(device),
            overhead=_overhead(device),
            name=f"{device.type}, measured",
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
