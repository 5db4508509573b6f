"""The rooms of the package import only what they may, and every file says in one line what it is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "pipecut"

# What each room may import of pipecut besides itself. A file in none of them (api, cli, compat, __init__) is "top": it
# may import anything, and no room may import it. The longest name wins: schedule/run is a room of its own.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "text": ("errors",),
    "pipe_ir": ("errors", "text"),
    "split": ("pipe_ir", "errors", "text"),
    "stage": ("pipe_ir", "errors", "text"),
    "schedule": ("errors", "text"),
    "schedule.run": ("stage", "pipe_ir", "schedule", "errors"),
}
TOP = "top"
WITHOUT_TORCH = "schedule"
PRIVATE_EXPORT = re.compile(r"torch\._export|torch\.export\.(.*\.)?_")
MAY_USE_PRIVATE_EXPORT = "split.unflatten"


@dataclass(frozen=True)
class Fault:
    """One broken rule, and where."""

    file: str
    line: int
    what: str
    rule: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}: {self.rule}"


@dataclass(frozen=True)
class Source:
    """One parsed file of the package."""

    file: str  # pipecut/split/points.py
    module: str  # split.points; a package's __init__ has the package's name, that of pipecut itself is empty
    package: tuple[str, ...]  # what a relative import of one dot starts from: ("pipecut", "split")
    tree: ast.Module

    @property
    def room(self) -> str:
        return room_of(self.module)


def room_of(module: str) -> str:
    """The room of a dotted name below pipecut, be it a module or something in it."""
    rooms = [room for room in MAY_IMPORT if f"{module}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=TOP)


def read_sources(package: Path) -> list[Source]:
    """Every Python file below the package directory."""
    sources = []
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        names = inside.with_suffix("").parts
        module = names[:-1] if names[-1] == "__init__" else names
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        file = (Path(package.name) / inside).as_posix()
        sources.append(Source(file, ".".join(module), (package.name, *names[:-1]), tree))
    return sources


def imported_by(source: Source, node: ast.AST) -> dict[str, str]:
    """Local name -> absolute dotted name, for what one statement imports; `from a import b` imports a.b."""
    if isinstance(node, ast.Import):
        # Without `as`, `import a.b` binds a; the key is kept whole, so that two imports of a stay two.
        return {alias.asname or alias.name: alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        above = source.package[: len(source.package) - (node.level - 1)] if node.level else ()
        base = ".".join((*above, node.module) if node.module else above)
        return {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
    return {}


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import, wherever it stands: in a function and under TYPE_CHECKING too."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported_by(source, node).values():
                yield node.lineno, name


def attribute_uses(source: Source) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every `a.b.c` that starts at an imported name: what is reached without an import."""
    names = {"torch": "torch"}
    for node in ast.walk(source.tree):
        names |= imported_by(source, node)
    attributes = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}
    for node in attributes:
        root, dot, rest = ast.unparse(node).partition(".")
        # Uses of a name whose import is itself a fault would only repeat that fault.
        if id(node) not in inner and root in names and not PRIVATE_EXPORT.match(names[root]):
            yield node.lineno, f"{names[root]}{dot}{rest}"


def room_faults(source: Source) -> Iterator[Fault]:
    """Imports from a room that this one may not know."""
    if source.room == TOP:
        return
    allowed = MAY_IMPORT[source.room]
    for line, name in imports(source):
        package, _, module = name.partition(".")
        if package == source.package[0] and room_of(module) not in (source.room, *allowed):
            rule = f"{source.room} may import of {package} only {', '.join(allowed) or 'itself'}"
            yield Fault(source.file, line, f"imports {name}", rule)


def torch_faults(source: Source) -> Iterator[Fault]:
    """Imports of the parts of torch that are closed to this file."""
    for line, name in imports(source):
        if source.room == WITHOUT_TORCH and f"{name}.".startswith("torch."):
            rule = f"{WITHOUT_TORCH} (all but {WITHOUT_TORCH}/run) works without torch"
            yield Fault(source.file, line, f"imports {name}", rule)
    touched = [(line, "imports", name) for line, name in imports(source)]
    touched += [(line, "uses", name) for line, name in attribute_uses(source)]
    for line, verb, name in touched:
        if f"{name}.".startswith("torch.distributed.pipelining."):
            yield Fault(source.file, line, f"{verb} {name}", "pipecut stands on its own, not on torch's pipelining")
        if PRIVATE_EXPORT.match(name) and source.module != MAY_USE_PRIVATE_EXPORT:
            rule = f"only {MAY_USE_PRIVATE_EXPORT.replace('.', '/')}.py may touch private torch.export"
            yield Fault(source.file, line, f"{verb} {name}", rule)


def docstring_faults(source: Source) -> Iterator[Fault]:
    """A file that does not open with a sentence."""
    first_line = (ast.get_docstring(source.tree, clean=False) or "").partition("\n")[0].strip()
    if not first_line.endswith("."):
        rule = "a file opens with a docstring whose first line is a sentence ending in '.'"
        yield Fault(source.file, 1, f"opens with {first_line!r}", rule)


def find_faults(package: Path) -> list[Fault]:
    """Every broken rule in the package, by file and line."""
    faults = [
        fault
        for source in read_sources(package)
        for check in (room_faults, torch_faults, docstring_faults)
        for fault in check(source)
    ]
    return sorted(faults, key=lambda fault: (fault.file, fault.line, fault.what))


def test_pipecut_keeps_its_rules() -> None:
    assert read_sources(PACKAGE), f"no Python file below {PACKAGE.name}"
    faults = find_faults(PACKAGE)
    assert not faults, "\n" + "\n".join(map(str, faults))


def faults_of(tmp_path: Path, file: str, code: str) -> list[str]:
    """The faults of a made-up package that has one file."""
    path = tmp_path / "pipecut" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""A file."""\n{code}\n', encoding="utf-8")
    return [str(fault) for fault in find_faults(tmp_path / "pipecut")]


@pytest.mark.parametrize(
    ("file", "code", "name", "line"),
    [
        ("errors.py", "import pipecut.pipe_ir", "pipecut.pipe_ir", 2),
        ("pipe_ir/pipe.py", "from pipecut.split.points import plan", "pipecut.split.points.plan", 2),
        ("pipe_ir/pipe.py", "from ..split import points", "pipecut.split.points", 2),
        ("pipe_ir/pipe.py", "from .. import split", "pipecut.split", 2),
        ("pipe_ir/__init__.py", "from ..split import points", "pipecut.split.points", 2),
        ("pipe_ir/pipe.py", "from pipecut import Pipe", "pipecut.Pipe", 2),
        ("pipe_ir/pipe.py", "import pipecut", "pipecut", 2),
        ("split/points.py", "def late():\n    from pipecut.stage import stage", "pipecut.stage.stage", 3),
        ("split/points.py", "if TYPE_CHECKING:\n    import pipecut.schedule.plan", "pipecut.schedule.plan", 3),
        ("split/points.py", "import os, pipecut.api", "pipecut.api", 2),
        ("stage/stage.py", "from pipecut.schedule.run import comm", "pipecut.schedule.run.comm", 2),
        ("stage/deep/er.py", "from ...split import cost", "pipecut.split.cost", 2),
        ("schedule/plan.py", "from ..pipe_ir import spec", "pipecut.pipe_ir.spec", 2),
        ("schedule/plan.py", "from .run import executor", "pipecut.schedule.run.executor", 2),
        ("schedule/plan.py", "from . import run", "pipecut.schedule.run", 2),
        ("schedule/plan.py", "from torch import nn", "torch.nn", 2),
        ("schedule/run/comm.py", "from pipecut.split import cost", "pipecut.split.cost", 2),
        ("schedule/run.py", "from ..split import cost", "pipecut.split.cost", 2),
        ("api.py", "import torch.distributed.pipelining", "torch.distributed.pipelining", 2),
        ("compat/names.py", "from torch.distributed import pipelining", "torch.distributed.pipelining", 2),
        ("api.py", "import torch\n\ntorch.distributed.pipelining.pipeline", "torch.distributed.pipelining.pipeline", 4),
        ("pipe_ir/trace.py", "from torch.export import _trace\n_trace._f()", "torch.export._trace", 2),
        ("pipe_ir/trace.py", "from torch._export.utils import f", "torch._export.utils.f", 2),
        ("split/state.py", "from torch.export.unflatten import _assign", "torch.export.unflatten._assign", 2),
        ("split/state.py", "import torch\nx = torch.export._unlift.f()", "torch.export._unlift.f", 3),
        ("split/state.py", "import torch.export as te\nte._unlift", "torch.export._unlift", 3),
    ],
)
def test_a_forbidden_import_is_found_and_named(tmp_path: Path, file: str, code: str, name: str, line: int) -> None:
    (fault,) = faults_of(tmp_path, file, code)
    assert re.match(rf"pipecut/{re.escape(file)}:{line}: (imports|uses) {re.escape(name)}: \w+", fault)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("errors.py", "import torch"),
        ("pipe_ir/pipe.py", "from ..errors import PipeError\nfrom . import spec\nfrom .spec import split"),
        ("split/points.py", "from pipecut import errors, pipe_ir\nfrom .cost import flops"),
        ("split/unflatten.py", "import torch\nfrom torch._export import utils\ntorch.export._unlift"),
        ("stage/stage.py", "from ..pipe_ir.pipe import Pipe\nimport torch.distributed"),
        ("schedule/plan.py", "import torchless\nfrom .action import Op\nfrom ..errors import PipeError"),
        ("schedule/run/executor.py", "import torch\nfrom ..plan import Plan\nfrom ...stage import stage"),
        ("api.py", "from .split import points\nfrom .schedule.run import executor\nfrom torch.export import export"),
        ("__init__.py", "from .api import pipeline\nfrom . import cli, stage"),
        ("compat/stage.py", "from .. import api\nfrom ..schedule.run import executor"),
    ],
)
def test_an_allowed_import_passes(tmp_path: Path, file: str, code: str) -> None:
    assert faults_of(tmp_path, file, code) == []


def test_the_message_names_file_line_import_and_rule(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, "split/cost.py", "\nfrom ..stage import shapes")
    assert fault == (
        "pipecut/split/cost.py:3: imports pipecut.stage.shapes: split may import of pipecut only pipe_ir, errors"
    )


@pytest.mark.parametrize("text", ["", "import os\n", '"""No full stop"""\n', '"""\nStarts on the second line.\n"""\n'])
def test_a_file_must_open_with_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "pipecut").mkdir()
    (tmp_path / "pipecut" / "api.py").write_text(text, encoding="utf-8")
    (fault,) = find_faults(tmp_path / "pipecut")
    assert (fault.file, fault.line) == ("pipecut/api.py", 1)
    assert "docstring" in fault.rule


def test_every_fault_is_reported(tmp_path: Path) -> None:
    faults = faults_of(tmp_path, "schedule/plan.py", "import torch\nfrom ..stage import stage\nimport pipecut.split")
    assert [fault.split(": ")[1] for fault in faults] == [
        "imports torch",
        "imports pipecut.stage.stage",
        "imports pipecut.split",
    ]
