"""The supported model families of Hugging Face: one module for each family, or for close relatives.

A module lists its records as ``FAMILIES``, and as ``WRAPPERS`` the multimodal models that hold one of them. Every
module of this folder is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from fivefold.model.huggingface.family import Family, Wrapper


def import_modules() -> Iterator[ModuleType]:
    """Import every module of this folder, in the order of their names."""
    for module in iter_modules(__path__):
        yield import_module(f"{__name__}.{module.name}")


def list_families(modules: list[ModuleType]) -> Iterator[Family]:
    """Yield the families of all ``modules``."""
    for module in modules:
        yield from module.FAMILIES


def list_wrappers(modules: list[ModuleType]) -> Iterator[Wrapper]:
    """Yield the multimodal models of all ``modules``."""
    for module in modules:
        yield from getattr(module, "WRAPPERS", ())


_MODULES = list(import_modules())
FAMILIES: dict[str, Family] = {family.model_type: family for family in list_families(_MODULES)}
WRAPPERS: dict[str, Wrapper] = {wrapper.model_type: wrapper for wrapper in list_wrappers(_MODULES)}
