"""The examples in docstrings and in the README run, and say what really comes out."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import pipecut

README = Path(__file__).resolve().parent.parent / "README.md"
PACKAGE = Path(pipecut.__file__).parent


def _name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# From the files: to walk the packages would import them, and integrations import other libraries, which takes seconds.
MODULES = sorted(_name_of(file) for file in PACKAGE.rglob("*.py") if (file.parent / "__init__.py").exists())
INTEGRATIONS = {"pipecut.integrations.transformers": "transformers"}


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    for integration, library in INTEGRATIONS.items():
        if name.startswith(integration):
            pytest.importorskip(library, reason=f"the extra for {library} is not installed")
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=flags).failed == 0
    # doctest leaves out functions that a decorator of another module made.
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=flags)
    for function in filter(inspect.isfunction, vars(module).values()):
        if function.__module__ == name and function.__globals__ is not vars(module):
            for examples in finder.find(function, globs=dict(vars(module))):
                runner.run(examples)
    assert runner.summarize().failed == 0


def test_examples_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks that import what they use, one after the other in a directory of their own."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    runnable = [block for block in blocks if "import" in block]
    assert len(runnable) >= 3
    names: dict[str, object] = {}
    for block in runnable:
        exec(compile(block, "README.md", "exec"), names)
