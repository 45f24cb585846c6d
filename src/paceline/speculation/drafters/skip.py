"""skip: the target without some of its attention and feed-forward parts, on the target's cache."""

from __future__ import annotations

import re
from typing import Any

from paceline.errors import RequestError
from paceline.speculation.drafter import DraftContext, Drafter
from paceline.speculation.model_drafter import models_of, shared_drafter
from paceline.speculation.models import ATTENTION, MLP, Sublayer
from paceline.speculation.options import Options

RATIO = 0.2
"""What promised most on the default model (`python tools/skip_lists.py`); larger models bear more."""
_SUBLAYER = re.compile(rf"({ATTENTION}|{MLP})\.(\d{{1,6}})")


def default_skip(layers: int, ratio: float = RATIO) -> frozenset[Sublayer]:
    """Whole layers, one run of them in the middle: their neighbours do similar things, while the first and the last
    ones cannot be spared. The same number spread over the model was accepted much less often."""
    middle = layers - 2
    count = max(1, min(middle, round(ratio * middle)))
    first = 1 + (middle - count) // 2
    return frozenset((layer, part) for layer in range(first, first + count) for part in (ATTENTION, MLP))


def read_skip(raw: Any, layers: int) -> frozenset[Sublayer]:
    """A list of layer numbers and of names like "attn.5" and "mlp.7"."""
    if not isinstance(raw, list | tuple) or not raw:
        raise RequestError(f"speculation skip must be a list of layer numbers or of names like 'attn.5' and 'mlp.7', "
                           f"got {raw!r}.", "speculation")
    found: set[Sublayer] = set()
    for item in raw:
        match = _SUBLAYER.fullmatch(item) if isinstance(item, str) else None
        if match is not None:
            parts, layer = [match[1]], int(match[2])
        elif isinstance(item, int) and not isinstance(item, bool):
            parts, layer = [ATTENTION, MLP], item
        else:
            raise RequestError(f"speculation skip names {item!r}: write a layer number, 'attn.N' or 'mlp.N'.",
                               "speculation")
        if not 0 <= layer < layers:
            raise RequestError(f"speculation skip names layer {layer}, but the model has layers 0 to {layers - 1}.",
                               "speculation")
        found.update((layer, part) for part in parts)
    if len(found) == 2 * layers:
        raise RequestError("speculation skip leaves nothing of the model: keep at least one sublayer.", "speculation")
    return frozenset(found)


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    """Options: "skip" (what to leave out; default_skip by default), "ratio" (how much of the middle the default leaves
    out), "branches", "min_confidence"."""
    models = models_of(context, method)
    raw = options.take("skip", None)
    ratio = options.number("ratio", RATIO, 0.0, 1.0)
    if raw is not None:
        skip = read_skip(raw, models.layers)
    elif models.layers < 3:
        raise RequestError("speculation method 'skip' keeps the first and the last layer, so it needs a model of at "
                           "least 3, or a list 'skip'.", "speculation")
    else:
        skip = default_skip(models.layers, ratio)
    return shared_drafter(method, options, context, models.skipping(skip), tuple(sorted(skip)))
