"""Bad input gets an error that names the culprit and the remedy."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from pipecut import PipeError, PipeWarning, SplitPoint, pipe_split, pipeline


class Net(nn.Module):
    """Three layers, a list of them never called itself, and a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.spare = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * scale
        return x if mask is None else x * mask


class Scripted(nn.Module):
    """A model whose forward is given."""

    def __init__(self, run: Callable[[Scripted, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


X = torch.ones(2, 4)


def refused(message: str, *args: object, **kwargs: object) -> None:
    with pytest.raises(PipeError, match=re.escape(message)):
        pipeline(*args, **kwargs)  # type: ignore[arg-type]


def test_an_unknown_module_path_is_named_and_the_nearest_are_offered() -> None:
    refused(
        "split_spec names 'layer.1', which is not a module of Net. Did you mean 'layers.1'",
        Net(),
        (X,),
        split_spec={"layer.1": SplitPoint.BEGINNING},
    )


def test_all_faults_of_a_split_spec_are_told_at_once() -> None:
    with pytest.raises(PipeError) as error:
        pipeline(Net(), (X,), split_spec={"nope": SplitPoint.END, "layers.1": 3, "layers.2#x": SplitPoint.END})
    assert "names 'nope'" in str(error.value)
    assert "split_spec['layers.1'] is 3; it must be SplitPoint.BEGINNING or SplitPoint.END" in str(error.value)
    assert "layers.2#1 is the second call" in str(error.value)


def test_a_split_spec_that_is_not_a_dict_is_refused() -> None:
    refused("split_spec must be a dict of module path to SplitPoint, got list", Net(), (X,), split_spec=["layers.1"])


def test_a_split_spec_key_that_is_not_a_path_is_refused() -> None:
    refused("split_spec has the key 1; a key is a module path", Net(), (X,), split_spec={1: SplitPoint.END})


def test_a_module_that_is_never_called_cannot_be_a_split_point() -> None:
    refused(
        "split_spec names 'spare', which the model does not call with these example inputs",
        Net(),
        (X,),
        split_spec={"spare": SplitPoint.BEGINNING},
    )


def test_a_container_that_is_never_called_says_to_name_a_member() -> None:
    refused(
        "a container is never called itself: name one of its members",
        Net(),
        (X,),
        split_spec={"layers": SplitPoint.BEGINNING},
    )


def test_a_call_that_does_not_happen_is_refused_with_the_number_of_calls() -> None:
    refused(
        "split_spec names call #1 of 'layers.1', which is called 1 time (#0 to #0)",
        Net(),
        (X,),
        split_spec={"layers.1#1": SplitPoint.BEGINNING},
    )


def test_a_cut_that_leaves_the_first_stage_empty_is_refused() -> None:
    refused(
        "stage 0 would be empty: there is nothing to run between the beginning of the model and the cut before "
        "'layers.0'",
        Net(),
        (X,),
        split_spec={"layers.0": SplitPoint.BEGINNING},
    )


def test_two_cuts_with_nothing_between_them_count_as_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    told = "two cuts have nothing between them and count as one: the cut after '0' and the cut before '1'"
    with pytest.warns(PipeWarning, match=told) as caught:
        pipe = pipeline(model, (X,), split_spec={"0": SplitPoint.END, "1": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2
    assert [warning.filename for warning in caught] == [__file__]


def test_more_stages_than_places_to_cut_are_refused_with_the_most_that_is_possible() -> None:
    refused(
        "9 stages were asked for, and this model can be cut into 3 at the most",
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))),
        (X,),
        num_stages=9,
    )


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_a_number_of_stages_that_is_no_number_is_refused(number: object) -> None:
    refused(f"num_stages must be an integer of at least 1, got {number!r}", Net(), (X,), num_stages=number)


def test_two_ways_to_say_where_to_cut_are_refused() -> None:
    refused(
        "split_spec and num_stages were both given", Net(), (X,), num_stages=2, split_spec={"layers.1": SplitPoint.END}
    )


def test_marks_and_a_number_of_stages_together_are_refused() -> None:
    def run(net: Scripted, x: torch.Tensor) -> torch.Tensor:
        x = net.a(x)
        pipe_split()
        return net.b(x)

    refused(
        "the model has pipe_split() marks in its forward, and num_stages says where to cut too",
        Scripted(run),
        (X,),
        num_stages=2,
    )


def test_a_mark_inside_vmap_is_refused_with_its_place() -> None:
    def run(net: Scripted, x: torch.Tensor) -> torch.Tensor:
        def row(part: torch.Tensor) -> torch.Tensor:
            part = net.a(part)
            pipe_split()
            return net.b(part)  # type: ignore[no-any-return]

        return torch.vmap(row)(x)

    refused("is inside a torch.vmap call (in the model's forward), which must stay whole", Scripted(run), (X,))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_mark_inside_a_checkpoint_is_refused(use_reentrant: bool) -> None:
    def part(net: Scripted, x: torch.Tensor) -> torch.Tensor:
        x = net.a(x)
        pipe_split()
        return net.b(x)

    def run(net: Scripted, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(part, net, net.a(x), use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    refused("is inside a part under torch.utils.checkpoint", Scripted(run), (X,))


def test_a_split_spec_inside_a_checkpointed_module_names_the_module() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, self.first(x), use_reentrant=False)  # type: ignore[no-any-return]

    refused(
        "the cut before 'block.1' is inside a part under torch.utils.checkpoint (in 'block.1')",
        Outer(),
        (X,),
        split_spec={"block.1": SplitPoint.BEGINNING},
    )


def test_a_model_that_cannot_be_traced_shows_the_users_line_and_what_to_try() -> None:
    def run(net: Scripted, x: torch.Tensor) -> torch.Tensor:
        x = net.a(x)
        if x.sum() > 0:
            x = net.b(x)
        return x

    with pytest.raises(PipeError) as error:
        pipeline(Scripted(run), (X,), split_spec={"a": SplitPoint.END})
    text = str(error.value)
    assert "Scripted could not be traced" in text
    assert "test_bad_input.py:" in text
    assert "if x.sum() > 0:" in text
    assert "torch.where or torch.cond" in text


def test_example_inputs_of_the_wrong_shape_show_the_models_line() -> None:
    with pytest.raises(PipeError, match="x = layer") as error:
        pipeline(Net(), (torch.ones(2, 7),), split_spec={"layers.1": SplitPoint.END})
    assert "could not be traced with these example inputs" in str(error.value)


def test_example_inputs_must_be_a_tuple() -> None:
    refused(
        "mb_args must be a tuple of positional arguments, got Tensor; for a single argument write mb_args=(x,)",
        Net(),
        X,
    )


def test_example_keywords_must_be_a_dict() -> None:
    refused("mb_kwargs must be a dict with the names of arguments as keys, got list", Net(), (X,), ["mask"])


def test_example_inputs_that_do_not_fit_the_signature_are_refused() -> None:
    refused("the arguments do not fit Net.forward", Net(), (X,), {"maks": X})


def test_what_is_not_a_module_is_refused() -> None:
    refused("pipeline() takes an nn.Module, got function", lambda x: x, (X,))


def test_a_pipe_and_a_stage_are_cut_already() -> None:
    pipe = pipeline(Net(), (X,), split_spec={"layers.1": SplitPoint.BEGINNING})
    refused("this model is cut already: it is a Pipe", pipe, (X,))
    refused("this Net is a stage of a model that is cut already", pipe.get_stage_module(0), (X,))


def test_a_stage_that_does_not_exist_is_refused_with_the_range() -> None:
    pipe = pipeline(Net(), (X,), split_spec={"layers.1": SplitPoint.BEGINNING})
    with pytest.raises(PipeError, match="no stage 2: this pipe has stages 0 to 1"):
        pipe.get_stage_module(2)


def test_a_split_policy_must_be_callable_and_return_a_graph_module() -> None:
    refused("split_policy must be a function from GraphModule to GraphModule, got 3", Net(), (X,), split_policy=3)

    def forgetful(graph_module: GraphModule) -> None:
        return None

    refused("split_policy returned NoneType; it must return a GraphModule", Net(), (X,), split_policy=forgetful)


def test_a_buffer_updated_in_two_stages_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mid = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.mid(self.norm(x)))  # type: ignore[no-any-return]

    refused("is updated in forward and used by stages [0, 1]", Twice(), (X,), split_spec={"mid": SplitPoint.BEGINNING})


def test_two_views_of_one_tensor_written_after_the_cut_are_refused() -> None:
    def run(net: Scripted, x: torch.Tensor) -> torch.Tensor:
        x = net.a(x)
        row = x[0]
        pipe_split()
        row.add_(1)
        return net.b(x)

    refused(
        "are views of one tensor, both come into stage 1, and stage 1 writes to one of them in place",
        Scripted(run),
        (X,),
    )


def test_a_backward_hook_on_a_module_that_is_cut_is_refused() -> None:
    model = Net()
    model.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    refused("'Net' has a backward hook and is cut", model, (X,), split_spec={"layers.1": SplitPoint.BEGINNING})


def test_a_forward_hook_on_a_module_that_is_cut_is_traced_with_a_warning() -> None:
    model = Net()
    model.register_forward_hook(lambda module, args, output: output * 2)
    expected = copy.deepcopy(model)(X)
    with pytest.warns(PipeWarning, match="'Net' has a forward hook and is cut"):
        pipe = pipeline(model, (X,), split_spec={"layers.1": SplitPoint.BEGINNING})
    torch.testing.assert_close(pipe(X), expected, rtol=0, atol=0)


class TestCallsThatDoNotFitTheTrace:
    """A value that the trace fixed and that differs later is never ignored: where it cannot be traced, an error."""

    def call(self, message: str, *args: object, **kwargs: object) -> None:
        pipe = pipeline(Net(), (X,), {"scale": 2.0}, split_spec={"layers.1": SplitPoint.BEGINNING})
        pipe = dataclasses.replace(pipe, retrace=None)
        with pytest.raises(PipeError, match=re.escape(message)):
            pipe(*args, **kwargs)

    def test_another_python_number(self) -> None:
        self.call("scale was 2.0 when the model was traced, and the trace holds for that value only; got 3.0", X, 3.0)

    def test_a_default_that_the_example_did_not_use(self) -> None:
        self.call("scale was 2.0 when the model was traced, and the trace holds for that value only; got 1.0", X)

    def test_a_number_of_another_type(self) -> None:
        self.call("scale was 2.0 when the model was traced, and the trace holds for that value only; got 2", X, 2)

    def test_a_tensor_where_there_was_none(self) -> None:
        self.call(
            "mask was None when the model was traced, and the trace holds for that value only; got a tensor [2, 4]",
            X,
            2.0,
            X,
        )

    def test_no_tensor_where_there_was_one(self) -> None:
        self.call("x was a tensor when the model was traced; got None", None, 2.0)

    def test_another_size_in_a_fixed_dim(self) -> None:
        self.call("x has size 5 in dim 1; the trace holds for 4 only", torch.ones(2, 5), 2.0)

    def test_another_number_of_dims(self) -> None:
        self.call("x has 3 dims [2, 2, 4]; the trace has 2: float32[batch, 4]", torch.ones(2, 2, 4), 2.0)

    def test_another_dtype(self) -> None:
        self.call("x is torch.float64; it was torch.float32 when the model was traced", X.double(), 2.0)

    def test_an_unknown_argument(self) -> None:
        self.call("the arguments do not fit Net.forward", X, 2.0, colour="red")

    def test_all_faults_are_told_at_once(self) -> None:
        pipe = pipeline(Net(), (X,), split_spec={"layers.1": SplitPoint.BEGINNING})
        with pytest.raises(PipeError) as error:
            pipe(torch.ones(2, 5), 3.0)
        assert "x has size 5" in str(error.value)
        assert "scale was 1.0" in str(error.value)
        assert "The model was traced again for this call, which failed" in str(error.value)


def test_another_structure_of_an_argument_names_what_is_missing_and_what_is_new() -> None:
    class Dicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.b(self.a(batch["x"]))  # type: ignore[no-any-return]

    pipe = pipeline(Dicts(), ({"x": X},), split_spec={"b": SplitPoint.BEGINNING})
    with pytest.raises(PipeError) as error:
        pipe({"y": X})
    assert "batch['x'] was part of the example inputs and is missing" in str(error.value)
    assert "batch['y'] was not part of the example inputs" in str(error.value)


class Optional(nn.Module):
    """Takes a dict that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, options: dict[str, Any] | None = None) -> torch.Tensor:
        x = self.b(self.a(x))
        return x * options["scale"] if options else x


def test_a_nested_argument_in_the_place_of_a_plain_one_and_the_other_way_round() -> None:
    at = {"b": SplitPoint.BEGINNING}
    again = r"call pipeline\(\) with an example in which options is like this$"
    with_options = dataclasses.replace(
        pipeline(Optional(), (X, {"scale": 2.0, "more": 1}), split_spec=at), retrace=None
    )
    text = rf"options held options\['more'\], options\['scale'\] when the model was traced; got None: {again}"
    with pytest.raises(PipeError, match=text):
        with_options(X)
    without = dataclasses.replace(pipeline(Optional(), (X,), split_spec=at), retrace=None)
    text = rf"options was None when the model was traced; now it holds options\['scale'\]: {again}"
    with pytest.raises(PipeError, match=text):
        without(X, {"scale": 2.0})


def test_a_forward_that_does_other_things_in_the_other_mode_says_so() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            if self.training:
                x = x.relu()
            return self.b(x)  # type: ignore[no-any-return]

    pipe = pipeline(Moody(), (X,), split_spec={"b": SplitPoint.BEGINNING})
    pipe(X)
    with pytest.raises(PipeError, match="was cut in training mode, and its forward does other operations in eval"):
        pipe.eval()(X)


def test_a_module_that_returns_something_else_than_when_it_was_traced_says_so() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
            return (x + 1, x + 2) if self.training else x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.pair, self.b = nn.Linear(4, 4), Pair(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = self.pair(self.a(x))
            return self.b(both[0])  # type: ignore[no-any-return]

    pipe = pipeline(Outer(), (X,), split_spec={"b": SplitPoint.BEGINNING})
    returned = "'pair' returned a tuple of 2 with a tensor at 0, 1 when the model was traced, and now a tensor"
    with pytest.raises(PipeError, match=returned):
        pipe.eval()(X)


def test_nothing_is_warned_of_when_nothing_is_unusual() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PipeWarning)
        pipeline(Net(), (X,), split_spec={"layers.1": SplitPoint.BEGINNING})
