"""Where a check runs and how it ends: its rows, its failures, and a status that says whether there were any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.bench.report import emit, say
from paceline.errors import ConfigError, PacelineError


def card() -> torch.device:
    """The card of a check that runs nowhere else."""
    if not torch.cuda.is_available():
        raise ConfigError("This check needs a CUDA device and torch finds none.")
    return torch.device("cuda")


def conclude(check: Callable[[], dict[str, Any]], target: str | None) -> None:
    """Emit what `check` returns, and exit with 1 where its "failures" name any."""
    try:
        result = check()
    except PacelineError as problem:
        raise SystemExit(f"error: {problem}") from None
    emit(result, target)
    for failure in result["failures"]:
        say(failure)
    if result["failures"]:
        raise SystemExit(1)
