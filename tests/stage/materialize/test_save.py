"""Stages are saved as one checkpoint of the model, and read back however the model is cut then."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipecut import CheckpointError, PipelineStage, PipeWarning, SplitPoint, empty_weights, pipeline, save_stage
from pipecut.stage.materialize.checkpoint import SafetensorsFile
from tests.stage.materialize.models import Tied, assert_trains_like, build_all, cut, real_model


def test_what_is_saved_by_all_stages_is_the_model(tmp_path: Path) -> None:
    real = real_model()
    stages = build_all(cut(real))
    for stage in stages[:0:-1]:
        save_stage(stage, tmp_path)
        assert not (tmp_path / "model.safetensors.index.json").exists()
    path = save_stage(stages[0], tmp_path)
    assert re.fullmatch(r"stage-00001-of-00004-\w{8}\.safetensors", path.name)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(real.state_dict()) - {"head.weight"}  # a tie is saved once, by its owner
    assert index["weight_map"]["head.bias"] == path.name.replace("00001-", "00004-", 1)
    assert set(SafetensorsFile(tmp_path / index["weight_map"]["head.bias"]).names) == {"head.bias"}
    with empty_weights():
        model = Tied()
    for split in (None, {"blocks.2": SplitPoint.BEGINNING}):
        assert_trains_like(build_all(cut(model, split), checkpoint=tmp_path), real)


def test_a_tie_inside_a_stage_is_saved_once(tmp_path: Path) -> None:
    real = real_model()
    pipe = pipeline(real, (torch.arange(6),), num_stages=1)
    path = save_stage(pipe.build_stage(0, "cpu"), tmp_path)
    assert "head.weight" not in SafetensorsFile(path).names
    assert_trains_like(build_all(pipe, checkpoint=tmp_path), real)


def test_a_stage_cut_by_hand_has_no_names_in_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"stage 0 was cut by hand, and what its parameters are called"):
        save_stage(PipelineStage(nn.Linear(2, 2), 0, 1, "cpu"), tmp_path)


def test_a_stage_without_values_is_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        pipe = cut(Tied())
    with pytest.raises(
        CheckpointError, match=r"blocks\.1\..* of stage 1 is on the meta device: there is nothing to save"
    ):
        save_stage(pipe.build_stage(1, "meta"), tmp_path)


class Saving(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_an_object_is_refused(tmp_path: Path) -> None:
    pipe = pipeline(nn.Sequential(Saving(2, 2)), (torch.ones(2, 2),), num_stages=1)
    with pytest.raises(
        CheckpointError, match=r"0\._extra_state is a dict, which a safetensors file cannot hold: use torch"
    ):
        save_stage(pipe.build_stage(0, "cpu"), tmp_path)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table.real  # type: ignore[operator, union-attr]


def test_a_dtype_that_the_format_does_not_know_is_refused(tmp_path: Path) -> None:
    pipe = pipeline(Wide(), (torch.ones(2, 2),), num_stages=1)
    with pytest.raises(CheckpointError, match=r"table is of dtype complex128, which safetensors files cannot hold"):
        save_stage(pipe.build_stage(0, "cpu"), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


class InShards(nn.Parameter):
    """Looks like a DTensor."""

    def to_local(self) -> torch.Tensor:
        return self.detach()


def test_shards_are_left_to_distributed_checkpoints(tmp_path: Path) -> None:
    stage = pipeline(nn.Sequential(nn.Linear(2, 2)), (torch.ones(2, 2),), num_stages=1).build_stage(0, "cpu")
    stage.submod.get_submodule("0").weight = InShards(torch.ones(2, 2))
    with pytest.raises(
        CheckpointError, match=r"0\.weight of stage 0 is in shards on several ranks: use pipecut\.save_ch"
    ):
        save_stage(stage, tmp_path)


def test_a_save_that_is_interrupted_leaves_the_one_before(tmp_path: Path) -> None:
    """A job was killed between the files of two ranks: half of the older step and half of the newer one were loaded."""
    stages = build_all(cut(real_model()))
    for stage in stages:
        save_stage(stage, tmp_path)
    older = {name: value.clone() for stage in stages for name, value in stage.submod.state_dict().items()}
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.submod.parameters():
                parameter.add_(1)
    for stage in stages[:-1]:
        save_stage(stage, tmp_path)
        assert_holds(tmp_path, older)
    (tmp_path / "stage-00001-of-00004-step9.safetensors").touch()
    with pytest.warns(PipeWarning, match=r"that did not come to the end are left alone: stage-00001-of-00004-step9"):
        save_stage(stages[-1], tmp_path)
    assert_holds(tmp_path, {name: value for stage in stages for name, value in stage.submod.state_dict().items()})
    assert len(list(tmp_path.glob("*.safetensors"))) == 5  # those of the first save are gone


def assert_holds(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    for stage in build_all(cut(real_model()), checkpoint=directory):
        for name, value in stage.submod.state_dict().items():
            assert torch.equal(value, expected[name])


def test_stages_of_several_saves_are_not_loaded_as_one(tmp_path: Path) -> None:
    stages = build_all(cut(real_model()))
    for step, stage in enumerate(stages):
        save_stage(stage, tmp_path, step=step)  # of four steps, each of which was interrupted
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors\.index\.json, which the last .*-step1\."):
        build_all(cut(real_model()), checkpoint=tmp_path)
