"""What an 8-bit cache costs and saves on a card: perplexity of a text with the cache in each number format, and bytes a
token. Keys and values are stored before they are read, so all of them come from the cache."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.cache.storage import bytes_per_token
from paceline.engine.build import KV_DTYPES, choose_device
from paceline.errors import ConfigError, PacelineError
from paceline.kernels import select
from paceline.measure.perplexity import Scorer, perplexity, read_text
from paceline.models.config import ModelConfig
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve
from paceline.models.load.weights import Weights
from paceline.models.registry import build
from paceline.models.tokenizer import Tokenizer

FORMATS = (("float32", "float32"), ("float32", "fp8"), ("bfloat16", "bfloat16"), ("bfloat16", "fp8"))
"""Numbers of the model and of its cache; the first of a model's is what its others are compared with."""
WINDOW = 1024


def run(text: str, model: str | None, tokens: int, device: str = "cuda") -> dict[str, Any]:
    where = choose_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[Row] = []
    with open_checkpoint(resolve(model)) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        if tokenizer is None:
            raise ConfigError("This model came without a tokenizer: its perplexity on a text cannot be measured.")
        ids = tokenizer.encode(read_text(text), add_special=False)[:tokens]
        base: dict[str, float] = {}
        for numbers, cache in FORMATS:
            weights = Weights(checkpoint, KV_DTYPES[numbers], where)
            decoder = build(ModelConfig.from_dict(checkpoint.config), weights, WINDOW)
            scorer = Scorer(decoder, select(False, where, "triton"), WINDOW, KV_DTYPES[cache], device)
            value = perplexity(scorer, ids, WINDOW)
            base.setdefault(numbers, value)
            loss = 100 * (value / base[numbers] - 1)
            size = bytes_per_token(decoder.cache_groups, KV_DTYPES[cache])
            say(f"fp8_cache: {numbers} model, {cache} cache: {value:.4f} ({loss:+.3f} %), {size} bytes a token")
            rows.append(Row(f"{numbers} model, {cache} cache", "perplexity", value, higher_is_better=False,
                            note=f"{loss:+.3f} %, {size} bytes a token"))
    return document(rows, model=model or "default", tokens=len(ids), window=WINDOW)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/fp8_cache.py", description=__doc__)
    parser.add_argument("--text", required=True, help="UTF-8 text to score, plain or .gz")
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=20000)
    json_argument(parser)
    given = parser.parse_args()
    try:
        emit(run(given.text, given.model, given.tokens), given.json)
    except PacelineError as problem:
        raise SystemExit(f"error: {problem}") from None


if __name__ == "__main__":
    main()
