"""What a caller may say about speculation, and the drafter it means."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import NotYetError, RequestError
from paceline.speculation.drafter import Drafter
from paceline.speculation.drafters.scripted import ScriptedDrafter

MAX_NODES = 1024
PLANNED_METHODS = ("auto", "ngram", "suffix", "lookahead", "rest", "draft", "skip", "exit", "precision", "specinfer",
                   "cascade", "merge", "eagle", "eagle3", "medusa", "hydra", "mtp", "streaming-kv", "retrieval-kv")
PLANNED_RULES = ("rejection", "multi-round", "without-replacement", "typical", "block")


@dataclass(frozen=True, slots=True)
class Speculation:
    """A validated wish: which drafter, how much, under which rule."""

    method: str
    k: int = 5
    verify: str = "coupled"
    options: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """What parse() reads."""
        return {"method": self.method, "k": self.k, "verify": self.verify, **(self.options or {})}


def parse(raw: Any) -> Speculation | None:
    """None | a method's name | a dict | a Speculation -> Speculation, or an error that says what to change."""
    if raw is None or isinstance(raw, Speculation):
        return raw
    if isinstance(raw, str):
        raw = {"method": raw}
    if not isinstance(raw, Mapping) or not isinstance(raw.get("method"), str):
        raise RequestError("speculation must be None, a method's name, or a dict with a 'method', "
                           f"got {raw!r}.", "speculation")
    options = dict(raw)
    method = options.pop("method")
    k = options.pop("k", 5)
    verify = options.pop("verify", "coupled")
    if method in PLANNED_METHODS:
        raise NotYetError(f"The drafter {method!r} is not in this version yet; available: "
                          f"{', '.join(sorted(BUILDERS))}. Leave speculation out to decode plainly.")
    if method not in BUILDERS:
        near = difflib.get_close_matches(method, [*BUILDERS, *PLANNED_METHODS], 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RequestError(f"Unknown speculation method {method!r}.{hint}", "speculation")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_NODES:
        raise RequestError(f"speculation k must be a whole number from 1 to {MAX_NODES}, got {k!r}.", "speculation")
    if verify in PLANNED_RULES:
        raise NotYetError(f"verify={verify!r} is not in this version yet; use 'coupled', which is exact.")
    if verify != "coupled":
        raise RequestError(f"Unknown verification rule {verify!r}; use 'coupled'.", "speculation")
    return Speculation(method, k, verify, options)


def build(spec: Speculation, vocab_size: int) -> Drafter:
    """The drafter of one request."""
    return BUILDERS[spec.method](spec, vocab_size)


def _scripted(spec: Speculation, vocab_size: int) -> Drafter:
    options = dict(spec.options or {})
    script = options.pop("tokens", None)
    branches = options.pop("branches", 1)
    if options:
        raise RequestError(f"Unknown speculation option {min(options)!r} for {spec.method!r}; "
                           "known: k, verify, tokens, branches.", "speculation")
    if not isinstance(script, list | tuple) or not all(
            isinstance(t, int) and not isinstance(t, bool) and 0 <= t < vocab_size for t in script):
        raise RequestError(f"speculation method {spec.method!r} needs 'tokens': the output's token ids, each below "
                           f"{vocab_size}.", "speculation")
    most = min(vocab_size // 2, MAX_NODES)
    if isinstance(branches, bool) or not isinstance(branches, int) or not 1 <= branches <= most:
        raise RequestError(f"speculation branches must be a whole number from 1 to {most}, got {branches!r}.",
                           "speculation")
    shift = branches if spec.method == "wrong" else 0
    return ScriptedDrafter(spec.method, script, vocab_size, k=spec.k, branches=branches, shift=shift)


BUILDERS: Mapping[str, Callable[[Speculation, int], Drafter]] = {"oracle": _scripted, "wrong": _scripted}
