"""The default model, read once for the examples that want it alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import EngineOptions
from paceline.engine import build
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.tokenizer import Tokenizer


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """Weights and tokenizers are kept from one example to the next; engines around them, which hold all that changes,
    are made anew. Examples run one after the other, so no two engines compute with one model at a time."""
    models: dict[str, Any] = {}
    tokenizers: dict[str, Tokenizer | None] = {}
    read_model, read_tokenizer = build.load_model, Tokenizer.from_checkpoint

    def load_model(options: EngineOptions, checkpoint: Checkpoint, *place: Any) -> Any:
        key = repr((replace(options, speculation=None, max_num_seqs=None), place))
        if key not in models:
            models[key] = read_model(options, checkpoint, *place)
        return models[key]

    def from_checkpoint(checkpoint: Checkpoint) -> Tokenizer | None:
        key = str(checkpoint.path)
        if key not in tokenizers:
            tokenizers[key] = read_tokenizer(checkpoint)
        return tokenizers[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_model", load_model)
        patch.setattr(Tokenizer, "from_checkpoint", from_checkpoint)
        yield
