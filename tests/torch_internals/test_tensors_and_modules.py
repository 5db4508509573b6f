"""Memory of tensors, entries of modules and schemas of operators are where pipecut looks for them."""

from __future__ import annotations

import functools
import logging
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from pipecut.torch_internals import (
    EXTRA_STATE,
    FAKE_TENSOR_LOGGER,
    HOOK_DICTS,
    STATE_DICTS,
    BatchNorm,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    backward_hooks,
    buffers_of,
    children_of,
    default_generators,
    depends_on_data,
    fake_mode_with_numbers,
    forward_hooks,
    hooks_of,
    is_compiled,
    is_compiled_whole,
    is_composite,
    is_from_data,
    is_higher_order,
    is_overload,
    is_view,
    is_wrapped_hook,
    keep_keys,
    make_subclass,
    norm_of_each,
    overload_name,
    parameters_of,
    part_types,
    schema_of,
    storage_id,
    trainable_parameters,
    unsaved_buffers,
    version_of,
    wrapped_attribute,
)


def test_a_view_shares_the_storage_id_and_the_version() -> None:
    x = torch.zeros(4)
    view, other = x[1:], torch.zeros(4)
    assert storage_id(view) == storage_id(x) != storage_id(other)
    view.add_(1)
    assert (version_of(x), version_of(other)) == (1, 0)
    assert (is_view(view), is_view(x)) == (True, False)
    with FakeTensorMode():
        fake = torch.zeros(4)
        assert storage_id(fake[1:]) == storage_id(fake) != storage_id(torch.zeros(4))


def test_fake_tensors_have_shapes_and_no_memory() -> None:
    with FakeTensorMode():
        product = torch.ones(2, 3) @ torch.ones(3, 4)
    assert isinstance(product, FakeTensor)
    assert (list(product.shape), product.device.type) == ([2, 4], "cpu")
    assert FAKE_TENSOR_LOGGER in logging.root.manager.loggerDict


def test_a_dispatch_mode_sees_the_parts_of_an_operator() -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(schema_of(func).name)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.einsum("ij,jk->ik", torch.ones(2, 2), torch.ones(2, 2))
    assert "aten::bmm" in seen


def test_a_tensor_of_a_class_is_a_leaf_over_the_same_memory() -> None:
    class Special(nn.Parameter):
        pass

    data = torch.ones(2)
    made = make_subclass(Special, data, requires_grad=True)
    assert type(made) is Special
    assert (made.is_leaf, made.requires_grad, storage_id(made)) == (True, True, storage_id(data))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, math.inf])
def test_norms_of_each_combine_to_those_of_torch(foreach: bool | None, order: float) -> None:
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    tensors = [torch.randn(7 * size + 1).to(kinds[size % 3]) for size in range(20)]
    norms = norm_of_each(tensors, order, foreach)
    assert [norm.dtype for norm in norms] == [tensor.dtype for tensor in tensors]
    total = torch.nn.utils.get_total_norm(tensors, order, foreach=foreach)
    # The norm of one number is the number, whatever its size: so norms are combined as torch combines them.
    assert torch.equal(torch.nn.utils.get_total_norm(norms, order, foreach=False), total)
    for tiny in (1e-30, 1e30):
        assert torch.nn.utils.get_total_norm([torch.tensor(tiny)], order, foreach=False) == torch.tensor(tiny)
    assert norm_of_each([], order, foreach) == []


def test_schemas_tell_names_writes_and_returns() -> None:
    add, add_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    assert is_overload(add)
    assert not is_overload(torch.add)
    assert (schema_of(add).name, overload_name(add), schema_of(add).is_mutable) == ("aten::add", "Tensor", False)
    assert schema_of(add_).arguments[0].alias_info.is_write
    assert schema_of(add_).returns[0].alias_info.is_write
    assert [str(result.type) for result in schema_of(add).returns] == ["Tensor"]
    assert is_composite(torch.ops.aten.einsum.default)
    assert not is_composite(torch.ops.aten.mm.default)
    assert is_higher_order(torch.ops.higher_order.cond)


def test_entries_of_a_module_are_its_own() -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm)
    model.register_buffer("table", torch.ones(1), persistent=False)
    assert [*parameters_of(norm)] == ["weight", "bias"]
    assert [*buffers_of(norm)] == ["running_mean", "running_var", "num_batches_tracked"]
    assert children_of(model) == {"0": norm}
    assert (unsaved_buffers(model), unsaved_buffers(norm)) == ({"table"}, set())
    assert all(isinstance(vars(norm)[name], dict) for name in (*STATE_DICTS, *HOOK_DICTS))
    norm.register_forward_pre_hook(print)  # type: ignore[arg-type]
    assert hooks_of(norm) == [print]
    assert isinstance(norm, BatchNorm)
    parameters_of(norm).clear()
    assert [*norm.parameters()] == []


def test_walks_over_a_module_are_those_of_torch() -> None:
    shared = nn.Linear(2, 2)
    shared.bias.requires_grad_(False)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.BatchNorm1d(2)), None)  # type: ignore[arg-type]
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(parameter) for parameter in trainable_parameters(model)} == set(map(id, wanted))
    assert part_types(model) == {id(module): type(module) for module in model.modules()}


def test_hooks_of_a_module_are_listed() -> None:
    module = nn.Linear(1, 1)
    before = module.register_forward_pre_hook(print)
    after = module.register_forward_hook(print)
    back = module.register_full_backward_hook(print)
    assert [[*hooks] for hooks in forward_hooks(module)] == [[before.id], [after.id]]
    assert [[*hooks] for hooks in backward_hooks(module)] == [[], [back.id]]


def test_every_dict_of_hooks_is_known() -> None:
    kept = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict)} - set(STATE_DICTS)
    assert set(HOOK_DICTS) == {name for name in kept if not name.endswith(("_with_kwargs", "_always_called"))}


def test_a_hook_that_takes_the_module_is_wrapped() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._register_load_state_dict_pre_hook(lambda *args: None, with_module=True)

    (hook,) = vars(Counting())["_load_state_dict_pre_hooks"].values()
    while isinstance(hook, functools.partial):
        hook = hook.func
    assert is_wrapped_hook(hook)
    assert not is_wrapped_hook(print)


def test_extra_state_has_a_key_of_its_own() -> None:
    class Stateful(nn.Module):
        def get_extra_state(self) -> Tensor:
            return torch.ones(1)

    assert [*Stateful().state_dict()] == [EXTRA_STATE]


def test_compiled_modules_are_known() -> None:
    in_place = nn.Linear(1, 1)
    in_place.compile(backend="eager")
    wrapped = torch.compile(nn.Linear(1, 1), backend="eager")
    assert (is_compiled(in_place), is_compiled(wrapped), is_compiled(nn.Linear(1, 1))) == (True, True, False)
    assert (is_compiled_whole(in_place), is_compiled_whole(wrapped)) == (False, True)


def test_wrappers_have_the_module_where_its_names_say() -> None:
    class DistributedDataParallel(nn.Module):  # not torch's
        pass

    layer = nn.Linear(1, 1)
    for wrapper in (torch.compile(layer), checkpoint_wrapper(layer), checkpoint_wrapper(torch.compile(layer))):
        attribute = wrapped_attribute(wrapper)
        assert attribute is not None
        names = [name for name, _ in nn.ModuleList([wrapper]).named_parameters()]
        assert all(name.startswith(f"0.{attribute}.") for name in names)
    assert wrapped_attribute(layer) is wrapped_attribute(DistributedDataParallel()) is None


def test_keys_of_a_parameter_dict_follow_its_parameters() -> None:
    parameters = nn.ParameterDict({"here": torch.ones(1), "gone": torch.ones(1)})
    del parameters_of(parameters)["gone"]
    assert sorted(parameters) == ["gone", "here"]
    keep_keys(parameters)
    assert [*parameters] == ["here"]


def test_sizes_of_tensors_without_memory_are_numbers_unless_they_depend_on_data() -> None:
    with fake_mode_with_numbers() as mode:
        x = mode.from_tensor(torch.ones(3, 4))
        assert type(x.sum(0).shape[0]) is int
        assert isinstance(x.nonzero().shape[0], torch.SymInt)
        assert (x + torch.ones(4)).shape == (3, 4)


def test_random_operations_draw_from_the_default_generators_but_not_without_memory() -> None:
    first = default_generators()[0]
    first.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(2), expected)
    assert first.initial_seed() == 7
    before = first.get_state()
    with fake_mode_with_numbers():
        torch.rand(2)
    assert torch.equal(first.get_state(), before)


def test_values_and_numbers_from_data_are_told_from_known_ones() -> None:
    with fake_mode_with_numbers():
        assert not depends_on_data(torch.tensor(3))
        x = torch.ones(3)
        assert depends_on_data(x)
        is_three = x.sum().int().item() == 3
        assert is_from_data(is_three)
        torch._check(is_three)
        assert str(is_three.node.expr) == "True"
        assert is_from_data(is_three)
