"""User settings: a TOML file in the XDG configuration folder with stack, machine, prices and output preferences.

A setting stands in for an option that was not given. Every answer names the settings that took effect in it.

    stack = "torchtitan"
    machine = "h100:64"

    [prices]
    h100 = 2.2

    [output]
    color = "never"
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from fivefold.atomic_file import replace_file
from fivefold.errors import UserError
from fivefold.record import Record
from fivefold.requests.machines import load_machine
from fivefold.spelling import make_unknown_name_error
from fivefold.text_files import read_file

if TYPE_CHECKING:
    from collections.abc import Iterator

Color = Literal["auto", "always", "never"]
Price = Annotated[float, Field(gt=0, le=1e6)]


class OutputSettings(Record):
    """The preferences for printing answers on a terminal."""

    color: Color | None = None
    width: Annotated[int, Field(ge=40, le=1000)] | None = None


class UserSettings(Record):
    """The settings of a user; None or empty: not set."""

    stack: str | None = None
    machine: str | None = None
    prices: dict[str, Price] = {}
    output: OutputSettings = OutputSettings()


COMMANDS_WITH_SETTINGS = ("predict", "search", "plan", "compare", "ratios", "ask")  # whose answers name them
KEYS = {
    "stack": "training software, where neither --stack nor a job names one",
    "machine": "machine, where none is named",
    "prices.NAME": "dollars per GPU hour of the machine NAME, where --price gives none",
    "output.color": "auto, always or never",
    "output.width": "columns of tables, instead of the terminal's",
}


class AppliedSettings(Record):
    """The settings that took effect in one answer, and the file that holds them."""

    file: str
    stack: str | None = None
    machine: str | None = None
    prices: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        """Tell whether no setting took effect."""
        return self == AppliedSettings(file=self.file)

    def list_fields(self) -> dict[str, Any]:
        """Return the settings as the field ``settings`` of an answer's JSON; empty if none took effect."""
        return {} if self.is_empty else {"settings": self.model_dump(exclude_defaults=True)}

    def describe(self) -> str:
        """Return the settings in one line."""
        values = {"stack": self.stack, "machine": self.machine}
        values |= {f"prices.{name}": f"{price:g}" for name, price in self.prices.items()}
        settings = ", ".join(f"{key}={value}" for key, value in values.items() if value is not None)
        return f"user settings: {settings} ({self.file})"


def find_settings_file() -> Path:
    """Return the path of the user's settings, which need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "fivefold" / "config.toml"


def show_settings_file() -> str:
    """Return the path of the user's settings with the home folder as ``~``."""
    path, home = find_settings_file(), Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def load_settings() -> UserSettings:
    """Read the user's settings; without a file, none is set. Raises ``UserError`` for a file that is not valid."""
    path = find_settings_file()
    return _read_settings(path, path.stat().st_mtime_ns) if path.exists() else UserSettings()


@lru_cache(maxsize=1)
def _read_settings(path: Path, _modified_ns: int) -> UserSettings:
    """Read a file once, as every line that is printed asks for the settings."""
    return UserSettings.read(read_file(path), origin=str(path))


def list_settings(settings: UserSettings) -> dict[str, str | float]:
    """Return what is set, by key."""
    return dict(_flatten(settings.model_dump(exclude_none=True)))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def get_setting(settings: UserSettings, key: str) -> str | float:
    """Return the value of one key; raises ``UserError`` if it is unknown or not set."""
    _check_key(key)
    values = list_settings(settings)
    if key not in values:
        raise UserError(f"{key} is not set; set it with: fivefold config set {key} VALUE")
    return values[key]


def change_setting(settings: UserSettings, key: str, text: str | None) -> UserSettings:
    """Return the settings with one changed, or removed if ``text`` is None; raises ``UserError`` for a bad value."""
    _check_key(key)
    values = settings.model_dump(exclude_none=True)
    table, _, name = key.rpartition(".")
    holder = values.setdefault(table, {}) if table else values
    if text is None:
        if name not in holder:
            raise UserError(f"{key} is not set")
        del holder[name]
    else:
        holder[name] = _parse_value(key, text)
    return UserSettings.read(values, origin=f"config set {key}")


def save_settings(settings: UserSettings) -> Path:
    """Write the user's settings and return the path; the file is replaced in one step."""
    from fivefold.machine import toml

    path, values = find_settings_file(), settings.model_dump(exclude_none=True)
    tables = {key: value for key, value in values.items() if value or not isinstance(value, dict)}  # no empty heading
    heading = "# Written by `fivefold config set`, which does not keep comments.\n"
    with replace_file(path, contents="the settings file") as file:
        file.write_text(heading + toml.emit(tables), encoding="utf-8")
    return path


def _check_key(key: str) -> None:
    """Raise ``UserError`` unless ``key`` is one of ``KEYS``."""
    if key in KEYS and key != "prices.NAME":
        return
    if not (key.startswith("prices.") and key.count(".") == 1 and key != "prices."):
        raise make_unknown_name_error(key, list(KEYS), kind="setting")


def _parse_value(key: str, text: str) -> str | float:
    """Return the value of a setting, checked against the catalogs."""
    if key == "stack":
        from fivefold.stack.catalog import build_stack

        return build_stack(text).name
    if key == "machine":
        load_machine(text)
    elif key.startswith("prices."):
        given = key.removeprefix("prices.")
        name = load_machine(given).name.split()[0]
        if name != given:
            raise UserError(f"{key}: the name in prices is that of the chip; write prices.{name}")
        try:
            return float(text.removesuffix("/h"))
        except ValueError:
            raise UserError(f"{key}={text!r} is not a price; write dollars per GPU hour, such as 2.2") from None
    return text
