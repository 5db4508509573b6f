"""flatten and unflatten: what goes apart comes back as it was, and each leaf has a path that reaches it."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from pipecut.pipe_ir.structure import LEAF, Atom, flatten, unflatten


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    content: Any
    label: str = "box"


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    content: Any


@dataclasses.dataclass
class Checked:
    """Counts how often it is made."""

    content: Any
    made = 0

    def __post_init__(self) -> None:
        Checked.made += 1


@dataclasses.dataclass(frozen=True)
class Token(Atom):
    content: Any


def changed(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same nested value with other leaves."""
    leaves, structure = flatten(value)
    return unflatten(structure, [function(leaf) for leaf in leaves])


VALUES: dict[str, Any] = {
    "leaf": 1,
    "None": None,
    "tuple": (1, 2, 3),
    "empty": ((), [], {}),
    "list": [1, [2, [3]]],
    "dict": {"b": 1, "a": {"c": 2}},
    "keys of all kinds": {0: 1, "a b": 2, (1, 2): 3},
    "ordered dict": OrderedDict(b=1, a=2),
    "default dict": defaultdict(list, a=[1]),
    "namedtuple": Pair(1, Pair(None, "x")),
    "dataclass": Box((1, Box(2, "inner"))),
    "frozen dataclass": Sealed([Sealed(1), 2]),
    "size": torch.Size([2, 3]),
    "slice": slice(1, None, 2),
    "mixed": {"pairs": [Pair(Box(1), Sealed({"x": (2, None)}))]},
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_unflatten_undoes_flatten(value: Any) -> None:
    leaves, structure = flatten(value)
    back = unflatten(structure, leaves)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_paths_lead_to_the_leaves(value: Any) -> None:
    leaves, structure = flatten(value)
    paths = list(structure.paths())
    assert len(paths) == len(leaves)
    for path, leaf in zip(paths, leaves, strict=True):
        assert eval(f"value{''.join(path)}", {"value": value}) is leaf


def test_none_is_a_leaf() -> None:
    assert flatten((None, [None]))[0] == [None, None]


def test_dicts_keep_their_order() -> None:
    leaves, structure = flatten({"z": 1, "a": 2, "m": 3})
    assert leaves == [1, 2, 3]
    assert list(unflatten(structure, [4, 5, 6]).items()) == [("z", 4), ("a", 5), ("m", 6)]


def test_a_default_dict_keeps_its_factory() -> None:
    leaves, structure = flatten(defaultdict(list, a=1))
    assert unflatten(structure, leaves)["missing"] == []


def test_tensors_strings_and_objects_are_leaves() -> None:
    tensor, thing = torch.ones(2), object()
    leaves, structure = flatten([tensor, "text", thing])
    assert [leaf is other for leaf, other in zip(leaves, (tensor, "text", thing), strict=True)] == [True] * 3
    assert structure.children == (LEAF, LEAF, LEAF)


def test_a_dataclass_type_and_an_atom_are_leaves() -> None:
    assert flatten([Box, Token((1, 2))])[0] == [Box, Token((1, 2))]


def test_a_dataclass_is_rebuilt_without_running_its_own_code() -> None:
    value = Checked(1)
    before = Checked.made
    back = changed(value, lambda leaf: leaf + 1)
    assert (back.content, Checked.made) == (2, before)


def test_a_dataclass_with_a_field_that_is_not_set_keeps_it_unset() -> None:
    value = Box(1)
    del value.content
    assert flatten(value)[0] == ["box"]
    assert not hasattr(changed(value, str.upper), "content")


def test_other_leaves_make_another_value_and_leave_the_first_alone() -> None:
    value = {"a": [1, (2,)], "b": Pair(3, Box(4, "x"))}
    assert changed(value, lambda leaf: leaf * 2) == {"a": [2, (4,)], "b": Pair(6, Box(8, "xx"))}
    assert value["a"] == [1, (2,)]


def test_the_kind_is_the_name_of_the_type() -> None:
    assert [flatten(value)[1].kind for value in ((), [], {}, Box(1), Pair(1, 2), 5)] == [
        "tuple", "list", "dict", "Box", "Pair", "leaf",
    ]  # fmt: skip


@pytest.mark.parametrize("make", [lambda x: OrderedDict(a=x), lambda x: defaultdict(list, a=x), lambda x: Pair(x, 1)])
def test_a_value_does_not_outlive_its_use(make: Callable[[torch.Tensor], Any]) -> None:
    """Types that torch knows lived until the garbage collector came, and with them the graph of a whole stage."""
    gc.collect()
    gc.disable()
    try:
        tensor = torch.ones(2)
        alive = weakref.ref(tensor)
        leaves, structure = flatten(make(tensor))
        unflatten(structure, leaves)
        del leaves, structure
        del tensor
        assert alive() is None
    finally:
        gc.enable()
