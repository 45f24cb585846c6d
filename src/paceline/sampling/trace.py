"""Traces: what a request asked for and how each of its tokens came about, enough to run it again and compare."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.errors import PacelineError, RequestError
from paceline.request import SamplingParams
from paceline.sampling.cycles import MOST_NUMBERS, Cycle
from paceline.sampling.setup import Setup

SCHEMA = 3
OUTCOMES = ("plain", "accepted", "corrected", "bonus")

_CALLABLES = frozenset(("interrupt", "stop_when"))
_LISTS = ("bad_words", "allowed_token_ids", "stop", "stop_token_ids", "choice")


@dataclass(slots=True)
class TraceToken:
    """One emitted token."""

    token: int
    position: int
    """Absolute, prompt included; with the seed it says which noise was used."""
    raw_logprob: float
    processed_logprob: float
    support: int
    """Tokens that could have come after every processor."""
    processors: tuple[str, ...]
    """Those that acted, in order."""
    drafter: str | None = None
    """Who proposed the token, where it was a draft."""
    outcome: str = "plain"
    """plain | accepted | corrected | bonus"""


@dataclass(slots=True)
class Trace:
    """One request (its sample 0) from beginning to end."""

    setup: Setup
    """What must be the same for a replay to be."""
    prompt: list[int]
    params: SamplingParams
    seed: int
    speculation: dict[str, Any] | None = None
    rule: str | None = None
    """By which its drafts were verified; None: it had no drafter."""
    adapter: str | None = None
    tokens: list[TraceToken] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    """Every draft that was verified, in order."""
    cut: int | None = None
    """Position from which cycles are not kept, because they had grown too many: a replay compares up to there."""
    finish_reason: str = ""
    cut_short: bool = False
    """A callable of the request ended the text, which no trace can hold: a replay, which has none, compares up to
    there."""
    _numbers: int = field(default=0, repr=False, compare=False)

    def add_cycle(self, cycle: Cycle) -> None:
        self._numbers += cycle.numbers
        if self.cut is None and self._numbers <= MOST_NUMBERS:
            self.cycles.append(cycle)
        elif self.cut is None:
            self.cut = cycle.start

    @property
    def numbers(self) -> int:
        """How much there is of cycles and tokens, for whoever keeps traces."""
        return len(self.prompt) + min(self._numbers, MOST_NUMBERS) + 8 * len(self.tokens)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "setup": self.setup.as_dict(), "adapter": self.adapter, "seed": self.seed,
            "speculation": self.speculation, "rule": self.rule, "params": params_to_dict(self.params),
            "prompt": list(self.prompt), "finish_reason": self.finish_reason,
            "cut_short": self.cut_short, "tokens": [{
                "token": t.token, "position": t.position, "raw_logprob": _plain(t.raw_logprob),
                "processed_logprob": _plain(t.processed_logprob), "support": t.support,
                "processors": list(t.processors), "drafter": t.drafter, "outcome": t.outcome,
            } for t in self.tokens],
            "cycles": [cycle.as_dict() for cycle in self.cycles], "cut": self.cut,
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read what `to_json` wrote; anything else is a RequestError that says where it goes wrong."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise RequestError(f"The trace is not valid JSON ({problem}); record it again.", "trace") from None
        return cls.from_dict(document)

    @classmethod
    def from_dict(cls, document: Any) -> Trace:
        if not isinstance(document, dict):
            raise _bad("the file must hold one object")
        schema = document.get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            raise RequestError(f"The trace was written by a newer version of Paceline (its schema is {schema}, this "
                               f"version reads {SCHEMA}): update Paceline to replay it.", "trace")
        if schema != SCHEMA:
            raise _bad(f"its schema is {schema!r} and this version reads {SCHEMA}")
        _check_keys(document, {"schema", "setup", "adapter", "seed", "speculation", "rule", "params", "prompt",
                               "finish_reason", "cut_short", "tokens", "cycles", "cut"}, "the trace")
        speculation = document["speculation"]
        if speculation is not None and not isinstance(speculation, dict):
            raise _bad("speculation must be an object or null")
        prompt = document["prompt"]
        if not isinstance(prompt, list) or not all(_is_id(token) for token in prompt):
            raise _bad("prompt must be a list of token ids")
        for name in ("tokens", "cycles"):
            if not isinstance(document[name], list):
                raise _bad(f"{name} must be a list")
        seed, cut = document["seed"], document["cut"]
        if not _is_id(seed) or seed >= 1 << 64:
            raise _bad("seed must be a whole number below 2^64")
        if cut is not None and not _is_id(cut):
            raise _bad("cut must be a position or null")
        if not isinstance(document["cut_short"], bool):
            raise _bad("cut_short must be true or false")
        found = cls(setup=_setup(document["setup"]), prompt=prompt, params=params_from_dict(document["params"]),
                    seed=seed, speculation=speculation,
                    rule=None if document["rule"] is None else _text(document, "rule"),
                    adapter=None if document["adapter"] is None else _text(document, "adapter"),
                    tokens=[_token(entry, i) for i, entry in enumerate(document["tokens"])],
                    finish_reason=_text(document, "finish_reason"), cut_short=document["cut_short"])
        for index, entry in enumerate(document["cycles"]):
            found.add_cycle(_cycle(entry, index))
        found.cut = cut if found.cut is None else found.cut
        return found


def params_to_dict(params: SamplingParams) -> dict[str, Any]:
    """Every parameter that is not at its default, in plain JSON types. Callables cannot be recorded."""
    plain: dict[str, Any] = {}
    for spec in fields(params):
        value = getattr(params, spec.name)
        if spec.name in _CALLABLES or value == spec.default:
            continue
        if isinstance(value, tuple):
            value = list(value)
        elif spec.name == "logit_bias":
            value = {str(token): _plain(float(bias)) for token, bias in value.items()}
        plain[spec.name] = value
    return plain


def params_from_dict(plain: Any) -> SamplingParams:
    """SamplingParams from JSON types; unknown names and impossible values are a RequestError."""
    if not isinstance(plain, dict):
        raise _bad("params must be an object")
    known = {spec.name for spec in fields(SamplingParams)} - _CALLABLES
    unknown = sorted(set(plain) - known)
    if unknown:
        raise RequestError(f"There is no sampling parameter {unknown[0]!r}; remove it.", unknown[0])
    values = dict(plain)
    for name in _LISTS:
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
        elif values.get(name) is not None:
            raise RequestError(f"{name} must be a list, got {values[name]!r}.", name)
    bias = values.get("logit_bias")
    if bias is not None:
        try:
            values["logit_bias"] = {int(token): float(value) for token, value in bias.items()}
        except (AttributeError, TypeError, ValueError, OverflowError):
            raise RequestError(f"logit_bias must map token ids to numbers, got {bias!r}.", "logit_bias") from None
    try:
        return SamplingParams(**values)
    except PacelineError:
        raise
    except (TypeError, ValueError, OverflowError) as problem:
        raise RequestError(f"The sampling parameters are not usable ({problem}); correct them.") from None


def _setup(found: Any) -> Setup:
    try:
        return Setup.from_dict(found)
    except ValueError as problem:
        raise _bad(f"of the setup, {problem}") from None


def _cycle(found: Any, index: int) -> Cycle:
    try:
        return Cycle.from_dict(found)
    except ValueError as problem:
        raise _bad(f"of cycle {index}, {problem}") from None


def _token(entry: Any, index: int) -> TraceToken:
    place = f"token {index}"
    if not isinstance(entry, dict):
        raise _bad(f"{place} must be an object")
    _check_keys(entry, {spec.name for spec in fields(TraceToken)}, place)
    for name in ("token", "position", "support"):
        if not _is_id(entry[name]):
            raise _bad(f"{place}: {name} must be a whole number from 0")
    if entry["outcome"] not in OUTCOMES:
        raise _bad(f"{place}: outcome must be one of {', '.join(OUTCOMES)}")
    processors = entry["processors"]
    if not isinstance(processors, list) or not all(isinstance(name, str) for name in processors):
        raise _bad(f"{place}: processors must be a list of names")
    return TraceToken(entry["token"], entry["position"], _number(entry, "raw_logprob", place),
                      _number(entry, "processed_logprob", place), entry["support"], tuple(processors),
                      None if entry["drafter"] is None else _text(entry, "drafter"), entry["outcome"])


def _bad(what: str) -> RequestError:
    return RequestError(f"This is not a trace that can be read: {what}; record it again.", "trace")


def _check_keys(found: dict[str, Any], wanted: set[str], place: str) -> None:
    missing, extra = sorted(wanted - set(found)), sorted(set(found) - wanted)
    if missing:
        raise _bad(f"{place} lacks {missing[0]!r}")
    if extra:
        raise _bad(f"{place} has an unknown entry {extra[0]!r}")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _text(found: dict[str, Any], name: str) -> str:
    value = found[name]
    if not isinstance(value, str):
        raise _bad(f"{name} must be text")
    return value


def _plain(value: float) -> float | str:
    """JSON has no infinities: they travel as text."""
    return value if math.isfinite(value) else str(value)


def _number(found: dict[str, Any], name: str, place: str) -> float:
    value = found[name]
    if isinstance(value, str) and value in ("inf", "-inf"):
        return float(value)
    try:
        if not isinstance(value, bool | str):
            return float(value)
    except (TypeError, OverflowError):
        pass
    raise _bad(f"{place}: {name} must be a number")
