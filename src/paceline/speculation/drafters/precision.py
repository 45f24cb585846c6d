"""precision: the target's own weights in fewer bits, on the target's cache."""

from __future__ import annotations

from paceline.errors import RequestError
from paceline.speculation.drafter import DraftContext, Drafter
from paceline.speculation.model_drafter import models_of, shared_drafter
from paceline.speculation.options import Options


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    """Options: "bits" (8 or 4; by default the nearest below the target's), "branches", "min_confidence"."""
    bits = options.take("bits", None)
    if bits is not None and (isinstance(bits, bool) or bits not in (4, 8)):
        raise RequestError(f"speculation bits must be 8 or 4, got {bits!r}.", "speculation")
    return shared_drafter(method, options, context, models_of(context, method).rounded(bits), (bits,))
