"""torch.distributed.pipelining._unflatten: stages keep the model's hierarchy by themselves."""

from .unsupported import replaced

_outline_submodules = replaced("_outline_submodules", "the stages of pipecut.pipeline() have the model's own hierarchy")
