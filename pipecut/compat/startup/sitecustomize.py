"""Start-up of a Python process with this directory in PYTHONPATH: lets pipecut.compat be imported for upstream.

It waits for the first import of torch.distributed.pipelining, for most processes never need torch.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class InstallPipecutWhenImported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder for one module, which it finds once."""

    name = "torch.distributed.pipelining"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules.pop(self.name)
        from pipecut.compat.installing import install

        install()


def _run_the_next_one() -> None:
    """Run the sitecustomize that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_next_one()
if os.environ.get("PIPECUT_COMPAT"):
    sys.meta_path.insert(0, InstallPipecutWhenImported())
