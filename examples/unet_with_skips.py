"""Cuts a tiny U-Net into three stages by name; its skip connections become edges that pass over the middle stage."""

from __future__ import annotations

import copy
import sys

import torch
from compare import check_forward, check_state, check_training_run, report
from rich.console import Console
from torch import Tensor, nn

from pipecut import SplitPoint, pipeline


class Convolutions(nn.Sequential):
    """Two convolutions that keep the image's size."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, 3, padding=1),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """Down, along the bottom, and up again; what went down comes back in on the same level.

    image --- down1 ------------------------------ up1 --- out
                 \\--- down2 -------------- up2 ---/
                          \\--- bottom ---/
    """

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.down1 = Convolutions(3, channels)
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


def main() -> int:
    """Cut, show, compare. 0 if the pipe and the uncut model agree in everything."""
    console = Console(width=120)
    torch.manual_seed(0)
    model = UNet()
    uncut = copy.deepcopy(model)
    images = torch.randn(4, 3, 32, 32)
    pipe = pipeline(model, (images,), split_spec={"down2": SplitPoint.END, "bottom": SplitPoint.END})
    console.print(str(pipe), highlight=False, markup=False)
    console.print()
    checks = [
        *check_training_run(pipe, uncut, images, lambda output: output.square().mean()),
        check_forward("output, batch of 7 without tracing again", pipe, uncut, torch.randn(7, 3, 32, 32)),
        check_state(pipe, uncut),
    ]
    return 0 if report(console, checks) else 1


if __name__ == "__main__":
    sys.exit(main())
