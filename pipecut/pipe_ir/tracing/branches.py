"""Branches on values that a trace does not know, of which one side is certain, or does nothing but raise.

`if labels.max() >= size: raise ValueError(...)` guards an error. Its trace takes the other side, with the condition as
an operation of its own, which raises when it runs and the condition says so: in every step, as the uncut model does.
The side is known by the code itself: there is no way from it to anything but a `raise`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import has_side_effect
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...torch_internals import depends_on_data, is_transforming, reported_conditions
from .events import Line, line_text
from .records import is_users_code, user_line

torch.library.define("pipecut::raise_if", "(Tensor condition, bool outcome, str error, str text) -> ()")
torch.library.define("pipecut::raise_if.number", "(Scalar condition, bool outcome, str error, str text) -> ()")


def _raise_if(condition: Any, outcome: bool, error: str, text: str) -> None:
    """Raise the error of a forward, if a condition on its values is what leads there."""
    if bool(condition) is outcome:
        raise getattr(builtins, error)(text)


for _overload in ("pipecut::raise_if", "pipecut::raise_if.number"):
    torch.library.impl(_overload, "CompositeExplicitAutograd")(_raise_if)
    torch.library.register_fake(_overload, lambda *_: None)
_CHECKS: tuple[Callable[..., object], ...] = (torch.ops.pipecut.raise_if.default, torch.ops.pipecut.raise_if.number)
for _check in _CHECKS:
    has_side_effect(_check)  # without outputs, it would be removed as dead code


def is_check(function: object) -> bool:
    """Return True for the operator that raises the error of a forward."""
    return function in _CHECKS


# Of a number in [0, 1): what is known of a comparison with a bound, if that is at or beyond an end.
_COMPARISONS: dict[Any, Callable[[float], bool | None]] = {}
for _names, _answer in {
    ("lt", "less", "__lt__"): lambda bound: False if bound <= 0 else True if bound >= 1 else None,
    ("le", "less_equal", "__le__"): lambda bound: False if bound < 0 else True if bound >= 1 else None,
    ("gt", "greater", "__gt__"): lambda bound: True if bound < 0 else False if bound >= 1 else None,
    ("ge", "greater_equal", "__ge__"): lambda bound: True if bound <= 0 else False if bound >= 1 else None,
}.items():
    for _name in _names:
        for _owner in (torch, Tensor):
            if hasattr(_owner, _name):
                _COMPARISONS[getattr(_owner, _name)] = _answer


class AnsweredBranches(TorchFunctionMode):
    """Answers `if` where the values of tensors are not known, and yet the outcome is.

    Comparisons of `torch.rand([])` may be certain: `torch.rand([]) < 0.0` is never true. Models write layer dropout
    like that, and most configurations leave its probability at 0. With any other the way through the model is not known
    until it runs, and no trace can hold it. A condition of which one side only raises is answered with the other.

    >>> with AnsweredBranches():
    ...     bool(torch.rand([]) < 0.0), bool(torch.rand([]) < 1)
    (False, True)
    """

    def __init__(
        self, on_answer: Callable[[str], None] = lambda line: None, listens: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__()
        self._on_answer, self._listens = on_answer, listens
        self._chances = WeakIdKeyDictionary()
        self._answers = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__:
            if args[0] in self._answers:
                self._on_answer(user_line())
                return self._answers[args[0]]
            answer = self._answer(args[0], sys._getframe(1)) if depends_on_data(args[0]) else None
            return func(*args) if answer is None else answer
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.dim() == 0:
            self._chances[result] = None
        elif func in _COMPARISONS and args[0] in self._chances and isinstance(args[1], int | float):
            answer = _COMPARISONS[func](args[1])
            if answer is not None:
                self._answers[result] = answer
        return result

    def of_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Answer `if` for numbers from tensors too (`x.max().item() > 5`), and repeat what torch._check checks."""
        return reported_conditions(self._answer_user, self._repeat_check)

    def _answer_user(self, condition: Any, frame: types.FrameType) -> bool | None:
        # torch itself takes other ways where a number is not known.
        return self._answer(condition, frame) if is_users_code(frame.f_code.co_filename) else None

    def _repeat_check(self, condition: Any, error: str, frame: types.FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename == torch.__file__:
            frame = frame.f_back
        if frame is not None and is_users_code(frame.f_code.co_filename) and self._listens():
            error = error if _is_known(error) else "RuntimeError"
            self._check(condition, False, error, "a condition does not hold", frame)

    def _answer(self, condition: Any, frame: types.FrameType) -> bool | None:
        """Return the outcome that does not raise, and have the other one checked; None if there is no such side."""
        found = _raising_side(frame) if self._listens() and not is_transforming() else None
        if found is None:
            return None
        self._check(condition, found.outcome, *_own_error(found.instruction, frame), frame)
        return not found.outcome

    def _check(self, condition: Any, outcome: bool, error: str, text: str, frame: types.FrameType) -> None:
        place = line_text(Line(frame.f_code, frame.f_lineno))
        check = _CHECKS[0 if isinstance(condition, Tensor) else 1]
        check(condition, outcome, error, f"{text}\n  raised by the model's own check at {place}")


class _RaisingSide(NamedTuple):
    """The outcome of a condition after which code does nothing but raise, and where it does."""

    outcome: bool
    instruction: dis.Instruction


def _raising_side(frame: types.FrameType) -> _RaisingSide | None:
    """Return the side of the branch that a frame is at which only raises, None if there is none or no branch."""
    code = list(dis.get_instructions(frame.f_code))
    at = next(position for position, each in enumerate(code) if each.offset == frame.f_lasti)
    at += code[at].opname == "TO_BOOL"
    branch = re.fullmatch(r"POP_JUMP_(?:FORWARD_|BACKWARD_)?IF_(TRUE|FALSE)", code[at].opname)
    if branch is None:
        return None
    jumps_if = branch[1] == "TRUE"
    position_of = {each.offset: position for position, each in enumerate(code)}
    for outcome, begin in ((jumps_if, position_of[code[at].argval]), (not jumps_if, at + 1)):
        raised = _only_raises(code, begin, position_of)
        if raised is not None:
            return _RaisingSide(outcome, raised)
    return None


_ALWAYS_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
_DOES_MORE = re.compile(r"RETURN|YIELD|RERAISE|SEND|(STORE|DELETE)_(ATTR|SUBSCR|GLOBAL|DEREF|NAME|SLICE)")


def _only_raises(code: list[dis.Instruction], begin: int, position_of: Mapping[int, int]) -> dis.Instruction | None:
    """Return a `raise` that all ways from a place in code lead to, None if one leads elsewhere or leaves a value."""
    found: dis.Instruction | None = None
    waiting, seen = [begin], set[int]()
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        each = code[at]
        if each.opname == "RAISE_VARARGS":
            found = each
            continue
        if _DOES_MORE.match(each.opname):
            return None
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            waiting.append(position_of[each.argval])
        if each.opname not in _ALWAYS_JUMPS:
            waiting.append(at + 1)
    return found


# The error as the model has it: its class, if it is one of Python's, and its text, if that needs no more than values.


def _own_error(instruction: dis.Instruction, frame: types.FrameType) -> tuple[str, str]:
    """Return the name of an error's class and its text, as a `raise` or `assert` of a frame would make it."""
    source = _source(instruction, frame.f_code.co_filename)
    try:
        (statement,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        statement = ast.Pass()
    raised: Any = statement.exc if isinstance(statement, ast.Raise) else None
    if isinstance(statement, ast.Assert):
        name, arguments = "AssertionError", [statement.msg] if statement.msg is not None else []
    else:
        called = raised.func if isinstance(raised, ast.Call) else raised
        name = called.id if isinstance(called, ast.Name) else ""
        arguments = raised.args if isinstance(raised, ast.Call) and not raised.keywords else []
    if not _is_known(name):
        return "RuntimeError", source
    text = _evaluated(arguments[0], frame) if len(arguments) == 1 else None
    return name, source if text is None else text


def _is_known(name: str) -> bool:
    """Return True for the name of an error of Python's own that is made from a text, and shows it."""
    error = getattr(builtins, name, None)
    if not (isinstance(error, type) and issubclass(error, Exception)):
        return False
    try:
        return str(error("a text")) == "a text"
    except TypeError:
        return False


def _source(instruction: dis.Instruction, filename: str) -> str:
    place = getattr(instruction, "positions", None)  # new in Python 3.11
    if place is None or place.lineno is None or place.end_lineno is None:
        return "an error"
    lines = [linecache.getline(filename, number) for number in range(place.lineno, place.end_lineno + 1)]
    return textwrap.dedent("".join(lines)).strip() or "an error"


_PLAIN_NODES = (ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.Add, ast.Mod, ast.Tuple, ast.Load)


def _evaluated(expression: ast.expr, frame: types.FrameType) -> str | None:
    """Return the value of an expression of constants, names and attributes in a frame, if it is the text of plain ones.

    Nothing is called: it might act on the trace.
    """
    names = [node for node in ast.walk(expression) if isinstance(node, ast.Name | ast.Attribute)]
    if not all(isinstance(node, (ast.Name, ast.Attribute, *_PLAIN_NODES)) for node in ast.walk(expression)):
        return None
    inner = {id(node.value) for node in names if isinstance(node, ast.Attribute)}
    try:
        values = [_value(node, frame) for node in names if id(node) not in inner]
        text = _value(expression, frame)
    except Exception:  # noqa: BLE001 - the model's own code would fail like that only where it raises anyway
        return None
    return text if isinstance(text, str) and all(type(value) in (bool, int, float, str) for value in values) else None


def _value(expression: ast.expr, frame: types.FrameType) -> Any:
    code = compile(ast.Expression(expression), frame.f_code.co_filename, "eval")
    return eval(code, frame.f_globals, dict(frame.f_locals))
