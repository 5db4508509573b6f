"""What the peer's PipeInfo has besides ours, or had in its place."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .. import pipe_ir
from ..pipe_ir.flat_output import FlatOutput
from ..stage.replaced_attributes import ReplacedAttributes


@dataclass(frozen=True)
class PipeInfo(pipe_ir.PipeInfo, ReplacedAttributes):
    """What is known of a Pipe without its modules. Stages that are built with it hand over tensors only."""

    has_loss_and_backward: bool = False  # a traced model holds no backward here either: it is the schedule's

    _replaced = {
        "graph": "what the stages are and what goes between them is in `stages` and `edges`, their code in "
        "pipe.print_readable()"
    }

    @classmethod
    def of(cls, info: pipe_ir.PipeInfo, flat_output: FlatOutput) -> PipeInfo:
        """The same, of a Pipe whose output is handed over flat."""
        known = {field.name: getattr(info, field.name) for field in fields(info)}
        return cls(**known | {"flat_output": flat_output})
