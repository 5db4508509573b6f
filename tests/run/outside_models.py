"""Random models that depend on things outside of a trace: Python state, random numbers, caches, hooks, other blocks.

A value that comes from outside is logged by the block that reads it. So a run on ranks can be repeated by the uncut
model with the same values; code that no longer reads them, because the cut froze one, logs too few.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import random as early_random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 4
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=0)
KEYED = {str(rows): 1.0 + rows / 8 for rows in range(16)}


class World:
    """All that models have outside of themselves."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, as a new process does."""
        self.counts: dict[str, int] = defaultdict(int)
        self.cache: dict[Any, Tensor] = {}
        self.tensor = torch.zeros((), dtype=torch.float64)
        self.stash: Any = None
        self.collected: list[Tensor] = []
        self.config = SimpleNamespace(calls=0, last=None)
        self.log: list[str] = []
        self.bytes = bytearray(1)
        self.hooked: Any = None
        CONTEXT.set(0)
        OfClass.calls = 0
        table.cache_clear()


class Log:
    """The values from outside that one user of them has read."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.forced: Iterator[float] | None = None

    def outside(self, draw: Callable[[], float]) -> float:
        """Return a value from outside, or in a repeated run the one that was logged."""
        value = draw() if self.forced is None else next(self.forced)
        self.values.append(value)
        return value


class OfClass:
    """A counter that all blocks share."""

    calls = 0


@functools.lru_cache(maxsize=8)
def table(rows: int) -> Tensor:
    """Return a table from a cache of Python's."""
    return torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64).expand(rows, WIDTH) * 1.0


WORLD = World()


class Block(nn.Module):
    """A layer, and something that its kind does to the result."""

    def __init__(self, index: int, kind: str) -> None:
        super().__init__()
        self.kind, self.name, self.log = kind, f"{index} {kind}", Log()
        self.change = KINDS[kind]
        self.lin, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)
        self.own_random = random.Random(index)
        self.own_numpy = np.random.default_rng(index)
        self.numbers = itertools.cycle([1.0, 1.25, 1.5])
        self.array = np.zeros(1)
        self.calls = 0
        self.kept: list[Tensor] = []
        self.plain = torch.zeros((), dtype=torch.float64)
        self.others: list[Block] = []  # not submodules: a model refers to its layers in many ways
        self.seen: Tensor | None = None
        self.hooked: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, torch.tanh(self.lin(x)))


def _scaled(draw: Callable[[Block], float]) -> Callable[[Block, Tensor], Tensor]:
    return lambda block, y: y * (1.0 + block.log.outside(lambda: draw(block)))


def _skipped(draw: Callable[[Block], float]) -> Callable[[Block, Tensor], Tensor]:
    def apply(block: Block, y: Tensor) -> Tensor:
        return y if block.log.outside(lambda: draw(block)) < 0.5 else torch.relu(block.lin(y))

    return apply


def _counted(count: Callable[[Block], float]) -> Callable[[Block, Tensor], Tensor]:
    return lambda block, y: y * (1.0 + count(block) / 8)


def _count_globally(block: Block, key: str) -> float:
    WORLD.counts[key] += 1
    return WORLD.counts[key]


def _count_in_class(block: Block) -> float:
    OfClass.calls += 1
    return OfClass.calls


def _count_in_config(block: Block) -> float:
    WORLD.config.calls += 1
    return float(WORLD.config.calls)


def _count_in_array(block: Block) -> float:
    block.array[0] += 1
    return float(block.array[0])


def _count_in_itself(block: Block) -> float:
    block.calls += 1
    return block.calls


def _third_call(count: Callable[[Block], float]) -> Callable[[Block, Tensor], Tensor]:
    """Return a change that acts on every third call only, which no single run shows."""
    return lambda block, y: y * 2 if count(block) % 3 == 0 else y


def _rarely(draw: Callable[[Block], float]) -> Callable[[Block, Tensor], Tensor]:
    return lambda block, y: y if block.log.outside(lambda: draw(block)) < 1e-3 else y * 1.5


def _array_of_draws(block: Block, y: Tensor) -> Tensor:
    drawn = block.log.outside(lambda: float(block.own_numpy.random()))
    return y + torch.from_numpy(np.full(WIDTH, drawn))


def _counts_for_others(block: Block, y: Tensor) -> Tensor:
    WORLD.counts["told"] += 1
    return y


def _decides_by_count(block: Block, y: Tensor) -> Tensor:
    return y * 2 if WORLD.counts["told"] > 2 else y


def _logs(block: Block, y: Tensor) -> Tensor:
    WORLD.log.append(block.name)
    return y


def _keeps_in_config(block: Block, y: Tensor) -> Tensor:
    WORLD.config.last = y.mean()
    return y


def _keeps_in_list(block: Block, y: Tensor) -> Tensor:
    block.kept.append(y.mean())
    return y


def _plain_tensor(block: Block, y: Tensor) -> Tensor:
    block.plain += 1
    return y * (1 + block.plain / 8)


def _assigned_tensor(block: Block, y: Tensor) -> Tensor:
    block.plain = block.plain + 1
    return y * (1 + block.plain / 8)


def _module_tensor(block: Block, y: Tensor) -> Tensor:
    WORLD.tensor += 1
    return y * (1 + WORLD.tensor / 8)


def _writes_parameter(block: Block, y: Tensor) -> Tensor:
    with torch.no_grad():
        block.lin.bias.mul_(0.5)
    return y + block.lin.bias


def _cached_in_dict(block: Block, y: Tensor) -> Tensor:
    rows = y.shape[0]
    if rows not in WORLD.cache:
        WORLD.cache[rows] = torch.arange(WIDTH, dtype=y.dtype) / 4
    return y + WORLD.cache[rows]


def _hooked(block: Block, y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y * 1.0


def _hooked_node(block: Block, y: Tensor) -> Tensor:
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda gradients: tuple(gradient * 0.5 for gradient in gradients))
    return y * 1.0


def _uses_another(block: Block, y: Tensor) -> Tensor:
    return y + 0.1 * block.others[0].lin.weight.sum()


def _stashes(block: Block, y: Tensor) -> Tensor:
    WORLD.stash = y.detach().mean()
    return y


def _takes_stash(block: Block, y: Tensor) -> Tensor:
    return y if WORLD.stash is None else y * (1 + WORLD.stash)


def _remembers(block: Block, y: Tensor) -> Tensor:
    block.seen = y.mean()
    return y


def _reads_another(block: Block, y: Tensor) -> Tensor:
    seen = block.others[0].seen
    return y if seen is None else y + seen.detach()


def _seeds(block: Block, y: Tensor) -> Tensor:
    torch.manual_seed(5)
    return F.dropout(y, 0.25, block.training)


def _own_generator(block: Block, y: Tensor) -> Tensor:
    numbers = torch.Generator().manual_seed(WORLD.counts[block.name])
    WORLD.counts[block.name] += 1
    return y * torch.rand(WIDTH, generator=numbers, dtype=y.dtype)


def _count_in_context(block: Block) -> float:
    CONTEXT.set(CONTEXT.get() + 1)
    return CONTEXT.get()


def _count_in_bytes(block: Block) -> float:
    WORLD.bytes[0] = (WORLD.bytes[0] + 1) % 128
    return WORLD.bytes[0]


def _third_text(block: Block, y: Tensor) -> Tensor:
    block.calls += 1
    return y * 2 if str(block.calls) in ("3", "6", "9", "12") else y


def _tells_by_hook(block: Block) -> None:
    block.register_forward_hook(lambda module, args, output: WORLD.counts.update(hooks=WORLD.counts["hooks"] + 1))


def _listens_by_hook(block: Block) -> None:
    block.register_forward_hook(lambda module, args, output: output * (1 + WORLD.counts["hooks"] / 8))


def _leaves_by_hook(block: Block) -> None:
    block.register_forward_hook(lambda module, args, output: setattr(WORLD, "hooked", output.detach().mean()))


def _takes_by_hook(block: Block) -> None:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return None if WORLD.hooked is None else (args[0] * (1 + WORLD.hooked),)

    block.register_forward_pre_hook(hook)


HOOKS: dict[str, Callable[[Block], None]] = {
    "counts by a hook": _tells_by_hook,
    "uses the count by a hook": _listens_by_hook,
    "leaves a tensor by a hook": _leaves_by_hook,
    "takes the tensor by a hook": _takes_by_hook,
}

KINDS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "plain": lambda block, y: y,
    **{kind: lambda block, y: y for kind in HOOKS},
    "count in a context": _counted(_count_in_context),
    "count in bytes": _counted(_count_in_bytes),
    "every third call, by its text": _third_text,
    "every third call, by an iterator": lambda block, y: y * 2 if next(block.numbers) == 1.5 else y,
    "rarely, by the clock": _rarely(lambda block: time.monotonic() % 1000),
    "rarely, by the system's numbers": _rarely(lambda block: secrets.randbelow(10**9) / 10**9),
    "rarely, by a file": _rarely(lambda block: float(Path(__file__).read_text(encoding="utf-8")[:1] == "#") or 1.0),
    "dropout": lambda block, y: block.drop(y),
    "noise": lambda block, y: y + 0.1 * torch.rand_like(y),
    "python number": _scaled(lambda block: random.random()),
    "python number, imported early": _scaled(lambda block: early_random()),
    "whole number": _scaled(lambda block: random.randint(0, 3)),
    "own python generator": _scaled(lambda block: block.own_random.random()),
    "numpy number": _scaled(lambda block: float(np.random.rand())),
    "own numpy generator": _scaled(lambda block: float(block.own_numpy.random())),
    "clock": _scaled(lambda block: time.perf_counter() % 1.0),
    "layer dropped by python": _skipped(lambda block: random.random()),
    "layer dropped by numpy": _skipped(lambda block: float(np.random.rand())),
    "iterator": _counted(lambda block: next(block.numbers)),
    "own count": _counted(lambda block: _count_globally(block, block.name)),
    "shared count": _counted(lambda block: _count_globally(block, "all")),
    "count in a class": _counted(_count_in_class),
    "count in a config": _counted(_count_in_config),
    "count in an array": _counted(_count_in_array),
    "every third call": _third_call(lambda block: _count_globally(block, block.name)),
    "every third call, by its own count": _third_call(_count_in_itself),
    "every third call, by an array": _third_call(_count_in_array),
    "rarely, by its own generator": _rarely(lambda block: block.own_random.random()),
    "rarely, by a numpy generator": _rarely(lambda block: float(block.own_numpy.random())),
    "array of draws": _array_of_draws,
    "counts for others": _counts_for_others,
    "decides by the count": _decides_by_count,
    "logs": _logs,
    "keeps in a config": _keeps_in_config,
    "keeps in a list": _keeps_in_list,
    "plain tensor": _plain_tensor,
    "assigned tensor": _assigned_tensor,
    "tensor of the module": _module_tensor,
    "writes a parameter": _writes_parameter,
    "key of a size": lambda block, y: y * KEYED[str(y.shape[0])],
    "number of a size": lambda block, y: y * (y.shape[0] / 4),
    "branch on requires_grad": lambda block, y: y * 2 if y.requires_grad else y,
    "branch on grad mode": lambda block, y: y * 2 if torch.is_grad_enabled() else y,
    "cached by lru_cache": lambda block, y: y * table(y.shape[0]),
    "cached in a dict": _cached_in_dict,
    "hook on a tensor": _hooked,
    "hook on a node": _hooked_node,
    "uses another block": _uses_another,
    "stashes": _stashes,
    "takes the stash": _takes_stash,
    "remembers": _remembers,
    "reads another block": _reads_another,
    "seeds torch": _seeds,
    "own torch generator": _own_generator,
}


USES_OTHERS = ("uses another block", "reads another block")


class Net(nn.Module):
    """Blocks in a row; the last kind is that of the forward that is cut."""

    def __init__(self, kinds: tuple[str, ...], root: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index, kind) for index, kind in enumerate(kinds))
        blocks: list[Any] = list(self.blocks)
        self.root = Block(len(kinds), root)
        for index, block in enumerate([*blocks, self.root]):
            if block.kind in HOOKS and block is not self.root:
                HOOKS[block.kind](block)
            if block.kind in USES_OTHERS:
                block.others = [*reversed(blocks[:index]), *blocks[index + 1 :]]
        self.loss_log = Log()

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 0 and self.root.kind != "plain":
                x = self.root.change(self.root, x)
        return x


def logs_of(model: nn.Module) -> dict[str, Log]:
    """Return the logs of blocks by the names of these: a stage has copies of them."""
    return {block.name: block.log for block in model.modules() if isinstance(block, Block)}


def _plain_loss(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
    return F.mse_loss


def _regularised(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, t: F.mse_loss(y, t) + 0.01 * sum(p.square().sum() for p in model.parameters())


def _with_stash(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, t: F.mse_loss(y, t) * (1.0 if WORLD.stash is None else 1.0 + WORLD.stash)


def _with_collected(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
    model.blocks[0].register_forward_hook(lambda module, args, output: WORLD.collected.append(output))

    def loss(y: Tensor, t: Tensor) -> Tensor:
        collected, WORLD.collected = WORLD.collected, []
        return F.mse_loss(y, t) + sum(0.1 * each.square().mean() for each in collected)

    return loss


def _with_attribute(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
    first: Any = model.blocks[0]
    return lambda y, t: F.mse_loss(y, t) + (0.0 if first.seen is None else first.seen)


def _with_hooked(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
    last: Any = model.blocks[-1]
    last.register_forward_hook(lambda module, args, output: setattr(module, "hooked", output.square().mean()))
    return lambda y, t: F.mse_loss(y, t) + (0.0 if last.hooked is None else last.hooked)


def _with_list(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
    kept: Any = [block.kept for block in model.blocks if isinstance(block, Block)]

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(y, t) + sum(0.1 * each.pop() for each in kept if each)

    return loss


def _with_config(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, t: F.mse_loss(y, t) + (0.0 if WORLD.config.last is None else WORLD.config.last)


def _with_count(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, t: F.mse_loss(y, t) * (1 + WORLD.counts["told"] / 8)


def _random_loss(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
    log = model.loss_log
    return lambda y, t: F.mse_loss(y, t) * (1 + log.outside(random.random))


LOSSES: dict[str, Callable[[Net], Callable[[Tensor, Tensor], Tensor]]] = {
    "plain": _plain_loss,
    "regularised": _regularised,
    "reads the stash": _with_stash,
    "reads what a hook collected": _with_collected,
    "reads an attribute": _with_attribute,
    "reads what a hook set": _with_hooked,
    "reads a list": _with_list,
    "reads a config": _with_config,
    "reads a count": _with_count,
    "random": _random_loss,
}

CUTS = ("between", "inside", "automatic")
SCHEDULES = ("1F1B", "GPipe", "ZB-H1")


@dataclass(frozen=True)
class OutsideCase:
    """One model, its loss, and how it is cut and run; it prints as the code that makes it again."""

    kinds: tuple[str, ...]
    root: str = "plain"
    loss: str = "plain"
    cut: str = "between"
    schedule: str = "1F1B"

    def build(self) -> tuple[Net, Callable[[Tensor, Tensor], Tensor]]:
        """Return the model, always with the same weights, and its loss."""
        torch.manual_seed(0)
        model = Net(self.kinds, self.root).double()
        return model, LOSSES[self.loss](model)


# Those that have to do with each other, so that they meet often.
_TOGETHER: tuple[tuple[str, ...], ...] = (
    ("stashes", "takes the stash", "reads the stash"),
    ("remembers", "reads another block", "reads an attribute"),
    ("counts for others", "decides by the count", "reads a count"),
    ("shared count", "count in a class", "count in a config", "tensor of the module"),
    ("keeps in a config", "count in a config", "reads a config"),
    ("keeps in a list", "logs", "reads a list", "reads what a hook collected", "reads what a hook set"),
    ("uses another block", "writes a parameter", "regularised"),
    (*HOOKS, "counts for others"),
    ("rarely, by the clock", "rarely, by a file", "count in a context", "count in bytes", "iterator", "clock"),
    ("dropout", "noise", "seeds torch", "own torch generator", "layer dropped by python", "random"),
)


def random_cases(seed: int, number: int) -> list[OutsideCase]:
    """Return different models with one to three unusual blocks among plain ones, the same for a seed."""
    numbers = random.Random(seed)
    found: dict[OutsideCase, None] = {}
    while len(found) < number:
        found[_random_case(numbers)] = None
    return list(found)


def _random_case(numbers: random.Random) -> OutsideCase:
    some = numbers.choice(_TOGETHER) if numbers.random() < 0.5 else (*KINDS, *LOSSES)
    kinds, losses = [name for name in some if name in KINDS], [name for name in some if name in LOSSES]
    blocks = ["plain"] * numbers.choice((3, 3, 4))
    for _ in range(numbers.choice((1, 1, 2, 3))):
        blocks[numbers.randrange(len(blocks))] = numbers.choice(kinds)
    root = numbers.choice(kinds) if numbers.random() < 0.3 else "plain"
    loss = numbers.choice(losses) if losses and numbers.random() < 0.5 else "plain"
    return OutsideCase(tuple(blocks), root, loss, numbers.choice(CUTS), numbers.choice(SCHEDULES))
