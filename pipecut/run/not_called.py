"""The methods of a peer's schedule that the executor does not call, and what to do instead."""

from __future__ import annotations

_STEPS = "the microbatches of a step are cut, run and merged by step() and eval()"
_LOSS = "make the schedule with loss_fn=, a function of the output and the target of a microbatch"
_READY = "stages are ready when they are made"
_ORDER = "derive from PipelineScheduleMulti, and set self.pipeline_order to the actions of every rank"

NOT_CALLED: dict[str, str] = {
    "_step_microbatches": (
        "set self.pipeline_order to the actions of every rank instead, or use PlannedSchedule with a plan"
    ),
    **dict.fromkeys(("_compute_loss", "_maybe_compute_loss", "_maybe_get_loss"), _LOSS),
    "_update_losses": "pass losses=, a list, to step()",
    "_split_inputs": f"{_STEPS}; args_chunk_spec= and kwargs_chunk_spec= say how to cut",
    "_merge_outputs": f"{_STEPS}; output_merge_spec= says how to merge",
    "_check_inputs": _STEPS,
    **dict.fromkeys(("_initialize_stages", "_initialize_stage", "_initialize_pp_stages"), _READY),
    "_warmup_p2p": "connections are made by the first step",
    "_assert_unsharded": "a stage waits for its parameters by itself",
    "_validate_adjacent_stage_communication": "the plan is validated before the first step",
}

# What a schedule that sets its own order calls by itself, and one whose plan follows from its name does not.
NOT_CALLED_WITH_A_NAME: dict[str, str] = {
    "_calculate_single_rank_operations": _ORDER,
    "_prepare_schedule_with_comms": _ORDER,
    "_validate_and_set_stage_mapping": _ORDER,
}
