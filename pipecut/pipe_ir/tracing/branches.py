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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import has_side_effect
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...torch_internals import depends_on_data, is_transforming, reported_conditions, version_of
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


def _current(known: WeakIdKeyDictionary, tensor: Any) -> bool | None:
    """Return what is known of a tensor, unless it was written to since then."""
    if not isinstance(tensor, Tensor) or tensor not in known:
        return None
    value, version = known[tensor]
    return bool(value) if version == _version(tensor) else None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


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
        self._refused: Exception | None = None

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__:
            known = _current(self._answers, args[0])
            if known is not None:
                self._on_answer(user_line())
                return known
            if not depends_on_data(args[0]):
                return func(*args)
            answer = self._answer(args[0], sys._getframe(1))
            return answer if answer is not None else self._refuse(func, args)
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.dim() == 0:
            self._chances[result] = True, _version(result)
        elif func in _COMPARISONS:
            given = dict(zip(("input", "other"), args, strict=False)) | {**(kwargs or {})}
            chance, bound = given.get("input"), given.get("other")
            if isinstance(bound, int | float) and _current(self._chances, chance) is not None:
                answer = _COMPARISONS[func](bound)
                if answer is not None:
                    self._answers[result] = answer, _version(result)
        return result

    def _refuse(self, func: Any, args: Sequence[Any]) -> Any:
        try:
            return func(*args)
        except Exception as error:
            self._refused = self._refused or error
            raise

    def raise_refused(self) -> None:
        """Raise if a condition had no answer: code that catches all errors would go on as if it had raised one."""
        if self._refused is not None:
            raise self._refused.with_traceback(None)

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
        error = _own_error(found, frame)
        if any(_is_caught(code, offset, error.kind) for code, offset in _places(found, frame)):
            return None  # the model goes on after it
        self._check(condition, found.outcome, error.name, error.text, frame)
        return not found.outcome

    def _check(self, condition: Any, outcome: bool, error: str, text: str, frame: types.FrameType) -> None:
        place = line_text(Line(frame.f_code, frame.f_lineno))
        check = _CHECKS[0 if isinstance(condition, Tensor) else 1]
        check(condition, outcome, error, f"{text}\n  raised by the model's own check at {place}")


class _RaisingSide(NamedTuple):
    """The outcome of a condition after which code does nothing but raise, where it does, and what it names before."""

    outcome: bool
    raises: tuple[dis.Instruction, ...]
    assigned: frozenset[str]


def _raising_side(frame: types.FrameType) -> _RaisingSide | None:
    """Return the side of the branch that a frame is at which only raises, None if there is none or no branch."""
    code = list(dis.get_instructions(frame.f_code))
    position_of = {each.offset: position for position, each in enumerate(code)}
    at = position_of[frame.f_lasti]
    at += code[at].opname == "TO_BOOL"
    branch = re.fullmatch(r"POP_JUMP_(?:FORWARD_|BACKWARD_)?IF_(TRUE|FALSE)", code[at].opname)
    if branch is None:
        return None
    jumps_if = branch[1] == "TRUE"
    for outcome, begin in ((jumps_if, position_of[code[at].argval]), (not jumps_if, at + 1)):
        passed = _ways_to_raise(code, begin, position_of)
        if passed is not None:
            raises = tuple(each for each in passed if each.opname == "RAISE_VARARGS")
            return _RaisingSide(outcome, raises, frozenset(each.argval for each in passed if "STORE" in each.opname))
    return None


_ALWAYS_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
_DOES_MORE = re.compile(r"RETURN|YIELD|RERAISE|SEND|(STORE|DELETE)_(ATTR|SUBSCR|GLOBAL|DEREF|NAME|SLICE)")


def _ways_to_raise(
    code: list[dis.Instruction], begin: int, position_of: Mapping[int, int]
) -> list[dis.Instruction] | None:
    """Return the code between a place and the `raise` that all ways lead to, None if one leads elsewhere or does more.

    A call whose result is dropped is made for what it does; others may make the text of the error.
    """
    waiting, seen = [begin], set[int]()
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        each = code[at]
        if each.opname == "RAISE_VARARGS":
            continue
        if _DOES_MORE.match(each.opname) or (each.opname.startswith("CALL") and code[at + 1].opname == "POP_TOP"):
            return None
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            waiting.append(position_of[each.argval])
        if each.opname not in _ALWAYS_JUMPS:
            waiting.append(at + 1)
    return [code[at] for at in sorted(seen)]


# Errors that the model itself catches.


def _places(side: _RaisingSide, frame: types.FrameType) -> Iterator[tuple[types.CodeType, int]]:
    """Yield where an error would pass: at its `raise`, and in the calls around it up to that of the model, by us."""
    yield from ((frame.f_code, each.offset) for each in side.raises)
    frames: list[types.FrameType] = []
    outer = frame.f_back
    while outer is not None:
        frames.append(outer)
        outer = outer.f_back
    ours = [at for at, each in enumerate(frames) if each.f_globals.get("__name__", "").startswith(f"{_PACKAGE}.")]
    for each in frames[: max(ours, default=0)]:
        if is_users_code(each.f_code.co_filename):
            yield each.f_code, each.f_lasti


_PACKAGE = __name__.partition(".")[0]


def _is_caught(code: types.CodeType, offset: int, error: type[Exception] | None) -> bool:
    """Return True if an `except` around a place in code may catch an error, None for one that is not known."""
    entries = getattr(dis.Bytecode(code), "exception_entries", ())  # new in Python 3.11
    targets = {each.target for each in entries if each.start <= offset < each.end}
    if not targets:
        return False
    instructions = list(dis.get_instructions(code))
    position_of = {each.offset: position for position, each in enumerate(instructions)}
    return any(_catches(instructions, position_of, position_of[target], error) for target in targets)


def _catches(
    code: list[dis.Instruction], position_of: Mapping[int, int], at: int, error: type[Exception] | None
) -> bool:
    """Return True if a handler may let code go on after an error; that of `with` and `finally` lets it pass."""
    if code[at].opname != "PUSH_EXC_INFO":
        return False  # the end of another handler
    kinds: list[Any] = []
    while True:
        at += 1
        name = code[at].opname
        if name.startswith("LOAD_"):
            kinds.append(getattr(builtins, str(code[at].argval), None) if name == "LOAD_GLOBAL" else None)
        elif name == "CHECK_EXC_MATCH":
            if error is None or None in kinds or issubclass(error, tuple(kinds)):
                return True
            at, kinds = position_of[code[at + 1].argval] - 1, []  # the next `except`
        elif name in _ENDS:
            return _ENDS[name]


# What decides over an error first, from the begin of a handler.
_ENDS = {"WITH_EXCEPT_START": False, "RERAISE": False, "CHECK_EG_MATCH": True, "POP_EXCEPT": True, "RETURN_VALUE": True}


# The error as the model has it: its class, if it is one of Python's, and its text, if that needs no more than values.


class _OwnError(NamedTuple):
    """An error that a check raises: the name of its class and its text. `kind` is the model's class, if it is known."""

    name: str
    text: str
    kind: type[Exception] | None = None


def _own_error(side: _RaisingSide, frame: types.FrameType) -> _OwnError:
    """Return the error that a `raise` or `assert` of a frame would make."""
    if len(side.raises) > 1:
        return _OwnError("RuntimeError", "one of several errors")
    whole, part = _sources(side.raises[0], frame.f_code.co_filename)
    source, statement = whole, _parsed(whole)
    if not isinstance(statement, ast.Raise | ast.Assert):  # a line with more than that, as `if x > 5: raise ...`
        source, statement = part, _parsed(part)
    raised: Any = statement.exc if isinstance(statement, ast.Raise) else None
    if isinstance(statement, ast.Assert):
        name, arguments = "AssertionError", [statement.msg] if statement.msg is not None else []
    else:
        called = raised.func if isinstance(raised, ast.Call) else raised
        name = called.id if isinstance(called, ast.Name) else ""
        arguments = raised.args if isinstance(raised, ast.Call) and not raised.keywords else []
    if not _is_known(name):
        return _OwnError("RuntimeError", source)
    names = {node.id for each in arguments for node in ast.walk(each) if isinstance(node, ast.Name)}
    is_known = len(arguments) == 1 and not names & side.assigned
    text = _evaluated(arguments[0], frame) if is_known else None
    return _OwnError(name, source if text is None else text, getattr(builtins, name))


def _is_known(name: str) -> bool:
    """Return True for the name of an error of Python's own that is made from a text, and shows it."""
    error = getattr(builtins, name, None)
    if not (isinstance(error, type) and issubclass(error, Exception)):
        return False
    try:
        return str(error("a text")) == "a text"
    except TypeError:
        return False


def _sources(instruction: dis.Instruction, filename: str) -> tuple[str, str]:
    """Return the lines of an instruction, and of one line its own part."""
    place = getattr(instruction, "positions", None)  # new in Python 3.11
    if place is None or place.lineno is None or place.end_lineno is None:
        return "an error", "an error"
    lines = [linecache.getline(filename, number) for number in range(place.lineno, place.end_lineno + 1)]
    part = lines[0].encode()[place.col_offset : place.end_col_offset].decode() if len(lines) == 1 else ""
    return textwrap.dedent("".join(lines)).strip() or "an error", part.strip() or "an error"


def _parsed(source: str) -> ast.stmt:
    try:
        (statement,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        return ast.Pass()
    return statement


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
