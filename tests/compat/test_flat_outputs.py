"""The output of a model that pipecut.compat has cut is handed over as upstream does: its tensors, and no structure."""

from __future__ import annotations

import collections
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipecut
from pipecut import compat, verify
from pipecut.compat import PipelineStage, ScheduleGPipe, SplitPoint
from pipecut.errors import PipeError
from tests.support.sampling import sampled

Pair = collections.namedtuple("Pair", ["first", "second"])  # noqa: PYI024 (as models return them)
MakeOutput = Callable[[Tensor, Tensor], Any]


@dataclasses.dataclass
class Both:
    logits: Tensor
    hidden: Tensor


class Net(nn.Module):
    """Two layers, and what a function makes of the results of both."""

    def __init__(self, make: MakeOutput) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.make = nn.Linear(4, 6), nn.Linear(6, 5), make

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        return self.make(self.second(hidden), hidden)


def kind(value: Any) -> Any:
    """Sizes in the place of tensors; other values as they are."""
    if isinstance(value, Tensor):
        return list(value.shape)
    return tuple(map(kind, value)) if type(value) is tuple else value


def cut(make: MakeOutput) -> tuple[Net, compat.Pipe]:
    model = Net(make)
    pipe = compat.pipeline(model, (torch.ones(2, 4),), split_spec={"second": SplitPoint.BEGINNING})
    return model, pipe


def built(pipe: compat.Pipe) -> list[PipelineStage]:
    return [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]


def built_from_info(pipe: compat.Pipe) -> list[PipelineStage]:
    info = pipe.info()
    return [compat.build_stage(pipe.get_stage_module(index), index, info, "cpu") for index in range(pipe.num_stages)]


def built_by_class(pipe: compat.Pipe) -> list[PipelineStage]:
    info = pipe.info()
    return [compat.stage._PipelineStage(pipe.get_stage_module(index), index, info, "cpu") for index in range(2)]


# What comes out of pipe(x) of 2 samples, and what loss_fn gets: seen with upstream, but for the last two.
OUTPUTS: dict[str, tuple[MakeOutput, Any, Any]] = {
    "tensor": (lambda y, h: y, ([2, 5],), [2, 5]),
    "dict": (lambda y, h: {"logits": y}, ([2, 5],), [2, 5]),
    "tuple of one": (lambda y, h: (y,), ([2, 5],), [2, 5]),
    "nested": (lambda y, h: [y, {"h": y[:, 1:]}], ([2, 5], [2, 4]), ([2, 5], [2, 4])),
    "keys in their order": (lambda y, h: {"z": y, "a": y[:, 1:]}, ([2, 5], [2, 4]), ([2, 5], [2, 4])),
    "namedtuple": (lambda y, h: Pair(y[:, 1:], y), ([2, 4], [2, 5]), ([2, 4], [2, 5])),
    "a None": (lambda y, h: (None, y), (None, [2, 5]), [2, 5]),
    "no tensors": (lambda y, h: {"n": 3, "y": y, "s": "text", "e": ()}, (3, [2, 5], "text"), [2, 5]),
    "one twice": (lambda y, h: (y, [y]), ([2, 5], [2, 5]), [2, 5]),
    "of an earlier stage": (lambda y, h: (y, h), ([2, 5], [2, 6]), ([2, 5], [2, 6])),
    "dataclass": (lambda y, h: Both(y, h), ([2, 5], [2, 6]), ([2, 5], [2, 6])),
}


@pytest.mark.parametrize(
    ("name", "build"),
    sampled(
        [(name, build) for name in OUTPUTS for build in (built, built_from_info, built_by_class)],
        lambda case: case[0] == "nested" or case[1] is built,
    ),
)
def test_tensors_are_handed_over_without_their_structure(name: str, build: Any) -> None:
    """Models that return dicts gave loss_fn the dict, and a loss_fn written for upstream failed with it."""
    make, called, given = OUTPUTS[name]
    model, pipe = cut(make)
    x, y = torch.randn(4, 4), torch.zeros(4)
    assert type(pipe(x[:2])) is tuple
    assert kind(pipe(x[:2])) == called
    seen: list[Any] = []

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        seen.append(kind(output))
        tensors = output if isinstance(output, tuple) else (output,)
        return torch.stack([tensor.square().mean() for tensor in tensors]).sum()

    stages = build(pipe)
    schedule = ScheduleGPipe(stages, 2, loss_fn=loss_fn)
    outputs = schedule.step(x, target=y)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    wanted, _ = pipecut.pipe_ir.structure.flatten(model(x))
    tensors = list(dict.fromkeys(leaf for leaf in wanted if isinstance(leaf, Tensor)))
    torch.stack([tensor.square().mean() for tensor in tensors]).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(found[parameter_name], parameter.grad, msg=parameter_name)
    assert seen == [given, given] == [kind(chunk) for chunk in stages[-1].output_chunks]
    for merged in (outputs, schedule.eval(x, target=y)):
        torch.testing.assert_close(list(merged) if isinstance(merged, tuple) else [merged], tensors)
        assert isinstance(merged, tuple) == isinstance(given, tuple)


def test_what_a_stage_returns_by_hand_is_flat_too() -> None:
    _, pipe = cut(lambda y, h: {"logits": y, "n": 3})
    first, last = built(pipe)
    last.set_local_fwd_input(first.forward_one_chunk(0, (torch.ones(2, 4),)), 0)
    assert kind(last.forward_one_chunk(0, ())) == [2, 5] == kind(last.output_chunks[0])


def test_tensors_that_are_one_in_eval_mode_only_stay_two() -> None:
    """Which tensors are the same is told by the trace: dropout returns its input in eval mode."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 4), nn.Dropout()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x)
            return y, self.drop(y)

    pipe = compat.pipeline(Dropping(), (torch.ones(2, 4),), split_spec={"drop": SplitPoint.BEGINNING})
    pipe.eval()
    assert kind(ScheduleGPipe(built(pipe), 1).eval(torch.ones(2, 4))) == ([2, 4], [2, 4])


@pytest.mark.parametrize("scale_grads", [True, False])
def test_a_loss_of_the_models_own_is_found_by_its_name(scale_grads: bool) -> None:
    model, pipe = cut(lambda y, h: {"logits": y, "loss": y.square().mean()})
    x = torch.randn(4, 4)
    logits, loss = ScheduleGPipe(built(pipe), 2, scale_grads=scale_grads).step(x)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    wanted = model(x)
    wanted["loss"].backward()
    times = 1 if scale_grads else 2
    torch.testing.assert_close((logits, loss), (wanted["logits"], wanted["loss"] * times))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad * times, msg=name)


def test_pipecuts_own_pipeline_hands_over_what_the_model_returns() -> None:
    model = Net(lambda y, h: {"logits": y})
    pipe = pipecut.pipeline(model, (torch.ones(2, 4),), num_stages=2)
    stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    assert list(ScheduleGPipe(stages, 2).eval(torch.ones(2, 4))) == ["logits"]


def test_verify_compares_what_is_handed_over() -> None:
    model, pipe = cut(lambda y, h: {"logits": y})
    x, y = torch.randn(4, 4), torch.randn(4, 5)
    assert verify(pipe, model, (x,), y, nn.functional.mse_loss).ok


def test_the_info_has_what_upstreams_has() -> None:
    _, pipe = cut(lambda y, h: y)
    info = pipe.info()
    assert (info.has_loss_and_backward, pipe.has_loss_and_backward, info.num_stages) == (False, False, 2)
    assert isinstance(info, compat._utils.PipeInfo)
    told = r"PipeInfo.graph is not part of pipecut: .* in `stages` and `edges`, their code in pipe.print_readable\(\)"
    with pytest.raises(AttributeError, match=told) as error:
        _ = info.graph  # type: ignore[attr-defined]
    assert isinstance(error.value, PipeError)
    assert not hasattr(info, "graph")
    assert pickle.loads(pickle.dumps(info)).flat_output == info.flat_output


@pytest.mark.slow
def test_a_published_model_with_a_loss_fn_for_upstream() -> None:
    """A ModelOutput with logits only is a tensor there."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8, "use_cache": False}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))
    ids = torch.randint(0, 20, (4, 5))

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    pipe = compat.pipeline(model, (ids[:2],), split_spec={"transformer.h.1": SplitPoint.BEGINNING})
    output = ScheduleGPipe(built(pipe), 2, loss_fn=loss_fn).step(ids, target=ids)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = model(ids).logits
    loss_fn(logits, ids).backward()
    torch.testing.assert_close(output, logits)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)
