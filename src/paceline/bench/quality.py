"""What each number format loses against the file's weights in float32 on a text: perplexity, how often the best token
is the same, and how far the probabilities of the reference's 20 best tokens are apart (KL)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.engine.build import choose_device
from paceline.errors import PacelineError
from paceline.kernels.cpu import load as native_library
from paceline.measure.agreement import Judged, judge
from paceline.measure.perplexity import BASELINE, Format, scorer, text_tokens
from paceline.models.config import ModelConfig
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve
from paceline.models.native import unsupported

WINDOW = 1024
ENGINES = (
    Format(BASELINE),
    Format("native", native=True, weights="int8_channel", cache="int8"),
    Format("native, float16 cache", native=True, weights="int8_channel", cache="float16"),
    Format("native, float32 cache", native=True, weights="int8_channel"),
    Format("native, the file's blocks", native=True, cache="int8"),
    Format("native, the file's blocks, float32 cache", native=True),
    Format("native, int8 blocks, float32 cache", native=True, weights="int8_block"),
)
_SIZES = ((32, "32"), (64, "64"), (128, "128"), (0, "row"))
GATE = (
    *(Format(f"{weights}, float activations", weights=weights)
      for weights in ("int8_channel", "int8_block", "int4_block")),
    *(Format(f"file, int8 per {size}", activations=number) for number, size in _SIZES),
    *(Format(f"{weights}, int8 per {size}", weights=weights, activations=number) for weights, number, size in (
        ("int8_channel", 32, "32"), ("int8_channel", 0, "row"), ("int8_block", 32, "32"), ("int4_block", 32, "32"))),
    *(Format(f"{weights}, int8 per {size}, float down", weights=weights, activations=number, float_down=True)
      for weights, number, size in (("file", 32, "32"), ("file", 0, "row"), ("int8_channel", 0, "row"))),
    Format("file, float activations, float16 cache", cache="float16"),
    Format("file, float activations, int8 cache", cache="int8"),
)


def run(text: str | Path, model: str | None = None, tokens: int = 20000, window: int = WINDOW,
        gate_windows: int = 6, threads: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Engines on `tokens` tokens; the rounded formats on the first gate_windows windows (0: not at all). Each loss is
    against float32 on the same tokens. `device` runs what is in torch."""
    threads = threads or torch.get_num_threads()
    device = str(choose_device(device))
    found: list[tuple[Row, dict[str, float]]] = []
    with open_checkpoint(resolve(model)) as checkpoint:
        ids = text_tokens(checkpoint, text, tokens)
        reason = unsupported(ModelConfig.from_dict(checkpoint.config))
        if native_library() is None:
            reason = "the native kernels are not built"
        engines = [format for format in ENGINES if not format.native or reason is None]
        if reason is not None:
            say(f"quality: native formats are left out: {reason}")
        short = ids[:gate_windows * window]
        for formats, some in ((engines, ids), ((ENGINES[0], *GATE) if len(short) > 1 else (), short)):
            baseline: Judged | None = None
            for format in formats:
                found_here = judge(scorer(format, checkpoint, min(window, len(some)), threads, device), some, window,
                                   None if baseline is None else baseline.best)
                baseline = baseline or found_here
                figures = _figures(found_here, baseline)
                note = (f"{figures['loss_percent']:+.2f} %, best token {figures['top1_percent']:.1f} % the same, "
                        f"KL {figures['kl']:.4f} on {len(some)} tokens")
                say(f"quality: {format.name}: {found_here.perplexity:.4f} ({note})")
                found.append((Row(format.name, "perplexity", found_here.perplexity, higher_is_better=False, note=note),
                              figures))
    result = document([row for row, _ in found], model=model or "default", tokens=len(ids), window=window,
                      gate_windows=gate_windows, device=device)
    for row, (_, figures) in zip(result["rows"], found):
        row.update(figures)
    return result


def _figures(judged: Judged, baseline: Judged) -> dict[str, float]:
    return {"loss_percent": 100 * (judged.perplexity / baseline.perplexity - 1), "top1_percent": 100 * judged.top1,
            "kl": judged.kl}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.quality", description=__doc__)
    parser.add_argument("--text", required=True, help="UTF-8 text to score, plain or .gz")
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens that are scored together")
    parser.add_argument("--gate-windows", type=int, default=6, help="windows for the formats tried in torch; 0: none")
    parser.add_argument("--device", default="cpu", help="of the formats that run in torch")
    json_argument(parser)
    arguments = parser.parse_args()
    try:
        result = run(arguments.text, arguments.model, arguments.tokens, arguments.window,
                     arguments.gate_windows, device=arguments.device)
    except PacelineError as problem:
        raise SystemExit(f"error: {problem}") from None
    emit(result, arguments.json)


if __name__ == "__main__":
    main()
