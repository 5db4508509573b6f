"""Names that torch.distributed.pipelining's modules have only because they import them, for code that takes them there.

pipecut uses none of them here: each is looked up where it is when somebody asks for it, and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_ORIGINS = {
    "_IR": """copy operator collections.defaultdict collections.abc.Callable inspect.Parameter inspect.Signature
        inspect.signature types.MethodType torch.fx torch.distributed.ProcessGroup torch.export.ExportedProgram
        torch.export.unflatten._assign_attr torch.export.unflatten._AttrKind torch.export.unflatten._sink_params
        torch.export.unflatten.InterpreterModule torch.fx.node.map_aggregate
        torch.fx.passes.split_module.split_module""",
    "_backward": "collections torch torch.autograd.graph.GradientEdge torch.autograd.graph.Node torch.nn.Parameter",
    "_debug": "torch torch.fx.node.Argument",
    "_schedule_visualizer": "collections unittest.mock",
    "_unflatten": """collections.defaultdict torch torch.export.unflatten._ModuleFrame
        torch.export.unflatten._SubmoduleEntry""",
    "_utils": """dataclasses.field enum.Enum typing.cast typing.Literal typing.overload typing.Protocol
        typing.TYPE_CHECKING typing.TypeAlias torch.fx torch.distributed._mesh_layout._MeshLayout
        torch.distributed.tensor.DTensor torch.utils._pytree.tree_flatten torch.utils._pytree.tree_unflatten""",
    "microbatch": """operator typing.cast torch.distributed.tensor.DTensor torch.fx.node.map_aggregate
        torch.nn.attention.flex_attention.BlockMask torch.utils._pytree.tree_flatten torch.utils._pytree.tree_map
        torch.utils._pytree.tree_unflatten""",
    "schedules": """copy csv itertools abc.ABC abc.abstractmethod collections.Counter collections.defaultdict
        dataclasses.dataclass enum.Enum functools.lru_cache typing.cast typing.Literal typing.NamedTuple
        torch._dynamo.OptimizedModule torch.distributed.fsdp.FSDPModule torch.distributed.fsdp.UnshardHandle
        torch.nn.modules.loss._Loss torch.profiler.record_function""",
    "stage": """operator warnings typing.cast torch.fx torch._subclasses.fake_tensor.FakeTensor
        torch.distributed._composable.replicate_with_fsdp.replicate
        torch.distributed._composable.replicate_with_fsdp.ReplicateModule torch.distributed.fsdp.FSDPModule
        torch.distributed.fsdp.fully_shard torch.distributed.tensor.DTensor torch.fx.node.Argument
        torch.fx.node.map_aggregate torch.nn.parallel.DistributedDataParallel""",
}


def imported_by(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of compat: it finds what upstream's module of that name imports.

    >>> from pipecut.compat.microbatch import BlockMask
    >>> BlockMask
    <class 'torch.nn.attention.flex_attention.BlockMask'>
    """
    name = module.rpartition(".")[2]
    origins = {path.rpartition(".")[2]: path for path in _ORIGINS[name].split()}

    def find(wanted: str) -> Any:
        if wanted not in origins:
            raise AttributeError(f"module {module!r} has no attribute {wanted!r}")
        owner, _, last = origins[wanted].rpartition(".")
        try:
            return getattr(importlib.import_module(owner), last) if owner else importlib.import_module(last)
        except ImportError as error:  # in another version of torch it is elsewhere, or nowhere
            raise AttributeError(f"module {module!r} has no attribute {wanted!r} with this torch: {error}") from error

    return find
