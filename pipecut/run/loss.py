"""The loss of a microbatch: what loss_fn makes of the output, or the one that the model's own output holds."""

from __future__ import annotations

import inspect
import math
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import InputError, MissingTargetError, PipeError, PipeWarning
from ..pipe_ir import PipeInfo
from ..text import shape_text

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
HOW_TO_GET_A_LOSS = (
    "make the schedule with loss_fn=, a function of (output, target) or of the output only; or use a model whose "
    "output holds its loss: as `loss`, as the first of a tuple, or as all there is, one number"
)


@dataclass(frozen=True)
class Objective:
    """Loss of a microbatch, from loss_fn or the model's own output.

    A loss_fn that takes one argument gets the output; without loss_fn the model has its own.

    >>> import torch
    >>> two, three = torch.tensor(2.0), torch.tensor(3.0)
    >>> Objective(lambda output: output * 2).loss(two, None, {})
    tensor(4.)
    >>> Objective(lambda output, target: output - target).loss(two, three, {})
    tensor(-1.)
    >>> Objective().loss({"loss": three, "logits": torch.zeros(4, 2)}, None, {})
    tensor(3.)
    """

    loss_fn: Callable[..., Tensor] | None = None
    _known_places: dict[tuple[str, ...], tuple[int, float]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        given: Any = self.loss_fn
        if isinstance(given, type) and issubclass(given, nn.Module):
            raise InputError(f"loss_fn is the class {given.__name__}: pass a loss of it, loss_fn={given.__name__}()")
        if given is not None and not callable(given):
            raise InputError(
                f"loss_fn must be a function of (output, target), or of the output only; got {given!r} "
                f"({type(given).__name__}). A model with a loss of its own needs none: leave it out"
            )

    @property
    def is_own(self) -> bool:
        """True if the model makes its own loss."""
        return self.loss_fn is None

    @property
    def takes_target(self) -> bool:
        """True if a target can be passed."""
        return self.loss_fn is not None and self._places({})[1] > 1

    def _places(self, loss_kwargs: Mapping[str, Any]) -> tuple[int, float]:
        """Return the numbers of positional arguments that loss_fn needs and takes besides these keywords."""
        names = tuple(loss_kwargs)
        if names not in self._known_places:
            assert self.loss_fn is not None  # the model's own loss takes none
            self._known_places[names] = _places(self.loss_fn, loss_kwargs)
        return self._known_places[names]

    def check(self, target: Any, loss_kwargs: Mapping[str, Any], *, training: bool) -> None:
        """Raise on a target that nobody would look at, and on a step without the one that is needed."""
        if self.loss_fn is None:
            if training and target is not None:
                raise InputError(
                    f"a training step needs a loss: {HOW_TO_GET_A_LOSS}. There is a target, and no loss_fn to take it"
                )
            return
        least, most = self._places(loss_kwargs)
        if target is not None and most < 2:
            raise InputError(
                "step() got a target, and loss_fn takes one argument, the output: leave out target=, or give loss_fn "
                "a second parameter"
            )
        if training and target is None and least > 1:
            raise MissingTargetError(
                "step() got no target on the rank of the last stage: pass target=, that of the whole batch; a loss_fn "
                "that needs none takes one argument, the output"
            )

    def loss(self, output: Any, target: Any, loss_kwargs: Mapping[str, Any]) -> Any:
        """Return the loss of one microbatch; None if there is none, as in an evaluation without a target or labels."""
        if self.loss_fn is None:
            return _own_loss(output)
        if target is not None:
            return self.loss_fn(output, target, **loss_kwargs)
        return self.loss_fn(output, **loss_kwargs) if self._places(loss_kwargs)[0] < 2 else None

    def checked(self, loss: Any, output: Any, microbatch: int) -> Tensor:
        """Return a loss that a backward can begin with, and raise on any other."""
        if isinstance(loss, Tensor) and loss.dim() == 0 and (loss.is_floating_point() or not self.is_own):
            return loss
        if self.is_own and loss is None:
            raise InputError(f"a training step needs a loss, and {_lack(output)}: {HOW_TO_GET_A_LOSS}")
        got = f"a tensor of shape {shape_text(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        if self.is_own:
            raise InputError(
                f"the loss in the output of the model is {got} for microbatch {microbatch}: {HOW_TO_GET_A_LOSS}"
            )
        raise InputError(
            f"loss_fn returned {got} for microbatch {microbatch}; it must return one number, a tensor without dims: "
            "take its mean, or its sum with scale_grads=False"
        )


def _own_loss(output: Any) -> Any:
    """Return the loss that an output holds, None if it holds none."""
    if isinstance(output, Tensor):
        return output if _is_number(output) else None
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    first = output[0] if isinstance(output, tuple) and output else None
    return first if _is_number(first) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def _lack(output: Any) -> str:
    """Say in what way an output holds no loss."""
    if isinstance(output, Tensor):
        return f"the output of the model is a tensor of shape {shape_text(output.shape)}"
    kind = type(output).__name__
    has_place = "loss" in output if isinstance(output, Mapping) else hasattr(output, "loss")
    if has_place:
        return f"the output of the model, of type {kind}, has None as its loss (were the labels passed?)"
    return f"the output of the model, of type {kind}, holds none"


def _places(function: Callable[..., Any], loss_kwargs: Mapping[str, Any]) -> tuple[int, float]:
    """Return the numbers of positional arguments that a function needs and takes, besides those passed by name."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # a function in C says nothing of itself
        return 2, 2
    parameters = [each for each in signature.parameters.values() if each.name not in loss_kwargs]
    places = [each for each in parameters if each.kind in _POSITIONAL]
    needed = sum(each.default is inspect.Parameter.empty for each in places)
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        return 2, float("inf")
    return needed, len(places)


# The weights of microbatches.


LossWeight = Callable[[Any], Any]
_Source = Literal["target", "arguments", "keywords"]


@dataclass(frozen=True)
class Weighing:
    """`loss_weight`, and what it is called with.

    That is the target of a microbatch where loss_fn takes one, on the rank of the last stage. A model with a loss of
    its own has its labels among its arguments: a traced one has them on the rank of the first stage, which tells the
    others; modules that were cut by hand among the keywords of the last stage's rank.
    """

    loss_weight: LossWeight
    source: _Source

    def of(self, parts: Sequence[Any] | None, *, training: bool = True) -> list[float] | None:
        """Return the weights of the microbatches; None in an evaluation without the labels that they are made from.

        >>> import torch
        >>> labels = [torch.tensor([[4, -100], [3, 2]]), torch.tensor([[1, -100]])]
        >>> Weighing(lambda target: (target != -100).sum(), "target").of(labels)
        [3.0, 1.0]
        """
        if parts is None:
            if not training:
                return None
            raise InputError("loss_weight is a function of the target here, and step() got none: pass target=")
        try:
            given = [self.loss_weight(part) for part in parts]
        except KeyError as error:
            if self.source == "target":
                raise
            if not training:
                return None
            known = ", ".join(map(repr, parts[0])) or "nothing"
            raise InputError(
                f"loss_weight asked for {error} in the {self.source} of a microbatch, and there is {known}"
            ) from error
        weights = [_number(weight, microbatch) for microbatch, weight in enumerate(given)]
        if not any(weights):
            raise InputError("loss_weight is 0 for every microbatch: the loss of such a batch is not defined")
        return weights

    def check_no_losses_without(self, weights: Sequence[float] | None) -> None:
        """Raise if there are losses after all, though the labels to weigh them by were not found."""
        if weights is None:
            raise InputError(
                f"there is a loss, and loss_weight did not find what it asks for in the {self.source} of this "
                "evaluation: pass it, or let loss_weight ask for something else"
            )


def weighing_of(
    loss_weight: LossWeight | None, objective: Objective, info: PipeInfo | None, scaled: bool
) -> Weighing | None:
    """Return the weighing of a schedule, if there is one."""
    if loss_weight is None:
        return None
    if not scaled:
        raise InputError(
            "loss_weight weighs losses that are means, and with scale_grads=False they are sums: leave out one of them"
        )
    own: _Source = "keywords" if info is None else "arguments"
    return Weighing(loss_weight, "target" if objective.takes_target else own)


_IGNORED = -100  # what torch's losses, and the models that use them, leave out of their mean


def warned_of_uneven_labels(microbatches: Sequence[Mapping[str, Any]]) -> bool:
    """Warn if labels that do not count are spread unevenly: the mean of the microbatches' means is another loss."""
    for name, first in microbatches[0].items():
        if not isinstance(first, Tensor) or first.dtype != torch.int64 or not first.dim():
            continue
        labels = [part[name] for part in microbatches]
        counted = [int((each != _IGNORED).sum()) for each in labels]
        if all(count == each.numel() for count, each in zip(counted, labels, strict=True)):
            continue
        shares = {round(count / max(len(each), 1), 9) for count, each in zip(counted, labels, strict=True)}
        if len(shares) > 1:
            warnings.warn(
                f"{name} has {counted} labels that count ({_IGNORED} does not) in its microbatches. If the model's "
                "loss is a mean over them, the loss of the batch is not the mean over samples, by which microbatches "
                f"are weighed: pass loss_weight=lambda inputs: (inputs[{name!r}] != {_IGNORED}).sum() to the schedule",
                PipeWarning,
                stacklevel=2,
            )
            return True
    return False


def _number(weight: Any, microbatch: int) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise InputError(
            f"loss_weight returned {weight!r} for microbatch {microbatch}; it must return a number that is not "
            "negative, such as how many labels count"
        )
    return number


def by_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call under the names of the parameters; those in `**options` under their own."""
    named: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        collects = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named |= value if collects else {name: value}
    return named


def as_integer(number: float) -> int:
    """Return the bits of a number, for messages that are integers.

    >>> from_integer(as_integer(0.1))
    0.1
    """
    return int(struct.unpack("q", struct.pack("d", number))[0])


def from_integer(bits: int) -> float:
    """Return the number with these bits."""
    return float(struct.unpack("d", struct.pack("q", bits))[0])


# The losses of a step.


@dataclass(frozen=True)
class Losses:
    """The losses of the last step by microbatch, none on ranks without the last stage; and the weights of all."""

    of: Mapping[int, Tensor] = field(default_factory=dict)
    weights: Sequence[float] = ()

    def in_order(self) -> list[Tensor]:
        """Return the losses of microbatch 0, 1, 2..."""
        return [self.of[number] for number in sorted(self.of)]

    def counted(self, scaled: bool) -> dict[int, float]:
        """Return the losses by microbatch, read at once; one without weight may be the mean of nothing."""
        numbers = [number for number in sorted(self.of) if self.weights[number] or not scaled]
        values = torch.stack([self.of[number] for number in numbers]).tolist() if numbers else []
        return dict(zip(numbers, values, strict=True))

    def total(self, scaled: bool, counted: Mapping[int, float]) -> float:
        """Return the loss of the whole batch: the mean by weight, or the sum of losses that are not scaled."""
        whole = sum(self.weights)
        return sum(loss * (self.weights[number] / whole if scaled else 1.0) for number, loss in counted.items())


def check_no_nan(losses: Mapping[int, float]) -> None:
    """Raise on a NaN: the gradients of such a loss are of no use."""
    numbers = [number for number, loss in losses.items() if math.isnan(loss)]
    if numbers:
        raise PipeError(
            f"the loss is NaN for microbatches {numbers}: the gradients of this step are of no use. Pass "
            "check_loss=False to the schedule if something else, such as a gradient scaler, looks after that"
        )


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a step as a rank knows it: numbers that are averaged over copies of a stage, and added over stages.

    >>> last, first = BatchLoss(1, 2.5, added=0.25), BatchLoss(added=0.5)
    >>> BatchLoss.of([one + other for one, other in zip(last.numbers, first.numbers)]).mean()
    3.25
    """

    count: float = 0.0  # 1 on the rank of the last stage, if there is a loss
    total: float = 0.0
    added: float = 0.0  # of parameters alone

    @classmethod
    def of(cls, numbers: Sequence[float]) -> BatchLoss:
        """Return the loss that these numbers stand for."""
        return cls(*numbers)

    @property
    def numbers(self) -> list[float]:
        """The numbers to be averaged and added."""
        return [self.count, self.total, self.added]

    def mean(self) -> float:
        """Return the loss of the batch; of copies of a pipeline the mean, as their gradients are averaged."""
        if not self.count:
            raise InputError("there is no loss yet: call step(), or eval() with a target or labels, before mean_loss()")
        return self.total / self.count + self.added
