"""Measurements: times of stages on example inputs, and the link between the ranks of a group."""

from __future__ import annotations

import contextlib
import copy
import functools
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import InputError, StageRunError
from ..pipe import Pipe
from ..pipe_ir import TracedModel, bind_inputs, flatten
from ..split import ConcreteCosts, Times
from ..stage import StageWeights, full_backward, input_backward, weight_backward


def example_values(
    traced: TracedModel,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    device: torch.device,
    sizes: Mapping[str, int] | None = None,
) -> dict[int, Any]:
    """Return the inputs by their index in the trace, on a device; for other sizes of dims their rows repeat."""
    weigh = ConcreteCosts(traced, {**traced.hints, **(sizes or {})})
    found = {}
    for index, value in bind_inputs(traced.call, args, kwargs or {}).items():
        spec = traced.operations[index].spec
        if isinstance(value, Tensor):
            shape = value.shape if spec is None else [int(weigh.number(dim)) for dim in spec.shape]
            value = _resized(value, shape).to(device)
        found[index] = value
    return found


def _resized(value: Tensor, shape: Sequence[int]) -> Tensor:
    for dim, size in enumerate(shape):
        if value.shape[dim] != size:
            if value.shape[dim] == 0:
                raise InputError(
                    f"an input of the example has the shape {tuple(value.shape)}: it has nothing that could be "
                    f"repeated to the {size} along dim {dim} that a measured run takes; pass an example with a sample "
                    "at least"
                )
            rows = torch.arange(size, device=value.device) % value.shape[dim]
            value = value.detach().index_select(dim, rows).requires_grad_(value.requires_grad)
    return value


def _stages_with_inputs(
    pipe: Pipe, values: dict[int, Any], device: torch.device
) -> Iterator[tuple[int, nn.Module, list[Any]]]:
    """Yield the number of each stage, a copy of it, and its inputs; the caller may run the copy, and keep it."""
    for info, stage in zip(pipe.stage_infos, pipe.stages, strict=True):
        # A copy has gradients and running statistics of its own, and is freed before the next one is made.
        module = copy.deepcopy(stage).to(device)
        inputs = [values[index] for index in info.inputs]
        yield info.index, module, inputs
        if info.index < pipe.num_stages - 1:
            with torch.no_grad():
                made = module(*map(_fresh, inputs))
            values.update(zip(info.outputs, (made,) if len(info.outputs) == 1 else made or (), strict=True))
            _mark_gradients(pipe, info.outputs, values)


def _fresh(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _mark_gradients(pipe: Pipe, indices: Sequence[int], values: dict[int, Any]) -> None:
    for index in indices:
        spec = pipe.traced.operations[index].spec
        if isinstance(values[index], Tensor) and spec is not None and spec.requires_grad:
            values[index] = values[index].detach().requires_grad_()


# Times of the stages of a pipe.

_PASSES = 3
_MIN_RUNS, _MAX_RUNS = 3, 20
_ENOUGH_SECONDS = 0.07

Run = tuple[float, float, float]  # seconds of a forward, of the gradients of inputs, and of those of weights


def measure_stages(
    pipe: Pipe, values: Mapping[int, Any], device: torch.device, key: Callable[[int], Hashable] = int
) -> list[Times]:
    """Return the times of every stage of a pipe: medians, as a step has its share of slow runs too.

    The stages take turns in some passes, for a machine is faster at one time than at another. Stages with the same key
    count as equal.
    """
    runs: dict[Hashable, list[Run]] = {}
    for _ in range(_PASSES):
        done = set()
        for index, module, inputs in _stages_with_inputs(pipe, dict(values), device):
            if key(index) not in done:
                done.add(key(index))
                runs.setdefault(key(index), []).extend(_some_runs(module, inputs))
    medians = {name: Times(*map(statistics.median, zip(*found, strict=True))) for name, found in runs.items()}
    return [medians[key(index)] for index in range(pipe.num_stages)]


def _some_runs(module: nn.Module, inputs: Sequence[Any]) -> list[Run]:
    """Run a module several times on its inputs. Gradients stay in its parameters."""
    weights = StageWeights(parameter for parameter in module.parameters() if parameter.requires_grad)
    _split_run(module, inputs, weights)
    runs: list[Run] = []
    begin = time.perf_counter()
    while len(runs) < _MIN_RUNS or (len(runs) < _MAX_RUNS and time.perf_counter() - begin < _ENOUGH_SECONDS):
        runs += _split_run(module, inputs, weights)
    return runs


def _split_run(module: nn.Module, inputs: Sequence[Any], weights: StageWeights, at_once: int = 1) -> list[Run]:
    """Run some forwards, and then their backwards in halves."""
    found = []
    for forward, leaves, outputs in [_forward(module, inputs) for _ in range(at_once)]:
        first, (_, pending) = _timed(input_backward, outputs, _ones(outputs), leaves, weights)
        second, _ = _timed(weight_backward, pending)
        found.append((forward, first, second))
    return found


def _full_run(module: nn.Module, inputs: Sequence[Any], at_once: int = 1) -> list[Run]:
    """Run some forwards, and then their full backwards, whose seconds count as those of the inputs."""
    found = []
    for forward, leaves, outputs in [_forward(module, inputs) for _ in range(at_once)]:
        backward, _ = _timed(full_backward, outputs, _ones(outputs), leaves)
        found.append((forward, backward, 0.0))
    return found


def _forward(module: nn.Module, inputs: Sequence[Any]) -> tuple[float, list[Any], list[Tensor]]:
    leaves = [_leaf(value) for value in inputs]
    seconds, result = _timed(module, *leaves)
    outputs = [
        value for value in flatten(result)[0] if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf
    ]
    return seconds, leaves, outputs


def _ones(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(output) for output in outputs]


def _leaf(value: Any) -> Any:
    """Return a value as it arrives from another stage: without a graph."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    _wait_for_device()
    begin = time.perf_counter()
    result = call(*args)
    _wait_for_device()
    return time.perf_counter() - begin, result


def _wait_for_device() -> None:
    """Wait for the accelerator, whose operations are asynchronous."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# Times of stages with several microbatches in flight.

_BENCHMARK_SECONDS = 0.6  # for all stages of a rank
_MIN_BENCHMARK_RUNS = 5
_MAX_IN_FLIGHT = 4


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch in one stage; a full backward may take less than its halves."""

    split: Times
    full_backward: float


@dataclass(frozen=True)
class StageBenchmark:
    """Benchmark of the stages of a pipe, at some sizes of its symbolic dims, with recomputation or without."""

    pipe: Pipe
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sizes: Mapping[str, int]
    recompute: bool

    def prepare(self, stages: Collection[int], in_flight: Sequence[float]) -> Callable[[], dict[int, StageTimes]]:
        """Copy some stages, with the values that they receive; return a function that measures them."""
        device = self.pipe.traced.device
        values = example_values(self.pipe.traced, self.args, self.kwargs, device, self.sizes)
        ready: dict[int, Callable[[float], StageTimes]] = {}
        with torch.random.fork_rng(), _stage_failures():
            for index, module, inputs in _stages_with_inputs(self.pipe, values, device):
                if index in stages:
                    if self.recompute:
                        checkpoint_forward(module)
                    at_once = max(1, min(_MAX_IN_FLIGHT, int(in_flight[index])))
                    ready[index] = functools.partial(_measure, module, list(inputs), at_once)

        def measure() -> dict[int, StageTimes]:
            with torch.random.fork_rng(), torch.enable_grad(), _stage_failures():
                return {index: run(_BENCHMARK_SECONDS / len(ready)) for index, run in ready.items()}

        return measure


def checkpoint_forward(module: nn.Module) -> None:
    """Recompute the activations of a module in its backward; its names stay as they are."""
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


@contextlib.contextmanager
def _stage_failures() -> Iterator[None]:
    """Raise errors of stages as StageRunError."""
    try:
        yield
    except Exception as error:
        raise StageRunError(f"{type(error).__name__}: {error}") from error


def _measure(module: nn.Module, inputs: Sequence[Any], at_once: int, seconds: float) -> StageTimes:
    """Return the mean time of each computation, as a step has slow ones too; full and split backwards take turns."""
    weights = StageWeights(parameter for parameter in module.parameters() if parameter.requires_grad)
    runs: tuple[list[Run], list[Run]] = ([], [])
    begin = time.perf_counter()
    while len(runs[1]) < _MIN_BENCHMARK_RUNS + 1 or time.perf_counter() - begin < seconds:
        runs[0].extend(_full_run(module, inputs, at_once))
        runs[1].extend(_split_run(module, inputs, weights, at_once))
    full, split = runs[0][1:], runs[1][1:]  # the first ones warm up
    times = Times(
        statistics.fmean(run[0] for run in [*full, *split]),
        statistics.fmean(run[1] for run in split),
        statistics.fmean(run[2] for run in split),
    )
    return StageTimes(times, statistics.fmean(run[1] for run in full))


# The link between ranks.

_SMALL, _LARGE = 8, 2**20  # bytes
_ROUND_TRIPS = 12


def measure_link(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float] | None:
    """Return the latency in seconds and the bytes per second to the neighbour of this rank; None if it has none.

    All ranks of the group have to call it.
    """
    rank = dist.get_rank(group)
    other = rank ^ 1
    if other >= dist.get_world_size(group):
        return None
    there = dist.get_global_rank(group, other)
    small = _seconds(_SMALL, rank < other, there, group, device)
    large = _seconds(_LARGE, rank < other, there, group, device)
    # A disturbed measurement must not give a negative or endless bandwidth.
    return small, (_LARGE - _SMALL) / max(large - small, _LARGE * 1e-12)


def _seconds(size: int, begins: bool, other: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return half of the time that a message takes to go there and come back."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    ways = (dist.send, dist.recv) if begins else (dist.recv, dist.send)
    times = []
    for _ in range(_ROUND_TRIPS):
        _wait_for_device()
        begin = time.perf_counter()
        for way in ways:
            way(message, other, group)
        _wait_for_device()
        times.append((time.perf_counter() - begin) / 2)
    return statistics.median(times[2:])
