"""Forms of calls that a schedule can run: that of the example, and those for which the model was traced since.

Only the rank of the first stage sees the arguments of a step. For a form that is new it sends the others a notice, and
a description of one microbatch through the store of the process group: every rank traces its own model for that call,
and they compare what came of it before any of them goes on.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, PipeError, RetraceError
from ..pipe_ir import Atom, PipeInfo, TensorSpec, TracedCall, bind_inputs, by_path, has_form, map_leaves
from ..stage import CallVariants, PipelineStage, batch_dims, split_by_dims, split_by_specs
from .connection import Connection
from .handshake import differences, facts_of_pipe

_Call = tuple[tuple[Any, ...], Mapping[str, Any]]

NEW = -1  # in the place of a form's number: the notice that a new one follows
_CALL, _ERROR = "call", "error"  # facts that ranks exchange
_WITHOUT_PIPE = (
    "a rank has a stage without its pipe, whose model would be traced for a call of another form: make the stage with "
    "pipe.build_stage() and keep the pipe, or call pipeline() with an example of this form"
)
_KEEP = "The model is traced for such a call if its pipe is there, and it was dropped: keep it (pipe = pipeline(...))"


class Forms:
    """The forms of calls that the stages can run, numbered alike on all ranks."""

    def __init__(self, info: PipeInfo | None, stages: Sequence[PipelineStage], connection: Connection) -> None:
        self._stages = stages
        self._connection = connection
        self._infos = [info]  # None for modules that were cut by hand
        self._numbers = [0]  # of the pipe's variants, which this process may have in another order
        self._whole: dict[int, tuple[int, PipeInfo]] = {}  # by form, the variant that returns all outputs

    def info(self, form: int, *, whole: bool = False) -> PipeInfo | None:
        """Return what is known of the stages and edges; None for modules that were cut by hand."""
        return self._whole_of(form)[1] if whole else self._infos[form]

    def can_return_all(self, form: int) -> bool:
        """Return True for a form that has a variant with more outputs, if there is a pipe to ask for it."""
        info = self._infos[form]
        return info is not None and bool(info.unsent) and (form in self._whole or self._stages[0].variants is not None)

    def _whole_of(self, form: int) -> tuple[int, PipeInfo]:
        if form not in self._whole:
            number = self._pipe.whole(self._numbers[form])
            self._whole[form] = number, self._pipe.info(number)
        return self._whole[form]

    def use(self, form: int, *, whole: bool = False) -> None:
        """Let the stages run calls of a form, with the outputs that training steps send, or with all of them."""
        number = self._whole_of(form)[0] if whole else self._numbers[form]
        for stage in self._stages:  # each is asked: one of them may have failed to get another variant
            if stage.variant != number:
                stage.use_variant(number)

    @property
    def _pipe(self) -> CallVariants:
        variants = self._stages[0].variants  # all stages are of one pipe
        if variants is None:
            raise InputError(_WITHOUT_PIPE)
        return variants

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Return the form of a call, None if it is to be traced first; one that cannot be counts as the example's."""
        for form, info in enumerate(self._infos):
            if info is None or has_form(info.call, args, kwargs):
                return form
        variants = self._stages[0].variants
        if self._stages[0].has_lost_its_pipe and self._infos[0] is not None:
            try:
                bind_inputs(self._infos[0].call, args, kwargs)
            except InputError as error:
                raise InputError(f"{error}\n{_KEEP}") from None
        return None if variants is not None and variants.can_add(args, kwargs) else 0

    def description(self, call: _Call) -> str:
        """Return what other ranks need to know of a microbatch, as text: values, structure, shapes of tensors.

        The values of tensors go along where modules that cannot be traced have to run on them.
        """
        like = _ValuedTensor if self._pipe.need_values else _TensorLike
        try:
            written = pickle.dumps(map_leaves(lambda leaf: like.of(leaf) if isinstance(leaf, Tensor) else leaf, call))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise InputError(
                "this call is of another form than the example, and the other ranks cannot be told of it, for not all "
                f"of its values can be pickled ({error}): call pipeline() with an example of this form"
            ) from error
        return base64.b64encode(written).decode()

    def add(self, call: _Call) -> None:
        """Trace the model for the form of a call of one microbatch, where all ranks are in this process."""
        self._keep(self._traced(call))

    def add_on_ranks(self, description: str | None) -> None:
        """Trace the model on all ranks for the call that the rank of the first stage describes.

        What does not work raises an error on all of them, and they can go on with other calls.
        """
        told = self._connection.exchange({} if description is None else {_CALL: description})
        written = next(facts[_CALL] for facts in told if _CALL in facts)
        number, failure = 0, None
        try:
            described = pickle.loads(base64.b64decode(written))
            number = self._traced(
                map_leaves(lambda leaf: leaf.made() if isinstance(leaf, _TensorLike) else leaf, described)
            )
            facts = facts_of_pipe(self._pipe.info(number))
        except Exception as error:  # raised below, once the others know
            facts, failure = {_ERROR: str(error) if isinstance(error, PipeError) else repr(error)}, error
        every = self._connection.exchange(facts)
        failed = [f"{known[_ERROR]} (on rank {rank})" for rank, known in enumerate(every) if _ERROR in known]
        lines = [] if failed else differences(every)
        if failed:
            raise RetraceError(failed[0]) from failure
        if lines:
            raise RetraceError(
                "the ranks traced the model for a call of another form, and disagree:\n"
                + "".join(f"  {line}\n" for line in lines)
                + "Make the pipe in the same way on every rank."
            )
        self._keep(number)

    def _keep(self, number: int) -> None:
        info = self._pipe.info(number)
        self._numbers.append(number)
        self._infos.append(info)

    def _traced(self, call: _Call) -> int:
        """Trace the model, and let the stages of this process have what comes of it."""
        pipe = self._pipe
        number = pipe.find(*call)
        if number is None:
            if not pipe.can_add(*call):
                raise InputError(_WITHOUT_PIPE)
            number = pipe.add(*call)
        for stage in self._stages:
            stage.use_variant(number)
        return number


@dataclass(frozen=True)
class _TensorLike(Atom):
    """A tensor by its shape: a trace needs no values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorLike:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def made(self) -> Tensor:
        """Return a tensor of the shape."""
        return torch.zeros(self.shape, dtype=self.dtype).requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class _ValuedTensor(_TensorLike):
    """A tensor with its values."""

    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorLike:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.detach().cpu().clone())

    def made(self) -> Tensor:
        """Return a tensor like it."""
        return self.values.requires_grad_(self.requires_grad)


def first_microbatch(
    call: TracedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int, specs: tuple[Any, Any]
) -> _Call:
    """Return the first microbatch of a call of another form than the traced one, to trace the model for.

    Tensors that the trace knows are cut as it says; others along dim 0, if they have as many rows as there are samples.
    """
    if specs != (None, None):
        made = split_by_specs(args, kwargs, chunks, *specs, fewer=True)
        return made.args[0], made.kwargs[0]
    tensors = {path: value for path, value in by_path(call, args, kwargs).items() if isinstance(value, Tensor)}
    batch = batch_dims(call, args, kwargs)
    total = next((len(tensor) for tensor in tensors.values() if tensor.dim()), 1) if batch is None else batch.samples
    if batch is not None and batch.exact is not None:
        chunks = max(1, total // batch.exact)
    alike = {path for path, spec in _specs(call).items() if path in tensors and tensors[path].dim() == len(spec.shape)}
    dims: dict[str, int | None] = {path: 0 if t.dim() and len(t) == total else None for path, t in tensors.items()}
    dims |= {} if batch is None else {path: dim for path, dim in batch.dims.items() if path in alike}
    made = split_by_dims(args, kwargs, chunks, dims, call.signature, fewer=True)
    return made.args[0], made.kwargs[0]


def _specs(call: TracedCall) -> dict[str, TensorSpec]:
    return {entry.path: entry.spec for entry in call.inputs if entry.spec is not None}
