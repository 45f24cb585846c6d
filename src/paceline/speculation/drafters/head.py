"""dspark, dflash, eagle3 and the other trained heads: small networks that read the target's own hidden states."""

from __future__ import annotations

from paceline.speculation.drafter import DraftContext, Drafter
from paceline.speculation.model_drafter import models_of, shared_drafter
from paceline.speculation.options import Options


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    """Options: "head" (the folder or name of one that was loaded when the engine was made; the only one of its kind by
    default), what the draft looks like (model_drafter.read_shape), "min_confidence"."""
    name = options.text("head")
    model = models_of(context, method).head(method, name)
    return shared_drafter(method, options, context, model, (name,))
