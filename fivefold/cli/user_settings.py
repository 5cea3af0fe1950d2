"""Fills what a command line leaves open from the user's settings, and names the settings that took effect.

They apply to commands that predict; dry runs and trainings take theirs only from arguments and run files. A config
(``--from``) and a run file name their own software, which no setting replaces.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fivefold.errors import UserError
from fivefold.requests.commands import CompareOptions, ConfigOptions, JobOptions, MachineRequest
from fivefold.requests.machines import check_is_model, load_machine
from fivefold.requests.schema import Request
from fivefold.requests.settings import COMMANDS_WITH_SETTINGS, AppliedSettings, load_settings, show_settings_file
from fivefold.text_files import read_file

if TYPE_CHECKING:
    from fivefold.machine.spec import Machine

Asked = TypeVar("Asked", bound=Request)


def apply_settings(request: Asked) -> tuple[Asked, AppliedSettings]:
    """Return the request with stack and machine of the user's settings where it names none, and what was applied."""
    applied = AppliedSettings(file=show_settings_file())
    if request.command in COMMANDS_WITH_SETTINGS:
        settings = load_settings()
        if (machine := settings.machine) and (changes := _insert_machine(request, machine)):
            request = request.model_copy(update=changes)
            applied = applied.replace(machine=machine)
        if settings.stack and isinstance(request, JobOptions) and not _names_stack(request):
            request = request.model_copy(update={"stack": settings.stack})
            applied = applied.replace(stack=settings.stack)
        if isinstance(request, MachineRequest) and not isinstance(request, ConfigOptions) and request.machine is None:
            check_is_model(request.model)
            raise UserError(
                "Missing argument 'machine'; add it, such as h100:64, or set it for all commands: "
                "fivefold config set machine h100:64"
            )
    return request, applied


def apply_prices(
    request: Asked, machines: Iterable[Machine], applied: AppliedSettings
) -> tuple[Asked, AppliedSettings]:
    """Return the request with the prices of the user's settings for machines that have no price of their own."""
    given: tuple[str, ...] | None = getattr(request, "price", None)
    if given is None or any("=" not in word for word in given):  # a price without a name is for every machine
        return request, applied
    settings = load_settings()
    priced = {word.partition("=")[0] for word in given}
    if not settings.prices:
        return request, applied
    asked = [*machines, *map(load_machine, _list_machine_names(request))]
    priced |= {machine.name.split()[0] for machine in asked if machine.dollars_per_rank_hour is not None}
    names = [machine.name.split()[0] for machine in asked]
    prices = {name: settings.prices[name] for name in names if name in settings.prices and name not in priced}
    if not prices:
        return request, applied
    words = (*(f"{name}={_format_price(price)}/h" for name, price in prices.items()), *given)
    return request.model_copy(update={"price": words}), applied.replace(prices=prices)


def _list_machine_names(request: Request) -> list[str]:
    """Return the machines that a request names besides its argument ``machine``."""
    from fivefold.machine.catalog import is_named

    if not isinstance(request, CompareOptions):
        return list(getattr(request, "machines", ()))
    if _are_run_files(request.words):
        with suppress(UserError):  # the command tells it
            tables = [read_file(Path(word)) for word in request.words]
            return [str(table["machine"]) for table in tables if "machine" in table]
        return []
    return [*filter(is_named, request.words[1:]), *([request.gpus] if request.gpus else [])]


def _format_price(price: float) -> str:
    """Return a price without an exponent, as ``--price`` takes it."""
    return f"{price:.9f}".rstrip("0").rstrip(".")


def _insert_machine(request: Request, machine: str) -> dict[str, object]:
    """Return the fields to change so that a request without a machine uses ``machine``; empty if it names one."""
    from fivefold.machine.catalog import is_named

    if isinstance(request, CompareOptions):
        words = request.words
        if request.from_files:
            return {} if request.gpus else {"gpus": machine}
        if not words or any(map(is_named, words[1:])) or _are_run_files(words):
            return {}
        return {"words": (words[0], machine, *words[1:])}
    if getattr(request, "from_file", None) is not None:
        return {} if getattr(request, "gpus", None) else {"gpus": machine}
    named = getattr(request, "machine", None)
    if named is None:
        return {"machine": machine} if getattr(request, "model", None) is not None else {}
    fields = type(request).model_fields
    layout = getattr(request, "layout", None)
    if "layout" in fields and layout in (None, fields["layout"].default) and not is_named(named):
        return {"machine": machine, "layout": named}  # MODEL LAYOUT
    return {}


def _are_run_files(words: tuple[str, ...]) -> bool:
    """Tell whether all words of ``compare`` are run files."""
    from fivefold.requests.cases import FILES

    return all(Path(word).suffix in FILES for word in words)


DEFAULT_STACK = (
    "software fivefold, the default: figures are of Fivefold's own trainer. For other software (`fivefold stacks`) add "
    "--stack torchtitan, or for all answers: fivefold config set stack torchtitan"
)


def assumes_stack(request: Request, machines: Iterable[Machine]) -> bool:
    """Tell whether an answer is for the default software, which nothing names, on machines other than this computer."""
    if request.command not in COMMANDS_WITH_SETTINGS or not isinstance(request, JobOptions) or _names_stack(request):
        return False
    return all(machine.has_gpus for machine in machines)


def _names_stack(request: JobOptions) -> bool:
    """Tell whether options, a job's file, a config or a run file name the software."""
    if request.stack is not None or any(word.partition("=")[0] == "stack" for word in request.set):
        return True
    if isinstance(request, CompareOptions) and (
        request.stacks or request.from_files or not request.words or _are_run_files(request.words)
    ):
        return True
    if getattr(request, "from_file", None) is not None:
        return True
    return request.job is not None and "stack" in read_file(request.job)
