"""Outputs that a training step leaves in the stages that made them, and what is in their places in its result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import UnsentOutputError

if TYPE_CHECKING:
    from .spec import TensorSpec


@dataclass(frozen=True)
class UnsentOutput:
    """An output of the model that stays in the stage that makes it, since nothing but the model's caller uses it.

    `name` leads to it in the output, such as `past_key_values.layers[0].keys`.
    """

    value: int
    name: str
    stage: int
    spec: TensorSpec


@dataclass(frozen=True)
class Unsent:
    """Place of an output that was not sent to the last stage: its name in the result, and the stage that has made it.

    The module of the last stage returns it, and hooks and wrappers may look at it; `UnsentValue` is for users.
    """

    name: str
    stage: int


class UnsentValue:
    """Stands for an output that was not sent: any use of it raises an error that says how to get the output.

    So does isinstance(): a loss that adds up all tensors in the output would otherwise leave this one out unnoticed.

    >>> value = UnsentValue(Unsent("hidden_states[0]", 1))
    >>> value
    <hidden_states[0], not sent by stage 1>
    >>> value.mean()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    pipecut.errors.UnsentOutputError: the output hidden_states[0] was not sent: stage 1 made it, ...
    """

    __slots__ = ("_unsent",)
    _unsent: Unsent

    def __init__(self, unsent: Unsent) -> None:
        object.__setattr__(self, "_unsent", unsent)

    def __repr__(self) -> str:
        return f"<{self._unsent.name}, not sent by stage {self._unsent.stage}>"

    def __reduce__(self) -> tuple[type, tuple[Unsent]]:
        return UnsentValue, (self._unsent,)

    def __copy__(self) -> UnsentValue:
        return self

    def __deepcopy__(self, memo: Any) -> UnsentValue:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        _raise(self)

    @property  # type: ignore[misc]  # it is read only, as most reads are
    def __class__(self) -> Any:
        _raise(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _raise(next(_values_in((args, kwargs))))


def first_key(name: str) -> str:
    """Return what `outputs` has to hold to name an output, as code.

    >>> first_key("cache.layers[0]"), first_key("['layer.0'][1]"), first_key("[1].x")
    ("'cache'", "'layer.0'", '1')
    """
    found = re.match(r"\[(.+?)\](?=[.\[]|$)", name)
    return found[1] if found else repr(re.split(r"[.\[]", name)[0])


def _raise(value: UnsentValue, *_: object, **__: object) -> NoReturn:
    unsent = value._unsent
    asked = first_key(unsent.name)
    raise UnsentOutputError(
        f"the output {unsent.name} was not sent: stage {unsent.stage} made it, and in a training step stages send what "
        f"later stages use. To have it in the loss or in the result of step(), call pipeline(..., outputs=[{asked}]), "
        "or outputs='all', or pass that to PipelineArguments of a PipelineTrainer; eval() and pipe(...) return it in "
        "any case"
    )


def _values_in(arguments: Any) -> Iterator[UnsentValue]:
    """Yield the unsent values in nested arguments; only types are looked at, since isinstance() would raise."""
    if type(arguments) is UnsentValue:
        yield arguments
    elif type(arguments) in (tuple, list, dict):
        for inside in arguments.values() if type(arguments) is dict else arguments:
            yield from _values_in(inside)


_USES = (
    "abs add and array bool bytes call ceil complex contains delattr delitem divmod enter eq exit float floor floordiv "
    "format ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul index int invert ior ipow irshift isub iter "
    "itruediv ixor le len lshift lt matmul mod mul ne neg next or pos pow radd rand rdivmod reversed rfloordiv rlshift "
    "rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setattr setitem sub truediv trunc xor"
)
for _use in _USES.split():
    setattr(UnsentValue, f"__{_use}__", _raise)
UnsentValue.__hash__ = object.__hash__  # type: ignore[method-assign]  # it may be a key, as any object


def as_values(leaf: Any) -> Any:
    """Return what users get for a leaf of a result.

    >>> as_values(Unsent("mask", 0)), as_values(3)
    (<mask, not sent by stage 0>, 3)
    """
    return UnsentValue(leaf) if type(leaf) is Unsent else leaf
