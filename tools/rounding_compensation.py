"""Measures on texts how the columns of a model's matrices can make up for one another's rounding errors, and writes the
file that the native path reads when it packs this model.

`python tools/rounding_compensation.py --text sherlock.txt --text war-and-peace.txt`: even parts of both, in short
windows, so that the first tokens of a text, whose inputs are unlike all others, weigh something; every other window
begins as a chat does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from paceline.bench.report import say
from paceline.kernels.eager import EagerKernels
from paceline.kernels.packed import Weight
from paceline.measure.perplexity import Scorer, read_text
from paceline.measure.rounding import spread
from paceline.models.config import ModelConfig
from paceline.models.load.compensation import BLOCK, path_for, shares, write
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve
from paceline.models.load.weights import Weights
from paceline.models.registry import build
from paceline.models.tokenizer import Tokenizer

WINDOW = 64
CHAT = "<|im_start|>user\n"


class GramKernels(EagerKernels):
    """Adds up x^T x for every block of every linear layer's input, by the order in which a pass calls them."""

    name = "gram"

    def __init__(self) -> None:
        super().__init__()
        self.grams: list[torch.Tensor] = []
        self.call = 0

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        blocks = spread(x.float()).reshape(len(x), -1, BLOCK).transpose(0, 1)
        gram = torch.bmm(blocks.transpose(1, 2), blocks).double()
        if self.call == len(self.grams):
            self.grams.append(gram)
        else:
            self.grams[self.call] += gram
        self.call += 1
        return super().linear(x, weight, bias)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", action="append", required=True, help="UTF-8 text, plain or .gz; may be repeated")
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--out", default=None, help="default: into the package, by the model's identity")
    given = parser.parse_args()
    with open_checkpoint(resolve(given.model)) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        if tokenizer is None:
            raise SystemExit("error: this model came without a tokenizer")
        config = ModelConfig.from_dict(checkpoint.config)
        kernels = GramKernels()
        model = build(config, Weights(checkpoint), WINDOW)
        scorer = Scorer(model, kernels, WINDOW)
        chat = tokenizer.encode(CHAT, add_special=False, parse_special=True)
        for number, window in enumerate(windows_of(tokenizer, given.text, given.tokens)):
            kernels.call = 0
            ids = torch.tensor((chat + window)[:WINDOW] if number % 2 else window)
            model.logits(model.forward(ids, scorer.context(0, len(ids))), kernels)
            if number % 16 == 0:
                say(f"compensation: {number * WINDOW} of {given.tokens} tokens")
        names = [f"{layer}.{site}" for layer in range(config.num_layers) for site in ("qkv", "out", "gate_up", "down")]
        found = {name: shares(gram) for name, gram in zip([*names, "head"], kernels.grams, strict=True)}
        target = Path(given.out) if given.out else path_for(checkpoint.revision)
    write(target, found)
    say(f"compensation: {target} ({target.stat().st_size / 1e6:.1f} MB)")


def windows_of(tokenizer: Tokenizer, texts: list[str], tokens: int) -> list[list[int]]:
    """Evenly spread over each text."""
    out = []
    count = tokens // WINDOW // len(texts)
    for text in texts:
        ids = tokenizer.encode(read_text(text), add_special=False)
        step = max(1, (len(ids) - WINDOW) // count)
        out += [ids[begin:begin + WINDOW] for begin in range(0, step * count, step)]
    return out


if __name__ == "__main__":
    main()
