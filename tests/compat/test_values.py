"""Functions of _utils, microbatch, _debug and _IR treat values as upstream's do."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import Pipe as OwnPipe
from pipecut import PipeWarning, pipeline
from pipecut.compat import _IR, _debug, _utils, microbatch, schedules
from pipecut.compat._schedule_visualizer import add_schedule_op_spacing, get_schedule_ops, visualize_schedule
from pipecut.errors import PipeError

META = _utils._TensorMeta.from_tensor(torch.ones(2, 3, requires_grad=True))
OTHER = _utils._TensorMeta.from_tensor(torch.ones(3, 2, dtype=torch.float64))


def test_stages_are_placed_on_ranks() -> None:
    assert _utils.generate_stage_to_rank_mapping(2, 4) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert _utils.generate_stage_to_rank_mapping(2, 4, "v") == {0: 0, 1: 1, 2: 1, 3: 0}
    assert _utils.generate_rank_to_stage_mapping(2, 4, "v") == {0: [0, 3], 1: [1, 2]}
    assert _utils.generate_rank_to_stage_mapping(4, 2) == {0: [0], 1: [1]}
    with pytest.raises(ValueError, match="Style x is not supported"):
        _utils.generate_stage_to_rank_mapping(2, 4, "x")
    with pytest.raises(
        PipeError, match="num_stages=5 must be evenly divisible by pp_size=2 in style 'v'.*or style 'loop'"
    ):
        _utils.generate_stage_to_rank_mapping(2, 5, "v")


def test_tensor_metas() -> None:
    assert META.to_tensor("meta").requires_grad
    assert META.get_diff(META) == []
    assert META.get_diff(OTHER) == [
        "shape mismatch: torch.Size([2, 3]) vs torch.Size([3, 2])",
        "stride mismatch: (3, 1) vs (2, 1)",
        "dtype mismatch: torch.float32 vs torch.float64",
    ]
    assert _utils._derive_grad_metas((META, OTHER))[1] is None
    assert _utils.extract_tensor_metas(None) is None
    assert _utils.extract_tensor_metas((torch.ones(1), None), allow_none=True)[1] is None  # type: ignore[index]
    with pytest.raises(
        RuntimeError, match="None values are not allowed here, and tensor 0 is None: pass allow_none=True"
    ):
        _utils.extract_tensor_metas((None,))
    with pytest.raises(_utils.PipeliningMetadataError, match="expected a tensor, got int: pass other values as"):
        _utils.extract_tensor_metas((torch.ones(1), 3))
    assert _utils.extract_tensor_metas((torch.ones(2, 3, requires_grad=True), 5), allow_none=True) == (META, None)


def test_whole_numbers_have_no_gradient() -> None:
    meta = dataclasses.replace(META, dtype=torch.int64)
    assert meta.requires_grad
    assert not meta.to_tensor("cpu").requires_grad
    assert dataclasses.replace(META, dtype=torch.complex64).to_tensor("cpu").requires_grad
    assert not _utils._make_tensor_from_meta(META, "cpu").requires_grad


def test_mismatches_are_returned_raised_or_warned_of() -> None:
    assert len(_utils.validate_metadata("x", META, OTHER)) == 3
    assert _utils.validate_metadata("x", META, None) == ["type: expected _TensorMeta, got NoneType"]
    with pytest.raises(_utils.PipeliningShapeError, match="x: shape mismatch"):
        _utils.validate_metadata("x", META, OTHER, raise_on_mismatch=True)
    with pytest.warns(UserWarning, match="x: Metadata mismatch"):
        _utils.validate_metadata("x", META, OTHER, warn_on_mismatch=True)
    assert _utils.validate_tensors_metadata("x", (META, None), (torch.ones(2, 3), None)) == []
    for expected, actual, told in (
        ((META,), (META, META), "x: expected 1 tensors, got 2"),
        ((META, None), (META, META), r"x\[1\]: expected None, got metadata"),
        ((META,), (OTHER,), r"x\[0\]: shape mismatch"),
    ):
        with pytest.raises(RuntimeError, match=told):
            _utils.validate_tensors_metadata("x", expected, actual)
        with pytest.warns(UserWarning, match=told.replace("shape", "Metadata mismatch. shape")):
            differences = _utils.validate_tensors_metadata(
                "x", expected, actual, raise_on_mismatch=False, warn_on_mismatch=True
            )
        assert differences


def test_arguments_and_their_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    assert _utils.validate_and_normalize_to_tuple(None) is None
    assert _utils.validate_and_normalize_to_tuple([x]) == (x,)
    assert _utils.validate_and_normalize_to_tuple((x, None), allow_none=True) == (x, None)
    for given, told in (
        ((x, None), r"Stage arg\[1\] is None, and all of them must be tensors: pass other values by keyword"),
        ((1,), r"Stage arg\[0\] has type int, and all of them must be tensors"),
        (3, "Stage arg must be a tensor, or a tuple or list of tensors; got int"),
    ):
        with pytest.raises(RuntimeError, match=told):
            _utils.validate_and_normalize_to_tuple(given)
    _utils.validate_static_arg_grad_correspondence(0, (x,), (torch.ones(2),), True)
    with pytest.raises(RuntimeError, match=r"input_grads length \(1\) does not match input_args length \(2\)"):
        _utils.validate_static_arg_grad_correspondence(0, (x, x), (torch.ones(2),), True)
    with pytest.raises(RuntimeError, match=r"output_args\[0\] has requires_grad=False, but output_grads\[0\] is not"):
        _utils.validate_static_arg_grad_correspondence(0, (x.detach(),), (torch.ones(2),), False)
    with pytest.warns(UserWarning, match=r"input_args\[0\] has requires_grad=True"):
        _utils.validate_static_arg_grad_correspondence(0, (x,), (None,), True)
    value, leaves = _utils.flatten_args_detach((x * 2, {"a": [3]}))
    assert leaves[0].is_leaf
    assert value[1] == {"a": [3]}
    assert _utils.flatten_args((1, [2])) == [1, 2]
    assert not _utils.to_local_if_dtensor(x, detach=True).requires_grad


def test_stage_metas_and_meshes() -> None:
    assert _utils.InferenceMode.needs_dynamic(_utils._StageMeta(), False)
    complete = _utils._StageMeta((META,), (META,))
    assert not _utils.InferenceMode.needs_dynamic(complete, True)
    assert complete.has_any()
    assert not complete.has_dtensors()
    cache = _utils._MeshCache()
    with pytest.raises(RuntimeError, match="pass get_mesh= to the stage"):
        cache.get_mesh((("tp",), None))
    nothing = _utils._MeshCache(lambda names, layout: None)
    with pytest.raises(
        _utils.PipeliningMetadataError, match=r"get_mesh= callback returned None for the dims \('tp',\)"
    ):
        nothing.get_mesh((("tp",), None))
    assert len(nothing) == 0
    mesh: Any = SimpleNamespace()
    found = _utils._MeshCache(lambda names, layout: mesh)
    assert found.get_mesh((("tp",), None)) is mesh
    assert (("tp",), None) in found
    assert len(found) == 1


def test_microbatches_by_upstreams_names() -> None:
    args, kwargs = microbatch.split_args_kwargs_into_chunks((torch.ones(4, 2),), {"y": torch.ones(4), "n": None}, 2)
    assert [len(arg) for (arg,) in args] == [2, 2]
    assert kwargs[1]["n"] is None
    merged = microbatch.merge_chunks([(torch.ones(1), 3), (torch.zeros(1), 3)], (None, microbatch._Replicate))
    assert merged[0].tolist() == [1, 0]
    assert merged[1] == 3
    assert microbatch.merge_chunks([(2.0,), (3.0,)], (microbatch.sum_reducer,)) == (5.0,)
    pieces = microbatch._split_tensor(torch.ones(4), microbatch.TensorChunkSpec(0), 2)
    assert isinstance(pieces, tuple)
    assert [len(piece) for piece in pieces] == [2, 2]
    cut = microbatch._shard_dict_of_args({"y": torch.ones(4)}, {"y": microbatch.TensorChunkSpec(0)}, 2)
    assert len(cut) == 2


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ((microbatch.TensorChunkSpec(0),), r"chunk_spec has 1 entries, and a chunk has 2 there: give one each"),
        ((None, None, None), r"chunk_spec has 3 entries, and a chunk has 2 there"),
        ((None, (None,)), r"chunk_spec\[1\] has 1 entries, and a chunk has 2 there"),
    ],
)
def test_a_spec_of_another_length_is_a_value_error(spec: Any, told: str) -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match=told):
        microbatch.merge_chunks([(x, [x, x]), (x, [x, x])], spec)


def test_debug_info() -> None:
    assert _debug.map_debug_info((torch.ones(2), {"a": 5})) == (
        "Tensor(torch.Size([2]), grad=False, dtype=torch.float32)",
        {"a": "5"},
    )


class Named(nn.Module):
    """Has an argument that is traced by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
        result: Tensor = self.two(self.one(x) + y)
        return result


def test_a_pipe_returns_a_tuple_and_takes_keywords_by_position() -> None:
    model, x, y = Named(), torch.randn(4, 3), torch.randn(4, 3)
    pipe = _IR.pipeline(model, (x,), {"y": y}, split_spec={"two": _IR.SplitPoint.BEGINNING})
    for result in (pipe(x, y), pipe(x, y=y)):
        assert isinstance(result, tuple)
        torch.testing.assert_close(result[0], model(x, y=y))
    assert isinstance(pipe, OwnPipe)
    assert pipe.num_stages == pipe.info().num_stages == 2
    assert pipe.build_stage(1, torch.device("cpu")).is_last
    assert pipe.get_stage_module(stage_idx=1) is pipe.stages[1]
    assert pipe.to("cpu") is pipe
    assert _IR.get_submod_name(1) == "submod_pp_1"


class Marked(nn.Module):
    """Has a mark in front of its second layer, and one inside of its last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.last = _IR.PipeSequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        _IR.pipe_split()
        result: Tensor = self.last(self.layers[2](self.layers[1](x)))
        return result


def test_marks_and_names_cut_together() -> None:
    """A split_spec for a model with marks was refused."""
    model, x = Marked(), torch.randn(4, 3)
    spec = {"layers.2": _IR.SplitPoint.BEGINNING}
    for cut in (_IR.pipeline, pipeline):
        pipe = cut(model, (x,), split_spec=spec)
        assert pipe.num_stages == 4
        names = [sorted(name for name, _ in stage.named_parameters()) for stage in pipe.stages]
        layers = [["layers.0"], ["layers.1"], ["last.0", "layers.2"], ["last.1"]]
        assert names == [[f"{name}.{kind}" for name in stage for kind in ("bias", "weight")] for stage in layers]
        assert_trains_alike(model, pipe, x)


def assert_trains_alike(model: nn.Module, pipe: OwnPipe, x: Tensor) -> None:
    """Gradients are those of the uncut model, whose parameters the stages have."""
    found = []
    for run in (model, pipe):
        model.zero_grad()
        result = run(x)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(grad is not None for grads in found for grad in grads.values())
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(("name", "side"), [("layers.0", _IR.SplitPoint.END), ("layers.1", _IR.SplitPoint.BEGINNING)])
def test_a_place_that_is_marked_and_named_is_one_cut(name: str, side: _IR.SplitPoint) -> None:
    model, x = Marked(), torch.randn(4, 3)
    with pytest.warns(
        PipeWarning, match=r"two cuts have nothing .* count as one: .*pipe_split\(\) at .*test_values.py"
    ):
        pipe = _IR.pipeline(model, (x,), split_spec={name: side})
    assert pipe.num_stages == 3
    torch.testing.assert_close(pipe(x)[0], model(x))


def test_sequences_and_losses_of_upstream() -> None:
    modules = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    assert _IR.Pipe.from_tracing(_IR.PipeSequential.from_sequential(modules), (torch.ones(4, 3),)).num_stages == 3
    wrapped = _IR.TrivialLossWrapper(modules, nn.functional.mse_loss)
    assert wrapped(torch.ones(4, 3), torch.ones(4, 3)).dim() == 0
    with pytest.raises(NotImplementedError, match=r"define forward\(\), or pass loss_fn="):
        _IR.LossWrapper(modules, None)()


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = get_schedule_ops("1F1B", 2, 2)
    assert [repr(row) for row in rows] == ["[0F0, 0F1, 0B0, 0B1, 0REDUCE_GRAD]", "[1F0, 1B0, 1F1, 1B1, 1REDUCE_GRAD]"]
    assert repr(add_schedule_op_spacing(rows)[1]) == "[None, 1F0, 1B0, 1F1, 1B1, None]"
    visualize_schedule(rows)
    assert "rank 1" in capsys.readouterr().out
    visualize_schedule(rows, str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    with pytest.raises(ValueError, match="Cannot add spacing and view comms"):
        get_schedule_ops("1F1B", 2, 2, add_spacing=True, with_comms=True)
    schedules._dump_chrometrace(dict(enumerate(rows)), str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["tid"] for event in events if event["name"] in ("0F0", "1F0", "1REDUCE_GRAD")] == [0, 1, 1]


def test_transfers_are_begun_one_by_one_or_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    work = SimpleNamespace(wait=lambda: begun.append("waited"))
    isend = lambda tensor, **how: begun.append(("send", how)) or work  # noqa: E731
    irecv = lambda tensor, **how: begun.append(("receive", how)) or work  # noqa: E731
    monkeypatch.setattr(schedules.dist, "isend", isend)
    monkeypatch.setattr(schedules.dist, "irecv", irecv)
    monkeypatch.setattr(schedules.dist, "batch_isend_irecv", lambda ops: begun.append(("batch", len(ops))) or [work])

    def op(function: Any, peer: int) -> Any:
        return SimpleNamespace(op=function, tensor=None, group=None, tag=7, group_peer=peer, peer=peer)

    assert schedules._batch_p2p([]) == []
    schedules._wait_batch_p2p(schedules._batch_p2p([op(isend, 1), op(isend, 2)]))
    schedules._batch_p2p([op(irecv, 1)])
    schedules._batch_p2p([op(isend, 1), op(irecv, 1)], desc="both")
    assert begun == [
        ("send", {"group": None, "tag": 7, "group_dst": 1}),
        ("send", {"group": None, "tag": 7, "group_dst": 2}),
        "waited",
        "waited",
        ("receive", {"group": None, "tag": 7, "group_src": 1}),
        ("batch", 2),
    ]
    monkeypatch.setattr(schedules.dist, "isend", nothing := lambda tensor, **how: None)
    assert schedules._batch_p2p([op(nothing, 1), op(nothing, 2)]) == [None, None]
    schedules._wait_batch_p2p([None])
    assert list(schedules._sorted_batch_p2p([op(isend, 2), op(isend, 1)])) == [1, 2]


def test_small_functions_of_schedules() -> None:
    action = schedules._Action(1, schedules.F, 0)
    assert schedules._get_profiler_function_name(action) == "PP:1F0"
    wanted = [schedules.BACKWARD_WEIGHT, schedules.FULL_BACKWARD]
    assert [kind for kind in schedules._ComputationType if schedules._requires_reduce_grad(kind)] == wanted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules._check_torch_compile_compatibility([], "any")
