"""Packaged heads: trained ones that come with Paceline, found by the target that they were trained for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.models.config import ModelConfig
from paceline.models.load.reading import read_object

PACKAGED_HEADS = Path(__file__).parents[2] / "heads"
"""<model>/<kind>/config.json and model.safetensors, in the speculators format."""
MOST_BYTES = 12_000_000
"""Of all of them together."""


def packaged_heads(folder: Path, target: ModelConfig, tokenizer: Callable[[], str], model: str) -> dict[str, Path]:
    """Those in `folder` that were trained for a target of this shape with the tokenizer of this fingerprint, by their
    names ("<model>/<kind>"); of each kind one, that of the model called `model` where there is one."""
    found: dict[str, Path] = {}
    places = [config.parent for config in folder.glob("*/*/config.json")]
    for place in sorted(places, key=lambda place: (place.parent.name != model, place)):
        if place.name not in found and _trained_for(place, target, tokenizer):
            found[place.name] = place
    return {f"{place.parent.name}/{kind}": place for kind, place in sorted(found.items())}


def packaged_head(folder: Path, name: str) -> Path | None:
    """The one of this name, whatever it was trained for."""
    model, _, kind = name.partition("/")
    place = folder / model / kind
    return place if model and kind and place.parent.parent == folder and (place / "config.json").is_file() else None


def _trained_for(place: Path, target: ModelConfig, tokenizer: Callable[[], str]) -> bool:
    raw = read_object(place / "config.json")
    layer, own = raw.get("transformer_layer_config"), raw.get("paceline")
    return (isinstance(layer, Mapping) and isinstance(own, Mapping)
            and (layer.get("hidden_size"), layer.get("vocab_size")) == (target.hidden_size, target.vocab_size)
            and own.get("tokenizer") == tokenizer())  # last: it takes a while to compute
