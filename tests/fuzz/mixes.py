"""Random mixes of everything an engine serves, by seed: the model, its options, and requests that come, share prefixes,
draft, search, run out of time and are cancelled. Each says what it says alone, decoded plainly."""

from __future__ import annotations

import functools
import itertools
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adapters.adapter_files import ATTENTION, MLP, factors, shapes_of, write_adapter
from engine.tiny import VOCAB
from engine.whole import SteppedClock, check_at_rest, check_between_steps
from paceline import LLM, SamplingParams
from paceline.engine.core import Engine
from paceline.errors import EmptySupportError, StepError
from paceline.request import RequestOutput, Tenant
from paceline.speculation.datastore import write_datastore
from speculation.model_drafting import NATIVE_CACHES, drafting_llm, target
from speculation.test_every_drafter_in_the_matrix import WISHES
from speculation.trained_heads import heads_for
from speculation.worded import GRAMMARS, SCHEMAS, tokenizer, words_of

LONGEST = 96
"""Tokens of a text, the prompt included."""
HOST = 0.0005
"""GiB of host memory: some hundred blocks."""
STEMS = [[(place * step + 7) % VOCAB for place in range(60)] for step in (31, 5)]
"""What prompts begin with."""
ADAPTERS = {"one": [*ATTENTION, *MLP], "two": ["q_proj", "v_proj"]}
EXACT = ("coupled", "rejection", "multi-round", "without-replacement")
"""Rules that leave a text as it is, where drafts are looked up."""
LOOKED_UP = ("ngram", "suffix", "lookahead", "rest")
REGEXES = ["[a-z]{2,9}", "(ab|ba|é){1,4}", "x[0-9]+(true|false)", "[^a-m]{3}", "(yes|no), [ab]*", ".{4,12}"]
_RUNS = itertools.count()


@dataclass(frozen=True)
class Ask:
    """A request, when it comes (before which step) and when it is cancelled, if nothing ends it before."""

    prompt: list[int]
    params: dict[str, Any]
    wish: Any = None
    adapter: str | None = None
    tenant: Tenant | None = None
    arrives: int = 0
    leaves: int | None = None

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**self.params)

    @property
    def alone(self) -> str:
        """All that its text depends on, as JSON."""
        about = {name: value for name, value in self.params.items()
                 if name not in ("timeout_s", "priority", "cache_salt")}
        bias = about.get("logit_bias")
        return json.dumps([self.prompt, about | ({"logit_bias": sorted(bias.items())} if bias else {}), self.adapter])


@dataclass(frozen=True)
class Mix:
    kind: str
    """Of the target, as speculation.model_drafting has them."""
    options: dict[str, Any]
    asks: list[Ask] = field(default_factory=list)


# ---------------------------------------------------------------- drawn by seed

KINDS = ("native", "native", "native int8", "llama", "stepped", "stepped", "qwen2", "mistral", "mixtral", "gemma2")


def mix(seed: int, kinds: tuple[str, ...] = KINDS, most: int = 7) -> Mix:
    luck = random.Random(seed)
    kind = luck.choice(kinds)
    options = _options(luck, kind)
    asks = [_ask(luck, kind, options) for _ in range(luck.randint(2, most))]
    if luck.random() < 0.5:  # the same once more, when caches and drafters know it
        asks.append(_again(luck, asks))
    return Mix(kind, options, asks)


def _options(luck: random.Random, kind: str) -> dict[str, Any]:
    size = luck.choice([1, 4, 8, 16])
    found: dict[str, Any] = {"block_size": size, "max_num_seqs": luck.choice([3, 6, 40]), "max_model_len": LONGEST,
                             "max_prefill_chunk": luck.choice([None, 1, 7, 32]),
                             "max_batch_tokens": luck.choice([16, 40, 512]),
                             "schedule_ahead": luck.random() < 0.5, "enable_prefix_caching": luck.random() < 0.8,
                             "kv_blocks": 1200 // size, "watermark": luck.choice([0.0, 0.01]),
                             "preemption": luck.choice(["recompute", "swap", "auto"])}
    if luck.random() < 0.5:  # hardly more than one of them needs
        found["kv_blocks"] = -(-LONGEST // size) * 5 // 4 + 2
    if found["enable_prefix_caching"] and luck.random() < 0.4:
        found["host_cache"] = HOST
    if found["preemption"] != "recompute":
        found["swap_space"] = HOST
    if kind == "stepped":
        found |= {"kernels": "stepped", "capture": luck.choice(["lazy", "lazy", "never"])}
        found["max_num_seqs"] = min(found["max_num_seqs"], 8)
    return found


def _prompt(luck: random.Random) -> list[int]:
    stem = luck.choice(STEMS)[:luck.choice([0, 8, 24, 33, 50])]
    own = [luck.randrange(VOCAB) for _ in range(luck.randint(1, 20))]
    if luck.random() < 0.5:
        period = luck.randint(1, 6)
        own = [own[place % min(period, len(own))] for place in range(len(own))]
    return stem + own


def _ask(luck: random.Random, kind: str, options: dict[str, Any]) -> Ask:
    prompt = _prompt(luck)
    params = _params(luck, LONGEST - len(prompt), options["max_num_seqs"])
    adapter = luck.choice([None, None, "one", "two"]) if kind not in NATIVE_CACHES else None
    tenant = luck.choice([None, None, Tenant("a"), Tenant("b"), Tenant("c", shares_cache=True)])
    ask = Ask(prompt, params, None, adapter, tenant, luck.choice([0, 0, 0, 1, 2, 5, 9, 17]),
              luck.randint(1, 25) if luck.random() < 0.2 else None)
    return ask if params.get("beam_width") else replace(ask, wish=_wish(luck, kind, ask))


def _params(luck: random.Random, room: int, seats: int) -> dict[str, Any]:
    length = luck.randint(1, min(20, room))
    found: dict[str, Any] = {"max_tokens": length, "seed": luck.getrandbits(64), "ignore_eos": luck.random() < 0.7}
    if luck.random() < 0.3:
        found["priority"] = luck.randint(-1, 2)
    if luck.random() < 0.2:
        found["cache_salt"] = luck.choice(["salt", "other"])
    if luck.random() < 0.15:
        found["timeout_s"] = float(luck.randint(2, 30))
    if luck.random() < 0.12 and seats > 2:
        width = luck.randint(2, min(4, seats))
        return found | {"beam_width": width, "n": luck.randint(1, width), "temperature": 0.0,
                        "early_stopping": luck.choice([True, False, "never"])}
    found |= {"temperature": luck.choice([0.0, 0.0, 0.3, 0.8, 1.2]), "on_empty_support": "stop"}
    if found["temperature"]:
        samples = luck.choice([1, 1, 1, 2, 3])
        found["n"] = samples
        if luck.random() < 0.2:
            found["best_of"] = samples + luck.randint(0, 2)
    optional: dict[str, Callable[[], Any]] = {
        "top_k": lambda: luck.randint(1, 40), "top_p": lambda: luck.uniform(0.05, 1.0),
        "min_p": lambda: luck.uniform(0.0, 0.3), "repetition_penalty": lambda: luck.uniform(0.7, 1.5),
        "presence_penalty": lambda: luck.uniform(-1.0, 1.0), "frequency_penalty": lambda: luck.uniform(-1.0, 1.0),
        "no_repeat_ngram_size": lambda: luck.randint(1, 4),
        "logit_bias": lambda: {luck.randrange(VOCAB): luck.uniform(-4.0, 4.0) for _ in range(3)},
        "allowed_token_ids": lambda: sorted(luck.sample(range(VOCAB), 40)),
        "stop_token_ids": lambda: [luck.randrange(VOCAB)], "min_tokens": lambda: luck.randint(0, length),
        "logprobs": lambda: luck.randint(0, 3), "prompt_logprobs": lambda: luck.randint(0, 2),
        "bad_words": lambda: words_of([luck.randrange(2, 93) for _ in range(4)], [(0, 1), (1, 2)]),
        "stop": lambda: words_of([luck.randrange(2, 60) for _ in range(4)], [(0, 1), (1, 1)])}
    for name in luck.sample(sorted(optional), luck.choice([0, 0, 1, 2, 4])):
        value = optional[name]()
        if value or name not in ("bad_words", "stop"):
            found[name] = value
    if luck.random() < 0.25:
        name, values = luck.choice([("regex", REGEXES), ("json_schema", SCHEMAS), ("grammar", GRAMMARS),
                                    ("choice", [["yes", "no"], ["the name", "true", "é"]])])
        found[name] = luck.choice(values)
    return found


def _wish(luck: random.Random, kind: str, ask: Ask) -> Any:
    if luck.random() < 0.3:
        return None
    wish = dict(WISHES[luck.choice(sorted(WISHES))]) | {"k": luck.randint(1, 6), "adaptive": luck.random() < 0.4}
    wish["nodes"] = luck.randint(wish["k"], 24)
    if wish["method"] == "rest":
        wish["datastore"] = _datastore()
    if wish["method"] in ("oracle", "wrong"):
        wish["tokens"] = alone(kind, ask).samples[0][0]
    if wish["method"] in LOOKED_UP:
        wish["verify"] = luck.choice(EXACT)
    return wish


def _again(luck: random.Random, asks: list[Ask]) -> Ask:
    one = luck.choice(asks)
    return replace(one, arrives=one.arrives + luck.randint(1, 12), leaves=None)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mixes")


@functools.cache
def _datastore() -> str:
    path, luck = Path(_folder().name) / "some.store", random.Random(3)
    write_datastore(path, [[luck.randrange(VOCAB) for _ in range(300)] for _ in range(4)] + STEMS, VOCAB)
    return str(path)


@functools.cache
def _adapter(kind: str, name: str) -> str:
    tensors = factors(shapes_of(target(kind), ADAPTERS[name]), name)
    return str(write_adapter(Path(_folder().name) / f"{kind}-{name}", tensors, target_modules=ADAPTERS[name]))


# ---------------------------------------------------------------- run and compared

def engine_of(kind: str, asks: list[Ask], clock: SteppedClock | None = None, **options: Any) -> Engine:
    """With the adapters and the heads that some requests ask for."""
    return llm_of(kind, asks, clock, **options).engine


def llm_of(kind: str, asks: list[Ask], clock: SteppedClock | None = None, **options: Any) -> LLM:
    shape = "llama" if kind == "stepped" else kind
    if clock is not None:
        options["clock"] = clock
    llm = drafting_llm(shape, tokenizer(), trained=heads_for([ask.wish for ask in asks], target(shape)), **options)
    for name in sorted({ask.adapter for ask in asks if ask.adapter is not None}):
        llm.load_adapter(name, _adapter(shape, name))
    return llm


@dataclass(frozen=True)
class Said:
    """What a request got: of each sample its tokens, text, ends and scores; and of the prompt the scores."""

    samples: list[tuple[list[int], str, str | None, str | int | None, Any]]
    prompt: Any
    error: str | None

    @classmethod
    def of(cls, out: RequestOutput, with_scores: bool = True) -> Said:
        """Without scores: whether there are as many. A device hands them over as float32."""
        def scores(given: Any) -> Any:
            return given if given is None or with_scores else len(given)

        return cls([(one.token_ids, one.text, one.finish_reason, one.stop_reason, scores(one.logprobs))
                    for one in out.outputs], scores(out.prompt_logprobs),
                   None if out.error is None else f"{type(out.error).__name__}: {out.error}")


@functools.lru_cache(maxsize=4096)
def _alone(kind: str, about: str) -> RequestOutput:
    prompt, params, adapter = json.loads(about)
    if "logit_bias" in params:
        params["logit_bias"] = dict(params["logit_bias"])
    llm = _plain(kind, adapter)
    out = llm.generate([prompt], SamplingParams(**params), adapter=adapter)[0]
    assert out.error is None or isinstance(out.error, EmptySupportError), out.error
    return out


@functools.lru_cache(maxsize=32)
def _plain(kind: str, adapter: str | None) -> LLM:
    """One after the other, with nothing to remember: as good as an engine of its own."""
    asks = [Ask([1], {}, adapter=adapter)] if adapter else []
    return llm_of(kind, asks, enable_prefix_caching=False, kv_blocks=200, preemption="recompute")


def alone(kind: str, ask: Ask, with_scores: bool = True) -> Said:
    return Said.of(_alone("llama" if kind == "stepped" else kind, ask.alone), with_scores)


Disturbance = Callable[[int, Engine], None]
"""Called at each step boundary, before anybody comes or leaves, with the number of the step to come."""


class Run:
    """One engine and all requests of a mix, step by step; invariants are checked between steps."""

    def __init__(self, mix: Mix, engine: Engine | None = None, clock: SteppedClock | None = None) -> None:
        """`engine`: one that is there already, and its clock."""
        self.mix = mix
        self.clock = clock or SteppedClock()
        self.engine = engine or engine_of(mix.kind, mix.asks, self.clock, **mix.options)
        self.names = [f"run-{next(_RUNS)}-{place}" for place in range(len(mix.asks))]
        self.outs: list[RequestOutput | None] = [None] * len(mix.asks)
        self.steps = 0

    def again(self, asks: list[Ask]) -> Run:
        """Of the same engine, with some requests that all come at once."""
        now = [replace(ask, arrives=0) for ask in asks]
        return Run(replace(self.mix, asks=now), self.engine, self.clock)

    def go(self, disturb: Disturbance = lambda step, engine: None, most: int = 3000) -> list[RequestOutput]:
        engine, waiting = self.engine, dict(enumerate(self.mix.asks))
        while waiting or engine.has_work:
            assert self.steps < most, "the engine does not come to rest"
            disturb(self.steps, engine)
            for place in [place for place, ask in waiting.items() if ask.arrives <= self.steps]:
                self._admit(place, waiting.pop(place))
            for place, ask in enumerate(self.mix.asks):
                if ask.leaves == self.steps and self.names[place] in engine._records:
                    engine.cancel(self.names[place])
                    self._take(place)
            engine.step()
            check_between_steps(engine)
            for place, name in enumerate(self.names):
                if name in engine._records and not engine.record(name).open:
                    self._take(place)
            self.steps += 1
            self.clock.pass_step()
        check_at_rest(engine)
        return [out for out in self.outs if out is not None]

    def _admit(self, place: int, ask: Ask) -> None:
        name = self.names[place]
        try:
            self.engine.add(ask.prompt, ask.sampling, speculation=ask.wish, request_id=name, adapter=ask.adapter,
                            tenant=ask.tenant)
        except Exception as problem:  # of a fault: it was not admitted, and there is nothing of it
            assert "injected" in str(problem)
            self.outs[place] = RequestOutput(name, None, ask.prompt, [], finished=True, error=StepError(str(problem)))

    def _take(self, place: int) -> None:
        self.outs[place] = self.engine.take(self.names[place]).snapshot()


def check_said(kind: str, ask: Ask, out: RequestOutput) -> None:
    """What it says alone; where it was cancelled, or its time was up, a beginning of it."""
    exact = kind != "stepped"
    want = alone(kind, ask, exact)
    reasons = {one.finish_reason for one in out.outputs}
    if reasons & {"cancelled", "timeout"}:
        assert out.error is None
        assert ask.leaves is not None if "cancelled" in reasons else "timeout_s" in ask.params
        for got, (tokens, *_) in zip(out.outputs, want.samples):
            assert got.token_ids == tokens[:len(got.token_ids)], ask
        return
    assert Said.of(out, exact) == want, ask
    failure = None if out.speculation is None else out.speculation.failure
    assert failure is None, (failure, ask)
