"""Tasks by name, and tasks and models from a user's file."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import sys
import traceback
import typing
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from torch import nn

from gruppetto.errors import GruppettoError, InvalidSetting, TaskError
from gruppetto.spec import read_value, split_spec, suggest
from gruppetto.training.randomness import one_thread
from gruppetto.training.task import Task
from gruppetto.training.tasks.cifar10 import cifar10
from gruppetto.training.tasks.digits import digits
from gruppetto.training.tasks.least_squares import least_squares
from gruppetto.training.tasks.mnist import mnist

__all__ = [
    "TASKS",
    "is_in_file",
    "load_model",
    "load_task",
    "resolve_data",
    "resolve_model",
    "resolve_task",
]

#: Built-in tasks: functions whose keyword arguments are the task's options.
TASKS: Final[dict[str, Callable[..., Task]]] = {
    "digits": digits,
    "least-squares": least_squares,
    "mnist": mnist,
    "cifar10": cifar10,
}

#: The folder in ``cifar10:model=cnn,data=folder``.
_DATA = re.compile(r"(?<=[:,]data=)[^,]+")
_FILE = re.compile(r"^(?P<path>.*\.py)(?::(?P<name>[A-Za-z_]\w*))?(?::(?P<options>.*=.*))?$")


def is_in_file(reference: str) -> bool:
    """Whether a task or a model is named by the file that defines it."""
    return _FILE.match(reference) is not None


def resolve_task(reference: str) -> str:
    """The same reference, with the paths in it made absolute, so that it can be found again."""
    match = _FILE.match(reference)
    if match is None:
        return _DATA.sub(lambda found: resolve_data(found[0]), reference)
    return str(Path(match["path"]).resolve()) + reference[match.end("path") :]


def resolve_model(text: str) -> str:
    """What ``model=`` of :func:`load_task` takes, a file's path made absolute; names stay."""
    return resolve_task(text) if is_in_file(text) else text


def resolve_data(text: str) -> str:
    """What ``data=`` of :func:`load_task` takes, made absolute."""
    return str(Path(text).resolve())


def load_task(reference: str, *, model: str | None = None, data: str | None = None) -> Task:
    """Load ``digits``, ``least-squares:n=100,d=5``, ``path/to/file.py`` or ``file.py:name``.

    In a file the name (default ``task``) is a :class:`Task` or a function that returns one;
    ``file.py:name:key=value`` gives the function options.

    Torch has one thread meanwhile: data that sums make have the same bits whatever the machine.

    Args:
        reference: which task, with its options.
        model: the name of a known model, for tasks with an option ``model``; or
            ``file.py:name``, for any task: a function or class (default ``model``) that builds an
            ``nn.Module`` from no arguments, instead of the task's own.
        data: a folder, for tasks with an option ``data``.

    Raises:
        TaskError: an unknown name; a file that is missing, fails to run, or has no task or model.
        InvalidSetting: an unknown option, or a value of the wrong type; a model or data for a task
            that takes none.
    """
    match = None if model is None else _FILE.match(model)
    given = {"data": data, "model": model if match is None else None}
    with one_thread():
        task = _load(reference, {k: v for k, v in given.items() if v is not None})
        if match is None:
            return task
        if re.search(r"[:,]model=", reference):
            raise InvalidSetting(f"the model is given twice, in {reference!r} and as {model!r}")
        return dataclasses.replace(task, model=_load_model(match))


def load_model(reference: str) -> Callable[[], nn.Module]:
    """What builds the model behind ``file.py:name``.

    Raises:
        TaskError: a file that is missing or fails to run, or that has no such function or class.
    """
    match = _FILE.match(reference)
    if match is None:
        raise TaskError(f"model: expected path/to/file.py:name, got {reference!r}")
    return _load_model(match)


def _load(reference: str, given: Mapping[str, str]) -> Task:
    match = _FILE.match(reference)
    if match is not None:
        module = _load_file(Path(match["path"]), "task")
        options = split_spec(f"x:{match['options']}")[1] if match["options"] else {}
        return _from_module(module, match["path"], match["name"] or "task", (options, given))
    name, options = split_spec(reference, "task")
    if name not in TASKS:
        raise TaskError(
            f"unknown task {name!r}; {suggest(name, list(TASKS))}; or a file.py that defines task"
        )
    task: Task = _call(TASKS[name], options, given, f"task {name}")
    return task


def _load_model(match: re.Match[str]) -> Callable[[], nn.Module]:
    path, name = match["path"], match["name"] or "model"
    module = _load_file(Path(path), "model")
    if match["options"]:
        raise InvalidSetting(f"{path}:{name}: a model takes no options, got {match['options']}")
    if not hasattr(module, name):
        classes = [
            n
            for n, v in vars(module).items()
            if isinstance(v, type) and issubclass(v, nn.Module) and v.__module__ == module.__name__
        ]
        hint = f"; write {path}:{classes[0]}" if classes else ""
        raise TaskError(f"{path} defines no {name!r}{hint}")
    build: Callable[[], nn.Module] = getattr(module, name)
    if isinstance(build, nn.Module) or not callable(build):
        raise TaskError(
            f"{path}:{name}: expected a function or class that builds the model, got "
            f"{type(build).__name__}"
        )
    missing = _required(build)
    if missing:
        raise TaskError(
            f"{path}:{name}: expected to build the model from no arguments, but it needs "
            f"{missing[0]}; write a function that gives it"
        )
    return build


def _load_file(path: Path, kind: str) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"{kind} file {path} does not exist")
    name = f"gruppetto_{kind}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{kind} file {path} cannot be loaded as Python")
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
            f"{kind} file {path} has a syntax error in line {error.lineno}: {error.msg}"
        ) from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()]
        where = f", line {lines[-1]}" if lines else ""
        raise TaskError(
            f"{kind} file {path}{where} failed to load: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _from_module(
    module: ModuleType,
    path: str,
    name: str,
    texts: tuple[dict[str, str], Mapping[str, str]],
) -> Task:
    if not hasattr(module, name):
        named = [n for n, v in vars(module).items() if isinstance(v, Task)]
        hint = f"it has {', '.join(named)}: write {path}:{named[0]}" if named else "it has no Task"
        raise TaskError(f"{path} defines no {name!r}; {hint}")
    found = getattr(module, name)
    options, given = texts
    if isinstance(found, Task):
        if options:
            raise InvalidSetting(f"{path}:{name} is a Task and takes no options")
        _check_given(given, (), f"{path}:{name}")
        return found
    if not callable(found):
        raise TaskError(
            f"{path}:{name}: expected a Task or a function that returns one, got "
            f"{type(found).__name__}"
        )
    task = _call(found, options, given, f"{path}:{name}")
    if not isinstance(task, Task):
        raise TaskError(f"{path}:{name}() returned {type(task).__name__}; expected a Task")
    return task


def _call(
    make: Callable[..., Any], texts: dict[str, str], given: Mapping[str, str], what: str
) -> Any:
    """Call with the options in a reference, ``texts``, and those given apart from it."""
    parameters = inspect.signature(make).parameters
    hints = typing.get_type_hints(make)
    _check_given(given, parameters, what)
    for key in given:
        if key in texts:
            raise InvalidSetting(
                f"{what}: {key} is given twice, as {texts[key]!r} and as {given[key]!r}"
            )
    options = {}
    for key, text in (texts | dict(given)).items():
        if key not in parameters:
            raise InvalidSetting(f"{what} has no option {key!r}; {suggest(key, list(parameters))}")
        options[key] = read_value(text, hints.get(key, str), f"{what}:{key}")
    missing = [name for name in _required(make) if name not in options]
    if missing:
        raise InvalidSetting(f"{what} needs the option {missing[0]}=")
    return make(**options)


def _check_given(given: Mapping[str, str], parameters: Container[str], what: str) -> None:
    if "data" in given and "data" not in parameters:
        raise InvalidSetting(f"{what} takes no data, got {given['data']!r}; leave it out")
    if "model" in given and "model" not in parameters:
        raise InvalidSetting(
            f"{what} has no models to choose from by name, got {given['model']!r}; give "
            "file.py:name, a function or class that builds one"
        )


def _required(make: Callable[..., Any]) -> list[str]:
    """Names of the arguments without which it cannot be called."""
    return [
        name
        for name, p in inspect.signature(make).parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
