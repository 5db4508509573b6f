"""Written for torch.distributed.pipelining: a model traced and cut, one stage on each of 2 ranks.

It runs on upstream and on pipecut alike, with the same losses:

    torchrun --nproc-per-node 2 examples/upstream_traced.py
    torchrun --nproc-per-node 2 -m pipecut.compat examples/upstream_traced.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

WORDS, WIDTH, LENGTH, BATCH, MICROBATCHES, STEPS = 50, 32, 12, 8, 4, 5


class Tagger(nn.Module):
    """Words in, words out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    """Train a few steps and print the losses on the last rank."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Tagger()
    example = torch.zeros(BATCH // MICROBATCHES, LENGTH, dtype=torch.long)
    pipe = pipeline(model, mb_args=(example,), split_spec={"layers.2": SplitPoint.BEGINNING})
    assert pipe.num_stages == ranks
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.5)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(words)
        else:
            schedule.step(target=words.flip(1), losses=losses)
        optimizer.step()
        if losses:
            print(f"step {step} loss {torch.stack(losses).mean().item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
