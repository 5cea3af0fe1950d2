"""``fivefold config``: the user's settings. Does not import torch."""

from __future__ import annotations

import json as json_module

from fivefold.cli.options import print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.commands import SettingsOptions
from fivefold.requests.settings import (
    KEYS,
    UserSettings,
    change_setting,
    find_settings_file,
    get_setting,
    list_settings,
    load_settings,
    save_settings,
)


@accept_request(SettingsOptions)
def config(request: SettingsOptions) -> None:
    """Set, get, unset or list user settings: the software and machine you use, prices, colors and width of tables.

    Commands that predict use a setting where no option or argument is given, and name it in their answer.
    """
    action, key, value = request.action, request.key, request.value
    settings = load_settings()
    if action == "list":
        if key is not None:
            raise UserError(f"config list takes no key; write: fivefold config get {key}")
        show(json_module.dumps(list_settings(settings), indent=2) if request.as_json else _list(settings))
        print_line(f"settings file: {find_settings_file()}")
        return
    if key is None or (value is None) == (action == "set"):
        raise UserError(
            f"write: fivefold config {action} KEY{' VALUE' if action == 'set' else ''}; the keys are {', '.join(KEYS)}"
        )
    if action == "get":
        setting = get_setting(settings, key)
        show(json_module.dumps({key: setting}, indent=2) if request.as_json else _format_value(setting))
        return
    path = save_settings(change_setting(settings, key, value))
    print_line(f"{key} is {'no longer set' if value is None else f'set to {value}'} in {path}")


def _list(settings: UserSettings) -> str:
    """Return the settings, one a line, or the keys that can be set if there are none."""
    values = list_settings(settings)
    if values:
        return "\n".join(f"{key} = {_format_value(value)}" for key, value in values.items())
    return "\n".join(["nothing is set; the keys are", *(f"  {key}: {meaning}" for key, meaning in KEYS.items())])


def _format_value(value: str | float) -> str:
    """Return a value as it is written on the command line."""
    return f"{value:g}" if isinstance(value, float) else str(value)
