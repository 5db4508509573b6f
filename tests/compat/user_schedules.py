"""Schedules as users of upstream write them: orders with bubbles, set in the constructor."""

from __future__ import annotations

from typing import Any

from pipecut.compat.schedules import PipelineScheduleMulti, _Action, _PipelineScheduleRuntime


def rows(*texts: str) -> dict[int, list[_Action | None]]:
    return {
        rank: [_Action.from_str("" if cell == "." else cell) for cell in text.split()]
        for rank, text in enumerate(texts)
    }


class VShaped(PipelineScheduleMulti):
    n_stages, microbatches, ranks = 4, 1, 2
    order = rows("0F0 . . 3F0 3B0 . . 0B0", ". 1F0 2F0 . . 2B0 1B0 .")

    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, scale_grads: bool = True) -> None:
        super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
        self.pipeline_order = self.order
        self._validate_and_set_stage_mapping(self.pipeline_order)


class Unbalanced(VShaped):
    n_stages = 5
    order = rows("0F0 1F0 . . 4F0 4B0 . . 1B0 0B0", ". . 2F0 3F0 . . 3B0 2B0 . .")


class WithW(_PipelineScheduleRuntime):
    n_stages, microbatches, ranks = 4, 2, 2

    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, scale_grads: bool = True) -> None:
        super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
        self.use_full_backward = False
        self.pipeline_order = rows(
            "0F0 0F1 2F0 2F1 . 2I0 2W0 0I0 2I1 0W0 0I1 2W1 0W1", ". 1F0 1F1 3F0 3I0 3F1 1I0 3I1 3W0 1I1 1W0 3W1 1W1"
        )
        self._validate_and_set_stage_mapping(self.pipeline_order)


class ReorderedB(_PipelineScheduleRuntime):
    n_stages, microbatches, ranks = 2, 2, 2

    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, scale_grads: bool = True) -> None:
        super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
        self.pipeline_order_with_comms = rows(
            "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1", "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1"
        )


class FilledLater(VShaped):
    """Sets an empty dict, and fills it rank by rank, as upstream's own schedules do."""

    n_stages, microbatches = 2, 1

    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, scale_grads: bool = True) -> None:
        PipelineScheduleMulti.__init__(self, stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn)
        self.pipeline_order = {}
        for rank, row in rows("0F0 . . 0B0", ". 1F0 1B0").items():
            self.pipeline_order[rank] = row


ALL: tuple[Any, ...] = (VShaped, Unbalanced, WithW, ReorderedB, FilledLater)
