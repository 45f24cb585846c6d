"""Functions that torch compiles where that pays, and runs as they are where it cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

log = logging.getLogger("paceline.training")


class Compiled:
    """`function`, compiled at its first call. A compilation that fails is said once, and costs nothing but speed."""

    def __init__(self, function: Callable[..., Any], compiles: bool) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = torch.compile(function, dynamic=False) if compiles else None

    @staticmethod
    @cache
    def of(function: Callable[..., Any], compiles: bool) -> Compiled:
        """The same for all who ask: compiled once."""
        return Compiled(function, compiles)

    @property
    def compiles(self) -> bool:
        return self._compiled is not None

    def __call__(self, *inputs: Any) -> Any:
        if self._compiled is not None:
            try:
                return self._compiled(*inputs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                log.warning("%s could not be compiled and runs in plain torch, slower: %s", self._function.__name__,
                            (str(error).splitlines() or [type(error).__name__])[0])
                self._compiled = None
        return self._function(*inputs)
