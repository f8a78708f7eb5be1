"""``"k-batch-async:k=4"`` <-> ``KBatchAsync(k=4)``: one parser and one class Registry.

Every room fills a registry of its own (protocols, modulations, delays, ...). Entries are frozen
dataclasses whose fields are the keys; a field's annotation says how its text is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from gruppetto.errors import InvalidSetting

__all__ = ["Registry", "read_value", "split_spec", "suggest"]

T = TypeVar("T")
C = TypeVar("C", bound=type)

_TRUE = {"true": True, "false": False}


def split_spec(text: str, kind: str = "setting") -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,key=value`` into its name and its keys.

    Raises:
        InvalidSetting: an empty name, a part without ``=``, or a key given twice.

    >>> split_spec("k-batch-async:k=4")
    ('k-batch-async', {'k': '4'})
    """
    name, colon, rest = text.strip().partition(":")
    if not name:
        raise InvalidSetting(f"{kind}: expected something like name:key=value, got {text!r}")
    keys: dict[str, str] = {}
    if colon and not rest:
        raise InvalidSetting(f"{kind} {text!r} ends in a colon; expected {name}:key=value")
    for part in filter(None, rest.split(",")) if rest else ():
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InvalidSetting(f"{kind} {text!r}: expected key=value, got {part!r}")
        if key in keys:
            raise InvalidSetting(f"{kind} {text!r}: {key!r} is given twice")
        keys[key] = value.strip()
    return name, keys


def suggest(wrong: str, valid: Sequence[str]) -> str:
    """The valid names, and a guess when one of them is close.

    >>> suggest("kasync", ["async", "k-async"])
    "valid: async, k-async (did you mean 'k-async'?)"
    """
    listed = "valid: " + ", ".join(valid) if valid else "it takes no keys"
    close = difflib.get_close_matches(wrong, valid, n=1)
    return listed + (f" (did you mean {close[0]!r}?)" if close else "")


def read_value(text: str, annotation: Any, what: str) -> Any:
    """Read ``text`` as the type of ``annotation`` (int, float, bool, str, Literal, or X | None).

    Raises:
        InvalidSetting: the text is not of that type.
    """
    origin = typing.get_origin(annotation)
    if origin is typing.Union or origin is types.UnionType:
        options = [a for a in typing.get_args(annotation) if a is not type(None)]
        if text.lower() == "none":
            return None
        return read_value(text, options[0], what)
    if origin is typing.Literal:
        valid = [str(a) for a in typing.get_args(annotation)]
        if text not in valid:
            raise InvalidSetting(f"{what}: expected one of {', '.join(valid)}, got {text!r}")
        return text
    if annotation is bool:
        if text.lower() not in _TRUE:
            raise InvalidSetting(f"{what}: expected true or false, got {text!r}")
        return _TRUE[text.lower()]
    if annotation is int or annotation is float:
        try:
            return annotation(text)
        except ValueError:
            noun = "a whole number" if annotation is int else "a number"
            raise InvalidSetting(f"{what}: expected {noun}, got {text!r}") from None
    return text


def _choices(annotation: Any) -> str:
    """The texts that an optional key takes, where there are few: ``discard|restart|wait``."""
    options = typing.get_args(annotation)
    literal = next((o for o in options if typing.get_origin(o) is typing.Literal), None)
    return "" if literal is None else "|".join(str(a) for a in typing.get_args(literal))


def _show(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


class Registry(Generic[T]):
    """Names of one kind of thing, and the frozen dataclass behind each.

    Args:
        kind: what the entries are, for messages: ``"protocol"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[T]] = {}
        #: Types of an entry's fields; kept, because reading annotations compiles them.
        self._types: dict[str, dict[str, Any]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator: make the class known under ``name``."""

        def add(cls: C) -> C:
            if name in self._classes:
                raise InvalidSetting(f"{self.kind} {name!r} is registered already")
            self._classes[name] = cls
            return cls

        return add

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._classes:
            raise InvalidSetting(f"unknown {self.kind} {name!r}; {suggest(name, list(self))}")
        return self._classes[name]

    def keys_of(self, name: str) -> dict[str, dataclasses.Field[Any]]:
        """The keys an entry takes, in order, as dataclass fields."""
        return {f.name: f for f in dataclasses.fields(self[name]) if f.init}  # type: ignore[arg-type]

    def _types_of(self, name: str) -> dict[str, Any]:
        if name not in self._types:
            self._types[name] = typing.get_type_hints(self[name])
        return self._types[name]

    def parse(self, spec: str | T) -> T:
        """Read a spec; an object of this kind is returned as it is.

        Raises:
            InvalidSetting: an unknown name or key, a missing key, a value of the wrong type or
                outside its range.
        """
        if not isinstance(spec, str):
            if type(spec) not in self._classes.values():
                raise InvalidSetting(
                    f"expected a {self.kind} or its name, got {type(spec).__name__}; "
                    f"{suggest('', list(self))}"
                )
            return spec
        name, texts = split_spec(spec, self.kind)
        cls = self[name]
        fields = self.keys_of(name)
        hints = self._types_of(name)
        for key in texts:
            if key not in fields:
                raise InvalidSetting(
                    f"{self.kind} {name!r} has no key {key!r}; {suggest(key, list(fields))}"
                )
        for key, field in fields.items():
            required = (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            if required and key not in texts:
                raise InvalidSetting(
                    f"{self.kind} {name!r} needs {key}=; expected {self.usage(name)}"
                )
        values = {
            key: read_value(text, hints[key], f"{self.kind} {name}:{key}")
            for key, text in texts.items()
        }
        return cls(**values)

    def name_of(self, obj: T) -> str:
        """The name an object's class is registered under."""
        for name, cls in self._classes.items():
            if type(obj) is cls:
                return name
        raise InvalidSetting(f"{type(obj).__name__} is not a registered {self.kind}")

    def format(self, obj: T) -> str:
        """The spec of an object, keys at their defaults left out; ``parse`` reads it back."""
        name = self.name_of(obj)
        shown = [
            f"{key}={_show(getattr(obj, key))}"
            for key, field in self.keys_of(name).items()
            if field.default is dataclasses.MISSING or getattr(obj, key) != field.default
        ]
        return name + (":" + ",".join(shown) if shown else "")

    def usage(self, name: str) -> str:
        """How an entry is written: ``uniform:low=,high=``, defaults shown.

        Keys that are absent unless given are in brackets: ``async[:max_staleness=]``.
        """
        hints = self._types_of(name)
        text, mark = name, ":"
        for key, f in self.keys_of(name).items():
            if f.default is None:
                text += f"[{mark}{key}={_choices(hints[key])}]"
            else:
                text += f"{mark}{key}=" + (
                    "" if f.default is dataclasses.MISSING else _show(f.default)
                )
            mark = ","
        return text

    def summary(self, name: str) -> str:
        """The first line of an entry's docstring."""
        return (self[name].__doc__ or "").strip().split("\n")[0]
