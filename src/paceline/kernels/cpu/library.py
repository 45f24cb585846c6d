"""Finds the native library and says how to build it."""

from __future__ import annotations

import importlib
from typing import Any

from paceline.errors import ConfigError

HOW_TO_BUILD = "install a C++17 compiler and run `pip install .` (or `make -B setup`) again to build them"


def load() -> Any | None:
    """The extension module, or None where it was not built."""
    try:
        return importlib.import_module("paceline.kernels.cpu._native")
    except ImportError:
        return None


def require() -> Any:
    module = load()
    if module is None:
        raise ConfigError(f"The native CPU kernels are not built here: {HOW_TO_BUILD}, or use kernels='auto'.")
    return module
