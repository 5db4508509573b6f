"""An exported folder is loaded by transformers and peft, and by pipecut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipecut import CheckpointError, InputError, Schedule1F1B, export_safetensors, pipeline
from tests.support.ranks import Ranks
from tests.training.checkpoint import rank_cases
from tests.training.checkpoint.jobs import cut, make_job


def test_the_folder_is_read_back_under_any_cut(tmp_path: Path) -> None:
    job = make_job(2)
    job.train(0, 2)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "other.bin").write_text("")
    for folder in (tmp_path / "export", tmp_path / "export"):  # into the same folder again
        assert export_safetensors(folder, job.schedule, {"model_type": "net"}, tokenizer) == folder
    names = sorted(path.name for path in folder.iterdir())
    assert [name for name in names if not name.startswith("stage-")] == [
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert len(names) == 5
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "net"}
    expected = job.schedule.state_dict()
    for index in range(3):
        for name, value in cut(3).build_stage(index, "cpu", checkpoint=folder).submod.state_dict().items():
            assert torch.equal(value, expected[name])


@pytest.mark.parametrize("wrapper", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_copies_and_shards_are_exported_once(wrapper: str, two_ranks: Ranks, tmp_path: Path) -> None:
    states = two_ranks.run(rank_cases.export_hybrid, str(tmp_path), wrapper)
    stage = cut(1).build_stage(0, "cpu", checkpoint=tmp_path)
    for name, value in stage.submod.state_dict().items():
        assert torch.equal(value, states[0][name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": 3}, r"config is a int: pass an object with save_pretrained\(\), or a path"),
        ({"tokenizer": "/nowhere"}, r"tokenizer='/nowhere': there is no such file or directory"),
    ],
)
def test_what_cannot_be_exported(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, InputError), match=message):
        export_safetensors(tmp_path, make_job(1).schedule, **arguments)
    assert not list(tmp_path.iterdir())


def schedule_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Schedule1F1B:
    pipe = pipeline(model, (), batch, num_stages=3)
    return Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(3)], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_transformers_loads_it(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    from tests.support.transformers_models import PUBLISHED, make

    assert name in PUBLISHED
    model, batch = make(name)
    schedule = schedule_of(model, batch)
    schedule.step(**batch)
    torch.optim.SGD(schedule.parameters(), lr=0.1).step()
    loaded = type(model).from_pretrained(export_safetensors(tmp_path, schedule))
    assert transformers.AutoConfig.from_pretrained(tmp_path).architectures == [type(model).__name__]
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.slow
def test_the_adapters_of_peft_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra `peft` is not installed")
    from tests.support.transformers_models import make

    model, batch = make("llama")
    base = {name: value.clone() for name, value in model.state_dict().items()}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    schedule = schedule_of(adapted, batch)
    schedule.step(**batch)
    torch.optim.SGD([p for p in schedule.parameters() if p.requires_grad], lr=0.1).step()
    export_safetensors(tmp_path, schedule)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    fresh, _ = make("llama")
    fresh.load_state_dict(base)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path)
    expected = adapted.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, expected[key]), key
