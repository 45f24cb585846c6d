"""Finding a model's files and reading them: resolve() -> open_checkpoint() -> Weights."""

from __future__ import annotations

from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve
from paceline.models.load.weights import Weights, check_vocabulary

__all__ = ["Checkpoint", "Weights", "check_vocabulary", "open_checkpoint", "resolve"]
