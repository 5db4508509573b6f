"""A model four times larger than the memory of a rank is cut on the meta device and trained."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipecut import Pipe, Schedule1F1B, pipeline, save_stage
from pipecut.stage.materialize.checkpoint import SafetensorsFile, write_safetensors
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WIDTH = 1200
LAYERS = 32
RANKS = 8  # an eighth of the model's parameters, with gradients for some of them, fits into the memory of a quarter
TRAINED = 4  # every fourth layer has gradients
MODEL_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
MEMORY = MODEL_BYTES // 4
M_MMAP_THRESHOLD = -3


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        for number, layer in enumerate(self.layers):
            layer.requires_grad_(number % TRAINED == 0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, WIDTH, generator=generator), torch.randn(6, WIDTH, generator=generator)


def layer_values(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        f"layers.{number}.weight": torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5,
        f"layers.{number}.bias": torch.randn(WIDTH, generator=generator),
    }


def write_checkpoint(folder: Path) -> None:
    """Layer by layer: whoever writes it needs no memory for the model either."""
    weight_map = {}
    for number in range(LAYERS):
        values = layer_values(number)
        write_safetensors(folder / f"layer-{number}.safetensors", values)
        weight_map |= dict.fromkeys(values, f"layer-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def limit_memory(more: int) -> None:
    """Let this process have so many bytes more than it has now."""
    # The allocator must give memory back when a tensor is gone, or old tensors would count too.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    status = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, resource.RLIM_INFINITY))


def cut() -> Pipe:
    with torch.device("meta"):
        model = Deep()
    return pipeline(model, (data()[0],), num_stages=RANKS)


def assert_the_whole_model_does_not_fit(pipe: Pipe, checkpoint: str) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        _ = [pipe.build_stage(index, "cpu", checkpoint=checkpoint) for index in range(RANKS)]
    assert caught.type is MemoryError or "can't allocate memory" in str(caught.value)
    del caught
    gc.collect()  # the stages that did fit are held by the frames of the error


def train(rank: int, checkpoint: str, results: str) -> float:
    limit_memory(MEMORY)
    pipe = cut()
    if rank == 0:
        assert_the_whole_model_does_not_fit(pipe, checkpoint)
    stage = pipe.build_stage(rank, "cpu", checkpoint=checkpoint)
    assert {parameter.device.type for parameter in pipe.traced.model.parameters()} == {"meta"}
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    x, y = data()
    schedule.step(*((x,) if rank == 0 else ()), target=y if rank == RANKS - 1 else None)
    gradients = {name: parameter.grad for name, parameter in stage.submod.named_parameters()}
    write_safetensors(Path(results) / f"{rank}.safetensors", {k: v for k, v in gradients.items() if v is not None})
    save_stage(stage, Path(results) / "saved")
    return schedule.mean_loss()


def test_ranks_with_a_quarter_of_the_models_memory_train_it(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    write_checkpoint(tmp_path)
    with Ranks(RANKS) as ranks:
        losses = ranks.run(train, str(tmp_path), str(results))
    uncut = Deep()
    uncut.load_state_dict({name: value for number in range(LAYERS) for name, value in layer_values(number).items()})
    x, y = data()
    loss = nn.functional.mse_loss(uncut(x), y)
    loss.backward()
    assert losses == pytest.approx([loss.item()] * RANKS, rel=1e-5)
    expected = dict(uncut.named_parameters())
    seen = set()
    for rank in range(RANKS):
        file = SafetensorsFile(results / f"{rank}.safetensors")
        for name in file.names:
            gradient = expected[name].grad
            # Through 32 layers float32 itself is off by 1e-5 of the largest gradient, whichever way the sums go.
            rounding = 2e-5 * gradient.abs().max().item() if gradient is not None else 0.0
            torch.testing.assert_close(file.load_object(name), gradient, rtol=1e-4, atol=rounding)
            seen.add(name)
    assert seen == {name for name, parameter in expected.items() if parameter.requires_grad}
    index = json.loads((results / "saved" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    assert index["metadata"]["total_size"] == MODEL_BYTES
