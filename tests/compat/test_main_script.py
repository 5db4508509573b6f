"""`python -m pipecut.compat script.py` is to a script what `python script.py` is: its globals, its errors, its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipecut.compat.installing import run_script, run_with_plain_errors
from tests.support.limits import WORK

ROOT = Path(__file__).resolve().parents[2]
COMPAT = ("-m", "pipecut.compat")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory, and what a main script changes in its process put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=WORK, env=environment)


def shown(script: str, capsys: Capture) -> str:
    """What Python would show of the error of a script that runs here."""
    try:
        run_with_plain_errors(lambda: run_script(script), __file__)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    return capsys.readouterr().err


GLOBALS = """
import os
import pickle
import sys
from pathlib import Path


class Kept:
    pass


assert type(pickle.loads(pickle.dumps(Kept()))) is Kept
assert sys.modules["__main__"].__dict__ is globals()
os.chdir("/")
print(Path(__file__).with_name("data.txt").read_text(), __file__, __name__, __package__, __spec__, __cached__)
print(type(__builtins__), type(__loader__), __doc__)
"""


def test_a_script_has_the_globals_of_a_main_script(process: Path, capsys: Capture) -> None:
    """`__file__` was as written on the command line, so that a script that changed the directory lost its files."""
    Path("script.py").write_text(GLOBALS)
    Path("data.txt").write_text("found")
    alone = run("script.py")
    run_script("script.py")
    assert capsys.readouterr().out == alone.stdout, alone.stderr
    assert alone.stdout.startswith(f"found {process}/script.py __main__ None None None")


ERROR = "def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError as error:\n    raise KeyError from error"


@pytest.mark.parametrize("text", [ERROR, "x = ("])
def test_an_error_is_shown_as_python_does(process: Path, capsys: Capture, text: str) -> None:
    """Tracebacks began with frames of runpy and pipecut, and the user's own came after them."""
    Path("script.py").write_text(text)
    assert shown("script.py", capsys) == run("script.py").stderr != ""


@pytest.mark.slow
def test_the_command_ends_as_the_script_does_alone(process: Path) -> None:
    Path("script.py").write_text(f"import sys\nprint(__file__, __package__, __spec__, sys.argv)\n{ERROR}")
    alone, here = (run(*way, "script.py", "a") for way in ((), COMPAT))
    assert (here.stdout, here.stderr, here.returncode) == (alone.stdout, alone.stderr, alone.returncode)


@pytest.mark.slow
def test_modules_and_directories_show_their_own_frames(process: Path, capsys: Capture) -> None:
    Path("package").mkdir()
    Path("package/__main__.py").write_text("1 / 0")
    own = f'  File "{process}/package/__main__.py", line 1, in <module>'
    assert shown("package", capsys).splitlines()[1] == own
    done = run(*COMPAT, "-m", "package")
    assert (done.stderr.splitlines()[1], done.returncode) == (own, 1)


@pytest.mark.parametrize("text", ["raise SystemExit(7)", "raise KeyboardInterrupt"])
def test_exits_and_interrupts_are_left_alone(process: Path, text: str) -> None:
    Path("script.py").write_text(text)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as error:
        run_with_plain_errors(lambda: run_script("script.py"), __file__)
    assert getattr(error.value, "code", 7) == 7
    assert sys.excepthook is sys.__excepthook__


def test_a_hook_of_the_script_gets_every_frame(process: Path, capsys: Capture) -> None:
    Path("script.py").write_text(
        "import sys\n"
        "sys.excepthook = lambda kind, error, trace: print(kind.__name__, trace.tb_frame.f_code.co_filename)\n"
        "1 / 0"
    )
    with pytest.raises(ZeroDivisionError) as error:
        run_with_plain_errors(lambda: run_script("script.py"), __file__)
    sys.excepthook(error.type, error.value, error.tb)
    assert capsys.readouterr().out == f"ZeroDivisionError {__file__}\n"
