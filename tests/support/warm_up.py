"""Cuts and traces a small model when it is imported: the ranks, which are forked afterwards, have it all at hand."""

from __future__ import annotations

import gc

import torch
import torch.distributed.fsdp  # slow to import, for four ranks at once
import torch.distributed.tensor.parallel
from torch import nn

from pipecut import get_schedule_class, pipeline

torch.set_num_threads(1)
_model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
_pipe = pipeline(_model, (torch.zeros(2, 2),), num_stages=2)
_stages = [_pipe.build_stage(index, "cpu") for index in range(2)]
_schedule = get_schedule_class("1F1B")(_stages, 2, nn.functional.mse_loss)  # type: ignore[arg-type]
_schedule.step(torch.zeros(2, 2), target=torch.zeros(2, 2))
gc.collect()
gc.freeze()  # ranks look at what they make, and leave this memory shared
