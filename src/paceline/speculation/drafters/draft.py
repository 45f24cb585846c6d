"""draft: another, smaller model with the same vocabulary, with a cache of its own."""

from __future__ import annotations

from paceline.errors import RequestError
from paceline.speculation.drafter import DraftContext, Drafter
from paceline.speculation.model_drafter import models_of, shared_drafter
from paceline.speculation.options import Options

LARGEST_CACHE = 1 << 40


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    """Options: "model" (a folder, a .gguf file, a hub id or a known short name), "cache_tokens" (how many tokens its
    cache holds; as many as the target's by default), "branches", "min_confidence"."""
    name = options.text("model")
    if name is None:
        raise RequestError("speculation method 'draft' needs 'model': the folder, file or name of a model with the "
                           "target's vocabulary.", "speculation")
    wish = options.take("cache_tokens", None)
    tokens = None
    if wish is not None:
        sizes = Options(method, {"cache_tokens": wish})
        tokens = sizes.integer("cache_tokens", 1, 1, LARGEST_CACHE)
    model = models_of(context, method).load(name, tokens)
    return shared_drafter(method, options, context, model, (name, tokens))
