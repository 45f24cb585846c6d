"""exit: the target's own first layers, then its norm and head. The lower layers' cache is the target's."""

from __future__ import annotations

from paceline.errors import RequestError
from paceline.speculation.drafter import DraftContext, Drafter
from paceline.speculation.model_drafter import models_of, shared_drafter
from paceline.speculation.options import Options


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    """Options: "layers" (how many run; a third by default), "branches", "min_confidence"."""
    models = models_of(context, method)
    if models.layers < 2:
        raise RequestError("speculation method 'exit' needs a model of at least 2 layers.", "speculation")
    layers = options.integer("layers", max(1, models.layers // 3), 1, models.layers - 1)
    return shared_drafter(method, options, context, models.exiting(layers), (layers,))
