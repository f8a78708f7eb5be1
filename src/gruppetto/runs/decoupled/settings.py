"""Everything a decoupled run is told, as plain values that can be written down and read back."""

from __future__ import annotations

from typing import Literal

from gruppetto.decoupled.methods import METHODS, Method
from gruppetto.decoupled.pass_times import PassTimes
from gruppetto.errors import InvalidSetting
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.settings import CommonSettings, Settings, read_settings
from gruppetto.trace.folder import read_config

__all__ = ["DecoupledSettings", "is_decoupled", "pass_times_of", "settings_of", "write_method"]


class DecoupledSettings(CommonSettings):
    """The settings of a decoupled run."""

    #: The method and its number of modules: ``ddg:modules=2``.
    decouple: str
    #: Whether what is in flight at the end is applied.
    tail: Literal["drain", "drop"] = "drain"
    #: Names of the blocks at which modules 2..K begin, as they were chosen: a run that is resumed
    #: or replayed is cut alike.
    begins: list[str]
    #: Virtual seconds of passes, as :func:`pass_times_of` reads them; those of the method's
    #: replays not included. None on other engines.
    pass_times: str | None = None

    def check(self) -> None:
        """Look at values that depend on each other.

        Raises:
            InvalidSetting: in one sentence.
        """
        super().check()
        modules = self.method.modules
        if len(self.begins) != modules - 1:
            raise InvalidSetting(
                f"decouple: {modules} modules begin at {modules - 1} cuts, got {len(self.begins)}"
            )
        if self.pass_times is not None and self.engine != "virtual":
            raise InvalidSetting(
                "pass times are for virtual time, real processes take their own: expected engine "
                f"virtual, got {self.engine}"
            )
        if len(self.read_pass_times().forward) != modules:
            raise InvalidSetting(
                f"pass times: expected forward/backward of {modules} module(s), got "
                f"{self.pass_times!r}"
            )

    @property
    def method(self) -> Method:
        """Of decoupled backpropagation."""
        return METHODS.parse(self.decouple)

    def read_pass_times(self) -> PassTimes:
        """Virtual seconds of passes; in equal parts where nothing is said."""
        if self.pass_times is None:
            return PassTimes.from_operations([1.0] * self.method.modules)
        return pass_times_of(self.pass_times)


def write_method(method: Method) -> str:
    """A method as settings hold it, with its number of modules even where that is the default.

    >>> write_method(METHODS.parse("ddg:stash=none"))
    'ddg:modules=2,stash=none'
    """
    name, _, keys = METHODS.format(method).partition(":")
    if "modules=" not in keys:
        keys = ",".join(filter(None, (f"modules={method.modules}", keys)))
    return f"{name}:{keys}"


def pass_times_of(text: str) -> PassTimes:
    """Read forward/backward seconds of each module.

    Raises:
        InvalidSetting: the text is not of that form.

    >>> pass_times_of("0.1/0.2,0.3/0.5")
    PassTimes(forward=(0.1, 0.3), backward=(0.2, 0.5))
    """
    pairs = []
    for part in text.split(","):
        forward, _, backward = part.partition("/")
        try:
            pairs.append((float(forward), float(backward)))
        except ValueError:
            raise InvalidSetting(
                "pass times: expected measured, or forward/backward seconds of each module, like "
                f"0.1/0.2,0.1/0.2, got {text!r}"
            ) from None
    return PassTimes(tuple(f for f, _ in pairs), tuple(b for _, b in pairs))


def is_decoupled(folder: RunFolder) -> bool:
    """Whether a run is one of decoupled backpropagation."""
    return "decouple" in read_config(folder.path).settings


def settings_of(folder: RunFolder) -> Settings | DecoupledSettings:
    """The settings of a run of either kind."""
    if is_decoupled(folder):
        return read_settings(DecoupledSettings, read_config(folder.path).settings)
    return folder.settings()
