"""Stages of many kinds, each with one microbatch's inputs, for the tests of the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class StageCase:
    """How to make a stage and inputs for it. `exact`: gradients are the same to the bit, for sums have one order."""

    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    exact: bool = True

    def __str__(self) -> str:
        return self.name


class Runs(nn.Module):
    """A module whose forward is a function of it and the inputs."""

    def __init__(self, function: Callable[..., Any], **children: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=dtype))


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def rows() -> tuple[Tensor]:
    return (floats(6, 8),)


def images() -> tuple[Tensor]:
    return (floats(2, 4, 9, 9),)


def sequences() -> tuple[Tensor]:
    return (floats(3, 5, 8),)


def tokens() -> tuple[Tensor]:
    return (torch.randint(0, 10, (4, 5)),)


def tokens_and_rows() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 10, (4, 5)), floats(4, 5, 8)


class Doubling(torch.autograd.Function):
    """A custom function with parameters among its arguments; its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        value, weight = ctx.saved_tensors
        return 2 * gradient @ weight.t(), 3 * value.t() @ gradient


class StraightThrough(torch.autograd.Function):
    """Rounds in the forward, does nothing in the backward, as in training with quantized weights."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Blocking(torch.autograd.Function):
    """Passes no gradient on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        return None


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.t()


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh())


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8))


def symmetric() -> nn.Module:
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def frozen_parts() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(6, 6, 3, padding=1))
    module[1].requires_grad_(False)
    module[2].weight.requires_grad_(False)
    module[3].bias.requires_grad_(False)  # type: ignore[union-attr]
    return module


def tied() -> nn.Module:
    module = Runs(lambda self, ids, value: self.head(value + self.embedding(ids)), embedding=nn.Embedding(10, 8))
    module.head = nn.Linear(8, 10, bias=False)
    module.head.weight = module.embedding.weight  # type: ignore[union-attr]
    return module


def autocast(self: Any, value: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return self.second(torch.relu(self.first(value))).float()


def with_no_grad(self: Any, value: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.first(value).abs().mean()
    return self.second(value) * scale + self.first(value.detach())


def in_place(self: Any, value: Tensor) -> Tensor:
    made = self.first(value)
    made.add_(1).mul_(2)
    made[:, :4] += self.second(value)[:, 4:].relu_()
    return made


def hypernetwork(self: Any, value: Tensor) -> Tensor:
    return value @ self.maker(value.mean(0)).view(8, 8) @ self.weight


def mixture(self: Any, value: Tensor) -> Tensor:
    made = torch.zeros_like(value)
    for number, expert in enumerate(self.experts):
        chosen = torch.arange(len(value)) % 3 == number
        made[chosen] = expert(value[chosen])
    return made


def offloaded(self: Any, value: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda packed: packed * 1.0):
        value = self.first(value).relu()
    return self.second(value)


def scaled_by_hooks(self: Any, value: Tensor) -> Tensor:
    made = self.first(value)
    made.register_hook(lambda gradient: gradient * 3)
    last = self.second(made.relu())
    last.register_hook(lambda gradient: gradient * 5)
    return last


def scaled_by_weight_hook(self: Any, value: Tensor) -> Tensor:
    weight = self.first.weight * 2
    weight.register_hook(lambda gradient: gradient * 3)
    return F.linear(value, weight) + weight.sum()


def scaled_by_node_hooks(self: Any, ids: Tensor, value: Tensor) -> Tensor:
    looked_up = self.embedding(ids)
    looked_up.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    made = self.first(value[:, 0])
    made.grad_fn.register_hook(lambda gradients, _: tuple(None if g is None else g * 3 for g in gradients))
    return made[:, None] + looked_up


def checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    def run(self: Any, value: Tensor) -> Tensor:
        return self.second(checkpoint(lambda v: self.first(self.second(v).relu()), value, use_reentrant=reentrant))

    return run


def linears(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Runs(function, first=nn.Linear(8, 8), second=nn.Linear(8, 8))


def low_rank(self: Any, value: Tensor) -> Tensor:
    return F.linear(value, self.base.weight + self.up @ self.down, self.base.bias)


def branch_without_input(self: Any, value: Tensor) -> Tensor:
    return value * 2 + self.outer(torch.relu(self.inner(self.table)))


def shared_view(self: Any, value: Tensor) -> Tensor:
    flipped = self.weight.t()
    return (value @ flipped).relu() @ flipped + (value[:2] @ flipped).sum()


PRODUCTS = [
    StageCase("linear layers", stack, rows),
    StageCase("one linear layer, which is the output", lambda: nn.Linear(8, 3), rows),
    StageCase("linear without bias", lambda: nn.Linear(8, 8, bias=False), rows),
    StageCase("linear over sequences", lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), sequences),
    StageCase("linear over transposed sequences", linears(lambda self, v: self.first(v.transpose(0, 1))), sequences),
    StageCase("double precision", lambda: stack().double(), lambda: (floats(6, 8, dtype=torch.float64),)),
    StageCase(
        "complex numbers",
        lambda: Runs(
            lambda s, v: torch.addmm(s.bias, v, s.w, alpha=2 - 1j).abs() @ s.u,
            bias=parameter(4, dtype=torch.complex64),
            w=parameter(8, 4, dtype=torch.complex64),
            u=parameter(4, 4),
        ),
        lambda: (floats(6, 8, dtype=torch.complex64),),
    ),
    StageCase("weight to the right", lambda: Runs(lambda s, v: v @ s.w, w=parameter(8, 5)), rows),
    StageCase("weight to the left", lambda: Runs(lambda s, v: s.w @ v, w=parameter(5, 6)), rows),
    StageCase("transposed weight to the left", lambda: Runs(lambda s, v: s.w.t() @ v, w=parameter(6, 5)), rows),
    StageCase(
        "scaled product",
        lambda: Runs(lambda s, v: torch.addmm(s.b, v, s.w, beta=3, alpha=0.5), b=parameter(8), w=parameter(8, 8)),
        rows,
    ),
    StageCase("batched product", lambda: Runs(lambda s, v: torch.bmm(v, s.w), w=parameter(3, 8, 4)), sequences),
    StageCase(
        "batched product, weight to the left",
        lambda: Runs(lambda s, v: torch.bmm(s.w, v), w=parameter(3, 4, 5)),
        sequences,
    ),
    StageCase(
        "einsum", lambda: Runs(lambda s, v: torch.einsum("bsd,dhk->bhsk", v, s.w), w=parameter(8, 2, 4)), sequences
    ),
    StageCase(
        "product of parameters",
        lambda: Runs(lambda s, v: v + (s.a @ s.b)[:6], a=parameter(8, 3), b=parameter(3, 8)),
        rows,
    ),
    StageCase("square of a parameter", lambda: Runs(lambda s, v: v @ (s.w @ s.w), w=parameter(8, 8)), rows),
    StageCase(
        "sparse times dense", lambda: Runs(lambda s, v: v @ (torch.eye(8).to_sparse() @ s.w), w=parameter(8, 8)), rows
    ),
]
WEIGHTS = [
    StageCase("a layer used twice", lambda: Runs(lambda s, v: s.layer(s.layer(v).relu()), layer=nn.Linear(8, 8)), rows),
    StageCase(
        "a layer used three times",
        lambda: Runs(lambda s, v: s.layer(s.layer(s.layer(v))), layer=nn.Linear(8, 8)),
        rows,
        exact=False,
    ),
    StageCase("tied embedding and head", tied, tokens_and_rows),
    StageCase("tied to an elementwise use", linears(lambda s, v: s.first(v) * s.first.weight.sum()), rows, exact=False),
    StageCase(
        "a transposed weight used twice and again", lambda: Runs(shared_view, weight=parameter(8, 8)), rows, exact=False
    ),
    StageCase("weight norm", weight_normed, rows),
    StageCase("symmetric weight", symmetric, rows),
    StageCase("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), rows),
    StageCase(
        "low-rank update", lambda: Runs(low_rank, base=nn.Linear(8, 8), up=parameter(8, 2), down=parameter(2, 8)), rows
    ),
    StageCase(
        "rounded weight", linears(lambda s, v: F.linear(s.first(v), StraightThrough.apply(s.second.weight))), rows
    ),
    StageCase(
        "rounded weight, not transposed",
        linears(lambda s, v: s.first(v) @ StraightThrough.apply(s.second.weight)),
        rows,
    ),
    StageCase(
        "slices of one weight", lambda: Runs(lambda s, v: v @ s.w[:8] + (v @ s.w[8:]).relu(), w=parameter(16, 8)), rows
    ),
    StageCase(
        "chunks of one weight",
        lambda: Runs(lambda s, v: sum(F.linear(v, part) for part in s.w.chunk(3)), w=parameter(24, 8)),
        rows,
        exact=False,
    ),
    StageCase("frozen parts", frozen_parts, rows),
    StageCase("all frozen", lambda: stack().requires_grad_(False), rows),
    StageCase(
        "unused parameters", lambda: Runs(lambda s, v: s.used(v), used=nn.Linear(8, 8), unused=nn.Linear(8, 8)), rows
    ),
    StageCase(
        "weights made from the input", lambda: Runs(hypernetwork, maker=nn.Linear(8, 64), weight=parameter(8, 8)), rows
    ),
    StageCase(
        "a branch without input",
        lambda: Runs(branch_without_input, inner=nn.Linear(8, 8), outer=nn.Linear(8, 8), table=parameter(6, 8)),
        rows,
    ),
    StageCase("a parameter is an output", lambda: Runs(lambda s, v: (v @ s.w, s.w), w=parameter(8, 8)), rows),
    StageCase(
        "parameters that get one and the same gradient",
        lambda: Runs(lambda s, v: v + s.a + s.b, a=parameter(6, 8), b=parameter(6, 8)),
        rows,
    ),
    StageCase("experts", lambda: Runs(mixture, experts=nn.ModuleList(nn.Linear(8, 8) for _ in range(3))), rows),
]
LAYERS = [
    StageCase(
        "convolution", lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3, bias=False)), images
    ),
    StageCase(
        "strided, padded, grouped convolution",
        lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2, dilation=2),
        images,
    ),
    StageCase("transposed convolution", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), images),
    StageCase("channels-last convolution", lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), images),
    StageCase("1-d convolution", lambda: nn.Conv1d(5, 5, 3), sequences),
    StageCase("batch norm", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), images),
    StageCase(
        "layer norm, group norm", lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GroupNorm(2, 8)), rows
    ),
    StageCase("embedding", lambda: Runs(lambda s, i, v: v + s.e(i), e=nn.Embedding(10, 8)), tokens_and_rows),
    StageCase(
        "embedding of two uses",
        lambda: Runs(lambda s, i, v: v * s.e(i) + s.e(9 - i), e=nn.Embedding(10, 8, padding_idx=3)),
        tokens_and_rows,
    ),
    StageCase(
        "embedding by frequency",
        lambda: Runs(lambda s, i, v: v + s.e(i), e=nn.Embedding(10, 8, scale_grad_by_freq=True)),
        tokens_and_rows,
    ),
    StageCase(
        "sparse embedding",
        lambda: Runs(lambda s, i, v: s.l(v + s.e(i)), e=nn.Embedding(10, 8, sparse=True), l=nn.Linear(8, 8)),
        tokens_and_rows,
    ),
    StageCase(
        "bag of embeddings", lambda: Runs(lambda s, i, v: v[:, 0] + s.e(i), e=nn.EmbeddingBag(10, 8)), tokens_and_rows
    ),
    StageCase(
        "first stage, of tokens",
        lambda: Runs(lambda s, i: s.l(s.e(i)), e=nn.Embedding(10, 8), l=nn.Linear(8, 8)),
        tokens,
    ),
    StageCase(
        "lstm", lambda: Runs(lambda s, v: s.rnn(v)[0], rnn=nn.LSTM(8, 6, num_layers=2, batch_first=True)), sequences
    ),
    StageCase("gru", lambda: Runs(lambda s, v: s.rnn(v)[0], rnn=nn.GRU(8, 6, batch_first=True)), sequences),
    StageCase(
        "rnn cell in a loop",
        lambda: Runs(lambda s, v: s.c(v[:, 1], s.c(v[:, 0])), c=nn.RNNCell(8, 8)),
        sequences,
        exact=False,
    ),
    StageCase(
        "attention",
        lambda: Runs(lambda s, v: s.a(v, v, v)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)),
        sequences,
    ),
    StageCase(
        "transformer block", lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), sequences
    ),
    StageCase("dropout", lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), rows),
]
CODE = [
    StageCase(
        "custom function",
        lambda: Runs(lambda s, v: s.l(Doubling.apply(v, s.w)), w=parameter(8, 8), l=nn.Linear(8, 8)),
        rows,
    ),
    StageCase("custom function last", linears(lambda s, v: Doubling.apply(s.first(v), s.second.weight)), rows),
    StageCase(
        "custom function last, no input",
        linears(lambda s, v: Doubling.apply(s.first(v), s.second.weight)),
        lambda: (torch.randn(6, 8),),
    ),
    StageCase("a gradient that stops", linears(lambda s, v: v + Blocking.apply(s.first(v)) + s.second(v)), rows),
    StageCase(
        "vmap", lambda: Runs(lambda s, v: torch.vmap(lambda row: (s.w @ row).relu())(v), w=parameter(8, 8)), rows
    ),
    StageCase("autocast", linears(autocast), rows),
    StageCase("no_grad and detach inside", linears(with_no_grad), rows, exact=False),
    StageCase("in-place operations", linears(in_place), rows),
    StageCase("packed saved tensors", linears(offloaded), rows),
    StageCase("checkpoint", linears(checkpointed(False)), rows, exact=False),
    StageCase("tensor hooks that change gradients", linears(scaled_by_hooks), rows),
    StageCase("hook on a weight that is not a leaf", linears(scaled_by_weight_hook), rows, exact=False),
    StageCase(
        "hooks on operations",
        lambda: Runs(scaled_by_node_hooks, first=nn.Linear(8, 8), embedding=nn.Embedding(10, 8)),
        tokens_and_rows,
    ),
]
VALUES = [
    StageCase("output is an input", linears(lambda s, v: (v, s.first(v))), rows),
    StageCase("output is a view of an input", linears(lambda s, v: (v.view(8, 6), s.first(v)[1:])), rows),
    StageCase("output that needs no gradient", linears(lambda s, v: (s.first(v), v.detach(), v.argmax(1))), rows),
    StageCase(
        "inputs of all kinds",
        linears(lambda s, v, w, ids, n, _: s.first(v) * n + w[ids]),
        lambda: (floats(6, 8), torch.randn(9, 8), torch.arange(6), 3, None),
    ),
    StageCase("input used twice", linears(lambda s, v: s.first(v) + s.second(v) * v), rows),
    StageCase("input without influence", linears(lambda s, v, w: s.first(v)), lambda: (floats(6, 8), floats(2, 2))),
    StageCase(
        "no input has influence", lambda: Runs(lambda s, v: s.l(s.w), l=nn.Linear(8, 8), w=parameter(4, 8)), rows
    ),
    StageCase("input that needs no gradient", stack, lambda: (torch.randn(6, 8),)),
    StageCase(
        "operations with many results",
        linears(lambda s, v: [p.relu() for p in s.first(v).split(4, 1)] + list(s.second(v).unbind(1))),
        rows,
    ),
    StageCase("empty batch", stack, lambda: (floats(0, 8),)),
    StageCase(
        "scalar", lambda: Runs(lambda s, v: v * s.scale, scale=nn.Parameter(torch.tensor(2.0))), lambda: (floats(),)
    ),
]
CASES = PRODUCTS + WEIGHTS + LAYERS + CODE + VALUES
# Its gradients cannot be had for chosen tensors only, so it needs to know that nobody listens.
REENTRANT = StageCase("reentrant checkpoint", linears(checkpointed(True)), rows, exact=False)
