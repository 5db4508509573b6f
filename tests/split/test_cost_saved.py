"""The bytes that autograd is said to keep, beside those that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipecut import pipeline
from pipecut.split.cost.operation import CostFinder, OperationCost
from pipecut.split.cost.trial import _tried, try_operation
from tests.support.sampling import sampled


class ConvNet(nn.Module):
    """Convolutions, norms, pooling and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """Products of activations, a norm written by hand, and attention by matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.up = (nn.Linear(32, width) for width in (96, 64, 64))
        self.down = nn.Linear(64, 32)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        query, key, value = (part.view(*x.shape[:2], 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = torch.softmax(query @ key.transpose(2, 3) / 8**0.5, dim=-1) @ value
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """Four blocks, each keeping only what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.LayerNorm(32)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Tokens(nn.Module):
    """An embedding, dropout, and a loss at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.dropout(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def mlp(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), activation(), nn.LayerNorm(32))))


def bytes_kept(model: nn.Module, args: tuple[Any, ...]) -> int:
    """What autograd keeps in one forward, parameters and buffers aside, each memory once."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(*args)
        assert result is not None
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "relu": (lambda: mlp(nn.ReLU), lambda batch: (torch.randn(batch, 32),)),
    "gelu": (lambda: mlp(nn.GELU), lambda batch: (torch.randn(batch, 32),)),
    "tanh": (lambda: mlp(nn.Tanh), lambda batch: (torch.randn(batch, 32),)),
    "convolutions": (ConvNet, lambda batch: (torch.randn(batch, 3, 16, 16),)),
    "gated": (Gated, lambda batch: (torch.randn(batch, 12, 32),)),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), 3,
                                      enable_nested_tensor=False),
        lambda batch: (torch.randn(batch, 12, 32),),
    ),
    "tokens": (Tokens, lambda batch: (torch.randint(50, (batch, 12)),)),
    "recurrent": (lambda: nn.LSTM(32, 32, 2, batch_first=True), lambda batch: (torch.randn(batch, 12, 32),)),
}  # fmt: skip


class After(nn.Module):
    """An operation on what a layer makes."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self.layer(x))


def attention(dropout: float) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads * 2, heads * 3, dropout_p=dropout)

    return run


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cdist": lambda x: torch.cdist(x, x * 2),
    "sort": lambda x: x.sort()[0],
    "topk": lambda x: x.topk(3)[0],
    "max": lambda x: x.max(1)[0],
    "cumprod": lambda x: x.cumprod(1),
    "lerp": lambda x: torch.lerp(x, x.detach() + 1, 0.3),
    "interpolate": lambda x: nn.functional.interpolate(x, scale_factor=2),
    "einsum": lambda x: torch.einsum("bti,bsi->bts", x, x * 2),
    "einsum that copies": lambda x: torch.einsum("bti,hij->bhtj", x, torch.ones(3, 8, 6) * x.mean()),
    "layer norm": lambda x: nn.functional.layer_norm(x, (8,)),
    "attention": attention(0.0),
    "attention with dropout": attention(0.1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_in_no_table_is_tried(name: str) -> None:
    """Arguments with gradients were taken to be all that other operators keep: sort kept its indices unseen."""
    model = After(OPERATIONS[name])
    cost = run_cost(model, (torch.randn(4, 6, 8),))
    for batch in (4, 7):
        assert cost.at({"batch": batch}).saved_bytes == bytes_kept(model, (torch.randn(batch, 6, 8),))


@pytest.mark.filterwarnings("ignore:the forward of '(RNN|GRU|LSTM)' sets self._flat_weight")
@pytest.mark.parametrize("make", sampled([nn.GRU, nn.RNN], lambda make: make is nn.RNN))
def test_recurrent_layers_keep_what_their_kind_keeps(make: type[nn.Module]) -> None:
    """All of them counted as an LSTM, which keeps several times as much."""
    model = make(32, 32, batch_first=True)
    x = torch.randn(4, 8, 32)
    assert run_cost(model, (x,)).at({"batch": 4}).saved_bytes == pytest.approx(bytes_kept(model, (x,)), rel=0.15)


def run_cost(model: nn.Module, args: tuple[Any, ...]) -> OperationCost:
    traced = pipeline(model, args).traced
    return CostFinder(traced).run(traced.operations)


@pytest.mark.filterwarnings("ignore:the forward of '(RNN|GRU|LSTM)' sets self._flat_weight")
@pytest.mark.parametrize("name", sampled(MODELS, lambda name: name not in ("relu", "tanh", "encoder", "recurrent")))
def test_saved_bytes_are_those_that_autograd_keeps_at_any_batch(name: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make()
    cost = run_cost(model, inputs(4))
    for batch in (4, 16):
        kept = bytes_kept(model, inputs(batch))
        assert cost.at({"batch": batch}).saved_bytes == pytest.approx(kept, rel=0.15)


def test_a_checkpoint_keeps_only_what_goes_in() -> None:
    cost = run_cost(Checkpointed(), (torch.randn(4, 32, requires_grad=True),)).at({"batch": 4})
    assert cost.saved_bytes == 4 * (4 * 32 * 4)


def test_parameters_are_counted_once_and_are_no_activations() -> None:
    layer = nn.Linear(8, 8)
    cost = run_cost(nn.Sequential(layer, nn.ReLU(), layer), (torch.randn(2, 8),)).at({"batch": 2})
    assert cost.parameter_bytes == (64 + 8) * 4
    assert cost.saved_bytes == 2 * (2 * 8 * 4)


def test_nothing_is_kept_without_gradients() -> None:
    model = mlp(nn.GELU).requires_grad_(False)
    assert run_cost(model, (torch.randn(2, 32),)).saved_bytes == 0


def test_a_view_moves_no_bytes_and_a_lookup_only_what_it_takes() -> None:
    traced = pipeline(nn.Sequential(nn.Embedding(1000, 4), nn.Flatten()), (torch.zeros(2, 3, dtype=torch.long),)).traced
    finder = CostFinder(traced)
    lookup, view = [finder.operation(op) for op in traced.operations if op.kind == "op"]
    assert view.bytes_moved == 0
    assert lookup.at({"batch": 2}).bytes_moved == 2 * (2 * 3 * 4 * 4) + 2 * 3 * 8


class EinsumsInAutocast(nn.Module):
    """Products of a float32 weight with what an autocast has made bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for weight in self.weights:
                x = torch.einsum("bti,ij->btj", x, weight)
        return x


def test_products_inside_an_autocast_are_not_free(caplog: pytest.LogCaptureFixture) -> None:
    """They were tried outside of it, where the dtypes do not fit: torch wrote a page, and two of three cost nothing."""
    traced = pipeline(EinsumsInAutocast(), (torch.ones(2, 4, 16),)).traced
    finder = CostFinder(traced)
    flops = [finder.operation(op).flops for op in traced.operations if "einsum" in str(op.target)]
    assert len(flops) == 3
    assert len({str(each) for each in flops}) == 1
    assert str(flops[0]) != "0"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 40))  # a size that nothing else has tried

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij->bj", x, self.weight)


def test_what_is_kept_does_not_depend_on_the_mode_around_the_pricing() -> None:
    """What was seen in inference mode, where nothing is kept, was remembered for later models too."""
    traced = pipeline(nn.Sequential(Einsum(), Einsum()), (torch.ones(2, 40),)).traced
    einsums = [op for op in traced.operations if "einsum" in str(op.target)]
    outside = [try_operation(traced, op) for op in einsums]
    assert [tried is not None and tried.kept is not None for tried in outside] == [True, True]
    _tried.cache_clear()
    with torch.inference_mode():
        assert [try_operation(traced, op) for op in einsums] == outside
