"""Values that later stages make again instead of receiving them: which, when, and that nothing changes by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import Pipe, PipeWarning, SplitPoint, pipe_split, pipeline
from tests.support.equality import assert_equals_uncut
from tests.support.sampling import sampled

BEGINNING = SplitPoint.BEGINNING


def made_again(pipe: Pipe) -> set[tuple[str, int]]:
    """Name and stage of what is recomputed."""
    return {(value.name, value.stage) for value in pipe.recomputed}


class Rotary(nn.Module):
    """Tables of sines; what comes in decides about their dtype only."""

    frequencies: Tensor

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("frequencies", 100.0 ** -torch.arange(0, 1, 0.25), persistent=persistent)

    @torch.no_grad()
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            angles = positions[:, :, None].float() * self.frequencies
            both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        rotated = x * tables[0] + x.flip(-1) * tables[1]
        scores = (rotated @ rotated.transpose(1, 2)).masked_fill(~mask, -1e9)
        return x + self.inner(scores.softmax(-1) @ x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Positions, tables and a mask of padding and causality, all made before the first block and used by each."""

    def __init__(self, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.rotary = rotary or Rotary()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(ids)
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        mask = causal & attention_mask.bool()[:, None, :]
        tables = self.rotary(x, torch.arange(length, device=ids.device)[None])
        for block in self.blocks:
            x = block(x, tables, mask)
        return x


def batch(size: int, length: int = 12) -> tuple[Tensor, Tensor]:
    mask = torch.ones(size, length, dtype=torch.int64)
    mask[:, -2:] = torch.randint(0, 2, (size, 2))
    return torch.randint(0, 16, (size, length)), mask


@pytest.mark.parametrize("persistent", sampled([False, True], lambda persistent: not persistent))
def test_tables_and_masks_are_made_where_they_are_used(persistent: bool) -> None:
    spec = {"blocks.1": BEGINNING, "blocks.3": BEGINNING}
    pipe = assert_equals_uncut(
        Decoder(Rotary(persistent)), batch(3), split_spec=spec, expect_stages=3, other_calls=[(batch(5), {})]
    )
    names = {"rotary_0", "rotary_1", "and_1"}
    assert made_again(pipe) == {(name, stage) for name in names for stage in (1, 2)}
    assert not names & {edge.name for edge in pipe.edges}
    assert {(edge.name, edge.target) for edge in pipe.edges if edge.kind == "root input"} == {
        ("attention_mask", 1),
        ("attention_mask", 2),
    }
    assert "recomputed in stage 2: and_1, rotary_0, rotary_1 (would be 1.2 kB)" in str(pipe)
    assert [("rotary.frequencies" in stage.state_dict()) for stage in pipe.stages] == [persistent] * 3
    assert "torch.set_grad_enabled(False)" in pipe.stage_infos[2].code[""], "the modes of the operations are kept"


def test_short_sequences_have_masks_that_are_cheaper_to_send() -> None:
    pipe = pipeline(Decoder(), batch(3, 4), split_spec={"blocks.1": BEGINNING})
    assert made_again(pipe) == {("rotary_0", 1), ("rotary_1", 1)}
    assert "and_1" in {edge.name for edge in pipe.edges}


def test_a_stage_drops_what_it_made_for_others_only() -> None:
    pipe = assert_equals_uncut(Decoder(), batch(3), split_spec={"blocks.0": BEGINNING}, expect_stages=2)
    assert "tril" not in pipe.stage_infos[0].code[""]
    assert "tril" in pipe.stage_infos[1].code[""]


class Two(nn.Module):
    """Two layers with a cut between them; `make` gives the second one a value that is made before the cut."""

    table: Tensor
    count: Tensor

    def __init__(
        self, make: Callable[[Two, Tensor], Tensor], use: Callable[[Tensor], Any] = lambda value: None
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(64))
        self.register_buffer("table", torch.linspace(0, 1, 64))
        self.register_buffer("count", torch.zeros(64))
        self.make, self.use = make, use

    def forward(self, x: Tensor) -> Tensor:
        value = self.make(self, x)
        x = self.first(x)
        self.use(value)
        pipe_split()
        return self.second(x) * value  # type: ignore[no-any-return]


def position(model: Two, x: Tensor) -> Tensor:
    return torch.arange(64, device=x.device) * torch.tensor(0.5)


MADE_AGAIN: dict[str, Callable[[Two, Tensor], Tensor]] = {
    "from sizes": position,
    "from a batch size": lambda model, x: torch.ones(x.shape[0], 64).cumsum(0),
    "from a buffer": lambda model, x: model.table.cos(),
    "pieces of a list": lambda model, x: torch.arange(256.0).split(64)[1],
}

SENT: dict[str, Callable[[Two, Tensor], Tensor]] = {
    "a parameter": lambda model, x: model.scale.detach() * 2,
    "a gradient": lambda model, x: (model.scale * 2).cos(),
    "an activation": lambda model, x: (model.first(x) > 0).float(),
    "chance": lambda model, x: torch.rand(64),
    "written in place": lambda model, x: torch.zeros(64).add_(1),
    "a buffer that is written": lambda model, x: model.count.add_(1).cos(),
    "much work": lambda model, x: (torch.ones(64, 512) @ torch.ones(512, 512))[:, 0],
}


@pytest.mark.parametrize("make", MADE_AGAIN.values(), ids=MADE_AGAIN)
def test_what_depends_on_nothing_that_changes_is_made_again(make: Callable[[Two, Tensor], Tensor]) -> None:
    pipe = assert_equals_uncut(Two(make), (torch.randn(3, 64),), other_calls=[((torch.randn(5, 64),), {})])
    assert len(pipe.recomputed) == 1
    assert [edge.name for edge in pipe.edges] == ["first"]


@pytest.mark.parametrize("make", SENT.values(), ids=SENT)
def test_all_else_is_sent(make: Callable[[Two, Tensor], Tensor]) -> None:
    pipe = assert_equals_uncut(Two(make), (torch.randn(3, 64),))
    assert pipe.recomputed == ()
    assert len(pipe.edges) == 2


def test_a_value_that_is_written_later_is_sent_as_it_was_written() -> None:
    pipe = assert_equals_uncut(Two(position, lambda value: value.mul_(3)), (torch.randn(3, 64),))
    assert pipe.recomputed == ()


class Pairs(nn.Module):
    """A value of [batch, n, n] from an input of [batch, n]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        near = (where[:, :, None] - where[:, None]).abs() < 3
        x = self.first(x)
        pipe_split()
        return self.second(near.float() @ x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("length", "again"), [(40, True), (6, False)])
def test_an_input_smaller_than_the_value_is_sent_instead(length: int, again: bool) -> None:
    def call(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, length, 8), torch.randint(0, 9, (size, length))

    pipe = assert_equals_uncut(Pairs(), call(3), other_calls=[(call(5), {})])
    assert bool(pipe.recomputed) is again
    assert [edge.kind for edge in pipe.edges] == ["root input" if again else "activation", "activation"]


class Moody(Rotary):
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(x, positions)
        return (cos * 2, sin) if self.training else (cos, sin)


class Deciding(Rotary):
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(x, positions)
        return (cos * 2, sin) if x.shape[0] > 2 else (cos, sin)


class Remembering(Rotary):
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x, positions)


@pytest.mark.parametrize("rotary", [Moody, Deciding, Remembering])
def test_a_module_that_may_do_something_else_next_time_is_called_once_and_its_results_are_sent(
    rotary: type[Rotary],
) -> None:
    model = Decoder(rotary())
    pipe = pipeline(model, batch(3), split_spec={"blocks.1": BEGINNING})
    assert {name for name, _ in made_again(pipe)} == {"and_1"}
    for size, training in ((3, True), (2, True), (3, False)):
        call = batch(size)
        model.train(training)
        pipe.train(training)
        torch.testing.assert_close(pipe(*call), model(*call), rtol=0, atol=0)


def test_the_results_of_a_module_with_a_hook_are_sent() -> None:
    model = Decoder()
    model.rotary.register_forward_hook(lambda module, args, result: (result[0] * 2, result[1]))
    pipe = pipeline(model, batch(3), split_spec={"blocks.1": BEGINNING})
    assert {name for name, _ in made_again(pipe)} == {"and_1"}
    call = batch(4)
    torch.testing.assert_close(pipe(*call), model(*call), rtol=0, atol=0)


class Counting(nn.Module):
    """A buffer that training updates and evaluation reads."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return x + self.seen


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counter, self.first, self.second = Counting(), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.counter.seen * 2
        x = self.first(self.counter(x))
        pipe_split()
        return self.second(x) * doubled  # type: ignore[no-any-return]


def test_a_buffer_that_the_other_mode_updates_is_not_copied() -> None:
    model = Counted().eval()
    pipe = pipeline(model, (torch.randn(3, 64),))
    assert pipe.recomputed == ()
    reference = copy.deepcopy(model)
    for training in (True, False):
        x = torch.randn(3, 64)
        pipe.train(training)
        torch.testing.assert_close(pipe(x), reference.train(training)(x), rtol=0, atol=0)


class Gone(nn.Module):
    """All that the second stage would receive could be made there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(64.0)
        y = self.first(x)
        pipe_split()
        return y, self.second(steps)


def test_a_stage_always_waits_for_another_one() -> None:
    pipe = assert_equals_uncut(Gone(), (torch.randn(3, 64),))
    assert [edge.name for edge in pipe.edges] == ["first"]
    assert [value.stage for value in pipe.recomputed] == [1]


def test_a_buffer_without_memory_that_is_not_saved_stays_where_its_module_is() -> None:
    for persistent in (False, True):
        model = Decoder(Rotary(persistent)).to("meta")
        pipe = pipeline(model, batch(3), split_spec={"blocks.1": BEGINNING})
        assert (("rotary_0", 1) in made_again(pipe)) is persistent


def test_nothing_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    pipeline(Decoder(), batch(3), num_stages=2)
    assert [warning for warning in recwarn if issubclass(warning.category, PipeWarning)] == []
