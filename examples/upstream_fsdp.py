"""Written for torch.distributed.pipelining: hand-written stages, fully_shard x pipeline, on 2 x 2 ranks.

It runs on upstream and on pipecut alike, with the same losses:

    torchrun --nproc-per-node 4 examples/upstream_fsdp.py
    torchrun --nproc-per-node 4 -m pipecut.compat examples/upstream_fsdp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, LAYERS, BATCH, MICROBATCHES, STEPS = 32, 4, 16, 4, 5


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    """Train a few steps and print the losses on the last rank of the first pipeline."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    data, pipe = mesh["dp"], mesh["pp"]
    torch.manual_seed(0)
    layers = [Block() for _ in range(LAYERS)]
    rank, ranks = pipe.get_local_rank(), pipe.size()
    share = LAYERS // ranks
    module = nn.Sequential(*layers[rank * share : (rank + 1) * share])
    for block in module:
        fully_shard(block, mesh=data, reshard_after_forward=False)
    fully_shard(module, mesh=data, reshard_after_forward=False)
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"), group=pipe.get_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + data.get_local_rank())
        x = torch.randn(BATCH, WIDTH, generator=generator)
        y = torch.tanh(x.roll(1, dims=1))
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        if losses and data.get_local_rank() == 0:
            print(f"step {step} loss {torch.stack(losses).mean().item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
