"""Parsed files of a package: their imports, top-level names and docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One imported name: `from a import b` imports a.b under the name b."""

    line: int
    name: str  # absolute: pipecut.split.points.SplitPlan
    local: str
    at_run_time: bool  # at the top of the file, not under TYPE_CHECKING and not in a function


@dataclass(frozen=True)
class Source:
    """One parsed file of the package."""

    file: str  # pipecut/split/points.py
    module: str  # split.points; a package's __init__ has the package's name, that of pipecut itself is empty
    package: tuple[str, ...]  # what a relative import of one dot starts from: ("pipecut", "split")
    text: str
    tree: ast.Module

    @property
    def is_door(self) -> bool:
        return self.file.endswith("/__init__.py")

    @property
    def full_name(self) -> str:
        return f"{self.package[0]}.{self.module}" if self.module else self.package[0]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree: walking it takes longer than anything that is asked of it."""
        return list(ast.walk(self.tree))

    @cached_property
    def statements(self) -> list[tuple[ast.AST, bool]]:
        """Every statement, and True for those that run when the file is loaded."""
        return list(_statements(self.tree, at_run_time=True))

    @cached_property
    def imports(self) -> list[Import]:
        """Every import, wherever it stands: in a function and under TYPE_CHECKING too."""
        return [
            Import(node.lineno, name, local, at_run_time)
            for node, at_run_time in self.statements
            if isinstance(node, ast.Import | ast.ImportFrom)
            for local, name in self.imported_by(node).items()
        ]

    def imported_by(self, node: ast.AST) -> dict[str, str]:
        """Local name -> absolute dotted name, for what one statement imports."""
        if isinstance(node, ast.Import):
            # Without `as`, `import a.b` binds a; the key is kept whole, so that two imports of a stay two.
            return {alias.asname or alias.name: alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            above = self.package[: len(self.package) - (node.level - 1)] if node.level else ()
            base = ".".join((*above, node.module) if node.module else above)
            return {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
        return {}

    @cached_property
    def attribute_uses(self) -> list[tuple[int, str]]:
        """Line and absolute name of every `a.b.c` that starts at an imported name."""
        names = {"torch": "torch"} | {entry.local: entry.name for entry in self.imports}
        attributes = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        inner = {id(node.value) for node in attributes}
        dotted = [(node.lineno, _dotted(node)) for node in attributes if id(node) not in inner]
        return [(line, ".".join((names[root], *rest))) for line, (root, *rest) in dotted if root in names]

    @cached_property
    def definitions(self) -> dict[str, int]:
        """Functions, classes and values of the top level, with their lines."""
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node.lineno
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                for part in ast.walk(target) if target is not None else ():
                    if isinstance(part, ast.Name):
                        found[part.id] = node.lineno
        return found

    @cached_property
    def registered(self) -> set[str]:
        """Functions that a decorator of the package, such as `@schedule("GPipe")`, puts into a table."""
        own = {entry.local for entry in self.imports if entry.name.startswith(f"{self.package[0]}.")}
        return {
            node.name
            for node in self.tree.body
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id in own
        }

    def docstrings(self) -> Iterator[tuple[int, str, str]]:
        """Line, owner and text of every docstring."""
        for node, _ in self.statements:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None:
                    yield getattr(node, "lineno", 1), getattr(node, "name", "the file"), text


def read_sources(package: Path) -> Iterator[Source]:
    """Parse every Python file below the package directory, and the stub that has its public names.

    One after the other: Python takes three times as long if it has to keep all trees.
    """
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")]):
        inside = path.relative_to(package)
        names = inside.with_suffix("").parts
        module = ("stub",) if path.suffix == ".pyi" else names[:-1] if names[-1] == "__init__" else names
        text = path.read_text(encoding="utf-8")
        file = (Path(package.name) / inside).as_posix()
        tree = ast.parse(text, filename=str(path))
        yield Source(file, ".".join(module), (package.name, *names[:-1]), text, tree)


def _statements(node: ast.AST, at_run_time: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield a statement and all inside of it; expressions have none."""
    yield node, at_run_time
    is_late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node)
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        for inner in getattr(node, block, ()):
            yield from _statements(inner, at_run_time and not is_late)


def _dotted(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; empty at its root if that is another kind of expression."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(names)]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
