"""Calls cut into microbatches and results merged by upstream's functions: the same values, and kinds of errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

import pipecut
from pipecut.compat import PipelineStage, schedules
from pipecut.compat.microbatch import (
    TensorChunkSpec,
    _shard_dict_of_args,
    _split_block_mask,
    _split_tensor,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from pipecut.errors import PipeError
from pipecut.stage import split_args_kwargs_into_chunks as own_split
from tests.support.ranks import Ranks

BY_ROWS = TensorChunkSpec(0)
X = torch.arange(8.0).reshape(2, 4)


def fails(kind: type[Exception], told: str, call: Any, *args: Any) -> None:
    with pytest.raises(kind, match=told) as caught:
        call(*args)
    assert isinstance(caught.value, PipeError)


@pytest.mark.parametrize("container", [tuple, list])
def test_one_spec_in_a_tuple_makes_a_tuple_of_one_tensor(container: type) -> None:
    merged = merge_chunks([X, X], container([BY_ROWS]))
    assert type(merged) is container
    assert torch.equal(merged[0], torch.cat([X, X]))


def test_the_merge_spec_of_a_schedule_makes_a_tuple_of_one_tensor() -> None:
    model = nn.Linear(4, 4)
    for microbatches in (1, 2):
        stage = PipelineStage(model, 0, 1, "cpu")
        schedule = schedules.ScheduleGPipe(stage, microbatches, nn.functional.mse_loss, output_merge_spec=(BY_ROWS,))
        output = schedule.step(X, target=X)
        assert type(output) is tuple
        torch.testing.assert_close(output, (model(X).detach(),))


def test_one_spec_for_a_tuple_leaves_it_a_tuple() -> None:
    assert type(merge_chunks([(X,), (X,)], BY_ROWS)) is tuple


def test_kinds_of_errors_of_merge_chunks() -> None:
    fails(IndexError, "nothing to merge", merge_chunks, [], None)
    fails(RuntimeError, "they may differ in that dim only", merge_chunks, [X, torch.ones(2, 3)], BY_ROWS)
    fails(IndexError, "cannot be joined along dim 2", merge_chunks, [X, X], TensorChunkSpec(2))


def test_too_few_samples_make_fewer_chunks() -> None:
    args, kwargs = split_args_kwargs_into_chunks((X, "a"), {"y": torch.ones(2), "n": 4}, 5)
    assert [(x.tolist(), text) for x, text in args] == [([row], "a") for row in X.tolist()]
    assert [(each["y"].tolist(), each["n"]) for each in kwargs] == [([1.0], 4)] * 2
    assert len(_shard_dict_of_args({"y": X}, {"y": BY_ROWS}, 3)) == 2
    fails(ValueError, "0 samples cannot be cut into 2", split_args_kwargs_into_chunks, (X[:0],), None, 2)


def test_too_few_samples_of_a_block_mask_make_fewer_chunks() -> None:
    masks = [
        create_block_mask(lambda b, h, q, k: q >= k, B=batch, H=None, Q_LEN=8, KV_LEN=8, device="cpu", BLOCK_SIZE=8)
        for batch in (1, 2)
    ]
    assert [len(split_args_kwargs_into_chunks((mask,), None, 4)[0]) for mask in masks] == [4, 2]
    fails(AssertionError, "2 samples cannot be cut into 4 microbatches", _split_block_mask, masks[1], 4)


def test_a_step_refuses_too_few_samples() -> None:
    schedule = schedules.ScheduleGPipe(PipelineStage(nn.Linear(4, 4), 0, 1, "cpu"), 3, nn.functional.mse_loss)
    fails(ValueError, "2 samples cannot be cut into 3 microbatches", lambda: schedule.step(X, target=X))


def test_as_many_specs_as_arguments() -> None:
    for specs in ((), (BY_ROWS, BY_ROWS)):
        told = f"args_chunk_spec has entries for {len(specs)} arguments, and there are 1 positional"
        fails(AssertionError, told, split_args_kwargs_into_chunks, (X,), None, 2, specs)
    told = "kwargs_chunk_spec is for none, and the keyword arguments are y, z: give one for each"
    fails(AssertionError, told, split_args_kwargs_into_chunks, (), {"y": X, "z": X}, 2, None, {})
    fails(AssertionError, "kwargs_chunk_spec is for none", _shard_dict_of_args, {"y": X}, {}, 2)


def test_too_few_samples_of_one_tensor() -> None:
    fails(AssertionError, "2 samples cannot be cut into 3 microbatches", _split_tensor, X, BY_ROWS, 3)


class Table(nn.Module):
    """A layer that looks a value up in a table of its own microbatch, and takes keywords that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None, **options: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if table is None else y + table.sum(0)


def test_arguments_with_other_numbers_of_rows_are_cut_by_themselves() -> None:
    """As upstream does: each argument into the number of microbatches. pipecut's own functions refuse."""
    table, unused = torch.arange(24.0).reshape(6, 4), torch.arange(5.0)
    args, kwargs = split_args_kwargs_into_chunks((X.repeat(4, 1), table), {"unused": unused}, 4)
    assert [[len(each) for each in part] for part in args] == [[2, 2], [2, 2], [2, 1], [2, 1]]
    assert [each["unused"].tolist() for each in kwargs] == [[0.0, 1.0], [2.0], [3.0], [4.0]]
    few, _ = split_args_kwargs_into_chunks((X.repeat(4, 1), torch.arange(3)), None, 4)
    assert [[len(each) for each in part] for part in few] == [[3, 1], [3, 1], [2, 1]]
    with pytest.raises(PipeError, match="do not have the same number of samples"):
        own_split((X.repeat(4, 1), table), None, 4)


@pytest.mark.upstream
def test_upstream_cuts_arguments_with_other_numbers_of_rows_in_the_same_way() -> None:
    from torch.distributed.pipelining import microbatch as upstream

    for rows in (8, 6, 3):
        call = ((X.repeat(4, 1), torch.arange(rows)), {"unused": torch.arange(5.0)}, 4)
        torch.testing.assert_close(split_args_kwargs_into_chunks(*call), upstream.split_args_kwargs_into_chunks(*call))


def test_a_step_cuts_arguments_with_other_numbers_of_rows() -> None:
    torch.manual_seed(0)
    model, x, table = Table(), torch.randn(8, 4), torch.randn(6, 4)
    schedule = schedules.ScheduleGPipe(PipelineStage(model, 0, 1, "cpu"), 2, nn.functional.mse_loss)
    for extra in ({}, {"unused": torch.arange(7)}):
        output = schedule.step(x, table, target=x, **extra)
        wanted = torch.cat([model(x[:4], table[:3]), model(x[4:], table[3:])])
        torch.testing.assert_close(output, wanted.detach())
    own = pipecut.ScheduleGPipe([pipecut.PipelineStage(model, 0, 1, "cpu")], 2, nn.functional.mse_loss)
    fails(ValueError, "do not have the same number of samples", lambda: own.step(x, table, target=x))
    fails(ValueError, "do not have the same number of samples", lambda: schedule.step(x, table[:1], target=x))


def with_other_rows(rank: int) -> None:
    """The keywords of each rank have rows of their own."""
    torch.manual_seed(0)
    model, x, table = nn.ModuleList([Table(), Table()]), torch.randn(8, 4), torch.randn(6, 4)
    schedule = schedules.Schedule1F1B(PipelineStage(model[rank], rank, 2, "cpu"), 2, nn.functional.mse_loss)
    schedule.step(*((x,) if rank == 0 else ()), target=x if rank else None, table=table, unused=torch.arange(5))
    halves = [model[1](model[0](part, half), half) for part, half in zip(x.split(4), table.split(3), strict=True)]
    found = [parameter.grad for parameter in model[rank].parameters()]
    model.zero_grad()
    nn.functional.mse_loss(torch.cat(halves), x).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model[rank].parameters()])


@pytest.mark.distributed
def test_keywords_with_other_numbers_of_rows_on_ranks(two_ranks: Ranks) -> None:
    two_ranks.run(with_other_rows)
