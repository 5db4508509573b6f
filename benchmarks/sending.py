"""Bytes that stages send each other per microbatch, for published models with labels at their default settings.

They are counted from the edges of the cut, not timed: forward every value that is sent, backward the gradients of those
that have one. `outputs="all"` sends all that the model returns; by default a training step sends what later stages use.
Layers are as wide as published, and fewer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import torch
import transformers
from torch import nn

import pipecut

from .measure import Goal, show_goals, show_table

STAGES, ROWS, TOKENS = 4, 1, 512
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4)),
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=4)),
    "T5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(num_layers=2, num_decoder_layers=6, decoder_start_token_id=0)
    ),
    "Mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(num_hidden_layers=4)),
}


def run(rounds: int) -> Iterator[Goal]:
    """Count for all models, print the table and the goals; a count needs no rounds."""
    transformers.logging.set_verbosity_error()
    rows, goals = [], []
    for name, make in MODELS.items():
        every, used = (_cut(make, outputs) for outputs in ("all", "used"))
        before, after = _bytes(every), _bytes(used)
        rows.append([name, _text(before), _text(after), f"{after / before:.3f}", str(_whole(every)), str(_whole(used))])
        goals.append(Goal(f"{name}: bytes that are sent only to be returned, of all", _only_returned(used) / after, 0))
    columns = ["model", 'outputs="all"', "default", "ratio", "whole modules", "by default"]
    show_table(f"sent per microbatch of {ROWS} x {TOKENS} tokens, forward and backward, {STAGES} stages", columns, rows)
    yield from show_goals(goals)


def _cut(make: Callable[[], nn.Module], outputs: str) -> pipecut.Pipe:
    with torch.device("meta"):
        model = make().train()
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with so few layers the stages are not even
        return pipecut.pipeline(model, (), batch, num_stages=STAGES, cut_inside_layers=False, outputs=outputs)


def _bytes(pipe: pipecut.Pipe, values: set[int] | None = None) -> int:
    """Bytes of the edges, or of those to the last stage that have these values."""
    last = pipe.num_stages - 1
    edges = [edge for edge in pipe.edges if values is None or (edge.value in values and edge.target == last)]
    found = 0
    for edge in edges:
        spec = edge.spec.bind(pipe.traced.hints)
        found += (2 if spec.requires_grad else 1) * math.prod(map(int, spec.shape)) * spec.dtype.itemsize
    return found


def _only_returned(pipe: pipecut.Pipe) -> int:
    return _bytes(pipe, set(pipe.only_returned))


def _whole(pipe: pipecut.Pipe) -> int:
    """Modules that run their own code, those inside of them not counted."""
    return sum(len(info.modules) for info in pipe.stage_infos)


def _text(count: int) -> str:
    return f"{count / 2**20:.2f} MB"
