"""Trains a U-Net on 2 local ranks to find discs in noisy images, and the uncut model beside it: run `python vision.py`.

The U-Net is cut into four stages, which a V-shaped schedule puts on rank 0, 1, 1 and 0. Its skip connections become
edges that pass over stages in between; the longest one stays on rank 0, which has both ends of the U.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipecut import Pipe, ScheduleZBVZeroBubble, SplitPoint, launch, pipeline
from pipecut.training import Progress

RANKS, MICROBATCHES, BATCH, SIZE = 2, 4, 16, 32


class Convolutions(nn.Sequential):
    """Two convolutions that keep the image's size."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """Down, along the bottom, and up again; what went down comes back in on the same level.

    image --- down1 ------------------------------ up1 --- out
                 \\--- down2 -------------- up2 ---/
                          \\--- bottom ---/
    """

    def __init__(self, channels: int = 8, image_channels: int = 1) -> None:
        super().__init__()
        self.down1 = Convolutions(image_channels, channels)
        self.down2 = Convolutions(channels, 2 * channels)
        self.bottom = Convolutions(2 * channels, 4 * channels)
        self.up2 = Convolutions(4 * channels + 2 * channels, 2 * channels)
        self.up1 = Convolutions(2 * channels + channels, channels)
        self.out = nn.Conv2d(channels, 1, 1)
        self.shrink = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2)

    def forward(self, image: Tensor) -> Tensor:
        level1 = self.down1(image)
        level2 = self.down2(self.shrink(level1))
        x = self.bottom(self.shrink(level2))
        x = self.up2(torch.cat([self.grow(x), level2], dim=1))
        x = self.up1(torch.cat([self.grow(x), level1], dim=1))
        return self.out(x)


def images(seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images with a disc in each, and where it is: 1 inside, 0 outside."""
    generator = torch.Generator().manual_seed(seed)
    center = torch.randint(8, SIZE - 8, (2, BATCH, 1, 1, 1), generator=generator)
    radius = torch.randint(3, 8, (BATCH, 1, 1, 1), generator=generator)
    rows, columns = torch.arange(SIZE).view(-1, 1), torch.arange(SIZE).view(1, -1)
    disc = ((rows - center[0]).square() + (columns - center[1]).square() <= radius.square()).double()
    return disc + 0.5 * torch.randn(disc.shape, generator=generator, dtype=disc.dtype), disc


@dataclass(frozen=True)
class Run:
    """The loss of each step, and the state of the model at the end, as far as it is here."""

    losses: list[float]
    state: dict[str, Tensor]


def cut(model: UNet) -> Pipe:
    """Cut the U after each level but the last."""
    cuts = {"down1": SplitPoint.END, "bottom": SplitPoint.END, "up2": SplitPoint.END}
    return pipeline(model, (images(0)[0],), split_spec=cuts)


def fresh_model() -> UNet:
    """Return the same weights every time, on every rank; in double precision, so that rounding does not add up."""
    torch.manual_seed(0)
    return UNet().double()


def train_rank(steps: int) -> Run:
    """Train the stages of this rank."""
    rank, pipe = dist.get_rank(), cut(fresh_model())
    stages = [pipe.build_stage(stage, "cpu") for stage in (rank, 2 * RANKS - 1 - rank)]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=F.binary_cross_entropy_with_logits)
    optimizer = torch.optim.SGD(schedule.parameters(), lr=0.1, momentum=0.9)
    losses = []
    with Progress(steps, schedule) as progress:
        for step in range(steps):
            x, y = images(step)
            optimizer.zero_grad()
            schedule.step(*([x] if rank == 0 else []), target=y if rank == 0 else None)  # both ends are on rank 0
            optimizer.step()
            progress.update()
            losses.append(schedule.mean_loss())
    return Run(losses, {name: value.detach() for name, value in schedule.state_dict().items()})


def train_uncut(steps: int) -> Run:
    """Train on one device, with gradients accumulated over the same microbatches, as batch norm sees them."""
    model, losses = fresh_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        parts = zip(*(part.chunk(MICROBATCHES) for part in images(step)), strict=True)
        found = [F.binary_cross_entropy_with_logits(model(x), y) / MICROBATCHES for x, y in parts]
        sum(found).backward()
        optimizer.step()
        losses.append(sum(found).item())
    return Run(losses, model.state_dict())


def main() -> int:
    """Cut, show, train, compare. 0 if the stages end like the uncut model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="(default: %(default)s)")
    steps = parser.parse_args().steps
    print(cut(fresh_model()))
    runs, uncut = launch(train_rank, RANKS, steps), train_uncut(steps)
    state = {name: value for run in runs for name, value in run.state.items()}
    assert len(runs) < RANKS or state.keys() == uncut.state.keys()  # under torchrun each rank compares its own stages
    worst = max((state[name].double() - uncut.state[name].double()).abs().max().item() for name in state)
    print(f"loss {runs[0].losses[0]:.4f} to {runs[0].losses[-1]:.4f} in {steps} steps on {RANKS} ranks")
    print(f"worst difference from the uncut model: {worst:.1e}, over {len(state)} parameters and buffers")
    return 0 if worst < 1e-8 else 1


if __name__ == "__main__":
    sys.exit(main())
