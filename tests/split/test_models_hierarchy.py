"""Models cut between and inside their modules: the stages compute what the model does, and are laid out as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipecut import SplitPoint, pipe_split, pipeline
from tests.support.equality import assert_equals_uncut

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in range(count)]


class MarkedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linears(3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        pipe_split()
        x = F.relu(self.second(x))
        pipe_split()
        return self.third(x)


class LayerList(nn.Module):
    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears(count))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def test_an_mlp_is_cut_at_its_marks() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert_equals_uncut(MarkedMLP(), (x,), expect_stages=3, other_calls=[((torch.randn(1, 8),), {})], trace_twice=True)


def test_layers_are_cut_by_name_on_either_side() -> None:
    spec = {"layers.2": BEGINNING, "layers.3": END}
    others = [((torch.randn(2, 8),), {}), ((torch.randn(9, 8),), {})]
    assert_equals_uncut(LayerList(), (torch.randn(4, 8),), split_spec=spec, expect_stages=3, other_calls=others)


def test_a_model_without_cuts_is_one_stage() -> None:
    assert_equals_uncut(LayerList(), (torch.randn(4, 8),), expect_stages=1)


def test_a_model_is_cut_again_and_again() -> None:
    model, x = LayerList(), torch.randn(4, 8)
    pipes = [pipeline(model, (x,), split_spec={f"layers.{index}": BEGINNING}) for index in (1, 1, 3)]
    pipes[0](x).sum().backward()
    pipes.append(pipeline(model, (x,), split_spec={"layers.1": BEGINNING, "head": BEGINNING}))
    assert [pipe.num_stages for pipe in pipes] == [2, 2, 2, 3]
    assert all(torch.equal(pipe(x), model(x)) for pipe in pipes)


def test_a_sequential_is_cut_inside() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)]
    assert_equals_uncut(
        nn.Sequential(*blocks), (torch.randn(4, 8),), split_spec={"0.1": BEGINNING, "1.1": END}, expect_stages=3
    )


class NestedContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.ModuleList(linears(2)) for _ in range(2))
        self.heads = nn.ModuleDict({"mean": nn.Linear(8, 2), "log.scale".replace(".", "-"): nn.Linear(8, 2)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for tower in self.towers:
            for layer in tower:
                x = layer(x).sin()
        return {name: head(x) for name, head in self.heads.items()}


@pytest.mark.parametrize("path", ["towers.0.1", "towers.1.0", "heads.log-scale"])
def test_nested_lists_and_dicts_of_modules_are_cut(path: str) -> None:
    assert_equals_uncut(NestedContainers(), (torch.randn(4, 8),), split_spec={path: BEGINNING}, expect_stages=2)


class MarkedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        pipe_split()
        return x + self.down(hidden)


class TwoLevels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Linear(8, 8), nn.Sequential(MarkedBlock(), nn.Linear(8, 8)))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.outer(x * 2) + x)


def test_a_module_is_cut_inside_itself_two_levels_deep() -> None:
    pipe = assert_equals_uncut(TwoLevels(), (torch.randn(4, 8),), expect_stages=2)
    assert [name for name, _ in pipe.stages[0].named_parameters()] == [
        "outer.0.weight", "outer.0.bias", "outer.1.0.up.weight", "outer.1.0.up.bias",
    ]  # fmt: skip


def test_every_block_of_a_list_is_cut_inside_itself() -> None:
    model = nn.Sequential(MarkedBlock(), MarkedBlock(), MarkedBlock())
    assert_equals_uncut(model, (torch.randn(4, 8),), expect_stages=4)


class Borrower(nn.Module):
    """Calls a module that another one registers."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.borrowed = [lender]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.borrowed[0](x))


class LentModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lender = nn.Linear(8, 8)
        self.first, self.second = Borrower(self.lender), Borrower(self.lender)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@pytest.mark.parametrize("path", ["first.own", "second", "second.own"])
def test_a_module_is_called_by_one_that_is_not_its_parent(path: str) -> None:
    assert_equals_uncut(LentModule(), (torch.randn(4, 8),), split_spec={path: BEGINNING}, expect_stages=2)


class PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.inner(x) * scale
        return y, {"norm": y.norm(dim=-1), "sign": y.sign()}


class PairCaller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = PairBlock(), PairBlock()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, first = self.a(x, scale=0.5)
        z, second = self.b(y)
        return z * first["norm"][:, None], second["sign"] * first["sign"]


@pytest.mark.parametrize("path", ["b", "a.inner"])
def test_modules_return_tuples_and_dicts_to_their_caller(path: str) -> None:
    spec = {path: BEGINNING if path == "b" else END}
    assert_equals_uncut(PairCaller(), (torch.randn(4, 8),), split_spec=spec, expect_stages=2)


class TakesASize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, size: torch.Size, width: int, dtype: torch.dtype, part: slice) -> Tensor:
        if not isinstance(size, torch.Size):
            raise TypeError(f"{size} is a {type(size).__name__}")
        return self.inner(x.reshape(size)).to(dtype)[:, part] + width


class PassesSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), TakesASize(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.c(self.b(y.flatten(), x.shape, x.shape[0] * 2, x.dtype, slice(0, 8)))


@pytest.mark.parametrize("path", ["b", "c", "b.inner"])
def test_modules_take_sizes_dtypes_and_slices_from_their_caller(path: str) -> None:
    others = [((torch.randn(5, 8),), {})]
    assert_equals_uncut(
        PassesSizes(), (torch.randn(4, 8),), split_spec={path: BEGINNING}, expect_stages=2, other_calls=others
    )


def test_a_stage_is_indexed_as_the_model_is() -> None:
    model = LayerList()
    pipe = pipeline(model, (torch.randn(4, 8),), split_spec={"layers.2": BEGINNING, "layers.4": BEGINNING})
    assert pipe.stages[1].layers[3].weight is model.layers[3].weight
    assert pipe.stages[1].get_submodule("layers.3").weight is model.layers[3].weight
    assert list(pipe.stages[1].state_dict()) == ["layers.2.weight", "layers.2.bias", "layers.3.weight", "layers.3.bias"]
    with pytest.raises(IndexError, match="member 0 is not in this stage"):
        pipe.stages[1].layers[0]


def test_a_hook_on_a_module_of_a_stage_fires_once_per_call() -> None:
    pipe = pipeline(LayerList(), (torch.randn(4, 8),), split_spec={"layers.2": BEGINNING})
    seen: list[tuple[int, ...]] = []
    pipe.stages[1].layers[3].register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    pipe(torch.randn(4, 8))
    pipe(torch.randn(6, 8))
    assert seen == [(4, 8), (6, 8)]
