"""Stages of a model without memory read their values from checkpoints of every kind, and only what they need."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from pipecut import CheckpointError, InputError, Pipe, PipeError, SplitPoint, empty_weights, pipeline
from pipecut.stage.materialize.checkpoint import SafetensorsFile, write_safetensors
from tests.stage.materialize.models import SPLIT, Tied, assert_trains_like, build_all, cut, real_model


def once(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without the second name of a tied parameter."""
    return {name: value for name, value in model.state_dict().items() if name != "head.weight"}


def as_file(model: nn.Module, folder: Path) -> Path:
    write_safetensors(folder / "all.safetensors", once(model))
    return folder / "all.safetensors"


def as_directory_of_files(model: nn.Module, folder: Path) -> Path:
    for number, (name, value) in enumerate(once(model).items()):
        write_safetensors(folder / f"{number}.safetensors", {name: value})
    return folder


def as_indexed_shards(model: nn.Module, folder: Path) -> Path:
    as_directory_of_files(model, folder)
    weight_map = {name: f"{number}.safetensors" for number, name in enumerate(once(model))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def as_torch_file(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def as_indexed_torch_files(model: nn.Module, folder: Path) -> Path:
    weight_map = {}
    for number, (name, value) in enumerate(model.state_dict().items()):
        torch.save({name: value}, folder / f"{number}.bin")
        weight_map[name] = f"{number}.bin"
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def as_distributed_checkpoint(model: nn.Module, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True)
    return folder


def as_state_dict(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    return model.state_dict()


FORMS = [
    as_file,
    as_directory_of_files,
    as_indexed_shards,
    as_torch_file,
    as_indexed_torch_files,
    as_distributed_checkpoint,
    as_state_dict,
]


def empty_model() -> Tied:
    with empty_weights():
        return Tied()


@functools.cache
def empty_pipe() -> Pipe:
    """Cut once, for building stages does not change it."""
    return cut(empty_model())


@pytest.mark.parametrize("form", FORMS)
def test_stages_read_from_a_checkpoint_train_like_the_model(form: Callable[..., Any], tmp_path: Path) -> None:
    pipe, real = empty_pipe(), real_model()
    stages = build_all(pipe, checkpoint=form(real, tmp_path))
    assert_trains_like(stages, real)
    assert {parameter.device.type for parameter in pipe.traced.model.parameters()} == {"meta"}
    assert {parameter.device.type for stage in pipe.stages for parameter in stage.parameters()} == {"meta"}


def test_the_model_can_be_cut_again_when_its_stages_have_values() -> None:
    real, model = real_model(), empty_model()
    for split in (SPLIT, {"blocks.1": SplitPoint.BEGINNING}):
        assert_trains_like(build_all(cut(model, split), checkpoint=real.state_dict()), real)


def test_the_model_keeps_its_buffers_when_a_stage_updates_its_own() -> None:
    model = empty_model()
    stages = build_all(cut(model), checkpoint=real_model().state_dict())
    assert_trains_like(stages, real_model())
    assert torch.equal(model.blocks[0].norm.running_mean, torch.zeros(8))  # type: ignore[union-attr, arg-type]


def test_a_model_that_has_values_gives_them_to_no_stage_that_reads_a_checkpoint() -> None:
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert_trains_like(build_all(cut(model), checkpoint=real_model().state_dict()), real_model())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_files_of_other_stages_are_not_opened(tmp_path: Path) -> None:
    real = real_model()
    pipe = empty_pipe()
    as_indexed_shards(real, tmp_path)
    for number, name in enumerate(once(real)):
        if name not in pipe.stages[1].state_dict():
            (tmp_path / f"{number}.safetensors").unlink()
    stage = pipe.build_stage(1, "cpu", checkpoint=tmp_path)
    assert torch.equal(stage.submod.get_parameter("blocks.2.scale"), real.get_parameter("blocks.2.scale"))
    with pytest.raises(
        CheckpointError, match=r"index\.json says that embed\.weight is in 0\.safetensors, and there is no"
    ):
        pipe.build_stage(0, "cpu", checkpoint=tmp_path)


def test_the_rest_of_a_file_is_not_read(tmp_path: Path) -> None:
    """Of a file with a terabyte of zeros, which take no room on the disk, one small tensor is read at once."""
    path, size = tmp_path / "large.safetensors", 1 << 40
    entries = {
        "large": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "small": {"dtype": "U8", "shape": [8], "data_offsets": [size, size + 8]},
    }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(size, 1)
        file.write(bytes(range(8)))
    assert SafetensorsFile(path).load_object("small").tolist() == list(range(8))


def test_a_file_that_was_not_written_to_the_end_is_not_read(tmp_path: Path) -> None:
    path = as_file(real_model(), tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)  # the end of head.bias
    with pytest.raises(CheckpointError, match=r"all\.safetensors is neither .*not fully covered.* copied, do so again"):
        empty_pipe().build_stage(1, "cpu", checkpoint=path)


def test_a_tied_parameter_is_found_under_each_of_its_names_and_stays_one() -> None:
    values = real_model().state_dict()
    for name in ("embed.weight", "head.weight"):
        kept = {key: value for key, value in values.items() if key != name}
        stages = build_all(empty_pipe(), checkpoint=kept)
        first, last = stages[0].submod.get_parameter("embed.weight"), stages[3].submod.get_parameter("head.weight")
        assert first is last
        assert torch.equal(first, values["embed.weight"])
    one_stage = cut(empty_model(), {"blocks.0": SplitPoint.BEGINNING}).build_stage(1, "cpu", checkpoint=values)
    assert torch.equal(one_stage.submod.get_parameter("head.weight"), values["embed.weight"])


def test_a_stage_that_is_built_again_shares_with_those_that_follow() -> None:
    pipe = empty_pipe()
    old, new = (build_all(pipe, checkpoint=real_model().state_dict()) for _ in range(2))
    (first, last), (new_first, new_last) = (
        (stages[0].submod.get_parameter("embed.weight"), stages[3].submod.get_parameter("head.weight"))
        for stages in (old, new)
    )
    assert first is last
    assert new_first is new_last
    assert first is not new_first


def test_frozen_parameters_and_notes_on_parameters_are_kept() -> None:
    model = empty_model()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].scale.no_decay = True  # type: ignore[union-attr, assignment]
    stages = build_all(cut(model), checkpoint=real_model().state_dict())
    assert not stages[0].submod.get_parameter("blocks.0.linear.weight").requires_grad
    assert stages[1].submod.get_parameter("blocks.1.scale").no_decay  # type: ignore[attr-defined]


def test_a_module_that_keeps_its_parameters_in_a_list_runs() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.b(self.a(x)[0])
            return result

    real, x = Recurrent(), torch.randn(2, 3, 4)
    with torch.device("meta"):
        pipe = pipeline(Recurrent(), (torch.ones(2, 3, 4),), split_spec={"b": SplitPoint.BEGINNING})
    stages = build_all(pipe, checkpoint=real.state_dict())
    assert torch.equal(stages[1].submod(stages[0].submod(x)), real(x))


def test_a_saved_buffer_that_is_not_saved_any_more_is_read_if_it_is_there() -> None:
    with torch.device("meta"):
        model = Tied()
    values = {**real_model().state_dict(), "table": torch.arange(8) / 8}
    assert_trains_like(build_all(cut(model), checkpoint=values), real_model())


def test_what_a_module_saves_beside_its_tensors_is_loaded() -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> Tensor:
            return torch.tensor(self.count)

        def set_extra_state(self, state: Tensor) -> None:
            self.count = int(state)

    def make() -> nn.Sequential:
        return nn.Sequential(Counting(2, 2), Counting(2, 2))

    real = make()
    real[1].count = 7  # type: ignore[assignment]
    with torch.device("meta"):
        pipe = pipeline(make(), (torch.ones(2, 2),), split_spec={"1": SplitPoint.BEGINNING})
    stage = pipe.build_stage(1, "cpu", checkpoint=real.state_dict())
    assert stage.submod.get_submodule("1").count == 7
    lacking = {name: value for name, value in real.state_dict().items() if name != "1._extra_state"}
    with pytest.raises(PipeError, match=r"does not have 1\._extra_state, which Counting saves beside its tensors"):
        pipe.build_stage(1, "cpu", checkpoint=lacking)
    assert pipe.build_stage(1, "cpu", checkpoint=lacking, strict=False).submod.get_submodule("1").count == 0


def test_other_programs_read_what_is_written_and_write_what_is_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    values = {
        "matrix": torch.randn(3, 5).t(),
        "half": torch.randn(7).bfloat16(),
        "flags": torch.tensor([True, False]),
        "number": torch.tensor(3),
        "nothing": torch.empty(0, 4),
        "large": torch.arange(5_000_000),
    }
    write_safetensors(tmp_path / "ours", values)
    read = safetensors.load_file(tmp_path / "ours")
    assert read.keys() == values.keys()
    safetensors.save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "theirs")
    file = SafetensorsFile(tmp_path / "theirs")
    for name, value in values.items():
        assert torch.equal(read[name], value), name
        assert torch.equal(file.load_object(name), value), name


def test_dtypes_are_converted_if_that_is_asked_for(tmp_path: Path) -> None:
    halved = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in real_model().state_dict().items()
    }
    pipe = empty_pipe()
    with pytest.raises(CheckpointError) as caught:
        pipe.build_stage(0, "cpu", checkpoint=halved)
    assert "embed.weight is bfloat16[11, 8] there, and float32[11, 8] in the model" in str(caught.value)
    assert "Pass dtype=torch.float32 to convert what is read" in str(caught.value)
    for form in (halved, as_file_of(halved, tmp_path)):
        stage = pipe.build_stage(0, "cpu", checkpoint=form, dtype=torch.float32)
        assert torch.equal(stage.submod.get_parameter("embed.weight"), halved["embed.weight"].float())
    with pytest.raises(
        CheckpointError, match=r"dtype=torch\.float16, and the model was cut with float32, .* convert the"
    ):
        pipe.build_stage(0, "cpu", checkpoint=halved, dtype=torch.float16)


def as_file_of(values: dict[str, Tensor], folder: Path) -> Path:
    write_safetensors(folder / "file", {name: value for name, value in values.items() if name != "head.weight"})
    return folder / "file"


def test_names_that_are_missing_and_unexpected_are_listed_with_near_ones() -> None:
    values = dict(real_model().state_dict())
    values["blocks.1.linear.wight"] = values.pop("blocks.1.linear.weight")
    values["lora"] = torch.ones(1)
    pipe = empty_pipe()
    with pytest.raises(CheckpointError) as caught:
        pipe.build_stage(1, "cpu", checkpoint=values)
    assert str(caught.value).splitlines() == [
        "this state dict does not fit the model.",
        "it does not have, and this stage needs:",
        "  blocks.1.linear.weight. Did you mean 'blocks.1.linear.wight'?",
        "it has, and the model does not:",
        "  blocks.1.linear.wight. Did you mean 'blocks.1.linear.weight'?",
        "  lora.",
        "Pass rename=, a function from the model's names to those of the checkpoint, if they only differ; or "
        "strict=False, to read what fits and leave the rest to init=, or to the values that the model has",
    ]
    message = r"stage 1 has parts that the checkpoint does not hold .*: blocks\.1\.linear\.weight \(parameter\)"
    with pytest.raises(CheckpointError, match=message):
        pipe.build_stage(1, "cpu", checkpoint=values, strict=False)
    pipe.build_stage(2, "cpu", checkpoint=values, strict=False)


def test_many_missing_names_are_counted() -> None:
    with torch.device("meta"):
        pipe = pipeline(nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))), (torch.ones(2, 2),), num_stages=1)
    with pytest.raises(CheckpointError, match="and 20 more"):
        pipe.build_stage(0, "cpu", checkpoint={"other": torch.ones(1)})


def test_names_are_translated() -> None:
    values = {f"model.{name}": value for name, value in real_model().state_dict().items()}
    pipe = empty_pipe()
    with pytest.raises(CheckpointError, match=r"embed\.weight\. Did you mean 'model\.embed\.weight'"):
        pipe.build_stage(0, "cpu", checkpoint=values)
    assert_trains_like(build_all(pipe, checkpoint=values, rename=lambda name: f"model.{name}"), real_model())


def test_init_fills_what_a_checkpoint_does_not_hold() -> None:
    values = {name: value for name, value in real_model().state_dict().items() if "scale" not in name}

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 3.0)

    stages = build_all(empty_pipe(), checkpoint=values, init=init, strict=False)
    expected = real_model()
    for block in expected.blocks:
        nn.init.constant_(block.scale, 3.0)  # type: ignore[arg-type]
    assert_trains_like(stages, expected)


def test_other_shapes_are_refused_with_both() -> None:
    values = {**real_model().state_dict(), "blocks.1.scale": torch.ones(9)}
    with pytest.raises(CheckpointError) as caught:
        empty_pipe().build_stage(1, "cpu", checkpoint=values)
    assert str(caught.value).splitlines() == [
        "this state dict is of a model of other sizes:",
        "  blocks.1.scale is float32[9] there, and float32[8] in the model",
    ]


def test_a_tie_that_was_saved_with_two_values_is_refused() -> None:
    values = dict(real_model().state_dict())
    for other in (values["head.weight"] + 1, torch.ones(3)):
        values["head.weight"] = other
        with pytest.raises(
            CheckpointError, match=r"embed\.weight and head\.weight differ in this state dict, and are one"
        ):
            empty_pipe().build_stage(0, "cpu", checkpoint=values)


def test_buffers_that_no_checkpoint_has_are_named() -> None:
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(CheckpointError) as caught:
        cut(model).build_stage(0, "cpu", checkpoint=real_model().state_dict())
    assert str(caught.value) == (
        "stage 0 has parts that the checkpoint does not hold and that are on the meta device: table (buffer that is "
        'not saved). Make the model under `with pipecut.empty_weights():` instead of torch.device("meta"), so that '
        "buffers have the values of their constructor; or pass strict=False and init=, a function that fills what the "
        "checkpoint does not hold"
    )


def write_text(folder: Path) -> Path:
    (folder / "notes.txt").write_text("this is a text, and not a checkpoint")
    return folder / "notes.txt"


def write_list(folder: Path) -> Path:
    torch.save([torch.ones(1)], folder / "list.pt")
    return folder / "list.pt"


def write_nested(folder: Path) -> Path:
    torch.save({"model": real_model().state_dict(), "epoch": 3}, folder / "nested.pt")
    return folder / "nested.pt"


def write_old_format(folder: Path) -> Path:
    torch.save(real_model().state_dict(), folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def write_module(folder: Path) -> Path:
    torch.save(nn.Linear(2, 2), folder / "module.pt")
    return folder / "module.pt"


def write_bad_index(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text('{"files": []}')
    return folder


def write_two_indices(folder: Path) -> Path:
    for name in ("a.index.json", "b.index.json"):
        (folder / name).write_text('{"weight_map": {}}')
    return folder


def write_twice(folder: Path) -> Path:
    for name in ("one.safetensors", "two.safetensors"):
        write_safetensors(folder / name, {"embed.weight": torch.ones(11, 8)})
    return folder


def write_wrong_index(folder: Path) -> Path:
    write_safetensors(folder / "one.safetensors", {"other": torch.ones(1)})
    names = dict.fromkeys(once(real_model()), "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def write_unknown_dtype(folder: Path) -> Path:
    header = json.dumps({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (folder / "new").write_bytes(len(header).to_bytes(8, "little") + header + b" ")
    return folder / "new"


def write_wrong_length(folder: Path) -> Path:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (folder / "short").write_bytes(len(header).to_bytes(8, "little") + header + b" ")
    return folder / "short"


def write_nothing(folder: Path) -> Path:
    (folder / "model.pth").write_text("x")
    return folder


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_text, r"notes\.txt is neither a safetensors file nor one that torch\.save has written"),
        (write_list, r"list\.pt holds a list and no tensors by name: save model\.state_dict\(\) alone"),
        (write_nested, r"nested\.pt holds a dict of 'model', 'epoch' and no tensors by name: .*\[\.\.\.\]"),
        (write_old_format, r"old\.pt cannot be read as a state dict: mmap can only be used with"),
        (write_module, r"module\.pt cannot be read as a state dict: Weights only load failed"),
        (write_bad_index, r'index\.json is not an index: it has no "weight_map" from names to files'),
        (write_two_indices, r"has several indices, a\.index\.json, b\.index\.json: pass the path of one"),
        (write_twice, r"embed\.weight is in one\.safetensors and in two\.safetensors of .*: remove the files of the"),
        (write_wrong_index, r"says that embed\.weight is in one\.safetensors, and it is not there"),
        (write_unknown_dtype, r"x in .*new has the dtype F4; those that can be read are F64, F32"),
        (write_wrong_length, r"short is neither a safetensors file .*copied, do so again"),
        (write_nothing, r"is not a checkpoint: it has no model\.safetensors\.index\.json.* It has model\.pth; a file"),
        (lambda folder: folder / "al.safetensors", r"there is no checkpoint .*: no such file or directory\.$"),
        (lambda folder: 3, "checkpoint must be a path or a state dict, got int"),
        (lambda folder: {"embed.weight": 3}, r"embed\.weight in this state dict is not a tensor, and is a parameter"),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_refused(write: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        empty_pipe().build_stage(0, "cpu", checkpoint=write(tmp_path), strict=False)


def test_a_wrong_path_brings_up_near_ones(tmp_path: Path) -> None:
    as_file(real_model(), tmp_path)
    with pytest.raises(CheckpointError, match=r"no such file or directory\. Did you mean '.*all\.safetensors'"):
        empty_pipe().build_stage(0, "cpu", checkpoint=tmp_path / "al.safetensors")


def test_a_checkpoint_on_the_meta_device_has_nothing_to_read() -> None:
    with pytest.raises(CheckpointError, match=r"is on the meta device in this state dict: it has no values to read"):
        empty_pipe().build_stage(1, "cpu", checkpoint=empty_model().state_dict())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"init": print, "checkpoint": "x"},
            "init and checkpoint were both given: pass one of them; or with strict=False",
        ),
        ({"dtype": torch.float32, "init": print}, "dtype say how a checkpoint is read: pass checkpoint= too"),
        ({"strict": False, "rename": str}, "strict and rename say how a checkpoint is read: pass checkpoint= too"),
        ({"init": "normal"}, "init must be a function that is called with modules, got str"),
    ],
)
def test_sources_that_do_not_go_together_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        empty_pipe().build_stage(0, "cpu", **values)


def test_values_on_the_meta_device_are_refused_and_stages_without_them_are_not() -> None:
    pipe = empty_pipe()
    with pytest.raises(InputError, match="which it cannot have on the meta device"):
        pipe.build_stage(0, "meta", checkpoint=real_model().state_dict())
    assert pipe.build_stage(3, "meta").submod(torch.ones(2, 8, device="meta")).shape == (2, 11)
