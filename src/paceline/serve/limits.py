"""What clients may ask for, as far as others pay for it: one place for the limits, and for how a refusal reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import ConfigError, RequestError
from paceline.request import SamplingParams
from paceline.speculation.options import files_named, shared_sizes
from paceline.speculation.plugins import places_named, registered
from paceline.speculation.spec import BUILDERS, HEADS, Speculation, is_method, parse

FREE_METHODS = ("auto", "ngram", "suffix", "lookahead", "merge", "specinfer", "cascade", "prediction", *HEADS)
"""Methods that any client may name: they look texts up, run what the operator has loaded, or are made of others. The
rest load weights and keep them, run most of the model for every drafted token, or are instruments."""
FILES = "files"
"""Beside methods: options that name files, or models to fetch."""
PRIORITIES = 100
"""How far from 0 a priority may be where nobody is held back."""
MOST_ENTRIES = {"stop": 64, "bad_words": 1024, "stop_token_ids": 1024}
MOST_CHARACTERS = 1 << 16
"""What a request may have watched for: each of these is looked at again and again while everybody waits."""
LONGEST_SALT = 1024
"""It is part of the name by which caches and drafters know a request, which is made again and again."""
_KNOBS = ("k", "nodes", "verify", "adaptive")
"""Options of every method: they choose among drafts, and load nothing."""


@dataclass(frozen=True, kw_only=True)
class ClientLimits:
    """Every refusal names what was asked, the limit, and the option that raises it. Only servers have such limits."""

    max_n: int = 16
    """Samples of one prompt: n, or best_of."""
    max_samples: int = 128
    """Prompts times samples of one call."""
    max_beams: int = 8
    """Of one search."""
    max_logprobs: int = 20
    """The likeliest tokens that are told beside each one."""
    max_output_tokens: int | None = None
    """Of one sample; None: what the context leaves."""
    max_draft_tokens: int = 64
    """Tokens of a draft: k and nodes of a request's speculation."""
    max_priority: int | None = None
    """The highest that a request may have; any may step back. None: 100 where all callers are one, and 0 where there
    are several keys: nobody gets ahead of others by asking."""
    timeout_s: float | None = None
    """The longest a request may take; its own timeout_s may only be shorter."""
    allow_speculation: tuple[str, ...] = ("default",)
    """Methods that requests may name; "default": those that cost nobody else much, "files": options that name files.
    What the server itself drafts with is always allowed."""

    def __post_init__(self) -> None:
        for name in ("max_n", "max_samples", "max_beams", "max_draft_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.max_logprobs < 0:
            raise ConfigError(f"max_logprobs must be at least 0, got {self.max_logprobs}.")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ConfigError(f"max_output_tokens must be at least 1, got {self.max_output_tokens}.")
        if self.max_priority is not None and not 0 <= self.max_priority <= PRIORITIES:
            raise ConfigError(f"max_priority must be from 0 to {PRIORITIES}, got {self.max_priority}.")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0, got {self.timeout_s}.")
        for name in self.allow_speculation:
            if not is_method(name) and name not in ("default", "none", FILES):
                raise ConfigError(f"allow_speculation names {name!r}: use default, none, {FILES} or one of "
                                  f"{', '.join(BUILDERS)}.")

    # -- one request ---------------------------------------------------------------------------------------------------

    def check_lists(self, asked: Mapping[str, Any]) -> None:
        """Before anybody reads what is in them."""
        for name, most in MOST_ENTRIES.items():
            given = asked.get(name) or ()
            if isinstance(given, list) and len(given) > most:
                raise RequestError(f"{name} has {len(given)} entries and this server takes {most}: give fewer.", name)
            length = len(given) if isinstance(given, str) else sum(len(one) for one in given if isinstance(one, str))
            if length > MOST_CHARACTERS:
                raise RequestError(f"{name} has {length} characters in all and this server takes {MOST_CHARACTERS}: "
                                   "give less.", name)
        if len(asked.get("cache_salt", "")) > LONGEST_SALT:
            raise RequestError(f"cache_salt has {len(asked['cache_salt'])} characters and this server takes "
                               f"{LONGEST_SALT}: give a digest of it.", "cache_salt")

    def check(self, params: SamplingParams, prompts: int) -> None:
        """What all samples of a call together ask for, before any of its prompts is tokenised."""
        if params.searches:
            _within("use_beam_search", "beams", params.beam_width, self.max_beams, "--max-beams")
        else:
            name = "n" if params.best_of is None else "best_of"
            _within(name, name, params.samples, self.max_n, "--max-n")
        if prompts * params.samples > self.max_samples:
            raise RequestError(f"{prompts} prompts with {params.samples} samples each are more than this server takes "
                               f"in one call ({self.max_samples}): split them or have its operator raise "
                               "--max-samples.", "n")
        most = PRIORITIES if self.max_priority is None else self.max_priority
        if not -PRIORITIES <= params.priority <= most:
            raise RequestError(f"priority is {params.priority} and this server allows {-PRIORITIES} to {most}: ask for "
                               "less or have its operator raise --max-priority.", "priority")

    def check_logprobs(self, asked: int | None, name: str) -> int | None:
        if asked is not None:
            _within(name, name, asked, self.max_logprobs, "--max-logprobs")
        return asked

    def speculation(self, wish: Any, own: Speculation | None) -> Speculation | None:
        """A request's wish as the engine takes it. `own`: what the server drafts with."""
        # A client must not have the server open files or fetch models, nor change what others share.
        for name, _ in () if FILES in self.allow_speculation else files_named(wish):
            raise RequestError(f"speculation.{name} names a file of the server: only the server's own --speculation "
                               f"may do that, unless its operator allows it (--allow-speculation {FILES}).",
                               "speculation")
        for name, _ in shared_sizes(wish):
            raise RequestError(f"speculation.{name} sets a size for all requests: only the server's own --speculation "
                               "may do that.", "speculation")
        mine_too = self._methods.union(places_named(None if own is None else own.as_dict()))
        for method in places_named(wish):
            if method not in mine_too:
                raise RequestError(f"speculation names {method!r}, which is code of the server's: only its own "
                                   "--speculation may do that, unless its operator allows it (--allow-speculation "
                                   f"{method}).", "speculation")
        parsed = parse(wish)
        if parsed is None:
            return None
        if own is not None and wish == own.method and wish not in self._methods:
            return own  # by its name alone it is what the server has loaded
        mine = [_loaded(one) for one in _wishes(None if own is None else own.as_dict())]
        for one in _wishes(wish):
            method = one["method"]
            if method not in self._methods and _loaded(one) not in mine:
                raise RequestError(f"speculation names {method!r}, which clients of this server may not: use one of "
                                   f"{', '.join(sorted(self._methods)) or 'none'}, or have its operator start it with "
                                   f"--allow-speculation {method}.", "speculation")
            for name in ("k", "nodes", "small_k"):
                if isinstance(size := one.get(name), int):
                    _within("speculation", f"speculation.{name}", size, self.max_draft_tokens, "--max-draft-tokens")
        k = min(parsed.k, self.max_draft_tokens)  # its own defaults bend
        return replace(parsed, k=k, nodes=max(k, min(parsed.nodes, self.max_draft_tokens)))

    @property
    def _methods(self) -> frozenset[str]:
        named = {name for name in self.allow_speculation if is_method(name)}
        return frozenset(named.union(FREE_METHODS if "default" in self.allow_speculation else ()))

    def allows(self, wish: Any, own: Speculation | None) -> bool:
        """Whether a client may ask for this."""
        try:
            self.speculation(wish, own)
        except RequestError:
            return False
        return True


def _within(param: str, what: str, asked: int, most: int, option: str) -> None:
    if asked > most:
        raise RequestError(f"{what} is {asked} and this server allows {most}: ask for fewer or have its operator raise "
                           f"{option}.", param)


def _wishes(wish: Any) -> Iterator[Mapping[str, Any]]:
    """A wish and those within it, each as an object: wherever a method is named, whatever the option is called."""
    if isinstance(wish, str):
        if wish in BUILDERS or wish in registered():
            yield {"method": wish}
    elif isinstance(wish, Mapping):
        if isinstance(wish.get("method"), str):
            yield wish
        for name, inner in wish.items():
            if name != "method":
                yield from _wishes(inner)
    elif isinstance(wish, list | tuple):
        for inner in wish:
            yield from _wishes(inner)


def _loaded(wish: Mapping[str, Any]) -> dict[str, Any]:
    """What decides what is loaded for a wish."""
    return {name: value for name, value in wish.items() if name not in _KNOBS}
