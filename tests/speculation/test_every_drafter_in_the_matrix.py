"""The equality matrix times every drafter: whatever mix of drafters, trees, sampling controls and circumstances
Hypothesis comes up with, each request gets the tokens it gets alone, with speculation off."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from engine.tiny import VOCAB
from paceline import SamplingParams
from paceline.errors import EmptySupportError
from paceline.kernels import cpu
from paceline.request import STRUCTURES, RequestOutput
from paceline.speculation.datastore import write_datastore
from paceline.speculation.spec import BUILDERS, HEADS
from pairwise import each
from speculation.model_drafting import FAST, NATIVE_CACHES, drafting_llm, target
from speculation.model_drafting import METHODS as MODEL_METHODS
from speculation.trained_heads import heads_for
from speculation.worded import PIECES, parts_of, structures, tokenizer, words_of

WISHES: dict[str, dict[str, Any]] = MODEL_METHODS | {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "suffix tree": {"method": "suffix", "tree": True, "factor": 3.0},
    "lookahead": {"method": "lookahead"},
    "rest": {"method": "rest"},
    "rest chain": {"method": "rest", "chain": True},
    "specinfer": {"method": "specinfer", "drafters": ["ngram", "lookahead", "exit"]},
    "merge": {"method": "merge", "drafters": ["ngram", "suffix", "skip"]},
    "auto": {"method": "auto"},
    "auto with probes": {"method": "auto", "drafters": ["ngram", "lookahead"]},
    "auto with a model": {"method": "auto", "drafters": ["ngram", {"method": "draft", "model": "same"}]},
    **{kind: {"method": kind} for kind in HEADS},
    "medusa, full tree": {"method": "medusa", "branches": [3, 2, 2]},
    "dflash, full tree": {"method": "dflash", "branches": [2, 2, 1, 1]},
    "dspark, siblings": {"method": "dspark", "branches": 3},
    "dspark, full tree": {"method": "dspark", "branches": [2, 1, 2]},
    **{f"{kind}, dynamic tree": {"method": kind, "tree": True, "top_k": 3} for kind in ("eagle3", "mtp", "hydra")},
    "medusa, sparse tree": {"method": "medusa", "choices": True},
    "eagle1, sparse tree": {"method": "eagle1", "choices": [[0], [2], [0, 0], [2, 1], [0, 0, 1]]},
    "merge of heads": {"method": "merge", "drafters": ["eagle3", {"method": "dspark", "branches": 2}, "ngram"]},
    "cascade of a head": {"method": "cascade", "drafter": "dspark", "by": {"method": "draft", "model": "same"}},
    "prediction": {"method": "prediction"},
    "oracle": {"method": "oracle", "branches": 2},
    "wrong": {"method": "wrong", "branches": 2},
}
METHODS = {wish["method"]: name for name, wish in WISHES.items()}
LEARNED = ("dspark", "eagle3", "mtp", "medusa", "hydra", "medusa, full tree", "dspark, siblings", "merge of heads",
           "cascade of a head")
"""In every run these have cells of their own, with heads that have learned their target (test_heads_in_the_matrix.py);
here, where heads are random, they are left to the long matrices."""
DIFFERENT = ({*METHODS.values()} - {*LEARNED}, ("draft, full tree", "suffix tree", "merge of models"))
"""One of every method, and some that differ more than in numbers."""
NATIVE = [pytest.param(kind, marks=pytest.mark.skipif(
    cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")) for kind in NATIVE_CACHES]
SLOW = [pytest.param(kind, marks=pytest.mark.full) for kind in ("llama", "qwen2")]


def test_the_matrix_has_every_method() -> None:
    assert {wish["method"] for wish in WISHES.values()} == set(BUILDERS)


@st.composite
def sampling(draw: st.DrawFn) -> dict[str, Any]:
    """Controls as users combine them; a third of the requests are greedy."""
    found: dict[str, Any] = {"temperature": draw(st.sampled_from([0.0, 0.3, 0.8, 1.2])),
                             "seed": draw(st.integers(0, 2**64 - 1)), "max_tokens": draw(st.integers(1, 20))}
    optional = {
        "top_k": st.integers(1, 40), "top_p": st.floats(0.05, 1.0), "min_p": st.floats(0.0, 0.5),
        "repetition_penalty": st.floats(0.7, 1.5), "presence_penalty": st.floats(-1.0, 1.0),
        "frequency_penalty": st.floats(-1.0, 1.0), "no_repeat_ngram_size": st.integers(1, 4),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-4.0, 4.0), max_size=4),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=40, unique=True),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True),
        "min_tokens": st.integers(0, 12), "logprobs": st.just(2), "n": st.just(2)}
    for name in draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)):
        found[name] = draw(optional[name])
    found["on_empty_support"] = draw(st.sampled_from(["stop", "error", "unmasked"]))
    if found["temperature"] == 0.0 or found["on_empty_support"] == "error":
        # The sample that fails ends its siblings wherever they are, and that depends on who drafted well.
        found.pop("n", None)
    found["min_tokens"] = min(found.get("min_tokens", 0), found["max_tokens"])
    found["ignore_eos"] = draw(st.booleans())
    if draw(st.booleans()):
        # Some structures are driven to where no token is left: they end too early, or repeat what they must not.
        cornered = st.sampled_from([{}, {"min_tokens": found["max_tokens"]}, {"no_repeat_ngram_size": 1}])
        found |= draw(structures()) | draw(cornered)
    return found


REQUEST = st.fixed_dictionaries({
    "prompt": st.tuples(st.integers(0, 2**32), st.integers(1, 60), st.booleans()),
    "params": sampling(), "bad_words": PIECES, "stop": PIECES,
    "wish": st.none() | st.sampled_from(sorted(WISHES)),
    "k": st.integers(1, 8), "nodes": st.integers(8, 40), "adaptive": st.booleans()})
CIRCUMSTANCES = st.fixed_dictionaries({
    "max_prefill_chunk": st.sampled_from([None, 1, 7, 32]), "schedule_ahead": st.booleans(),
    "enable_prefix_caching": st.booleans(), "crowded": st.booleans(),
    "preemption": st.sampled_from(["recompute", "swap"]), "host_cache": st.sampled_from([0.0, 0.01])})


def prompt_of(recipe: tuple[int, int, bool]) -> list[int]:
    """Random, or repeating itself so that look-ups find something."""
    number, length, repeats = recipe
    luck = random.Random(number)
    period = luck.randrange(1, 7) if repeats else length
    own = [luck.randrange(VOCAB) for _ in range(period)]
    return [own[i % period] for i in range(length)]


class Said(NamedTuple):
    """All that a request got."""

    samples: list[tuple[list[int], str, str | None, str | int | None, Any]]
    error: str | None


def said(out: RequestOutput) -> Said:
    return Said([(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) for one in out.outputs],
                None if out.error is None else f"{type(out.error).__name__}: {out.error}")


@functools.lru_cache(maxsize=4096)
def _alone(kind: str, prompt: tuple[int, ...], params: str) -> Said:
    wanted = given_params(json.loads(params))
    out = drafting_llm(kind, tokenizer(), enable_prefix_caching=False).generate([list(prompt)], wanted)[0]
    assert out.error is None or (isinstance(out.error, EmptySupportError) and wanted.on_empty_support == "error")
    return said(out)


def alone(kind: str, prompt: list[int], params: dict[str, Any]) -> Said:
    return _alone(kind, tuple(prompt), json.dumps(params))


def given_params(raw: dict[str, Any]) -> SamplingParams:
    bias = raw.get("logit_bias")
    if bias:  # JSON has made texts of its keys
        raw = raw | {"logit_bias": {int(token): value for token, value in bias.items()}}
    return SamplingParams(**({"ignore_eos": True} | raw))


def worded(kind: str, prompt: list[int], request: dict[str, Any]) -> dict[str, Any]:
    """The request's parameters with words to keep out and to stop at. They are of the text that comes without them."""
    params: dict[str, Any] = request["params"]
    if request.get("bad_words"):
        words = words_of(alone(kind, prompt, params).samples[0][0], request["bad_words"])
        params = params | {"bad_words": words}
    if request.get("stop"):
        params = params | {"stop": parts_of(alone(kind, prompt, params).samples[0][1], request["stop"])}
    return params


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("matrix") / "some.store"
    luck = random.Random(3)
    write_datastore(path, [[luck.randrange(VOCAB) for _ in range(300)] for _ in range(4)], VOCAB)
    return str(path)


def completed(request: dict[str, Any], expected: Said, store: str) -> Any:
    if request["wish"] is None:
        return None
    wish = WISHES[request["wish"]] | {"k": request["k"], "nodes": max(request["nodes"], request["k"]),
                                      "adaptive": request["adaptive"]}
    if wish["method"] == "rest":
        wish["datastore"] = store
    if wish["method"] in ("prediction", "oracle", "wrong"):
        wish["tokens"] = expected.samples[0][0]
    return wish


def check(kind: str, requests: list[dict[str, Any]], around: dict[str, Any], store: str) -> list[RequestOutput]:
    torch.set_num_threads(1)
    prompts = [prompt_of(request["prompt"]) for request in requests]
    params = [worded(kind, prompt, request) for prompt, request in zip(prompts, requests)]
    expected = [alone(kind, prompt, own) for prompt, own in zip(prompts, params)]
    options = dict(around)
    if not options["enable_prefix_caching"]:
        options.pop("host_cache", None)
    if options.pop("crowded"):
        options |= {"kv_blocks": 24, "max_model_len": 96, "watermark": 0.0}
    wishes = [completed(request, want, store) for request, want in zip(requests, expected)]
    llm = drafting_llm(kind, tokenizer(), trained=heads_for(wishes, target(kind)), **options)
    for _ in range(2):  # the second time the prefix cache and the drafters remember the first
        outs = llm.generate(prompts, [given_params(own) for own in params], speculation=wishes)
        for request, own, want, out in zip(requests, params, expected, outs):
            assert said(out) == want, (request, own)
            assert request["wish"] is None or out.speculation.failure is None, out.speculation.failure
        llm.engine.cache.check([])
    return outs


@pytest.mark.parametrize("kind", ["llama", *NATIVE])
@settings(max_examples=7, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(requests=st.lists(REQUEST, min_size=1, max_size=4), around=CIRCUMSTANCES)
def test_any_mix_gives_the_tokens_of_plain_decoding(kind: str, requests: list[dict[str, Any]],
                                                    around: dict[str, Any], store: str) -> None:
    check(kind, requests, around, store)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "qwen3", "mixtral", *NATIVE])
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests=st.lists(REQUEST, min_size=1, max_size=12), around=CIRCUMSTANCES)
def test_very_many_mixes(kind: str, requests: list[dict[str, Any]], around: dict[str, Any], store: str) -> None:
    check(kind, requests, around, store)


def test_words_and_structures_take_effect_in_what_is_drawn() -> None:
    """Otherwise equality with and without speculation would say nothing about them."""
    drawn: Counter[str] = Counter()
    effective: Counter[str] = Counter()

    def unsettled(what: str) -> bool:
        """A dozen tell enough."""
        return drawn[what] < 12

    def note(what: str, effect: bool) -> None:
        drawn[what] += 1
        effective[what] += effect

    @seed(1)
    @settings(max_examples=160, deadline=None, suppress_health_check=list(HealthCheck), database=None,
              phases=[Phase.generate])
    @given(request=REQUEST)
    def look(request: dict[str, Any]) -> None:
        structure = given_params(request["params"]).structure
        drawn[f"when empty: {request['params']['on_empty_support']}"] += 1
        about = {"bad words of several tokens": request["bad_words"], "stop": request["stop"]} | (
            {structure: True} if structure else {})
        if not any(there and unsettled(what) for what, there in about.items()):
            return
        prompt = prompt_of(request["prompt"])
        params = worded(FAST, prompt, request)
        got = alone(FAST, prompt, params)
        if structure is not None and unsettled(structure):
            free = {name: value for name, value in params.items() if name != structure}
            note(structure, alone(FAST, prompt, free) != got)
        if params.get("bad_words") and unsettled("bad words of several tokens"):
            note("bad_words", alone(FAST, prompt, params | {"bad_words": []}) != got)
            longer = [word for word in params["bad_words"] if len(tokenizer().encode(word, add_special=False)) > 1]
            if longer:
                note("bad words of several tokens", alone(FAST, prompt, params | {"bad_words": longer}) != alone(
                    FAST, prompt, params | {"bad_words": []}))
        if params.get("stop"):
            note("stop", any(reason in params["stop"] for _, _, _, reason, _ in got.samples))
        note("on_empty_support", alone(FAST, prompt, params | {"on_empty_support": "error"}).error is not None)

    torch.set_num_threads(1)
    look()
    for what in (*STRUCTURES, "bad_words", "bad words of several tokens", "stop"):
        assert effective[what] >= max(5, drawn[what] // 2), (what, drawn, effective)
    assert effective["on_empty_support"] >= 10, (drawn, effective)
    assert min(drawn[f"when empty: {policy}"] for policy in ("stop", "error", "unmasked")) >= 15, drawn


@each(name=[pytest.param(name, marks=pytest.mark.full) if name in LEARNED else name for name in sorted(WISHES)],
      kind=NATIVE)
def test_each_drafter_in_company(kind: str, name: str, store: str) -> None:
    check_in_company(kind, name, store)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(WISHES))
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_each_drafter_in_company_in_torch(kind: str, name: str, store: str) -> None:
    check_in_company(kind, name, store)


def check_in_company(kind: str, name: str, store: str) -> None:
    """One drafter for three requests of different kinds, beside one without."""
    styles: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 16}, {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 14},
        {"temperature": 1.1, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.3,
         "logit_bias": {"5": 1.5}, "no_repeat_ngram_size": 3, "seed": 6, "max_tokens": 15}]
    requests = [{"prompt": (number, 30, number % 2 == 1), "params": style, "wish": name, "k": 4,
                 "nodes": 20, "adaptive": False} for number, style in enumerate(styles)]
    requests.append(requests[1] | {"wish": None, "prompt": (9, 20, False)})
    check(kind, requests, {"max_prefill_chunk": 7, "schedule_ahead": True, "enable_prefix_caching": True,
                           "crowded": False}, store)


@pytest.mark.parametrize("name", [
    name if any(name in names for names in DIFFERENT) else pytest.param(name, marks=pytest.mark.full)
    for name in sorted(WISHES)])
@pytest.mark.parametrize("kind", [NATIVE[0], *SLOW])
def test_each_drafter_among_words_and_structures(kind: str, name: str, store: str) -> None:
    """Structures that leave choices and some that leave none, words kept out and stopped at, and a structure that comes
    to where no token is left, under each policy."""
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "an": {"type": "integer"}},
              "required": ["name", "an"], "additionalProperties": False}
    cornered = {"regex": "[ab]{9}", "no_repeat_ngram_size": 1, "max_tokens": 12}
    styles: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 20, "json_schema": schema},
        {"temperature": 0.9, "seed": 5, "max_tokens": 14, "regex": "[a-e]{9}(true|false), é+", "logprobs": 2},
        {"temperature": 1.1, "seed": 6, "max_tokens": 14},
        *({"temperature": 0.8, "seed": 7, "on_empty_support": policy} | cornered
          for policy in ("stop", "error", "unmasked"))]
    requests = [{"prompt": (number, 30, number % 2 == 1), "params": style, "wish": name, "k": 4,
                 "nodes": 20, "adaptive": False} for number, style in enumerate(styles)]
    requests[1] |= {"bad_words": [(2, 1)]}
    requests[2] |= {"bad_words": [(1, 1), (4, 2)], "stop": [(9, 2)]}
    outs = check(kind, requests, {"max_prefill_chunk": 7, "schedule_ahead": True, "enable_prefix_caching": True,
                                  "crowded": False}, store)
    stopped, failed, freed = outs[3:]
    assert stopped.outputs[0].finish_reason == "stop" and len(stopped.outputs[0].token_ids) < 9
    assert isinstance(failed.error, EmptySupportError) and len(freed.outputs[0].token_ids) == 12
    assert outs[2].outputs[0].finish_reason == "stop"
    assert any(origin.drafter == "grammar" for origin in outs[0].speculation.provenance)
    if name == "oracle":
        assert min(out.speculation.accepted for out in outs[:3]) > 4
