"""How even the stages are that pipecut cuts: the longest measured stage beside the mean, and beside two simple rules.

Every stage runs by itself, forward and backward; the time of a stage is the median of its runs. The same models are
cut into equal numbers of layers, and by parameters, at the same places.
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import pipecut
from examples.vision import UNet
from pipecut.pipe import Pipe
from pipecut.pipe_ir.traced import TracedModel
from pipecut.planning.measure import example_values, measure_stages
from pipecut.planning.measured_chain import measured_chain, refined_cut
from pipecut.split.automatic import balanced_cut
from pipecut.split.balance.solve import Blocks, Shared, balance_stages
from pipecut.split.chain import Chain, chain_of
from pipecut.split.cost.machine import Machine
from pipecut.split.cut import cut_trace
from pipecut.split.points import SplitPlan

from .measure import Goal, console, show_table, time_left

STAGES = (2, 4, 8)
LIMIT = 1.10
OF_THE_GOAL = ("GPT-2", "Llama", "T5", "ViT", "example: U-Net")
SECONDS_FOR_EACH = 15  # of a further model; it is left out if there is less than that three times over
ROWS, TOKENS, WIDTH, LAYERS, WORDS = 4, 64, 128, 8, 2048
LARGE = (50_000, 64)


@dataclass(frozen=True)
class Subject:
    """A model and what it is called with."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]


def _text() -> dict[str, Tensor]:
    tokens = torch.randint(3, 1000, (ROWS, TOKENS))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.arange(ROWS) % 2}


def _published(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return made.train()

    return make


DECODER = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
    "pad_token_id": 0,
}  # fmt: skip
ENCODER = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
BOTH = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH, "pad_token_id": 0,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


def subjects() -> list[Subject]:
    """The models of the examples, and published ones at sizes where a step takes some milliseconds."""
    from examples.gpt import GPT, GPTConfig, random_tokens

    config = GPTConfig(width=WIDTH, vocabulary=WORDS)
    return [
        Subject("example: GPT", lambda: GPT(config), lambda: {"tokens": random_tokens(config, ROWS)}),
        Subject("example: U-Net", lambda: UNet(16, image_channels=3), lambda: {"image": torch.randn(ROWS, 3, 64, 64)}),
        Subject("GPT-2", _published("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS,
                                    n_head=4, n_positions=128), _text),
        Subject("Llama", _published("LlamaForCausalLM", "LlamaConfig", **DECODER), _text),
        Subject("Mistral", _published("MistralForCausalLM", "MistralConfig", **DECODER), _text),
        Subject("Qwen2", _published("Qwen2ForCausalLM", "Qwen2Config", **DECODER), _text),
        Subject("Gemma", _published("GemmaForCausalLM", "GemmaConfig", **DECODER), _text),
        Subject("GPT-NeoX", _published("GPTNeoXForCausalLM", "GPTNeoXConfig", vocab_size=WORDS, hidden_size=WIDTH,
                                       intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
                                       num_attention_heads=4), _text),
        Subject("OPT", _published("OPTForCausalLM", "OPTConfig", vocab_size=WORDS, hidden_size=WIDTH, ffn_dim=4 * WIDTH,
                                  num_hidden_layers=LAYERS, num_attention_heads=4, word_embed_proj_dim=WIDTH), _text),
        Subject("BERT", _published("BertForMaskedLM", "BertConfig", **ENCODER), _text),
        Subject("RoBERTa", _published("RobertaForMaskedLM", "RobertaConfig", **ENCODER), _text),
        Subject("T5", _published("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=WIDTH, d_kv=32,
                                 d_ff=4 * WIDTH, num_layers=4, num_heads=4, decoder_start_token_id=0), _text),
        Subject("BART", _published("BartForConditionalGeneration", "BartConfig", **BOTH), _text),
        Subject("ViT", _published("ViTForImageClassification", "ViTConfig", hidden_size=WIDTH, num_hidden_layers=LAYERS,
                                  num_attention_heads=4, intermediate_size=4 * WIDTH, image_size=64,
                                  patch_size=8), _images),
    ]  # fmt: skip


def stage_times(traced: TracedModel, plan: SplitPlan, inputs: Mapping[str, Tensor], rounds: int) -> list[float]:
    """The time of each stage: the median over rounds, in which the stages take turns."""
    pipe = cut_trace(traced, plan, Pipe)
    device = torch.device("cpu")
    values = example_values(traced, (), inputs, device)
    totals = [[times.total for times in measure_stages(pipe, values, device)] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*totals, strict=True)]


def imbalance(times: Sequence[float]) -> float:
    """The longest beside the mean."""
    return max(times) / statistics.mean(times)


def _by_layers(chain: Chain, stages: int) -> list[int]:
    count = len(chain.times)
    return [round(count * stage / stages) for stage in range(1, stages)]


def _by_parameters(chain: Chain, stages: int) -> list[int]:
    amounts = [
        sum(item.parameter for item in chain.shared if block == item.blocks[0]) for block in range(len(chain.times))
    ]
    total = [own + tied for own, tied in zip(chain.parameters, amounts, strict=True)]
    return list(balance_stages(Blocks(times=tuple(total)), stages).cuts)


def _outer(chain: Chain, stages: int) -> Chain:
    """The outermost modules of which there are enough: what a rule by layers deals out."""
    depths = sorted({place.depth for place in chain.places})
    return next((part for part in map(chain.up_to, depths) if len(part.times) >= 2 * stages), chain)


def _compare(subject: Subject, rounds: int) -> list[tuple[list[str], float, float]]:
    torch.manual_seed(0)
    model, inputs = subject.make(), subject.inputs()
    traced = pipecut.pipeline(model, (), inputs).traced
    analytic = chain_of(traced, Machine.measure("cpu"))
    rows = []
    for stages in STAGES:
        if stages > len(analytic.times):
            continue
        chain = measured_chain(analytic, (), inputs, stages=stages)
        outer = _outer(chain, stages)
        cut = refined_cut(chain, functools.partial(balanced_cut, stages=stages), (), inputs)
        plans = {
            "measured": cut.plan,
            "analytic": balanced_cut(analytic, stages).plan,
            "layers": outer.plan(_by_layers(outer, stages)),
            "parameters": outer.plan(_by_parameters(outer, stages)),
        }
        found = {name: imbalance(stage_times(traced, plan, inputs, rounds)) for name, plan in plans.items()}
        texts = [f"{found[name]:.3f}" for name in plans]
        rows.append(
            (
                [subject.name, str(stages), f"{cut.balance.imbalance:.3f}", *texts],
                cut.balance.imbalance,
                found["measured"],
            )
        )
    return rows


def _show_large() -> None:
    """The time that a large chain takes."""
    count, stages = LARGE
    blocks = Blocks(
        times=tuple(1.0 + (place * 7919 % 101) / 100 for place in range(count)),
        transfers=tuple(float(place * 31 % 17) for place in range(count - 1)),
        saved=(1.0,) * count,
        shared=(Shared((0, count - 1), kept=50.0),),
    )
    limits: list[tuple[str, dict[str, Any]]] = [
        ("no memory limit", {}),
        ("a memory limit", {"memory_limit": 2e4, "in_flight": [stages - stage for stage in range(stages)]}),
    ]
    rows = []
    for name, options in limits:
        begin = time.process_time()
        found = balance_stages(blocks, stages, **options)
        rows.append([name, f"{time.process_time() - begin:.2f}", f"{found.imbalance:.4f}", str(found.is_best)])
    show_table(f"{count:,} blocks into {stages} stages", ["", "seconds", "bottleneck / mean", "proven best"], rows)


def run(rounds: int) -> Iterator[Goal]:
    """Print the imbalance of the models of the goal, and of others as long as there is time."""
    warnings.filterwarnings("ignore", category=pipecut.PipeWarning)
    _show_large()
    rows, found = [], []
    for subject in sorted(subjects(), key=lambda subject: subject.name not in OF_THE_GOAL):
        begin = time.monotonic()
        if subject.name not in OF_THE_GOAL and time_left() < 3 * SECONDS_FOR_EACH:
            break
        for texts, expected, measured in _compare(subject, rounds):
            rows.append(texts)
            console.print("  ".join(texts), style="dim")
            if expected <= LIMIT / 1.03:
                found.append(measured)
                yield Goal(f"{subject.name}, {texts[1]} stages: longest stage / mean", measured, LIMIT)
        console.print(f"{subject.name} took {time.monotonic() - begin:.0f} s", style="dim")
    columns = ["model", "stages", "expected", "measured costs", "analytic costs", "by layers", "by parameters"]
    show_table("the longest stage / the mean stage, measured", columns, rows)
    good = sum(each <= LIMIT for each in found)
    console.print(f"{good} of {len(found)} cuts within {LIMIT}; median {statistics.median(found):.3f}")
