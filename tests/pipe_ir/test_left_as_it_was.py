"""A trace leaves behind no tensor of its own, writes to no tensor and moves no generator, wherever a model has them."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import random
import sys
import sysconfig
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipecut import PipeError, SplitPoint, pipeline
from pipecut.errors import TraceError
from pipecut.pipe_ir.surroundings import Surroundings
from pipecut.pipe_ir.tracing.outside_state import watched_sources
from pipecut.pipe_ir.untouched import left_as_it_was
from pipecut.torch_internals import FakeTensor, FakeTensorMode
from tests.support.sampling import sampled

MASKS: dict[Any, Any] = {}
NESTED: dict[str, dict[str, Tensor]] = {"tables": {}}
PLACEHOLDER: dict[str, Any] = {"mask": None, "size": 0}
LISTED: list[Tensor] = []
ORDERED: collections.OrderedDict[str, Tensor] = collections.OrderedDict()
QUEUE: collections.deque[Tensor] = collections.deque(maxlen=3)
SPACE = types.SimpleNamespace(mask=None)
LOCAL = threading.local()
GLOBAL_MASK: Tensor | None = None
COUNT = torch.zeros(2)
PYTHON, NUMPY, TORCH = random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)


def triangle(size: int) -> Tensor:
    return torch.ones(size, size).tril()


@functools.lru_cache
def cached(size: int) -> tuple[Tensor, int]:
    return triangle(size), size


def with_default(size: int, kept: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return kept.setdefault(size, triangle(size))


class Slotted:
    """Keeps a mask in a slot."""

    __slots__ = ("mask",)


class Table:
    """Keeps masks in attributes of the class, and of its one object."""

    masks: ClassVar[dict[int, Tensor]] = {}
    last: ClassVar[Tensor | None] = None
    slotted = Slotted()

    @functools.cached_property
    def mask(self) -> Tensor:
        return triangle(4)


TABLE = Table()


def closure() -> Callable[[], Tensor]:
    kept: list[Tensor] = []
    last: Tensor | None = None

    def mask() -> Tensor:
        nonlocal last
        last = last if last is not None else triangle(4)
        kept.append(last)
        return last

    return mask


ENCLOSED = closure()


def in_a_global() -> Tensor:
    global GLOBAL_MASK
    if GLOBAL_MASK is None:
        GLOBAL_MASK = triangle(4)
    return GLOBAL_MASK


def in_a_placeholder() -> Tensor:
    if PLACEHOLDER["size"] < 4:
        PLACEHOLDER["mask"], PLACEHOLDER["size"] = triangle(4), 4
    return PLACEHOLDER["mask"]  # type: ignore[no-any-return]


def in_a_list() -> Tensor:
    if not LISTED:
        LISTED.append(triangle(4))
    return LISTED[0]


def in_a_deque() -> Tensor:
    QUEUE.append(triangle(4))
    return QUEUE[-1]


def in_a_namespace() -> Tensor:
    if SPACE.mask is None:
        SPACE.mask = triangle(4)
    return SPACE.mask  # type: ignore[no-any-return]


def in_a_thread() -> Tensor:
    LOCAL.mask = getattr(LOCAL, "mask", None) if hasattr(LOCAL, "mask") else triangle(4)
    return LOCAL.mask  # type: ignore[no-any-return]


def in_a_class() -> Tensor:
    if Table.last is None:
        Table.last = triangle(4)
    return Table.masks.setdefault(4, Table.last)


def in_a_slot() -> Tensor:
    if not hasattr(Table.slotted, "mask"):
        Table.slotted.mask = triangle(4)
    return Table.slotted.mask  # type: ignore[no-any-return]


def in_a_function() -> Tensor:
    if not hasattr(in_a_function, "mask"):
        in_a_function.mask = triangle(4)  # type: ignore[attr-defined]
    return in_a_function.mask  # type: ignore[attr-defined, no-any-return]


PLACES: dict[str, Callable[[], Tensor]] = {
    "a dict": lambda: MASKS.setdefault(4, triangle(4)),
    "a dict with a tensor as key": lambda: MASKS.setdefault(mask := triangle(4), mask),
    "a dict in a dict": lambda: NESTED["tables"].setdefault("mask", triangle(4)),
    "a new dict in a dict": lambda: MASKS.setdefault("new", {"mask": triangle(4)})["mask"],
    "an OrderedDict": lambda: ORDERED.setdefault("mask", triangle(4)),
    "an lru_cache": lambda: cached(4)[0],
    "a default argument": lambda: with_default(4),
    "a cached property": lambda: TABLE.mask,
    "an enclosing function": ENCLOSED,
    "a global variable": in_a_global,
    "a dict with a placeholder": in_a_placeholder,
    "a list": in_a_list,
    "a deque": in_a_deque,
    "a namespace": in_a_namespace,
    "a thread's own": in_a_thread,
    "a class": in_a_class,
    "a slot": in_a_slot,
    "an attribute of a function": in_a_function,
}


class Masked(nn.Module):
    """A layer whose mask comes from outside."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear, self.place = nn.Linear(4, 4), place

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) @ PLACES[self.place]()
        return y


@pytest.mark.parametrize("place", PLACES)
def test_no_tensor_of_a_run_on_fake_tensors_survives(place: str) -> None:
    """The uncut model returned fake tensors ever after, wherever it kept its mask."""
    model, x = Masked(place), torch.ones(4, 4)
    with left_as_it_was(model) as watch, FakeTensorMode(allow_non_fake_inputs=True), watch:
        assert isinstance(model(x), FakeTensor)
    for _ in range(2):
        assert type(model(x)) is Tensor
        assert torch.equal(model(x), model.linear(x) @ triangle(4))


@pytest.mark.parametrize("place", ["a dict", "an lru_cache", "a global variable", "a placeholder in use"])
def test_a_model_whose_layers_share_a_mask_is_cut_twice_and_runs_uncut(place: str) -> None:
    """A second pipeline() failed on the tensors that the first had left in the cache."""
    MASKS.clear()
    cached.cache_clear()
    before = PLACEHOLDER["mask"] = 3 * triangle(4)  # used before: what was there is there again
    PLACEHOLDER["size"] = 2
    place = "a dict with a placeholder" if place == "a placeholder in use" else place
    model, x = nn.Sequential(Masked(place), Masked(place)), torch.randn(4, 4)
    for _ in range(2):
        pipe = pipeline(model, (x,), split_spec={"1": SplitPoint.BEGINNING})
        assert {"mask": before, "size": 2} == PLACEHOLDER
        assert torch.equal(pipe(x), model(x))
        PLACEHOLDER["mask"], PLACEHOLDER["size"] = before, 2


def test_sizes_of_a_trace_do_not_survive_either() -> None:
    """A symbolic size that is kept ties the uncut model to the trace: its comparisons are guards of a dead tracer."""

    class Sized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            SPACE.rows = x.shape[0]
            return x + 1

    SPACE.rows = 7
    pipeline(nn.Sequential(Sized(), nn.Linear(3, 3)), (torch.ones(2, 3),), num_stages=1)
    assert SPACE.rows == 7
    assert type(SPACE.rows) is int


class Unreachable(nn.Module):
    """Keeps what it makes where no name leads to."""

    def __init__(self, keep: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.keep = iter_of(keep)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.keep.send(y)
        return y


def iter_of(keep: Callable[[Tensor], None]) -> Any:
    def run() -> Iterator[None]:
        while True:
            keep((yield))  # type: ignore[func-returns-value, arg-type]

    generator: Any = run()
    next(generator)
    return generator


def test_an_error_names_the_holder_of_what_cannot_be_taken_out() -> None:
    hidden: list[Tensor] = []
    model = Unreachable(hidden.append)
    guard = contextlib.ExitStack()
    with FakeTensorMode(allow_non_fake_inputs=True):
        guard.enter_context(left_as_it_was(model))
        model(torch.ones(2, 4))
    with pytest.raises(TraceError, match=r"Unreachable keeps a tensor of shape .* in .*iter_of.*functools.lru_cache"):
        guard.close()


class Counts(nn.Module):
    """Writes to a tensor that is not its own, in one of many ways."""

    def __init__(self, write: Callable[[nn.Module], object], *, untraceable: bool) -> None:
        super().__init__()
        self.linear, self.write, self.untraceable = nn.Linear(4, 4), write, untraceable
        self.plain = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.untraceable and x.sum() > 1e9:
            return x
        self.write(self)
        y: Tensor = self.linear(x)
        return y


def through_numpy(_: nn.Module) -> None:
    COUNT.numpy()[0] += 1


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda _: COUNT.add_(1),
    "an item": lambda _: COUNT.__setitem__(0, 5.0),
    "past autograd": lambda _: COUNT.data.add_(1),
    "as out=": lambda _: torch.add(COUNT, 1, out=COUNT),
    "a plain attribute": lambda module: module.plain.add_(1),
    "a parameter": lambda module: module.linear.weight.data.clamp_(-0.01, 0.01),
    "through numpy": through_numpy,
}


@pytest.mark.parametrize(
    "untraceable", sampled([False, True], lambda untraceable: not untraceable), ids=["traced", "example run"]
)
@pytest.mark.parametrize("write", WRITES)
def test_no_real_tensor_is_written(write: str, untraceable: bool) -> None:
    """A count in a module-level tensor was 2 after a trace of two layers, and clamped weights were clamped."""
    model = nn.Sequential(*(Counts(WRITES[write], untraceable=untraceable) for _ in range(2)))
    COUNT.zero_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that stay as they are
        try:
            pipeline(model, (torch.ones(4, 4),), split_spec={"1": SplitPoint.BEGINNING})
        except PipeError as error:  # what is refused must leave nothing behind either
            print(error)
    assert COUNT.tolist() == [0, 0]
    assert [layer.plain.tolist() for layer in model] == [[0, 0], [0, 0]]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("untraceable", [False, True], ids=["traced", "example run"])
def test_generators_are_as_before(untraceable: bool) -> None:
    def draw(module: nn.Module) -> None:
        random.random(), np.random.rand(), torch.rand(2), PYTHON.random(), NUMPY.random()
        torch.rand(2, generator=TORCH)

    def states() -> list[Any]:
        own = [PYTHON.getstate(), NUMPY.bit_generator.state, TORCH.get_state().tolist()]
        return [*own, random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]

    model = nn.Sequential(Counts(draw, untraceable=untraceable), nn.Linear(4, 4))
    before = states()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline(model, (torch.ones(4, 4),), split_spec={"1": SplitPoint.BEGINNING})
    assert states() == before


def test_real_tensors_of_an_example_run_do_not_stay_in_a_cache() -> None:
    """A cache kept a table of the copy that ran on the example, and the model went on with it."""

    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Buffer(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e9:
                return x
            MASKS.setdefault("table", self.table * 2)
            return x * MASKS["table"]

    MASKS.clear()
    model = nn.Sequential(Tabled(), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="cannot trace all"):
        pipeline(model, (torch.ones(4, 4),), split_spec={"1": SplitPoint.BEGINNING})
    assert MASKS == {}
    model[0].table.fill_(3)
    assert model[0](torch.ones(1, 4)).tolist() == [[6, 6, 6, 6]]


def test_a_failed_trace_leaves_nothing_behind() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            MASKS["kept"] = x + 1
            raise ValueError("no luck")

    MASKS.clear()
    with pytest.raises(TraceError, match="no luck"):
        pipeline(nn.Sequential(Failing()), (torch.ones(4, 4),), num_stages=1)
    assert MASKS == {}


ARRAY = np.zeros(2)


def test_arrays_and_generators_are_as_they_were() -> None:
    """Of all kinds; those of the system have no state."""
    generators: list[Any] = [np.random.RandomState(1), np.random.PCG64(1), random.Random(1), random.SystemRandom()]

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ARRAY[0] += 1
            return x + generators[0].rand() + generators[1].random_raw() + generators[2].random() + ARRAY.sum()

    expected = np.random.RandomState(1).rand(), np.random.PCG64(1).random_raw(), random.Random(1).random()
    with left_as_it_was(Draws(), always=True), FakeTensorMode(allow_non_fake_inputs=True):
        Draws()(torch.ones(2))
    assert (generators[0].rand(), generators[1].random_raw(), generators[2].random()) == expected
    assert ARRAY.tolist() == [0, 0]


def installed(name: str, **names: Any) -> types.ModuleType:
    """Return a module as if it were installed, with a function that keeps values in a dict of its own."""
    module = types.ModuleType(name)
    vars(module).update(__file__=f"{sysconfig.get_paths()['purelib']}/{name}.py", **names)
    exec("KEPT = {}\ndef keep(value): return KEPT.setdefault('value', value)", vars(module))
    sys.modules[name] = module
    return module


@pytest.mark.parametrize("knows_torch", [True, False])
def test_installed_packages_are_looked_at_if_they_know_torch(knows_torch: bool) -> None:
    """Large ones that do not (parsers, test tools) hold no tensors of a model: looking at them takes time."""
    name = f"some_package_{knows_torch}"
    package = installed(name, **({"torch": torch} if knows_torch else {}))
    try:
        around = Surroundings()
        around.note([package.keep])
        package.keep(3)
        around.restore()
        assert ({} if knows_torch else {"value": 3}) == package.KEPT
    finally:
        del sys.modules[name]


def test_a_class_that_a_further_run_makes_is_not_kept() -> None:
    """A cache of classes kept those that the runs make for their modules, and so every tensor of the runs.

    Nothing was wrong with the stages. But after each run all of Python's objects were searched for who keeps what.
    """
    made = type("Made", (nn.Linear,), {})
    known = weakref.ref(made)
    place: Any = None  # nothing is replaced there
    with watched_sources([(place, {"layer": made(1, 1)})], print):
        del made
    gc.collect()
    assert known() is None
