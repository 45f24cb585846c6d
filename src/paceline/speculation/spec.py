"""What a caller may say about speculation, and the drafter it means."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import NotYetError, RequestError
from paceline.speculation.drafter import DraftContext, Drafter
from paceline.speculation.drafters import (
    auto,
    cascade,
    draft,
    exit,
    head,
    lookahead,
    merge,
    ngram,
    precision,
    prediction,
    rest,
    scripted,
    skip,
    specinfer,
    suffix,
)
from paceline.speculation.options import MAX_NODES, Options, check_nesting, shown
from paceline.speculation.plugins import Builder, is_place, load, places_named, registered
from paceline.speculation.verify import RULES

PLANNED_METHODS = ("streaming-kv", "retrieval-kv")
PLANNED_RULES = ("block",)
HEADS = ("dspark", "dflash", "eagle3", "eagle1", "mtp", "medusa", "hydra")
"""Trained heads, by their kind."""

BUILDERS: Mapping[str, Builder] = {
    "auto": auto.build,
    "ngram": ngram.build,
    "suffix": suffix.build,
    "lookahead": lookahead.build,
    "rest": rest.build,
    "specinfer": specinfer.build,
    "merge": merge.build,
    "draft": draft.build,
    "skip": skip.build,
    "exit": exit.build,
    "precision": precision.build,
    "cascade": cascade.build,
    "prediction": prediction.build,
    **dict.fromkeys(HEADS, head.build),
    "oracle": scripted.build,
    "wrong": scripted.build,
}
"""One line per method; others come from packages (plugins.py). A builder reads its options, refuses what does not fit,
and returns a drafter: a new one, or one that requests share (kept in context.shared), so that they are drafted
together."""

SCRIPTED = ("oracle", "wrong")
"""Methods that prove something and therefore do what they are told unless asked to adapt."""
TOLD = (*SCRIPTED, "prediction")
"""Methods that draft what the caller gives them: without that there is nothing to try."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """A wish: which drafter, how much, under which rule. What parse() returns is valid."""

    method: str
    k: int = 5
    """The deepest draft."""
    verify: str = "coupled"
    options: Mapping[str, Any] | None = None
    nodes: int = 64
    """The largest draft, in tokens; at least k."""
    adaptive: bool = True
    """Depth and size follow what pays for the request, up to k and nodes; False: always k."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What was set about the rule (Rule.numbers)."""

    def as_dict(self) -> dict[str, Any]:
        """What parse() reads."""
        return {"method": self.method, "k": self.k, "nodes": self.nodes, "verify": self.verify,
                "adaptive": self.adaptive, **self.numbers, **(self.options or {})}


def is_method(name: str) -> bool:
    """Ours, one that a package registered, or a place in the form "module:builder". Nothing is imported."""
    return name in BUILDERS or name in registered() or is_place(name)


def load_plugins(wish: Any) -> None:
    """Import the drafters that a wish names by their place, so that a mistake shows before the first request."""
    for method in places_named(wish.as_dict() if isinstance(wish, Speculation) else wish):
        load(method)


def parse(raw: Any) -> Speculation | None:
    """None | a method's name | a dict | a Speculation -> Speculation, or an error that says what to change."""
    if raw is None:
        return None
    if isinstance(raw, str):
        raw = {"method": raw}
    elif isinstance(raw, Speculation) and isinstance(raw.options, Mapping | None):
        raw = raw.as_dict()  # anyone can make one: it is read like any other wish
    if not isinstance(raw, Mapping) or not isinstance(raw.get("method"), str):
        raise RequestError("speculation must be None, a method's name, or a dict with a 'method', "
                           f"got {shown(raw)}.", "speculation")
    check_nesting(raw)
    options = dict(raw)
    method = options.pop("method")
    if not is_method(method):
        if method in PLANNED_METHODS:
            raise NotYetError(f"The drafter {method!r} is not in this version yet; available: "
                              f"{', '.join(sorted(BUILDERS))}. Leave speculation out to decode plainly.")
        known = sorted({*BUILDERS, *registered()})
        near = difflib.get_close_matches(method, [*known, *PLANNED_METHODS], 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(known)}, or None."
        raise RequestError(f"Unknown speculation method {shown(method)}. {hint}", "speculation")
    verify = options.pop("verify", "coupled")
    if not isinstance(verify, str) or verify not in RULES:
        if isinstance(verify, str) and verify in PLANNED_RULES:
            raise NotYetError(f"verify={verify!r} is not in this version yet; use 'coupled', which is exact.")
        raise RequestError(f"Unknown verification rule {shown(verify)}; use one of {', '.join(RULES)}.", "speculation")
    common = Options(method, options)
    adaptive = common.flag("adaptive", method not in SCRIPTED)
    k = common.integer("k", 12 if adaptive else 5, 1, MAX_NODES)
    nodes = common.integer("nodes", max(64, k), k, MAX_NODES)
    usual = RULES[verify].numbers
    numbers = {name: common.number(name, usual[name], 0.0, 1.0) for name in usual if name in options}
    for name in ("adaptive", "k", "nodes", *numbers):
        options.pop(name, None)
    return Speculation(method, k, verify, options, nodes, adaptive, numbers)


def heads_named(wish: Any) -> list[str]:
    """The trained heads that a wish names, those of its parts included, each once."""
    if isinstance(wish, Speculation):
        wish = wish.as_dict()
    found: list[str] = []
    if isinstance(wish, Mapping):
        name = wish.get("head")
        found = [name] if wish.get("method") in HEADS and isinstance(name, str) else []
    inner = wish.values() if isinstance(wish, Mapping) else wish if isinstance(wish, list | tuple) else ()
    return list(dict.fromkeys([*found, *(name for more in inner for name in heads_named(more))]))


def build(spec: Speculation, context: DraftContext) -> Drafter:
    """The drafter of one request, or a part of one: whatever drafts for an engine was built here."""
    options = Options(spec.method, spec.options or {}, spec.verify)
    builder = BUILDERS[spec.method] if spec.method in BUILDERS else load(spec.method)
    drafter = builder(spec.method, options, context)
    options.finish()
    taps = drafter.needs.taps
    if taps and context.models is not None and not (min(taps) >= 0 and max(taps) <= context.models.layers):
        raise RequestError(f"The drafter {drafter.name!r} reads hidden states of layers {', '.join(map(str, taps))}, "
                           f"and the model has {context.models.layers}: it was made for another one.", "speculation")
    return drafter
