"""The description of a checkpoint of torch.distributed.checkpoint is made of the classes that pipecut knows."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from pipecut.torch_internals import METADATA_FILE, unpickle_metadata


@pytest.mark.filterwarnings("ignore:.*single process")
def test_a_description_is_read(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": {"c": 1}}, checkpoint_id=tmp_path)
    metadata = unpickle_metadata((tmp_path / METADATA_FILE).read_bytes())
    assert isinstance(metadata, Metadata)
    entry = metadata.state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    assert (tuple(entry.size), entry.properties.dtype) == ((2, 3), torch.bfloat16)
    assert set(metadata.state_dict_metadata) == {"a", "b.c"}


class _Call:
    def __reduce__(self) -> Any:
        return shutil.rmtree, ("/nowhere",)


@pytest.mark.parametrize("content", [_Call(), {"a": torch.nn.Linear}, [eval], torch.load])
def test_code_is_not_run(content: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="it names .*, which is no part of a checkpoint's description"):
        unpickle_metadata(pickle.dumps(content))


def test_a_number_that_would_take_all_memory_is_refused() -> None:
    """Python's unpickler makes a table of 34 GB for an object that is kept under the number 2 ** 32 - 1."""
    content = b"\x80\x02]r\xff\xff\xff\xff."
    with pytest.raises(pickle.UnpicklingError, match="keeps an object under the number 4294967295, and has 9 bytes"):
        unpickle_metadata(content)
