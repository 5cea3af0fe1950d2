"""What the real packages want to import and cannot have without a GPU; the worlds that they believe in.

Run by `make interop`, in an environment of its own; without the packages these tests are passed over.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages whose every name is there and does nothing."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name.partition(".")[0] == self.package:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__version__, module.__path__, module.__file__ = "2.9.0", [], "absent"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


@pytest.fixture
def hide_transformer_engine() -> Any:
    """Megatron-Bridge imports Transformer Engine by name; its kernels are needed by no config."""
    finder = Absent("transformer_engine")
    sys.meta_path.insert(0, finder)
    yield
    sys.meta_path.remove(finder)


@pytest.fixture
def nanotron_config() -> Any:
    """nanotron 0.4 imports its logging and its config in a circle."""
    if importlib.util.find_spec("nanotron") is None:
        pytest.skip("nanotron is not installed")
    sys.modules["nanotron.logging"] = MagicMock()
    import nanotron.config

    return nanotron.config


class Constants:
    """Of SkyPilot: clouds, and patterns that any text fits."""

    ALL_CLOUDS = ("aws", "gcp", "kubernetes")
    STORAGE_ONLY_CLOUDS: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return [] if "KEYS" in name else ".*"


@pytest.fixture
def sky_schemas() -> Any:
    """SkyPilot's schemas, without the server and the clouds that its package imports."""
    result = importlib.util.find_spec("sky")
    if result is None or result.submodule_search_locations is None:
        pytest.skip("skypilot is not installed")
    path = Path(next(iter(result.submodule_search_locations))) / "utils" / "schemas.py"
    finder = Absent("sky")
    sys.meta_path.insert(0, finder)
    spec = importlib.util.spec_from_file_location("sky_schemas", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.constants = Constants()
    yield module
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sky"]:
        del sys.modules[name]
