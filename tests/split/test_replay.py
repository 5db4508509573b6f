"""Decisions and values from outside of a trace: the module that has them stays whole, or the cut is refused."""

from __future__ import annotations

import contextvars
import copy
import itertools
import json
import logging
import random
import secrets
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from random import randint
from random import random as draw
from time import monotonic as early_clock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipecut import PipeError, SplitError, SplitPoint, pipe_split, pipeline
from tests.support.equality import assert_same_run, run_apart, run_uncut
from tests.support.nested_values import Call, fresh
from tests.support.sampling import sampled

X = torch.randn(4, 8)
CALL: Call = ((X,), {})
COUNTS = types.SimpleNamespace(calls=0)
COUNTER = itertools.count()
ARRAY = np.zeros(1)
BYTES = bytearray(4)
CONTEXT = contextvars.ContextVar("calls", default=0)
GENERATOR = torch.Generator()
NUMPY_GENERATOR = np.random.default_rng(0)
NUMPY_STATE = np.random.RandomState(0)
COUNTING_TENSOR = torch.zeros(())
PHASES = {"phase 0": False, "phase 1": True}
TABLE = {"4": 2.0, "5": 3.0}


class Counts:
    calls = 0


def python_number(block: Block, x: Tensor) -> Tensor:
    return x * draw()


def python_integer(block: Block, x: Tensor) -> Tensor:
    return x * randint(1, 10**6)


def rare_branch(block: Block, x: Tensor) -> Tensor:
    """LayerDrop: a replay takes the same way nearly always."""
    return x if draw() < 1e-9 else x.tanh()


def shuffled(block: Block, x: Tensor) -> Tensor:
    return random.choice([x, x * 1]) * 2


def numpy_number(block: Block, x: Tensor) -> Tensor:
    return x * float(np.random.rand())


def numpy_branch(block: Block, x: Tensor) -> Tensor:
    return x if np.random.rand() < 1e-9 else x.tanh()


def own_numpy_generator(block: Block, x: Tensor) -> Tensor:
    return x * NUMPY_GENERATOR.random()


def rare_branch_by_its_own_generator(block: Block, x: Tensor) -> Tensor:
    return x if block.random.random() < 1e-9 else x.tanh()


def rare_branch_by_a_numpy_generator(block: Block, x: Tensor) -> Tensor:
    return x if NUMPY_GENERATOR.random() < 1e-9 else x.tanh()


def rare_branch_by_a_numpy_state(block: Block, x: Tensor) -> Tensor:
    return x if NUMPY_STATE.rand() < 1e-9 else x.tanh()


def array_of_random_numbers(block: Block, x: Tensor) -> Tensor:
    return x + torch.from_numpy(NUMPY_GENERATOR.random(8)).float()


def rare_part_of_a_text(block: Block, x: Tensor) -> Tensor:
    """In a longer text it is not a number's any more."""
    block.calls += 1
    return x.relu() if PHASES[f"phase {block.calls // 12}"] else x


def rare_word_in_a_text(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return x.relu() if len(f"call {block.calls}") > 9 else x


def rare_remainder(block: Block, x: Tensor) -> Tensor:
    """A watched number that divmod did not take ended the run, which was then made again without a watch."""
    _, seconds = divmod(time.monotonic(), 1e9)
    return x.relu() if seconds < 1e-9 else x


def number_that_goes_where_none_can(block: Block, x: Tensor) -> Tensor:
    return x.relu() if json.dumps(time.time()) == "0.0" else x


def new_numpy_generator(block: Block, x: Tensor) -> Tensor:
    return x * np.random.default_rng().random()


def counter_in_a_global(block: Block, x: Tensor) -> Tensor:
    COUNTS.calls += 1
    return x * COUNTS.calls


def counter_in_a_class(block: Block, x: Tensor) -> Tensor:
    Counts.calls += 1
    return x * Counts.calls


def counter_in_itself(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return x * block.calls


def every_thousandth_call(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return x if block.calls % 1000 == 0 else x.tanh()


def every_thousandth_call_by_a_global(block: Block, x: Tensor) -> Tensor:
    COUNTS.calls += 1
    return x if 0.5 * COUNTS.calls > 1000 else x.tanh()


def number_that_grows_late(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return x * (block.calls // 1000 + 1)


def rare_entry_of_an_array(block: Block, x: Tensor) -> Tensor:
    ARRAY[0] += 1
    return x if ARRAY[0] > 1000 else x.tanh()


def iterator(block: Block, x: Tensor) -> Tensor:
    return x * next(COUNTER)


def exhausted(block: Block, x: Tensor) -> Tensor:
    return x * next(block.numbers)


def counter_in_an_array(block: Block, x: Tensor) -> Tensor:
    ARRAY[0] += 1
    return x * ARRAY[0]


def clock(block: Block, x: Tensor) -> Tensor:
    return x * (time.perf_counter() % 1)


def size_as_a_key(block: Block, x: Tensor) -> Tensor:
    return x * TABLE.get(str(x.shape[0]), 7.0)


def earlier_result(block: Block, x: Tensor) -> Tensor:
    y = x if block.earlier is None else x + block.earlier
    block.earlier = y.detach().mean(0)
    return y


def own_tensor(block: Block, x: Tensor) -> Tensor:
    block.plain += 1
    return x * block.plain


def unread_tensor_of_a_module(block: Block, x: Tensor) -> Tensor:
    COUNTING_TENSOR.add_(1)
    return x * 2


def new_generator(block: Block, x: Tensor) -> Tensor:
    return x + torch.randn(8, generator=torch.Generator().manual_seed(3))


def own_generator(block: Block, x: Tensor) -> Tensor:
    return x + torch.randn(8, generator=GENERATOR)


def set_state(block: Block, x: Tensor) -> Tensor:
    torch.random.set_rng_state(block.state)
    return x + torch.randn_like(x)


def hook_on_a_node(block: Block, x: Tensor) -> Tensor:
    x = x * 2
    if x.grad_fn is not None:
        x.grad_fn.register_hook(lambda into, out: None)
    return x


def hook_on_a_parameter(block: Block, x: Tensor) -> Tensor:
    block.a.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return x


def hook_on_several(block: Block, x: Tensor) -> Tensor:
    if x.requires_grad:
        torch.autograd.graph.register_multi_grad_hook((x, x * 2), lambda gradients: None)
    return x


# What the message has to name, by the function that a block calls between its two layers.
def rare_branch_by_the_clock(block: Block, x: Tensor) -> Tensor:
    return x * 2 if early_clock() % 1000 < 1e-9 else x.tanh()


def rare_branch_by_the_systems_numbers(block: Block, x: Tensor) -> Tensor:
    return x * 2 if secrets.randbelow(10**9) == 7 else x.tanh()


def rare_branch_by_a_file(block: Block, x: Tensor) -> Tensor:
    return x * 2 if "no such line" in Path(__file__).read_text(encoding="utf-8")[:9] else x.tanh()


def rare_value_of_an_iterator(block: Block, x: Tensor) -> Tensor:
    return x * 2 if next(COUNTER) == 10**6 else x.tanh()


def rare_value_of_a_context(block: Block, x: Tensor) -> Tensor:
    CONTEXT.set(CONTEXT.get() + 1)
    return x * 2 if CONTEXT.get() == 10**6 else x.tanh()


def rare_byte(block: Block, x: Tensor) -> Tensor:
    BYTES[0] = (BYTES[0] + 1) % 256
    return x * 2 if BYTES[0] == 255 else x.tanh()


def rare_text_of_a_number(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return x * 2 if str(block.calls) == "1000000" else x.tanh()


REFUSED: dict[Callable[[Block, Tensor], Tensor], str] = {
    python_number: "random numbers of Python",
    python_integer: "random numbers of Python",
    rare_branch: "random numbers of Python",
    shuffled: "random numbers of Python",
    numpy_number: "random numbers of numpy",
    numpy_branch: "random numbers of numpy",
    own_numpy_generator: "it uses random numbers of a numpy.Generator of its own",
    rare_branch_by_its_own_generator: "it uses random numbers of a random.Random of its own",
    rare_branch_by_a_numpy_generator: "it uses random numbers of a numpy.Generator of its own",
    rare_branch_by_a_numpy_state: "it uses random numbers of a numpy.RandomState of its own",
    array_of_random_numbers: "it uses random numbers of a numpy.Generator of its own",
    every_thousandth_call: r"it uses 'calls', a number that changes from call to call at .* % 1000 == 0 else",
    every_thousandth_call_by_a_global: r"it uses 'calls', a number that changes .* 0.5 \* COUNTS.calls > 1000",
    number_that_grows_late: r"it uses 'calls', a number that changes .* return x \* \(block.calls // 1000 \+ 1\)",
    rare_entry_of_an_array: "it uses an array that it writes to: generated code would do what the trace did",
    rare_branch_by_the_clock: r"it uses time.monotonic\(\) at .* % 1000 < 1e-9",
    rare_branch_by_the_systems_numbers: r"it uses posix.urandom\(\) at",
    rare_branch_by_a_file: r"it uses io.open\(\) at",
    rare_value_of_an_iterator: r"it uses an iterator at .*next\(COUNTER\)",
    rare_value_of_a_context: r"it uses a number that changes .*CONTEXT.get\(\) == 10\*\*6",
    rare_byte: "it uses an array that it writes to",
    rare_text_of_a_number: "it uses 'calls', a number that changes from call to call at .*str",
    rare_part_of_a_text: r"it uses a number that changes from call to call \(KeyError: 'phase \d+'\)",
    rare_word_in_a_text: "it uses a number that changes from call to call, as a part of a text",
    rare_remainder: r"it uses time.monotonic\(\) at .* seconds < 1e-9",
    number_that_goes_where_none_can: r"it uses a number that changes from call to call \(TypeError",
    new_numpy_generator: "with other random numbers it calls mul with",
    counter_in_a_global: r"calls mul with \d+, and when run again .* calls mul with \d+ at .*return x \* COUNTS.calls",
    counter_in_a_class: "calls mul with",
    counter_in_itself: "calls mul with 1, and when run again a second time in a row it calls mul with 2 at",
    iterator: "calls mul with",
    exhausted: "it raises StopIteration",
    counter_in_an_array: "calls mul with",
    clock: "calls mul with",
    size_as_a_key: "calls mul with 7, and when run again .* calls mul with 2 at .*str",
    earlier_result: "a second time in a row",
    own_tensor: r"writes to a tensor that is neither an argument nor a parameter or buffer at .*block.plain \+= 1",
    unread_tensor_of_a_module: "writes to a tensor that is neither an argument nor a parameter or buffer at",
    new_generator: "a torch.Generator",
    own_generator: "a torch.Generator",
    set_state: "a seed or a state for torch's random numbers",
    hook_on_a_node: "a hook on a tensor or on its grad_fn",
    hook_on_a_parameter: "a hook on a tensor or on its grad_fn",
    hook_on_several: "a hook on a tensor or on its grad_fn",
}
QUICK = {rare_branch, numpy_branch, counter_in_itself, exhausted, size_as_a_key, own_tensor, new_generator}
QUICK |= {rare_branch_by_its_own_generator, every_thousandth_call, rare_entry_of_an_array}
QUICK |= {rare_branch_by_the_clock, rare_value_of_an_iterator, rare_text_of_a_number}
QUICK |= {rare_part_of_a_text, rare_word_in_a_text, rare_remainder, number_that_goes_where_none_can}
QUICK |= {counter_in_a_global, hook_on_a_node, set_state, earlier_result}


class Block(nn.Module):
    """Two layers with a given function between them, and things for it to use."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function
        self.calls = 0
        self.earlier: Tensor | None = None
        self.plain = torch.zeros(())
        self.random = random.Random(3)
        self.state = torch.get_rng_state()
        self.numbers: Iterator[int] = ones_once()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self, self.a(x)))


class ones_once:  # noqa: N801
    """An iterator that can be copied, and has one value."""

    def __init__(self) -> None:
        self.left = [1]

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()


def around(function: Callable[[Any, Tensor], Tensor]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Block(function), nn.Linear(8, 8))


@pytest.mark.parametrize("function", sampled(REFUSED, lambda function: function in QUICK), ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:the forward of")
def test_a_cut_through_it_is_refused(function: Callable[[Any, Tensor], Tensor]) -> None:
    """Generated code would repeat what the trace did for ever: a LayerDrop left out the same layers in every step."""
    model = around(function)
    random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.raises(SplitError, match=REFUSED[function]) as error:
        pipeline(model, (X,), split_spec={"1.b": SplitPoint.BEGINNING})
    assert "the forward of '1' is cut" in str(error.value)
    assert "into a module that is not cut" in str(error.value)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert states[:2] == after[:2]
    assert torch.equal(states[2], after[2])


@pytest.mark.parametrize("function", [counter_in_itself, own_tensor, hook_on_a_node], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:what lies between")
def test_the_automatic_cut_goes_around_it(function: Callable[[Any, Tensor], Tensor]) -> None:
    model = around(function)
    pipe = pipeline(model, (X,), num_stages=2)
    uncut = copy.deepcopy(model)
    assert "1" in {module for info in pipe.stage_infos for module in info.modules}
    assert "1 has to run its own code, and stays as it is" in str(pipe.explain())
    for _ in range(2):
        expected = run_uncut(uncut, fresh(CALL), 0)
        assert_same_run(run_apart(pipe, fresh(CALL), 0), expected, "run_apart", set())


def test_too_few_places_are_left_around_it() -> None:
    with pytest.raises(SplitError, match="the forward of '1' is cut: it uses random numbers of Python") as error:
        pipeline(around(rare_branch), (X,), num_stages=4)
    assert "4 stages were asked for" in str(error.value.__cause__)


class Drops(nn.Module):
    """Drops layers in its own forward, between its modules: there is nothing to go around."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or np.random.rand() >= 1e-9:
                x = layer(x)
        return x


def test_layers_dropped_by_numpy_in_the_models_own_forward() -> None:
    with pytest.raises(SplitError, match="the forward of 'Drops' is cut: it uses random numbers of numpy"):
        pipeline(Drops(), (X,), num_stages=2)


def test_what_is_dropped_in_the_other_mode_is_refused_in_that_mode() -> None:
    model = Drops().eval()
    pipe = pipeline(model, (X,), num_stages=2)
    torch.testing.assert_close(pipe(X), model(X))
    pipe.train()
    with pytest.raises(PipeError, match="was cut in evaluation mode"):
        pipe(X)


def asks_for_gradients(block: Block, x: Tensor) -> Tensor:
    return x * 2 if x.requires_grad else x * 3


def asks_for_the_mode(block: Block, x: Tensor) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x * 3


@pytest.mark.parametrize("function", [asks_for_gradients, asks_for_the_mode])
def test_other_operations_without_gradients(function: Callable[[Any, Tensor], Tensor]) -> None:
    """Evaluation took the branch of training. Where the cut can go around it, it does; otherwise evaluation raises."""
    model = around(function)
    pipe = pipeline(model, (X,), num_stages=2)
    with torch.no_grad():
        torch.testing.assert_close(pipe(X), model(X))
    pipe = pipeline(model, (X,), split_spec={"1.b": SplitPoint.BEGINNING})
    torch.testing.assert_close(pipe(X), model(X))
    with torch.no_grad(), pytest.raises(PipeError, match=r"the forward of 1 does other operations under torch.no_grad"):
        pipe(X)


def kept_mask(block: Block, x: Tensor) -> Tensor:
    if block.earlier is None or block.earlier.shape[0] != x.shape[0]:
        block.earlier = torch.ones(x.shape[0], 1) * 2
    return x * block.earlier


def noise(block: Block, x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5, block.training) + torch.rand_like(x)


def updated(block: Block, x: Tensor) -> Tensor:
    block.a.weight.detach().clone().mul_(2)
    return x.clone().add_(x.mean()).contiguous().to(x.dtype)


def counted(block: Block, x: Tensor) -> Tensor:
    """A count that is shown, and by which nothing is decided."""
    block.calls += 1
    COUNTS.calls = block.calls * 2 - 1
    assert f"{block.calls} calls"
    return x * 2


def timed(block: Block, x: Tensor) -> Tensor:
    """The time that it takes is added up, shown and written down, and nothing is decided by it."""
    begin = time.perf_counter()
    y = x * 2
    block.seconds = getattr(block, "seconds", 0.0) + time.perf_counter() - begin  # type: ignore[assignment]
    logging.getLogger("a model").warning("took %s", block.seconds)
    return y


@pytest.mark.parametrize("function", [kept_mask, noise, updated, counted, timed], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:the forward of")
def test_what_is_the_same_in_every_run_is_cut(function: Callable[[Any, Tensor], Tensor]) -> None:
    """A table that is computed once and kept has the value that generated code computes in every call."""
    model = around(function)
    uncut = copy.deepcopy(model)
    pipe = pipeline(model, (X,), split_spec={"1.b": SplitPoint.BEGINNING})
    expected = run_uncut(uncut, fresh(CALL), 0)
    assert_same_run(run_apart(pipe, fresh(CALL), 0), expected, "run_apart", set())


class CountsForItsLayer(nn.Module):
    """Counts in its own forward, and a layer of it decides by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), Block(lambda block, x: x if COUNTS.calls > 1000 else x.tanh())

    def forward(self, x: Tensor) -> Tensor:
        COUNTS.calls += 1
        return self.b(self.a(x))


def test_a_count_by_which_a_whole_module_decides() -> None:
    """The layer runs its own code, and would wait for ever: generated code does not count."""
    with pytest.raises(SplitError, match="it changes 'calls', a number by which 'b' decides, which is no operation"):
        pipeline(CountsForItsLayer(), (X,), split_spec={"b": SplitPoint.BEGINNING})


def test_noise_that_is_drawn_once_and_kept_is_refused() -> None:
    """Generated code would draw it anew in every call."""

    def kept_noise(block: Block, x: Tensor) -> Tensor:
        if block.earlier is None:
            block.earlier = torch.randn(8)
        return x * block.earlier

    with pytest.raises(SplitError, match="a second time in a row"):
        pipeline(around(kept_noise), (X,), split_spec={"1.b": SplitPoint.BEGINNING})


def test_a_model_around_a_module_that_cannot_be_traced_is_checked_too() -> None:
    class Untraceable(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x * 3

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.u, self.b = nn.Linear(8, 8), Untraceable(), nn.Linear(8, 8)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.u(self.a(x)) * (1 + (next(COUNTER) if self.calls else 0))
            pipe_split()
            return self.b(x)

    model = Net()
    pipe = pipeline(model, (X,), tracer="fx")
    torch.testing.assert_close(pipe(X), model(X))
    model.calls = 1
    with pytest.raises(SplitError, match="the forward of 'Net' is cut: in the trace it calls mul with"):
        pipeline(model, (X,), tracer="fx")


def test_a_model_without_memory_is_checked_too() -> None:
    with torch.device("meta"):
        model = around(counter_in_a_global)
    with pytest.raises(SplitError, match="calls mul with"):
        pipeline(model, (X,), split_spec={"1.b": SplitPoint.BEGINNING})
