"""Tasks by name, and tasks from a user's file."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from gruppetto.errors import GruppettoError, InvalidSetting, TaskError
from gruppetto.spec import read_value, split_spec, suggest
from gruppetto.training.task import Task
from gruppetto.training.tasks.digits import digits
from gruppetto.training.tasks.least_squares import least_squares

__all__ = ["TASKS", "load_task", "resolve_task"]

#: Built-in tasks: functions whose keyword arguments are the task's options.
TASKS: Final[dict[str, Callable[..., Task]]] = {
    "digits": digits,
    "least-squares": least_squares,
}

_FILE = re.compile(r"^(?P<path>.*\.py)(?::(?P<name>[A-Za-z_]\w*))?(?::(?P<options>.*=.*))?$")


def resolve_task(reference: str) -> str:
    """The same reference, with a file's path made absolute, so that it can be found again."""
    match = _FILE.match(reference)
    if match is None:
        return reference
    return str(Path(match["path"]).resolve()) + reference[match.end("path") :]


def load_task(reference: str) -> Task:
    """Load ``digits``, ``least-squares:n=100,d=5``, ``path/to/file.py`` or ``file.py:name``.

    In a file the name (default ``task``) is a :class:`Task` or a function that returns one;
    ``file.py:name:key=value`` gives the function options.

    Raises:
        TaskError: an unknown name; a file that is missing, fails to run, or has no task.
        InvalidSetting: an unknown option, or a value of the wrong type.
    """
    match = _FILE.match(reference)
    if match is not None:
        module = _load_file(Path(match["path"]))
        options = split_spec(f"x:{match['options']}")[1] if match["options"] else {}
        return _from_module(module, match["path"], match["name"] or "task", options)
    name, options = split_spec(reference, "task")
    if name not in TASKS:
        raise TaskError(
            f"unknown task {name!r}; {suggest(name, list(TASKS))}; or a file.py that defines task"
        )
    task: Task = _call(TASKS[name], options, f"task {name}")
    return task


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"task file {path} does not exist")
    name = f"gruppetto_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"task file {path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # As when the file is run as a script, its own folder's modules can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except GruppettoError:
        raise
    except SyntaxError as error:
        raise TaskError(
            f"task file {path} has a syntax error in line {error.lineno}: {error.msg}"
        ) from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()]
        where = f", line {lines[-1]}" if lines else ""
        raise TaskError(
            f"task file {path}{where} failed to load: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _from_module(module: ModuleType, path: str, name: str, options: dict[str, str]) -> Task:
    if not hasattr(module, name):
        named = [n for n, v in vars(module).items() if isinstance(v, Task)]
        hint = f"it has {', '.join(named)}: write {path}:{named[0]}" if named else "it has no Task"
        raise TaskError(f"{path} defines no {name!r}; {hint}")
    found = getattr(module, name)
    if isinstance(found, Task):
        if options:
            raise InvalidSetting(f"{path}:{name} is a Task and takes no options")
        return found
    if not callable(found):
        raise TaskError(
            f"{path}:{name}: expected a Task or a function that returns one, got "
            f"{type(found).__name__}"
        )
    task = _call(found, options, f"{path}:{name}")
    if not isinstance(task, Task):
        raise TaskError(f"{path}:{name}() returned {type(task).__name__}; expected a Task")
    return task


def _call(make: Callable[..., Any], texts: dict[str, str], what: str) -> Any:
    parameters = inspect.signature(make).parameters
    hints = typing.get_type_hints(make)
    options = {}
    for key, text in texts.items():
        if key not in parameters:
            raise InvalidSetting(f"{what} has no option {key!r}; {suggest(key, list(parameters))}")
        options[key] = read_value(text, hints.get(key, str), f"{what}:{key}")
    missing = [
        n
        for n, p in parameters.items()
        if p.default is p.empty
        and n not in options
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing:
        raise InvalidSetting(f"{what} needs the option {missing[0]}=")
    return make(**options)
