"""The methods of a peer's stage that the executor does not call, and what to do instead."""

from __future__ import annotations

_FORWARD = "put what it does into the forward of the stage's module, or into a hook of that module"
_BACKWARD = "put what it does into hooks of the module or its tensors, or register a custom function for backwards"
_TRANSFERS = "what is sent and received is the work of the schedule's executor"
_SHAPES = "shapes follow from the sizes of each step"
_REDUCTION = "gradients are reduced by the executor, as the wrapper of the module says"
_CHECKS = "the executor checks the order of calls, and what arrives"

NOT_CALLED: dict[str, str] = {
    "forward_one_chunk": _FORWARD,
    "forward_maybe_with_nosync": _FORWARD,
    "_compute_outputs": _FORWARD,
    "backward_one_chunk": _BACKWARD,
    "backward_maybe_with_nosync": _BACKWARD,
    "_compute_input_grads": _BACKWARD,
    "backward_weight_one_chunk": "pass dw_builder= to the stage for weight gradients of your own",
    "scale_grads": "make the schedule with scale_grads=False, and scale in loss_fn, or the gradients after step()",
    "perform_reduce_grad": _REDUCTION,
    **dict.fromkeys(("set_local_fwd_input", "set_local_bwd_input", "get_local_bwd_output"), _TRANSFERS),
    **dict.fromkeys(("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"), _TRANSFERS),
    **dict.fromkeys(("_get_recv_ops", "_get_init_p2p_neighbors_ops", "_map_tensor_from_recv_info"), _TRANSFERS),
    **dict.fromkeys(("_retrieve_recv_activations", "_retrieve_recv_grads", "_resolve_peer_global_rank"), _TRANSFERS),
    **dict.fromkeys(("_create_act_recv_info", "_create_act_send_info", "_create_grad_send_info"), _TRANSFERS),
    **dict.fromkeys(("_setup_forward_recv_info", "_setup_forward_send_info", "_is_same_rank"), _TRANSFERS),
    **dict.fromkeys(("_setup_backward_recv_info", "_create_grad_recv_info", "find_dst_rank"), _TRANSFERS),
    **dict.fromkeys(("_prepare_forward_infra", "_prepare_backward_infra", "_get_grad_send_meta"), _SHAPES),
    **dict.fromkeys(("_recv_meta", "_send_meta", "_to_tensor", "_ones_from_metadata"), _SHAPES),
    **dict.fromkeys(("_warmup_forward_vote", "_warmup_backward_result", "_validate_inferred_metadata"), _SHAPES),
    **dict.fromkeys(("_forward_metadata_inference", "_backward_metadata_inference"), _SHAPES),
    **dict.fromkeys(("_post_metadata_inference_cleanup", "get_outputs_meta", "_configure_outputs_meta"), _SHAPES),
    **dict.fromkeys(("_shape_inference", "_get_output_node"), _SHAPES),
    **dict.fromkeys(("_check_chunk_id", "_validate_stage_tensors"), _CHECKS),
    **dict.fromkeys(("_validate_fwd_input", "_validate_fwd_outputs"), _CHECKS),
    "_move_submod_to_device": "move the module before the stage is made",
    "get_stage_index_of_submod": "a stage's number is its stage_index",
}
