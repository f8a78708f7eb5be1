"""The house rules that a machine can check: who imports whom, purity, exports, docstrings, size."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import gruppetto

SOURCE = Path(gruppetto.__file__).parent
#: A room imports only rooms above it.
ROOMS = ("errors", "spec", "staleness", "delays", "protocols", "theory", "trace", "training",
         "decoupled", "engines", "runs", "report", "cli", "testing")  # fmt: skip
PURE = ("staleness", "delays", "protocols", "theory")
#: Pure files in other rooms.
PURE_FILES = (
    *("decoupled/schedule.py", "decoupled/timeline.py", "decoupled/grid.py"),
    "decoupled/pass_times.py",
)
IMPURE_MODULES = {"torch", "time", "datetime", "os", "io", "pathlib", "threading", "socket",
                  "subprocess", "multiprocessing", "asyncio", "random", "tempfile"}  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = [m.name for m in pkgutil.walk_packages(gruppetto.__path__, "gruppetto.")]


def room_of(path: Path) -> str:
    name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "cli" if name == "__main__" else name


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
    return found


def test_every_file_is_in_a_room() -> None:
    assert {room_of(p) for p in FILES} - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_room_imports_only_rooms_above_it(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "gruppetto" or len(parts) == 1:
            # The package itself: only what stands below all rooms may use it.
            assert parts != ["gruppetto"] or room in ("testing", "cli"), f"{path} imports gruppetto"
            continue
        assert ROOMS.index(parts[1]) <= ROOMS.index(room), f"{room} imports {parts[1]}"


@pytest.mark.parametrize(
    "path",
    [
        p
        for p in FILES
        if room_of(p) in (*PURE, "errors", "spec") or p.relative_to(SOURCE).as_posix() in PURE_FILES
    ],
    ids=lambda p: str(p.relative_to(SOURCE)),
)
def test_pure_rooms_know_no_torch_clock_file_or_thread(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports_of(path)} & IMPURE_MODULES
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input"}


def test_report_knows_nothing_of_training_or_engines() -> None:
    for path in FILES:
        if room_of(path) == "report":
            rooms = {n.split(".")[1] for n in imports_of(path) if n.startswith("gruppetto.")}
            assert not rooms & {"training", "engines", "runs"}, path


@pytest.mark.parametrize(
    "module", ["gruppetto.protocols", "gruppetto.theory", "gruppetto.trace", "gruppetto.report"]
)
def test_reading_and_planning_do_not_wait_for_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", [m for m in MODULES if "__main__" not in m])
def test_exports_exist_and_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} says what it is for"
    for export in getattr(module, "__all__", ()):
        value = getattr(module, export)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{export} has no docstring"


def test_public_names_are_those_of_the_package() -> None:
    for name in gruppetto.__all__:
        assert getattr(gruppetto, name) is not None
    assert set(gruppetto.__all__) <= set(dir(gruppetto))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gruppetto.nothing


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 420
