"""What a caller asks for and gets back: SamplingParams, Request, RequestOutput."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import NotYetError, PacelineError, RequestError
from paceline.so_far import Moved

SEED_LIMIT = 1 << 64
POOLINGS = ("mean", "last")
STRUCTURES = ("json_schema", "regex", "grammar", "choice")
"""Parameters that say which texts are allowed; a request may set one of them."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Validated on construction; the order of application is in sampling/pipeline.py.

    temperature 0 is greedy. top_k 0 means all tokens. seed None: the engine chooses one and returns it.
    `logprobs=k` gives the chosen token and the k best, `prompt_logprobs=k` the same for the prompt.
    One of json_schema (an object, a boolean or their JSON text), regex (the whole text matches), grammar (Lark or GBNF)
    and choice (one of these texts) may say which texts are allowed; see docs/structured-output.md.
    `best_of` makes so many samples and returns the n whose tokens are likeliest on average; `beam_width` above 1 is a
    beam search that returns the n best texts it found, by length_penalty and early_stopping as in transformers; see
    docs/search.md.
    """

    n: int = 1
    """Samples that are returned, each with a seed of its own."""
    best_of: int | None = None
    """Samples that are made; the n likeliest per token are returned."""
    max_tokens: int | None = 16
    """Longest output; None: what the context leaves."""
    min_tokens: int = 0
    """No end before so many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this much probability."""
    min_p: float = 0.0
    """Drop tokens below this fraction of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Above 1 discourages tokens of the prompt and of the output."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that was written before."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time it was written."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    bad_words: tuple[str, ...] = ()
    """Texts that are never written."""
    no_repeat_ngram_size: int = 0
    """No run of so many tokens comes twice; 0: any may."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may come."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these texts."""
    stop_token_ids: tuple[int, ...] = ()
    """The text ends at the first of these tokens."""
    include_stop_str_in_output: bool = False
    """The stop string, or the text of the stop token, that ended a text is part of it."""
    ignore_eos: bool = False
    """Go on past the model's own end."""
    seed: int | None = None
    """The same seed gives the same text; None: one is chosen and returned."""
    logprobs: int | None = None
    """Log-probabilities of each token and of the k best."""
    prompt_logprobs: int | None = None
    """The same for the prompt."""
    pooling: str | None = None
    """With max_tokens=0: no text is wanted but the prompt's embedding, the "mean" of its tokens' last hidden states or
    that of its "last" token."""
    beam_width: int = 1
    """Above 1: a beam search with so many beams."""
    length_penalty: float = 1.0
    """Of a beam search: a score is the sum of log-probabilities / length ** this."""
    early_stopping: bool | str = False
    """Of a beam search: when it ends; True, False or "never"."""
    json_schema: Any = None
    """The text is JSON that follows this schema: an object, a boolean or their JSON text."""
    strict_schema: bool = False
    """Of json_schema: keywords that cannot be enforced are refused; otherwise uniqueItems and propertyNames are taken
    for annotations."""
    regex: str | None = None
    """The whole text matches this expression."""
    grammar: str | None = None
    """The text follows this grammar, in Lark's notation or in GBNF."""
    choice: tuple[str, ...] | None = None
    """The text is one of these."""
    structure_after: str | None = None
    """What may come before the text that json_schema, regex, grammar or choice describes (a model's thoughts): in
    Lark's notation, with a rule `start`."""
    on_empty_support: str = "error"
    """What happens where masks leave no token: "error", "stop" or "unmasked"."""
    priority: int = 0
    """Higher ones run first and are preempted last."""
    timeout_s: float | None = None
    """Seconds after which the request ends with what it has."""
    target_ttft_ms: float | None = None
    """Milliseconds after which its first token should be there: while that is at stake nobody's drafts get rows. None:
    the engine's target."""
    target_tpot_ms: float | None = None
    """Milliseconds that each further token should take: while they take longer its drafts come first. None: the
    engine's target."""
    parse_special: bool = False
    """Special tokens written in the prompt's text (<|im_end|>), or in messages, are special tokens; otherwise text."""
    skip_special_tokens: bool = True
    """Special tokens that are written (<|channel|>) are left out of the text."""
    cache_salt: str = ""
    """Requests with different salts share neither cache blocks nor what drafters remember."""
    interrupt: Callable[[str, list[int]], bool] | None = None
    """Called with text and token ids after each step; True ends the text."""
    stop_when: Callable[[], Callable[[str], bool]] | None = None
    """Called for each sample; what it returns is told each new piece of the text, and ends it, with "stop", by True."""
    trace: bool = False
    """Record what `paceline replay` needs."""

    def __post_init__(self) -> None:
        for name in ("bad_words", "stop", "stop_token_ids", "allowed_token_ids", "choice"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif value is not None and not isinstance(value, tuple):
                if not isinstance(value, Iterable):
                    raise RequestError(f"{name} must be a list, got {value!r}.", name)
                object.__setattr__(self, name, tuple(value))
        _validate(self)
        for name in ("stop_token_ids", "allowed_token_ids"):  # valid by now; each counts once
            if getattr(self, name):
                object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))

    @property
    def samples(self) -> int:
        """How many sequences run for a request: one for every sample or beam."""
        return max(self.n, self.best_of or 1, self.beam_width)

    @property
    def searches(self) -> bool:
        """Whether its sequences are the beams of one search."""
        return self.beam_width > 1

    @property
    def chosen_at_end(self) -> bool:
        """Whether what is returned is chosen among more when all have ended, so that nothing can be streamed."""
        return self.searches or self.samples > self.n

    @property
    def structure(self) -> str | None:
        """The name of the parameter that says which texts are allowed; None: all are."""
        return next((name for name in STRUCTURES if getattr(self, name) is not None), None)


def _whole(params: SamplingParams, name: str, least: int, *, most: int | None = None, none: bool = False) -> None:
    value = getattr(params, name)
    if value is None and none:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, got {value!r}.", name)
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise RequestError(f"{name} must be at least {least}{upper}, got {value}.", name)


def _real(params: SamplingParams, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(params, name)
    if not _is_number(value) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}.", name)
    if value < low or value > high or (open_low and value == low):
        left = "above" if open_low else "at least"
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise RequestError(f"{name} must be {left} {low:g}{upper}, got {value:g}.", name)


def _is_number(value: object) -> bool:
    """A real number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < 1 << 1000


def _validate(p: SamplingParams) -> None:
    _whole(p, "n", 1, most=1024)
    _whole(p, "max_tokens", 0, none=True)
    _whole(p, "min_tokens", 0)
    _real(p, "temperature", 0.0, math.inf)
    _whole(p, "top_k", 0)
    _real(p, "top_p", 0.0, 1.0, open_low=True)
    _real(p, "min_p", 0.0, 1.0)
    _real(p, "repetition_penalty", 0.0, math.inf, open_low=True)
    _real(p, "presence_penalty", -math.inf, math.inf)
    _real(p, "frequency_penalty", -math.inf, math.inf)
    _whole(p, "no_repeat_ngram_size", 0)
    _whole(p, "seed", 0, most=SEED_LIMIT - 1, none=True)
    _whole(p, "logprobs", 0, none=True)
    _whole(p, "prompt_logprobs", 0, none=True)
    _whole(p, "priority", -(1 << 31), most=(1 << 31) - 1)
    _whole(p, "best_of", 1, most=1024, none=True)
    _whole(p, "beam_width", 1, most=1024)
    _real(p, "length_penalty", -10.0, 10.0)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise RequestError(f"min_tokens ({p.min_tokens}) must not exceed max_tokens ({p.max_tokens}).", "min_tokens")
    if p.max_tokens == 0 and p.prompt_logprobs is None and p.pooling is None:
        raise RequestError("max_tokens is 0: ask for at least one token, or set prompt_logprobs or pooling.",
                           "max_tokens")
    _validate_pooling(p)
    if p.timeout_s is not None:
        _real(p, "timeout_s", 0.0, math.inf, open_low=True)
    for name in ("target_ttft_ms", "target_tpot_ms"):
        if getattr(p, name) is not None:
            _real(p, name, 0.0, math.inf, open_low=True)
    for name in ("stop", "bad_words"):
        for text in getattr(p, name):
            if not isinstance(text, str) or not text:
                raise RequestError(f"{name} must hold non-empty strings, got {text!r}: remove it.", name)
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token in getattr(p, name) or ():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise RequestError(f"{name} must hold token ids (whole numbers from 0), got {token!r}.", name)
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise RequestError("allowed_token_ids is empty: no token could ever be sampled; name some or leave it out.",
                           "allowed_token_ids")
    if p.logit_bias is not None and not isinstance(p.logit_bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {p.logit_bias!r}.", "logit_bias")
    for token, bias in (p.logit_bias or {}).items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(f"logit_bias keys are token ids (whole numbers from 0), got {token!r}.", "logit_bias")
        if not _is_number(bias) or math.isnan(bias):
            raise RequestError(f"logit_bias for token {token} must be a number, got {bias!r}.", "logit_bias")
    for name in ("parse_special", "include_stop_str_in_output", "skip_special_tokens", "strict_schema"):
        if not isinstance(getattr(p, name), bool):
            raise RequestError(f"{name} must be True or False, got {getattr(p, name)!r}.", name)
    if not isinstance(p.cache_salt, str):
        raise RequestError(f"cache_salt must be a text, got {p.cache_salt!r}.", "cache_salt")
    try:
        p.cache_salt.encode()
    except UnicodeEncodeError:
        raise RequestError("cache_salt holds half a character (a lone surrogate); repair it.", "cache_salt") from None
    if p.on_empty_support not in ("error", "stop", "unmasked"):
        raise RequestError(
            f"on_empty_support must be 'error', 'stop' or 'unmasked', got {p.on_empty_support!r}.", "on_empty_support")
    if p.interrupt is not None and not callable(p.interrupt):
        raise NotYetError("interrupt must be a callable (text, token_ids) -> bool; named policies come later.")
    if p.stop_when is not None and not callable(p.stop_when):
        raise RequestError("stop_when must be a callable that returns one for each sample: text -> bool.", "stop_when")
    _validate_structure(p)
    _validate_best_of(p)
    _validate_beams(p)


def _validate_pooling(p: SamplingParams) -> None:
    if p.pooling is None:
        return
    if p.pooling not in POOLINGS:
        raise RequestError(f"pooling must be one of {', '.join(POOLINGS)}, got {p.pooling!r}.", "pooling")
    if p.max_tokens != 0 or p.samples != 1:
        raise RequestError("pooling is for an embedding of the prompt alone: set max_tokens=0 and leave n out.",
                           "pooling")


def _validate_structure(p: SamplingParams) -> None:
    """Types only; whether anything can be made of it is found out when the engine compiles it."""
    given = [name for name in STRUCTURES if getattr(p, name) is not None]
    if len(given) > 1:
        raise RequestError(f"{given[0]} and {given[1]} cannot be combined: give one structure.", given[1])
    if p.json_schema is not None and not isinstance(p.json_schema, Mapping | bool | str):
        raise RequestError(f"json_schema must be an object, a boolean or JSON text, got {p.json_schema!r}.",
                           "json_schema")
    for name in ("regex", "grammar"):
        value = getattr(p, name)
        if value is not None and (not isinstance(value, str) or not value):
            raise RequestError(f"{name} must be a non-empty text, got {value!r}.", name)
    if p.structure_after is not None and (not isinstance(p.structure_after, str) or p.structure is None):
        raise RequestError("structure_after is a grammar's text, and needs a structure: json_schema, regex, grammar or "
                           "choice.", "structure_after")
    if p.choice is not None:
        if not p.choice:
            raise RequestError("choice is empty: no text could ever be chosen; name some or leave it out.", "choice")
        for text in p.choice:
            if not isinstance(text, str) or not text:
                raise RequestError(f"choice must hold non-empty texts, got {text!r}.", "choice")


def _validate_best_of(p: SamplingParams) -> None:
    if p.best_of is None:
        return
    if p.best_of < p.n:
        raise RequestError(f"best_of ({p.best_of}) must be at least n ({p.n}): the n best of them are returned.",
                           "best_of")
    if p.best_of > p.n and p.trace:
        raise RequestError("trace cannot be combined with best_of: a trace is of one sample; run it with the seed of "
                           "the one that was chosen.", "trace")


_NEUTRAL: dict[str, Any] = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "logit_bias": None, "bad_words": (), "no_repeat_ngram_size": 0,
    "allowed_token_ids": None, "stop": (), "best_of": None, "interrupt": None, "stop_when": None,
    "trace": False,
    **dict.fromkeys(STRUCTURES)}
"""What a beam search leaves at its default: it ranks whole texts by the model's own probabilities."""


def _validate_beams(p: SamplingParams) -> None:
    if not isinstance(p.early_stopping, bool) and p.early_stopping != "never":
        raise RequestError(f"early_stopping must be True, False or 'never', got {p.early_stopping!r}.",
                           "early_stopping")
    if not p.searches:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(p, name) != neutral:
                raise RequestError(f"{name} is for beam search (beam_width of 2 or more): leave it out.", name)
        return
    if p.n > p.beam_width:
        raise RequestError(f"n ({p.n}) must not exceed beam_width ({p.beam_width}): a search finds as many texts as "
                           "it has beams.", "n")
    if p.max_tokens == 0:
        raise RequestError("max_tokens is 0 and a beam search needs at least one token.", "max_tokens")
    if p.temperature not in (0.0, 1.0):
        raise RequestError(f"temperature ({p.temperature:g}) cannot be combined with beam_width: a beam search samples "
                           "nothing; leave it out.", "temperature")
    for name, neutral in _NEUTRAL.items():
        if getattr(p, name) != neutral:
            raise RequestError(f"{name} cannot be combined with beam_width: a beam search ranks whole texts by the "
                               "model's own probabilities; leave it out.", name)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose a request is. Tenants learn nothing of each other's texts: what one of them read and wrote is neither found
    in a cache nor drafted from nor shown for another."""

    name: str = ""
    """Nobody else's. The server makes it of the API key."""
    shares_cache: bool = False
    """With all others that do: one pool, in which nobody is told where its texts part from others'."""


def scope_of(tenant: Tenant, salt: str, adapter: str | None = None) -> str:
    """See Request.scope. `adapter`: the revision of the one that blocks are computed with. (Without one a scope begins
    with a number, or is empty: it cannot be taken for an adapter's.)"""
    owner = "" if tenant.shares_cache else tenant.name
    scope = f"{len(owner)} {owner} {salt}" if owner or salt else ""
    return scope if adapter is None else f"adapter {adapter} {scope}"


def adapter_of(scope: str) -> str | None:
    """The revision of the adapter in a scope; None: there is none."""
    word, _, rest = scope.partition(" ")
    return rest.partition(" ")[0] if word == "adapter" else None


@dataclass(slots=True, eq=False)
class Request:
    """One admitted request: validated, tokenised, seeded. Owned by the engine; callers see RequestOutput."""

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    """Resolved: params.max_tokens, or what the context leaves."""
    arrival: float
    """Engine clock, seconds."""
    deadline: float | None = None
    speculation: Any = None
    """A resolved drafter handle or None; opaque to the scheduler."""
    prompt_text: str | None = None
    adapter: Any = None
    """A loaded adapter (models.adapters.Adapter) or None: the model as it is."""
    tenant: Tenant = Tenant()
    target_ttft_s: float | None = None
    target_tpot_s: float | None = None
    """Resolved: its own targets, or the engine's."""
    shadow: bool = False
    """The engine's own (paceline.watch): nobody is told of it, and nobody's account has it."""

    @property
    def scope(self) -> str:
        """What requests have in common that may be served from each other's texts: their tenant, unless it shares, and
        their salt. Neither can be chosen so that it looks like the other."""
        return scope_of(self.tenant, self.params.cache_salt)


@dataclass(slots=True)
class TokenLogprob:
    """Natural-log probabilities of one emitted (or prompt) token, before and after the processors."""

    token: int
    """Its id."""
    raw: float
    """Log-probability by the model alone."""
    processed: float
    """After every control: that of the distribution it was sampled from."""
    rank: int
    """1 = most likely under the raw distribution."""
    top: dict[int, float] = field(default_factory=dict)
    """The k most likely tokens, raw log-probabilities, best first, ties to the lowest id."""


@dataclass(slots=True)
class Completion:
    """One sample of a request."""

    index: int
    """Which of the n."""
    text: str = ""
    """What was written, without the stop string that ended it unless that was asked for."""
    token_ids: list[int] = field(default_factory=list)
    """Of the output alone."""
    finish_reason: str | None = None
    """None while running; "stop" | "length" | "interrupt" | "timeout" | "cancelled" | "error"."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it, where one did."""
    logprobs: list[TokenLogprob] | None = None
    """One per token, where asked for."""
    seed: int = 0
    """Its own: with it the sample can be had alone."""
    cumulative_logprob: float | None = None
    """Sum of its tokens' raw log-probabilities, where the request chose among texts by it."""
    score: float | None = None
    """What it was chosen by: cumulative_logprob by token (best_of), or by length ** length_penalty (beams)."""


@dataclass(slots=True)
class RequestOutput:
    """What a request produced so far; `finished` says whether more will come."""

    request_id: str
    """Also in the server's answers and logs."""
    prompt: str | None
    """As it was given; None: it came as token ids."""
    prompt_token_ids: list[int]
    """The prompt as the model saw it."""
    outputs: list[Completion]
    """The n samples; where some were chosen at the end, the best first."""
    finished: bool = False
    """All samples have ended."""
    seed: int = 0
    """Given or chosen: with it the request can be repeated."""
    metrics: Any = None
    """Times and counts of the request (engine/records/metrics.py)."""
    speculation: Any = None
    """SpeculationStats; None: it did not speculate."""
    trace: Any = None
    """What `paceline replay` reads, where asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per prompt token, where asked for; None for the first."""
    embedding: list[float] | None = None
    """Of the prompt, of length 1, where `pooling` asked for it."""
    error: PacelineError | None = None
    """Set when this request alone failed; `outputs` then hold what came before."""
    moved: Moved | None = None
    """Set where it changed workers on the way (paceline.cluster)."""
