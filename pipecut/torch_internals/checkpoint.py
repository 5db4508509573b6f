"""The classes in the `.metadata` of torch.distributed.checkpoint, some of which have no public name.

The file is a pickle, and unpickling may run any code. Public torch reads it with `pickle.load`, whatever is in it.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import torch

# Where a checkpoint of torch.distributed.checkpoint has its description, and those of a rank that saved alone.
METADATA_FILE = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # Written by torch before 2.3.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
    "collections": {"OrderedDict"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that knows the classes of a checkpoint's description, dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = name in _CLASSES.get(module, ())
        if not known and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's description")
        return super().find_class(module, name)


def unpickle_metadata(content: bytes) -> Any:
    """Return the description of a checkpoint without running code from it; raise pickle.UnpicklingError otherwise."""
    for opcode, argument, _ in pickletools.genops(content):
        # The unpickler makes a table as long as the largest number that an object is kept under.
        if "PUT" in opcode.name and int(argument or 0) > len(content):
            raise pickle.UnpicklingError(
                f"it keeps an object under the number {argument}, and has {len(content)} bytes"
            )
    return _MetadataUnpickler(io.BytesIO(content)).load()
