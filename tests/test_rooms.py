"""The rooms of the package: what each may import, doors, private names, sizes of files and how docstrings begin."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.package_source import Source, read_sources

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pipecut"
USERS = ("tests", "benchmarks", "examples")

# On one worker: the files are read once.
pytestmark = pytest.mark.xdist_group("rooms")

# What each room may import of pipecut besides itself; a file of the top directory is a room of its own.
LOW = ("errors", "text", "files", "torch_internals")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "text": ("errors",),
    "files": ("errors", "text"),
    "torch_internals": ("errors", "text"),
    "pipe_ir": LOW,
    "split": (*LOW, "pipe_ir"),
    "stage": (*LOW, "pipe_ir"),
    "schedule": ("errors", "text", "files"),
    "run": (*LOW, "pipe_ir", "stage", "schedule"),
}
# These stand on top of the rooms above, and may use each other as long as there is no cycle.
ON_TOP = ("api", "pipe", "planning", "verification", "launcher", "training", "integrations", "compat", "")
WITHOUT_TORCH = "schedule"
PRIVATE_TORCH = "torch_internals"
MOST_FILES, MOST_LINES = 250, 420
UPSTREAM = re.compile(r"pipelining|peer_|[Tt]he peer's\b|[Aa]s with the peer\b|written for the peer\b")
HEADLESS = re.compile(r"(What|Which|Whether|How|Where|When|Why|Who|Whose)\b")


@dataclass(frozen=True)
class Fault:
    """One broken rule, and where."""

    file: str
    line: int
    what: str
    rule: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}: {self.rule}"


def room_of(module: str) -> str:
    """The room of a dotted name below pipecut; the package's own file has none."""
    return module.partition(".")[0]


def own_imports(source: Source) -> Iterator[tuple[int, str, bool]]:
    """Imports from the package itself: line, the name below pipecut, and whether it is imported at run time."""
    for entry in source.imports:
        package, _, name = entry.name.partition(".")
        if package == source.package[0]:
            yield entry.line, name, entry.at_run_time


def owner_of(name: str, sources: dict[str, Source]) -> Source | None:
    """The file that an import of this name loads: the longest module that begins it."""
    while name and name not in sources:
        name = name.rpartition(".")[0]
    return sources.get(name)


def forbidden_imports(sources: dict[str, Source]) -> Iterator[Fault]:
    """Imports from a room that this one may not know."""
    for source in sources.values():
        room = room_of(source.module)
        allowed = MAY_IMPORT.get(room)
        for line, name, _ in own_imports(source) if allowed is not None else ():
            if room_of(name) not in (room, *allowed):
                rule = f"{room} may import of pipecut only {', '.join(allowed) or 'itself'}"
                yield Fault(source.file, line, f"imports pipecut{'.' * bool(name)}{name}", rule)


def cycles_between_rooms(sources: dict[str, Source]) -> Iterator[Fault]:
    """Rooms of the top that need each other, be it in a function or for types alone."""
    uses = {
        room: {room_of(name) for s in sources.values() if room_of(s.module) == room for _, name, _ in own_imports(s)}
        for room in ON_TOP[:-1]
    }
    for cycle in find_cycles(uses):
        yield Fault("pipecut", 0, " -> ".join(cycle), "rooms do not need each other in a cycle")


def cycles_between_files(sources: dict[str, Source]) -> Iterator[Fault]:
    """Files of a room that import each other when they are loaded."""
    uses: dict[str, set[str]] = {}
    for source in sources.values():
        for _, name, at_run_time in own_imports(source):
            used = owner_of(name, sources)
            if at_run_time and used is not None and room_of(used.module) == room_of(source.module) != "":
                uses.setdefault(source.file, set()).add(used.file)
    for cycle in find_cycles(uses):
        yield Fault(cycle[0], 1, " -> ".join(cycle), "files of a room do not import each other in a cycle")


def find_cycles(uses: dict[str, set[str]]) -> Iterator[list[str]]:
    """One cycle of each knot of names that use each other, a name that uses itself left out."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        found = None
        for other in sorted(uses.get(name, set()) - {name}):
            found = found or visit(other, [*path, name])
        done.add(name)
        return found

    for name in sorted(uses):
        cycle = visit(name, [])
        if cycle is not None:
            yield cycle


def not_through_the_door(sources: dict[str, Source]) -> Iterator[Fault]:
    """Imports of a file inside another room, or of a name that its door does not have."""
    for source in sources.values():
        for line, name, _ in own_imports(source):
            room, _, inside = name.partition(".")
            door = sources.get(room)
            if room_of(source.module) == room or door is None or not door.is_door or not inside:
                continue
            if inside not in names_of_door(door):
                rule = f"other rooms import what pipecut/{room}/__init__.py has, from there"
                yield Fault(source.file, line, f"imports pipecut.{name}", rule)


def names_of_door(door: Source) -> set[str]:
    """All that an `__init__` offers: what it imports from the files of its room, and what it defines."""
    inside = {entry.local for entry in door.imports if entry.name.startswith(f"{door.full_name}.")}
    return inside | set(door.definitions)


def unused_names_of_doors(sources: dict[str, Source]) -> Iterator[Fault]:
    """Names of a door that no other room uses, nor README tells users of; `__all__` of schedules is for users too."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    used = {name for source in sources.values() for _, name, _ in own_imports(source) if not is_in_room(source, name)}
    for room in (*MAY_IMPORT, *ON_TOP):
        door = sources.get(room)
        if door is None or not door.is_door or room in ("", "compat"):
            continue
        public = re.findall(r'"(\w+)"', door.text.partition("__all__ = [")[2]) if room == "schedule" else []
        public += re.findall(rf"pipecut\.{room}\.(\w+)", readme)
        for entry in door.imports:
            is_own = entry.name.startswith(f"{door.full_name}.")
            if is_own and entry.local not in public and f"{room}.{entry.local}" not in used:
                rule = "a door has what other rooms use, and no more"
                yield Fault(door.file, entry.line, f"offers {entry.local}", rule)


def is_in_room(source: Source, name: str) -> bool:
    return room_of(source.module) == room_of(name)


def private_names(sources: dict[str, Source]) -> Iterator[Fault]:
    """Private names that another file uses."""
    for source in sources.values():
        if room_of(source.module) == "compat":  # its names are those of the library that it stands in for
            continue
        touched = [(entry.line, "imports", entry.name) for entry in source.imports]
        touched += [(line, "uses", name) for line, name in source.attribute_uses]
        for line, verb, name in touched:
            if is_private(name, sources):
                yield Fault(source.file, line, f"{verb} {name}", "a name with _ is for its own file")


def names_without_users(sources: dict[str, Source]) -> Iterator[Fault]:
    """Names that no other file uses, tests and benchmarks included, and that do not begin with an underscore."""
    used = {*used_outside(), *(name for source in sources.values() for name in names_used_in(source))}
    for source in sources.values():
        if source.is_door or room_of(source.module) in ("compat", "errors", ""):
            continue
        for name, line in source.definitions.items():
            is_used = f"{source.full_name}.{name}" in used or name in source.registered
            if not name.startswith("_") and not is_used:
                yield Fault(source.file, line, f"defines {name}", "a name that no other file uses begins with _")


@cache
def pipecut_sources() -> dict[str, Source]:
    return sources_of(PACKAGE)


@cache
def used_outside() -> set[str]:
    return {name for folder in USERS for source in read_sources(ROOT / folder) for name in names_used_in(source)}


def names_used_in(source: Source) -> Iterator[str]:
    yield from (entry.name for entry in source.imports)
    yield from (name for _, name in source.attribute_uses)


def is_private(name: str, sources: dict[str, Source]) -> bool:
    """True for a name with an underscore in some file of the package."""
    package, _, inside = name.partition(".")
    owner, _, last = inside.rpartition(".")
    return package == PACKAGE.name and bool(re.match("_[^_]", last)) and owner in sources and inside not in sources


def torch_faults(sources: dict[str, Source]) -> Iterator[Fault]:
    """Imports of the parts of torch that are closed to a file."""
    for source in sources.values():
        touched = [(entry.line, "imports", entry.name) for entry in source.imports]
        touched += [(line, "uses", name) for line, name in source.attribute_uses]
        for line, verb, name in touched:
            if room_of(source.module) == WITHOUT_TORCH and f"{name}.".startswith("torch.") and verb == "imports":
                yield Fault(source.file, line, f"imports {name}", f"{WITHOUT_TORCH} works without torch")
            if f"{name}.".startswith("torch.distributed.pipelining."):
                yield Fault(source.file, line, f"{verb} {name}", "pipecut stands on its own, not on torch's pipelining")


def upstream_inside(sources: dict[str, Source]) -> Iterator[Fault]:
    """Words for torch.distributed.pipelining outside of compat."""
    for source in sources.values():
        for number, line in enumerate(source.text.splitlines(), 1) if room_of(source.module) != "compat" else ():
            for word in UPSTREAM.findall(line):
                yield Fault(source.file, number, f"says {word}", "compat alone knows torch.distributed.pipelining")


def private_torch(sources: dict[str, Source]) -> Iterator[Fault]:
    """Names of torch with an underscore, and unittest.mock, outside of torch_internals."""
    for source in sources.values():
        if room_of(source.module) == PRIVATE_TORCH:
            continue
        touched = [(entry.line, "imports", entry.name) for entry in source.imports]
        touched += [(line, "uses", name) for line, name in source.attribute_uses]
        named = {line for line, _, name in touched if is_private_torch(name)}
        touched += [(line, "uses", name) for line, name in torch_attributes(source) if line not in named]
        for line, verb, name in touched:
            if is_private_torch(name):
                yield Fault(source.file, line, f"{verb} {name}", f"only {PRIVATE_TORCH} touches private torch")
            if name.startswith("unittest.mock"):
                yield Fault(source.file, line, f"{verb} {name}", "the package does not need mocks")


def is_private_torch(name: str) -> bool:
    root, *parts = name.split(".")
    return root == "torch" and any(map(re.compile("_[^_]").match, parts))


def torch_attributes(source: Source) -> Iterator[tuple[int, str]]:
    """Line and name of every `value._name`, and `getattr(value, "_name")`, that objects of torch have."""
    attributes = [node for node in source.nodes if isinstance(node, ast.Attribute)]
    own = {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and is_self(node.value)}
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            name = "" if node.attr in own or is_self(node.value) else node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr") and len(node.args) > 1:
            text = isinstance(node.args[1], ast.Constant | ast.JoinedStr)
            name = ast.unparse(node.args[1]).lstrip("f").strip("'\"") if text else ""
        else:
            continue
        if name in names_in_torch() or name.startswith(("_saved_", "_raw_saved_")):
            yield node.lineno, f"torch.{name}"


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@cache
def names_in_torch() -> set[str]:
    """Private attributes of the objects of torch that pipecut meets."""
    node = torch.ones(1, requires_grad=True).mul(2).grad_fn
    met: list[Any] = [torch.nn.Module(), torch.ones(1), node, torch.ops.aten.add.Tensor]
    met += [torch.nn.parallel.DistributedDataParallel, torch.distributed.ProcessGroup, torch.distributed.Reducer]
    return {"_cdata"} | {name for thing in met for name in dir(thing) if re.match("_[^_]", name)}


def first_lines(sources: dict[str, Source]) -> Iterator[Fault]:
    """Files that do not open with a sentence."""
    for source in sources.values():
        text = next((text for line, owner, text in source.docstrings() if owner == "the file"), "")
        first = text.partition("\n")[0]
        opens = source.text.startswith(f'"""{first}') or source.text.startswith(f'r"""{first}')
        if not (opens and first.endswith(".")):
            rule = "a file opens with a docstring whose first line is a sentence ending in '.'"
            yield Fault(source.file, 1, f"opens with {first!r}", rule)


def files_that_doors_name(sources: dict[str, Source]) -> Iterator[Fault]:
    """Files that the docstring of an `__init__` names, and that are not there."""
    for source in sources.values():
        for line, owner, text in source.docstrings() if source.is_door else ():
            for name in re.findall(r"([\w/]+)\.py\b", text) if owner == "the file" else ():
                if ".".join(filter(None, [source.module, *name.split("/")])) not in sources:
                    yield Fault(source.file, line, f"names {name}.py", "a door names files that are there")


def headless_docstrings(sources: dict[str, Source]) -> Iterator[Fault]:
    """Docstrings that begin with a question word instead of a verb or a noun."""
    for source in sources.values():
        for line, owner, text in source.docstrings():
            if HEADLESS.match(text):
                rule = "a docstring begins with a verb (functions) or a noun (files, classes)"
                yield Fault(source.file, line, f"{owner}: {text.partition('.')[0][:60]!r}", rule)


def sizes(sources: dict[str, Source]) -> Iterator[Fault]:
    """Files that are too long, and too many of them."""
    if len(sources) > MOST_FILES:
        yield Fault("pipecut", 0, f"{len(sources)} files", f"at most {MOST_FILES}")
    for source in sources.values():
        lines = source.text.count("\n")
        if lines > MOST_LINES:
            yield Fault(source.file, lines, f"{lines} lines", f"at most {MOST_LINES}")


Rule = Callable[[dict[str, Source]], Iterator[Fault]]
RULES: list[Rule] = [
    forbidden_imports,
    cycles_between_rooms,
    cycles_between_files,
    not_through_the_door,
    unused_names_of_doors,
    private_names,
    names_without_users,
    torch_faults,
    upstream_inside,
    private_torch,
    first_lines,
    files_that_doors_name,
    headless_docstrings,
    sizes,
]


def sources_of(package: Path) -> dict[str, Source]:
    return {source.module: source for source in read_sources(package)}


def find_faults(package: Path, rules: list[Rule]) -> list[Fault]:
    """Every broken rule in the package, by file and line."""
    faults = [fault for rule in rules for fault in rule(sources_of(package))]
    return sorted(faults, key=lambda fault: (fault.file, fault.line, fault.what))


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_pipecut_keeps_its_rules(rule: Rule) -> None:
    faults = list(rule(pipecut_sources()))
    assert not faults, "\n" + "\n".join(map(str, faults))


def faults_of(tmp_path: Path, files: dict[str, str], rules: list[Rule]) -> list[str]:
    """The faults of a made-up package of these files, where each room has a door."""
    package = tmp_path / "pipecut"
    for file, code in {"__init__.py": "", **files}.items():
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        door = path.parent / "__init__.py"
        for new in {path, door} - {door} if door.exists() else {path, door}:
            new.write_text('"""A file."""\n' + (f"{code}\n" if new == path else ""), encoding="utf-8")
    return [str(fault) for fault in find_faults(package, rules)]


@pytest.mark.parametrize("line", ["# as in torch.distributed.pipelining", "peer_action = 1", '"""As with the peer."""'])
def test_upstream_is_known_to_compat_alone(tmp_path: Path, line: str) -> None:
    (fault,) = faults_of(tmp_path, {"run/mail.py": line, "compat/stage.py": line}, [upstream_inside])
    assert fault.startswith("pipecut/run/mail.py:2: says ")
    assert faults_of(tmp_path, {"run/mail.py": "peer = rank_of[other_stage]"}, [upstream_inside]) == []


IMPORT_RULES: list[Rule] = [forbidden_imports, torch_faults]


@pytest.mark.parametrize(
    ("file", "code", "name", "line"),
    [
        ("errors.py", "import pipecut.pipe_ir", "pipecut.pipe_ir", 2),
        ("pipe_ir/pipe.py", "from pipecut.split.points import plan", "pipecut.split.points.plan", 2),
        ("pipe_ir/pipe.py", "from ..split import points", "pipecut.split.points", 2),
        ("pipe_ir/pipe.py", "from .. import split", "pipecut.split", 2),
        ("pipe_ir/sizes/rows.py", "from ...split import points", "pipecut.split.points", 2),
        ("pipe_ir/pipe.py", "from pipecut import Pipe", "pipecut.Pipe", 2),
        ("pipe_ir/pipe.py", "import pipecut", "pipecut", 2),
        ("split/points.py", "def late():\n    from pipecut.stage import stage", "pipecut.stage.stage", 3),
        ("split/points.py", "if TYPE_CHECKING:\n    import pipecut.schedule.plan", "pipecut.schedule.plan", 3),
        ("split/points.py", "import os, pipecut.api", "pipecut.api", 2),
        ("stage/stage.py", "from pipecut.run import executor", "pipecut.run.executor", 2),
        ("schedule/plan.py", "from ..pipe_ir import spec", "pipecut.pipe_ir.spec", 2),
        ("schedule/plan.py", "from ..run import executor", "pipecut.run.executor", 2),
        ("schedule/plan.py", "from torch import nn", "torch.nn", 2),
        ("run/mail.py", "from pipecut.split import cost", "pipecut.split.cost", 2),
        ("run/mail.py", "from ..planning import cost", "pipecut.planning.cost", 2),
        ("api.py", "import torch.distributed.pipelining", "torch.distributed.pipelining", 2),
        ("compat/names.py", "from torch.distributed import pipelining", "torch.distributed.pipelining", 2),
        ("api.py", "import torch\n\ntorch.distributed.pipelining.pipeline", "torch.distributed.pipelining.pipeline", 4),
    ],
)
def test_a_forbidden_import_is_found_and_named(tmp_path: Path, file: str, code: str, name: str, line: int) -> None:
    (fault,) = faults_of(tmp_path, {file: code}, IMPORT_RULES)
    assert re.match(rf"pipecut/{re.escape(file)}:{line}: (imports|uses) {re.escape(name)}: \w+", fault)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("errors.py", "import torch"),
        ("pipe_ir/pipe.py", "from ..errors import PipeError\nfrom . import spec\nfrom .spec import split"),
        ("split/points.py", "from pipecut import errors, pipe_ir\nfrom .cost import flops"),
        ("stage/stage.py", "from ..pipe_ir import Pipe\nimport torch.distributed"),
        ("schedule/plan.py", "import torchless\nfrom .action import Op\nfrom ..errors import PipeError"),
        ("run/executor.py", "import torch\nfrom ..schedule import Plan\nfrom ..stage import PipelineStage"),
        ("api.py", "from .split import points\nfrom .run import executor\nfrom torch.export import export"),
        ("__init__.py", "from .api import pipeline\nfrom . import cli, stage"),
        ("compat/stage.py", "from .. import api\nfrom ..run import executor"),
    ],
)
def test_an_allowed_import_passes(tmp_path: Path, file: str, code: str) -> None:
    assert faults_of(tmp_path, {file: code}, IMPORT_RULES) == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from torch.export import _trace\n_trace.f()", "torch.export._trace"),
        ("from torch._export.utils import f", "torch._export.utils.f"),
        ("import torch.utils._pytree as pytree", "torch.utils._pytree"),
        ("import torch.export as te\nte._unlift", "torch.export._unlift"),
        ("def f(module):\n    return module._buffers", "torch._buffers"),
        ("def f(node, name):\n    return getattr(node, f'_saved_{name}')", "torch._saved_{name}"),
        ("from unittest.mock import patch", "unittest.mock.patch"),
    ],
)
def test_private_torch_is_in_one_room(tmp_path: Path, code: str, name: str) -> None:
    (fault, *_) = faults_of(tmp_path, {"split/cost.py": code}, [private_torch])
    assert re.search(rf"(imports|uses) {re.escape(name)}: \w+", fault)
    assert faults_of(tmp_path, {"split/cost.py": "", "torch_internals/cost.py": code}, [private_torch]) == []


def test_the_message_names_file_line_import_and_rule(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, {"split/cost.py": "\nfrom ..stage import shapes"}, [forbidden_imports])
    rule = "split may import of pipecut only errors, text, files, torch_internals, pipe_ir"
    assert fault == f"pipecut/split/cost.py:3: imports pipecut.stage.shapes: {rule}"


def test_every_fault_is_reported(tmp_path: Path) -> None:
    code = "import torch\nfrom ..stage import stage\nimport pipecut.split"
    faults = faults_of(tmp_path, {"schedule/plan.py": code}, IMPORT_RULES)
    assert [fault.split(": ")[1] for fault in faults] == [
        "imports torch",
        "imports pipecut.stage.stage",
        "imports pipecut.split",
    ]


def test_rooms_on_top_may_not_need_each_other_in_a_cycle(tmp_path: Path) -> None:
    files = {
        "api.py": "from .planning import cuts",
        "planning/cuts.py": "def late():\n    from ..launcher import launch",
    }
    assert faults_of(tmp_path, files, [cycles_between_rooms]) == []
    (fault,) = faults_of(tmp_path, {**files, "launcher/launch.py": "from ..api import p"}, [cycles_between_rooms])
    assert "api -> planning -> launcher -> api" in fault


def test_files_of_a_room_may_not_import_each_other_in_a_cycle(tmp_path: Path) -> None:
    files = {
        "run/a.py": "from .b import x",
        "run/b.py": "from . import c\n",
        "run/c.py": "def f():\n    from .a import y",
    }
    assert faults_of(tmp_path, files, [cycles_between_files]) == []
    (fault,) = faults_of(tmp_path, {**files, "run/c.py": "from .a import y"}, [cycles_between_files])
    assert "pipecut/run/a.py -> pipecut/run/b.py -> pipecut/run/c.py -> pipecut/run/a.py" in fault


def test_other_rooms_come_through_the_door(tmp_path: Path) -> None:
    files = {"stage/__init__.py": "from .part import Part", "stage/part.py": "class Part: ...", "run/a.py": ""}
    rules: list[Rule] = [not_through_the_door, unused_names_of_doors]
    for line in ("from ..stage import Part", "from pipecut.stage import Part"):
        assert faults_of(tmp_path, {**files, "run/a.py": line}, rules) == []
    for line in ("from ..stage.part import Part", "from ..stage import part", "import pipecut.stage.part"):
        fault, unused = faults_of(tmp_path, {**files, "run/a.py": line}, rules)
        assert re.search(r"run/a.py:2: imports pipecut.stage.part.*pipecut/stage/__init__.py has", fault)
        assert "pipecut/stage/__init__.py:2: offers Part: " in unused


def test_private_names_stay_in_their_file(tmp_path: Path) -> None:
    files = {"run/a.py": "def _helper(): ...\ndef used(): ...\nLIMIT = 3", "run/b.py": "from .a import used as _used"}
    assert faults_of(tmp_path, files, [private_names]) == []
    (fault,) = faults_of(tmp_path, files, [names_without_users])
    assert "pipecut/run/a.py:4: defines LIMIT: " in fault
    for line in ("from .a import _helper", "from . import a\na._helper()"):
        (fault,) = faults_of(tmp_path, {**files, "run/b.py": line}, [private_names])
        assert "pipecut.run.a._helper: a name with _ is for its own file" in fault


@pytest.mark.parametrize("text", ["", "import os\n", '"""No full stop"""\n', '"""\nStarts on the second line.\n"""\n'])
def test_a_file_must_open_with_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "pipecut").mkdir()
    (tmp_path / "pipecut" / "api.py").write_text(text, encoding="utf-8")
    (fault,) = find_faults(tmp_path / "pipecut", [first_lines])
    assert (fault.file, fault.line) == ("pipecut/api.py", 1)
    assert "docstring" in fault.rule


def test_a_docstring_does_not_begin_with_a_question_word(tmp_path: Path) -> None:
    code = 'def f():\n    """Whether it rains."""\nclass A:\n    """Weather, whatever it is."""\n'
    (fault,) = faults_of(tmp_path, {"api.py": code}, [headless_docstrings])
    assert "pipecut/api.py:2: f: 'Whether it rains'" in fault


def test_a_door_names_files_that_are_there(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.py"):
        (tmp_path / "pipecut" / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pipecut" / "run" / name).write_text('"""It says d.py."""', encoding="utf-8")
    (tmp_path / "pipecut" / "run" / "__init__.py").write_text('"""Read a.py, b/c.py, then c.py."""', encoding="utf-8")
    (fault,) = find_faults(tmp_path / "pipecut", [files_that_doors_name])
    assert str(fault) == "pipecut/run/__init__.py:1: names c.py: a door names files that are there"


def test_registered_functions_need_no_other_user(tmp_path: Path) -> None:
    files = {"schedule/registry.py": "def schedule(name): ...", "schedule/a.py": "from .registry import schedule\n"}
    files["schedule/a.py"] += '@schedule("A")\ndef a(): ...\ndef b(): ...'
    (fault,) = faults_of(tmp_path, files, [names_without_users])
    assert "defines b" in fault


def test_files_are_neither_too_long_nor_too_many(tmp_path: Path) -> None:
    files = {f"run/a{number}.py": "" for number in range(MOST_FILES - 2)}
    assert faults_of(tmp_path, files, [sizes]) == []
    many, long = faults_of(tmp_path, {**files, "api.py": "\n" * MOST_LINES}, [sizes])
    assert (many, long.split(": ")[1]) == (f"pipecut:0: {MOST_FILES + 1} files: at most {MOST_FILES}", "422 lines")
