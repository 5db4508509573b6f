"""Every name of the surface is there, and takes the arguments that code written for upstream passes."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import textwrap

import pytest

import pipecut
import pipecut.compat
from pipecut.compat import schedules
from pipecut.compat.unsupported import ReplacedError

SURFACE = {
    "": "pipeline pipe_split SplitPoint Pipe build_stage PipelineStage Schedule1F1B ScheduleGPipe "
    "ScheduleInterleaved1F1B ScheduleLoopedBFS ScheduleInterleavedZeroBubble ScheduleZBVZeroBubble ScheduleDualPipeV "
    "_ScheduleForwardOnly",
    "schedules": "_Action _ComputationType F B I W FORWARD FULL_BACKWARD BACKWARD_INPUT BACKWARD_WEIGHT OVERLAP_F_B "
    "SEND_F SEND_B RECV_F RECV_B UNSHARD RESHARD REDUCE_GRAD _PipelineContext _CustomFunctionProtocol "
    "_PipelineSchedule PipelineScheduleSingle PipelineScheduleMulti _PipelineScheduleRuntime get_schedule_class "
    "_add_reduce_grad _add_send_recv _add_unshard_reshard _batch_p2p _sorted_batch_p2p _defer_recv_ops "
    "_dump_chrometrace _format_pipeline_order _get_profiler_function_name _merge_bw _requires_reduce_grad "
    "_simulate_comms_compute _validate_schedule _wait_batch_p2p _check_torch_compile_compatibility dist",
    "stage": "PipelineStage build_stage _PipelineStageBase _PipelineStage _normalize_model_output_as_tuple _RecvInfo",
    "microbatch": "TensorChunkSpec _Replicate _CustomReducer _LossReducer sum_reducer split_args_kwargs_into_chunks "
    "merge_chunks _split_tensor _split_block_mask _shard_dict_of_args DEFAULT_CHUNK_DIM",
    "_IR": "Pipe pipeline pipe_split SplitPoint annotate_split_points PipeSequential LossWrapper TrivialLossWrapper "
    "MultiUseParameterConfig get_submod_name PipeSplitWrapper DetachExecutor",
    "_utils": "generate_stage_to_rank_mapping generate_rank_to_stage_mapping PipeInfo PipeliningMetadataError "
    "PipeliningShapeError flatten_args flatten_args_detach _TensorMeta _DTensorMeta _StageMeta _MeshCache "
    "InferenceMode extract_tensor_meta extract_tensor_metas to_local_if_dtensor validate_and_normalize_to_tuple "
    "validate_metadata validate_tensors_metadata validate_static_arg_grad_correspondence _StageForwardMeta "
    "_StageBackwardMeta",
    "_backward": "stage_backward stage_backward_input stage_backward_weight",
    "_unflatten": "_outline_submodules",
    "_schedule_visualizer": "get_schedule_ops visualize_schedule add_schedule_op_spacing OpKey",
    "_debug": "friendly_debug_info map_debug_info",
}
IMPORTED = {  # names that upstream's modules have by their imports, and what pipecut has for them
    "schedules": "_PipelineStageBase _RecvInfo InferenceMode generate_rank_to_stage_mapping "
    "generate_stage_to_rank_mapping merge_chunks split_args_kwargs_into_chunks _split_tensor logger",
    "stage": "_TensorMeta _DTensorMeta _StageMeta _StageForwardMeta _StageBackwardMeta _MeshCache TensorMeta "
    "InferenceMode GetMeshCallback PipeliningMetadataError stage_backward stage_backward_input stage_backward_weight "
    "extract_tensor_meta extract_tensor_metas flatten_args map_debug_info to_local_if_dtensor logger "
    "_derive_grad_metas _make_tensor_from_meta validate_and_normalize_to_tuple validate_tensors_metadata "
    "validate_static_arg_grad_correspondence",
    "microbatch": "logger",
    "_IR": "PipeInfo _PipelineStage stage_backward MultiUseParamSpec _outline_submodules logger",
    "_utils": "MeshCacheKey GetMeshCallback logger",
    "_backward": "map_debug_info logger",
    "_schedule_visualizer": "_Action _ComputationType action_type_to_color_mapping _ComputationTypeVisual "
    "PipelineStage PipelineScheduleMulti _PipelineSchedule _PipelineScheduleRuntime",
}
REPLACED = {
    "schedules": "_get_1f1b_rank_ops _get_warmup_ops _RecvInfo",
    "stage": "_RecvInfo _autograd_grad_for_inputs",
    "_IR": "_outline_submodules _null_coalesce_accumulate _move_placeholders_to_front _split_after_forward "
    "_split_before_forward _find_loss_from_output_and_spec _find_loss_output _direct_serialization_deserialize "
    "_direct_serialization_reduce _pipe_split aten_pipe_split_alias",
    "_backward": "_get_grad_fn_or_grad_acc _autograd_grad_for_inputs _null_coalesce_accumulate",
}
NAMES = [(module, name) for module, names in SURFACE.items() for name in names.split()]
BUILT_IN = "GPipe 1F1B Interleaved1F1B LoopedBFS InterleavedZeroBubble ZBVZeroBubble DualPipeV".split()


def module_of(package: str, module: str) -> object:
    return importlib.import_module(f"{package}.{module}" if module else package)


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_name_is_there(module: str, name: str) -> None:
    assert hasattr(module_of("pipecut.compat", module), name)


def parameters(value: object) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(value).parameters)  # type: ignore[arg-type]


SIGNED = [
    (module, name)
    for module, name in NAMES
    if name.islower()
    or name.startswith(("Schedule", "PipelineStage", "_PipelineStageBase", "_Action", "_Stage", "_Mesh"))
]
OTHER_WORDS = {"dist", "sum_reducer"}  # no signature of their own, or a longer one


@pytest.mark.upstream
@pytest.mark.parametrize(("module", "name"), [each for each in SIGNED if each[1] not in OTHER_WORDS])
def test_a_signature_takes_what_upstreams_takes(module: str, name: str) -> None:
    theirs = getattr(module_of("torch.distributed.pipelining", module), name, None)
    ours = getattr(module_of("pipecut.compat", module), name)
    if theirs is None or name in ("annotate_split_points", "_outline_submodules"):
        assert name in ("PipeliningShapeError", "annotate_split_points", "_outline_submodules")
        return
    assert_takes(name, ours, theirs)


def assert_takes(name: str, ours: object, theirs: object) -> None:
    """Whatever can be passed to the one can be passed to the other, by position or by name."""
    mine, wanted = parameters(ours), parameters(theirs)
    kinds = {parameter.kind for parameter in mine.values()}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return  # it takes anything
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in mine.values())
    for place, (key, parameter) in enumerate(wanted.items()):
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        assert key in mine or open_ended, f"{name} does not take {key}"
        needed = parameter.default is inspect.Parameter.empty
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and (key in mine or needed):
            assert list(mine)[place] == key, f"{name} takes {key} at another place"
            assert mine[key].kind is not inspect.Parameter.KEYWORD_ONLY, f"{name} takes {key} by name only"
        if key in mine and not needed:
            assert mine[key].default is not inspect.Parameter.empty, f"{name} needs {key}, and upstream does not"


METHODS = {
    ("stage", "PipelineStage"): "clear_runtime_states scale_grads forward_one_chunk backward_one_chunk "
    "backward_weight_one_chunk set_local_fwd_input get_local_bwd_output set_local_bwd_input perform_reduce_grad "
    "_create_grad_recv_info _prepare_forward_infra _prepare_backward_infra",
    ("stage", "_PipelineStageBase"): "__init__ forward_one_chunk _create_grad_recv_info",
    ("schedules", "ScheduleGPipe"): "step eval",
    ("schedules", "ScheduleDualPipeV"): "step eval _validate_and_set_stage_mapping _prepare_schedule_with_comms "
    "_load_csv _dump_csv _simulate register_custom_function _maybe_compute_loss _maybe_get_loss",
    ("schedules", "_Action"): "from_str",
    ("_IR", "Pipe"): "get_stage_module build_stage info print_readable from_tracing forward",
    ("_utils", "_TensorMeta"): "from_tensor to_tensor get_diff",
    ("_utils", "_DTensorMeta"): "from_dtensor to_dtensor get_diff",
    ("_utils", "_MeshCache"): "__init__ put get_mesh update_from_tensors",
    ("_utils", "InferenceMode"): "needs_dynamic",
    ("microbatch", "TensorChunkSpec"): "__init__ from_tuple from_dict",
}


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("module", "kind", "method"),
    [(module, kind, method) for (module, kind), methods in METHODS.items() for method in methods.split()],
)
def test_a_method_takes_what_upstreams_takes(module: str, kind: str, method: str) -> None:
    theirs = getattr(getattr(module_of("torch.distributed.pipelining", module), kind), method)
    ours = getattr(getattr(module_of("pipecut.compat", module), kind), method)
    assert_takes(f"{kind}.{method}", ours, theirs)


@pytest.mark.upstream
@pytest.mark.parametrize("name", [*(f"Schedule{name}" for name in BUILT_IN), "PipelineScheduleMulti"])
def test_the_options_of_a_schedule_have_upstreams_places(name: str) -> None:
    wanted = parameters(getattr(module_of("torch.distributed.pipelining", "schedules"), name))
    mine = parameters(getattr(schedules, name))
    assert list(mine)[: len(wanted)] == list(wanted)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in IMPORTED for name in IMPORTED[module].split()]
)
def test_a_name_that_upstreams_module_imports_is_there(module: str, name: str) -> None:
    assert hasattr(module_of("pipecut.compat", module), name)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in REPLACED for name in REPLACED[module].split()]
)
def test_a_name_without_meaning_here_is_refused_by_name(module: str, name: str) -> None:
    with pytest.raises(ReplacedError, match=f"{name} is not part of pipecut: "):
        getattr(module_of("pipecut.compat", module), name)(None)


def test_imported_names_are_the_same_objects() -> None:
    from pipecut.compat import _IR, _backward, _schedule_visualizer, _utils, microbatch, stage

    assert schedules._PipelineStageBase is stage._PipelineStageBase
    assert schedules.merge_chunks is microbatch.merge_chunks
    assert stage._TensorMeta is _utils._TensorMeta
    assert stage.stage_backward is _IR.stage_backward is _backward.stage_backward
    colours = _schedule_visualizer.action_type_to_color_mapping
    assert len({colours[kind].color for kind in (schedules.F, schedules.I, schedules.W, schedules.B)}) == 4


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_class_of_a_built_in_schedule_is_ours(name: str) -> None:
    cls = schedules.get_schedule_class(name.upper())
    assert cls is getattr(schedules, f"Schedule{name}")
    assert issubclass(cls, getattr(pipecut, f"Schedule{name}"))
    assert issubclass(cls, schedules._PipelineSchedule)
    assert issubclass(cls, schedules.PipelineScheduleSingle) is (name in ("GPipe", "1F1B"))
    assert issubclass(cls, schedules._PipelineScheduleRuntime) is (name not in ("GPipe", "1F1B"))
    assert not hasattr(cls, "num_microbatches")


def test_bases_are_found_by_name() -> None:
    assert schedules.get_schedule_class("pipelineschedulemulti") is schedules.PipelineScheduleMulti
    assert schedules.get_schedule_class("PipelineScheduleSingle") is schedules.PipelineScheduleSingle
    with pytest.raises(ValueError, match=r"^Unknown schedule name 'nope'\. Known are GPipe, LoopedBFS, .*") as error:
        schedules.get_schedule_class("nope")
    assert str(error.value).endswith(", PipelineScheduleSingle, PipelineScheduleMulti.")
    assert isinstance(error.value, pipecut.PipeError)


def test_a_star_import_brings_upstreams_names_and_no_more() -> None:
    """A user's `stage` or `install` was overwritten by `from torch.distributed.pipelining import *`."""
    names: dict[str, object] = {}
    exec("from pipecut.compat import *", names)
    assert set(names) - {"__builtins__"} == set(SURFACE[""].split()) - {"_ScheduleForwardOnly"}
    assert all(hasattr(pipecut.compat, module) for module in SURFACE if module)


def test_a_replaced_name_says_what_to_use() -> None:
    from pipecut.compat._IR import annotate_split_points

    with pytest.raises(ReplacedError, match=r"annotate_split_points is not part of pipecut: pass split_spec= to"):
        annotate_split_points(None, {})


@pytest.mark.slow
def test_compat_does_not_import_upstream() -> None:
    code = """
        import sys, pipecut.compat
        assert not [name for name in sys.modules if name.startswith("torch.distributed.pipelining")]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


# Names of upstream's modules that are left out on purpose: (module, name) -> the reason.
LEFT_OUT: dict[tuple[str, str], str] = {}


@pytest.mark.upstream
@pytest.mark.parametrize("module", [name for name in SURFACE if name])
def test_every_name_of_upstreams_module_is_in_ours(module: str) -> None:
    """A framework took BlockMask from `microbatch`, where upstream merely imports it."""
    theirs = importlib.import_module(f"torch.distributed.pipelining.{module}")
    ours = importlib.import_module(f"pipecut.compat.{module}")
    names = {name for name in vars(theirs) if not name.startswith("__")}
    missing = {name for name in names if not hasattr(ours, name) and (module, name) not in LEFT_OUT}
    assert not missing
    for name in names:
        value = vars(theirs)[name]
        origin = getattr(value, "__module__", None) or (value.__name__ if inspect.ismodule(value) else None)
        if isinstance(origin, str) and not origin.startswith("torch.distributed.pipelining"):
            assert getattr(ours, name) is value or not is_imported(value), name


def is_imported(value: object) -> bool:
    """True for what a module has by an import, False for an alias or a constant of its own."""
    return inspect.ismodule(value) or inspect.isclass(value) or inspect.isfunction(value)


def test_a_name_that_is_nowhere_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pipecut.compat.microbatch' has no attribute 'nowhere'"):
        importlib.import_module("pipecut.compat.microbatch").nowhere  # noqa: B018
