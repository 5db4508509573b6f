"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = """batch_dims block_mask call_leaves chunk_spec distributed_tensor merge merge_leaf split
sample_count spec_match spec_text tensor_cut""".split()


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"pipecut.stage.microbatch.{module}")).failed == 0
