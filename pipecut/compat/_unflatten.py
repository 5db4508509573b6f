"""torch.distributed.pipelining._unflatten: stages keep the model's hierarchy by themselves."""

from typing import TYPE_CHECKING

from .imported_names import imported_by
from .unsupported import replaced

_outline_submodules = replaced("_outline_submodules", "the stages of pipecut.pipeline() have the model's own hierarchy")

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = imported_by(__name__)
