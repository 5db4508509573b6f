"""Random models of sequences, traced once with symbolic batch and sequence: any sizes are right, or refused."""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import Pipe, Schedule1F1B, SplitPoint, pipeline
from pipecut.errors import InputError
from tests.support.properties import examples
from tests.support.training import assert_same_gradients, gradients_of

EXAMPLES = examples(4)
WIDTH = 4

# From [batch, seq, 4] and the other input, [batch, seq], to [batch, seq, 4].
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted": lambda h, w: h * w.unsqueeze(-1),
    "summed so far": lambda h, w: h.cumsum(1),
    "mean of the sequence": lambda h, w: h + h.mean(1, keepdim=True).expand_as(h),
    "flattened": lambda h, w: torch.tanh(h.reshape(h.shape[0] * h.shape[1], WIDTH)).view(h.shape),
    "turned": lambda h, w: torch.relu(h.transpose(0, 1).contiguous()).transpose(0, 1),
    "turned and left so": lambda h, w: torch.sin(h.transpose(1, 2)).transpose(1, 2),
    "shifted": lambda h, w: h + F.pad(h[:, :-1], (0, 0, 1, 0)),
    "attention": lambda h, w: F.scaled_dot_product_attention(h, h, h, is_causal=True),
    "scores": lambda h, w: torch.softmax(h @ h.transpose(1, 2) + w.unsqueeze(1), -1) @ h,
    "positions": lambda h, w: h + torch.arange(h.shape[1], dtype=h.dtype)[:, None] / h.shape[1],
    "numbers of rows": lambda h, w: h + torch.arange(h.shape[0], dtype=h.dtype)[:, None, None] * 0,
    "by the length": lambda h, w: h * h.shape[1] + w.shape[0] * 0,
    "squeezed": lambda h, w: h.unsqueeze(1).squeeze(),
    "first two": lambda h, w: h + h[:, :2].sum(1, keepdim=True),
    "long or short": lambda h, w: h * 2 if h.shape[1] > 3 else h,
    "one or many": lambda h, w: h if w.shape[0] == 1 else h * 3,
    "in pairs": lambda h, w: torch.cat([part * 2 for part in h.split(2, dim=1)], 1),
    "written": lambda h, w: torch.cat([h, h], 1)[:, : h.shape[1]].clone().add_(w.unsqueeze(-1)),
    "broadcast": lambda h, w: h + w.new_ones(1, h.shape[1], 1),
    "one place": lambda h, w: h + h[:, -1:].detach(),
}  # fmt: skip


class Sequences(nn.Module):
    """Linear layers with operations between them."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in names)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        for name, layer in zip(self.names, self.layers, strict=True):
            x = OPERATIONS[name](layer(x), weights)
        return x


Size = tuple[int, int]
sizes = st.tuples(st.integers(1, 6), st.integers(1, 7))


def inputs(size: Size) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(sum(size))
    made = [torch.randn(*shape, dtype=torch.float64, generator=numbers) for shape in ((*size, WIDTH), size)]
    return made[0], made[1]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return output.sum() * target.shape[0]


def runs(model: nn.Module, size: Size) -> bool:
    """Return True if the uncut model does: what is squeezed has fewer dims than some operations need."""
    try:
        model(*inputs(size))
    except (IndexError, RuntimeError):
        return False
    return True


def check_step(pipe: Pipe, model: nn.Module, size: Size, microbatches: int, tally: Counter[str]) -> None:
    """A training step of one size: the gradients of the uncut model by microbatches, or a refusal that names a size."""
    stages = [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]
    schedule = Schedule1F1B(stages, microbatches, loss_of, scale_grads=False)
    model.zero_grad(set_to_none=True)
    args, rows = inputs(size), torch.arange(size[0])
    uncut = copy.deepcopy(model)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the batch has .* the step runs|.* cut into microbatches together")
            schedule.step(*args, target=rows)
    except InputError as error:
        if not re.search(r"batch|seq|_dim1 = |which has one row|\{1: 'a name'\}|fixed by the model", str(error)):
            raise
        tally["refused"] += 1
        return
    parts = min(size[0], microbatches)
    for part in zip(*(value.tensor_split(parts) for value in (*args, rows)), strict=True):
        loss_of(uncut(*part[:2]), part[2]).backward()
    assert_same_gradients(gradients_of(model), gradients_of(uncut), 1e-9)
    tally["right"] += 1


@pytest.mark.hypothesis
def test_other_sizes_are_right_or_refused() -> None:
    tally: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(
        st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=2, max_size=5),
        sizes,
        st.lists(sizes, min_size=3, max_size=3),
        st.integers(1, 3),
        st.sampled_from([{"x": {1: "seq"}, "weights": {1: "seq"}}, {"x": ("batch", "seq", None)}, "auto"]),
    )
    def check(names: list[str], example: Size, others: list[Size], microbatches: int, dynamic: object) -> None:
        torch.manual_seed(0)
        model = Sequences(names).double()
        assume(runs(model, example))
        cut = {f"layers.{len(names) // 2}": SplitPoint.BEGINNING}
        pipe = pipeline(model, inputs(example), split_spec=cut, dynamic=dynamic)  # type: ignore[arg-type]
        x = inputs(example)
        torch.testing.assert_close(pipe(*x), model(*x))
        for size in others:
            check_step(pipe, model, size, microbatches, tally)

    check()
    print(dict(tally))
    assert tally["right"] >= EXAMPLES
