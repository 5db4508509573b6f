"""Calls of equal modules are computed once: the trace is the one in which all of them are computed."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipecut import SplitPoint
from pipecut.pipe_ir.tracing.repeats import Follower, Repeats
from tests.support.equality import assert_equals_uncut
from tests.support.sampling import sampled
from tests.support.traces import traced_in_both_ways
from tests.support.transformers_models import PUBLISHED

WIDTH, BLOCKS = 4, 4
STATE = types.SimpleNamespace(count=0, kept=[])


class Block(nn.Module):
    """A block with all that one of them may have differently; `step` is a part of its forward."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.scale, self.rate, self.is_wide = index, 0.5, 0.0, False
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.outer, self.act = nn.Linear(2 * WIDTH, WIDTH), nn.GELU()
        self.register_buffer("bias", torch.zeros(WIDTH))
        self.step: Callable[[Block, Tensor], Tensor] = plain

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = F.dropout(self.act(self.inner(self.norm(x) + self.bias)), self.rate, self.training)
        hidden = self.outer(hidden) * self.scale
        if mask is not None:
            hidden = hidden * mask
        return x + self.step(self, hidden)


def plain(block: Block, x: Tensor) -> Tensor:
    return x.relu() if block.is_wide else x


def by_index(block: Block, x: Tensor) -> Tensor:
    return x.tanh() if block.index == 2 else x


def by_global_counter(block: Block, x: Tensor) -> Tensor:
    STATE.count += 1
    return x * STATE.count


def by_rare_counter(block: Block, x: Tensor) -> Tensor:
    STATE.count += 1
    return x.tanh() if STATE.count % BLOCKS == 3 else x


def by_last_digit(block: Block, x: Tensor) -> Tensor:
    return x * (0.3 if block.index < 2 else 0.1 + 0.2)


def condition_on_size(block: Block, x: Tensor) -> Tensor:
    return x.tanh() if x.shape[0] > 1 + block.index else x


def keeps_its_result(block: Block, x: Tensor) -> Tensor:
    block.last = x.tanh()
    return block.last * 2


def reads_the_one_before(block: Block, x: Tensor) -> Tensor:
    previous, STATE.kept = STATE.kept, [x.sigmoid()]
    return x + (previous[0] if previous else 0)


def writes_in_place(block: Block, x: Tensor) -> Tensor:
    return x.mul(2).add_(1).clamp_(max=3)


def in_other_modes(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = x.sigmoid()
    with torch.autocast("cpu", torch.bfloat16):
        return gate * F.linear(x, block.outer.weight[:, :WIDTH])


def checkpointed(block: Block, x: Tensor) -> Tensor:
    return checkpoint(torch.tanh, x, use_reentrant=False)


def batch_norm(block: Block, x: Tensor) -> Tensor:
    block.bias.add_(1)
    return x


def views(block: Block, x: Tensor) -> Tensor:
    first, second = x.t().contiguous().t().chunk(2, dim=-1)
    return torch.cat([second, first], dim=-1).unsqueeze(0).expand(2, -1, -1)[1]


def makes_a_buffer(block: Block, x: Tensor) -> Tensor:
    if block.table is None:
        block.table = torch.arange(WIDTH, dtype=x.dtype)
    return x + block.table


def forget_tables(model: nn.Module) -> None:
    for block in model.blocks:
        block.table = None


def swallows_errors(block: Block, x: Tensor) -> Tensor:
    try:
        return x.tanh() if block.index != 1 else x.sigmoid()
    except Exception:
        return x


def hands_over_a_closure(block: Block, x: Tensor) -> Tensor:
    """The function was compared by its name."""
    scale = 1 + block.index
    distance = F.triplet_margin_with_distance_loss(
        x, 2 * x, 3 * x, distance_function=lambda a, b: ((a - b) * scale).norm(dim=1)
    )
    return x * distance


def doubled_by_a_global(x: Tensor) -> Tensor:
    return x * STATE.factor


TORCH_FUNCTION = torch.overrides.wrap_torch_function(lambda x: (x,))(doubled_by_a_global)


def overridable_function(block: Block, x: Tensor) -> Tensor:
    """The body of such a function was taken to depend on its arguments alone."""
    STATE.factor = 1 + block.index
    return TORCH_FUNCTION(x)


def list_or_tuple(block: Block, x: Tensor) -> Tensor:
    """As an index, one of them takes rows, and the other one element."""
    return x + x[[0, 1] if block.index % 2 else (0, 1)].sum()


STEPS = (
    hands_over_a_closure, overridable_function, list_or_tuple,
    plain, by_index, by_global_counter, by_rare_counter, by_last_digit, condition_on_size, keeps_its_result,
    reads_the_one_before, writes_in_place, in_other_modes, checkpointed, batch_norm, views, swallows_errors,
)  # fmt: skip


class Stack(nn.Module):
    """Blocks in a row, with work around them; `call` calls one of them."""

    def __init__(self, step: Callable[[Block, Tensor], Tensor] = plain) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(map(Block, range(BLOCKS)))
        self.call: Callable[[Stack, Block, Tensor, Tensor], Tensor] = lambda stack, block, x, mask: block(x, mask)
        for block in self.blocks:
            block.step = step

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > -1).to(x.dtype)
        x = self.first(x)
        for block in self.blocks:
            x = self.call(self, block, x, mask)
        return x


def set_flag(model: Stack) -> None:
    model.blocks[2].is_wide = True


def set_rate(model: Stack) -> None:
    model.blocks[1].rate = 0.25


def set_scale(model: Stack) -> None:
    model.blocks[3].scale = 0.125


def freeze(model: Stack) -> None:
    model.blocks[1].inner.weight.requires_grad_(False)


def freeze_first(model: Stack) -> None:
    for parameter in (*model.first.parameters(), *model.blocks[0].parameters()):
        parameter.requires_grad_(False)


def tie(model: Stack) -> None:
    model.blocks[2].inner.weight = model.blocks[0].inner.weight


def tie_inside(model: Stack) -> None:
    for block in model.blocks:
        block.other = nn.Linear(WIDTH, WIDTH)
        block.step = lambda block, x: block.other(x)
    model.blocks[1].other.weight = model.blocks[2].other.weight


def other_buffer(model: Stack) -> None:
    model.blocks[1].bias = torch.zeros(1)


def other_layout(model: Stack) -> None:
    model.blocks[2].inner.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())


def other_dtype(model: Stack) -> None:
    model.blocks[1].bias = model.blocks[1].bias.double()


def adapter(model: Stack) -> None:
    model.blocks[1].inner = nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, 2 * WIDTH))


def other_mode(model: Stack) -> None:
    for block in model.blocks:
        block.rate = 0.5
    model.blocks[2].eval()


def other_method(model: Stack) -> None:
    block = model.blocks[2]
    block.forward = types.MethodType(lambda self, x, mask: Block.forward(self, x, mask).tanh(), block)


def other_class(model: Stack) -> None:
    model.blocks[1].norm = nn.Identity()


def without_mask(model: Stack) -> None:
    model.call = lambda stack, block, x, mask: block(x, mask if block.index % 2 else None)


def same_tensor_twice(model: Stack) -> None:
    model.call = lambda stack, block, x, mask: block(x, x if block.index == 1 else mask)


def changed_argument(model: Stack) -> None:
    model.call = lambda stack, block, x, mask: block(x.double().float() if block.index == 2 else x.clone(), mask)


def written_result(model: Stack) -> None:
    model.call = lambda stack, block, x, mask: block(x, mask).mul_(2)


def written_argument(model: Stack) -> None:
    model.call = lambda stack, block, x, mask: x.clone().add_(block(x, mask))


def called_twice(model: Stack) -> None:
    model.call = lambda stack, block, x, mask: block(block(x, mask), mask)


def same_block(model: Stack) -> None:
    model.blocks[3] = model.blocks[1]


def share_a_layer(model: Stack) -> None:
    """Its calls were copied to paths that no module has."""
    for block in model.blocks:
        block.inner = model.blocks[0].inner


def share_an_activation(model: Stack) -> None:
    for block in model.blocks:
        block.act = model.blocks[0].act


def share_and_own(model: Stack) -> None:
    """The first block calls one module twice, where the others call two."""
    act = model.blocks[0].act
    for block in model.blocks:
        block.step = lambda block, x: act(x)


DIFFERENCES = (
    share_a_layer, share_an_activation, share_and_own,
    set_flag, set_rate, set_scale, freeze, freeze_first, tie, tie_inside, other_buffer, other_layout, other_dtype,
    adapter, other_mode, other_method, other_class, without_mask, same_tensor_twice, changed_argument, written_result,
    written_argument, called_twice, same_block,
)  # fmt: skip


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """The calls that were copied, by the paths of their modules."""
    counts: collections.Counter[str] = collections.Counter()
    copy = Follower.copied

    def counted(follower: Follower) -> Any:
        counts[follower.path] += 1
        return copy(follower)

    monkeypatch.setattr(Follower, "copied", counted)
    return counts


def reset() -> None:
    STATE.count, STATE.kept = 0, []


@pytest.mark.parametrize("step", sampled(STEPS, lambda step: step in (by_index, hands_over_a_closure)))
def test_a_trace_of_repeated_blocks_is_that_of_all(
    step: Callable[[Block, Tensor], Tensor], copied: collections.Counter[str]
) -> None:
    traced_in_both_ways(Stack(step), (torch.randn(3, WIDTH),), reset=reset)


@pytest.mark.parametrize("differ", sampled(DIFFERENCES, lambda change: change is freeze_first))
def test_a_block_that_differs_gets_its_own_trace(
    differ: Callable[[Stack], None], copied: collections.Counter[str]
) -> None:
    model = Stack()
    differ(model)
    traced_in_both_ways(model, (torch.randn(3, WIDTH),), reset=reset)


# With a buffer of another dtype the model itself does not run on data.
TRAINED = [change for change in (*DIFFERENCES, *STEPS) if change is not other_dtype]


@pytest.mark.parametrize("differ", sampled(TRAINED, lambda change: change in (tie, share_a_layer, list_or_tuple)))
def test_gradients_of_repeated_blocks_are_those_of_the_model(differ: Any, copied: collections.Counter[str]) -> None:
    model = Stack(differ) if differ in STEPS else Stack()
    if differ in DIFFERENCES:
        differ(model)
    if differ in (by_global_counter, by_rare_counter, reads_the_one_before, batch_norm, keeps_its_result):
        pytest.skip("another call of the model gives another result")
    cuts = {f"blocks.{block}.act": SplitPoint.BEGINNING for block in (0, 2)}
    assert_equals_uncut(model, (torch.randn(4, WIDTH),), split_spec=cuts)


def test_all_blocks_but_the_first_are_copied_in_every_run(copied: collections.Counter[str]) -> None:
    traced_in_both_ways(Stack(), (torch.randn(3, WIDTH),), reset=reset)
    assert copied == {f"blocks.{block}": 3 for block in (1, 2, 3)}


def test_a_block_that_decides_by_its_place_is_computed_and_the_others_copied(
    copied: collections.Counter[str],
) -> None:
    traced_in_both_ways(Stack(by_index), (torch.randn(3, WIDTH),), reset=reset)
    assert copied["blocks.2"] == 0
    assert copied["blocks.3"] >= 1


def test_blocks_that_share_a_module_are_copied(copied: collections.Counter[str]) -> None:
    model = Stack()
    share_an_activation(model)
    traced_in_both_ways(model, (torch.randn(3, WIDTH),), reset=reset)
    assert copied == {f"blocks.{block}": 3 for block in (1, 2, 3)}


def test_a_buffer_that_a_forward_makes(copied: collections.Counter[str]) -> None:
    """It has no number, and was looked up by its name."""
    model = Stack(makes_a_buffer)
    model.call = lambda stack, block, x, mask: block(block(x, mask), mask)
    for block in model.blocks:
        block.register_buffer("table", None)
    traced_in_both_ways(model, (torch.randn(3, WIDTH),), reset=lambda: forget_tables(model))


def test_of_modules_inside_each_other_those_are_repeated_that_save_most() -> None:
    towers = nn.Sequential(*(nn.Sequential(*(Block(index) for index in range(6))) for _ in range(2)))
    assert set(Repeats(towers).groups) == {f"{tower}.{block}" for tower in range(2) for block in range(6)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_trace_of_a_published_model_is_that_of_all_its_layers(name: str) -> None:
    published = PUBLISHED[name]
    traced_in_both_ways(published.make(), (), published.inputs())
