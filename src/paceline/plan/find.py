"""A drafter by what a user calls it: a method, a trained head, or a model."""

from __future__ import annotations

import difflib
import math

from paceline.errors import ConfigError
from paceline.hub.store import here
from paceline.plan.drafters import DRAFT_CACHE, METHODS, Drafter
from paceline.plan.known import Found, find_config
from paceline.plan.shape import ModelShape
from paceline.plan.trained import config_of, drafter_of, packaged


def find_drafter(text: str, target: ModelShape) -> Drafter:
    """A method's name; a trained head: its folder, the name of one that comes with Paceline, or a hub id; or a model
    that drafts, by the same names, also written draft:MODEL. Of a head and a model config.json alone is read."""
    if text in METHODS:
        return METHODS[text](target)
    method, colon, model = text.partition(":")
    is_model = bool(colon) and method == "draft"
    folder = None if is_model else packaged(text)
    if not colon and folder is None and here(text) is None and (
            near := difflib.get_close_matches(text, METHODS, 1, 0.75)):
        raise ConfigError(f"There is no drafter {text!r}: did you mean {near[0]!r}? Known are {', '.join(METHODS)}, "
                          "and draft:MODEL.")
    try:
        found = find_config(model if is_model else str(folder or text))
    except ConfigError as error:
        raise ConfigError(f"There is no drafter {text!r}: known are {', '.join(METHODS)}, a trained head's folder, "
                          f"and draft:MODEL. {error}") from None
    head = None if is_model else config_of(found, target)
    return _draft_model(found, target) if head is None else drafter_of(text, head, target)


def _draft_model(found: Found, target: ModelShape) -> Drafter:
    shape = found.shape
    share = shape.parameters / target.parameters
    # Draft models of 1 to 10 % of the target are reported to have .6 to .8 accepted; larger ones agree more.
    guess = min(0.9, max(0.5, 0.75 + 0.1 * math.log10(max(share, 1e-4) / 0.05)))
    return Drafter(f"draft:{shape.name}", guess, "a guess by its size: .6 to .8 is usual", shape, dtype=shape.dtype,
                   cache=DRAFT_CACHE, vocab=shape.vocab, wish={"method": "draft", "model": shape.name})
