"""The equality matrix times every drafter: whatever mix of drafters, trees, sampling controls and circumstances
Hypothesis comes up with, each request gets the tokens it gets alone, with speculation off."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.tiny import VOCAB
from paceline import SamplingParams
from paceline.kernels import cpu
from paceline.speculation.datastore import write_datastore
from paceline.speculation.spec import BUILDERS
from speculation.model_drafting import METHODS as MODEL_METHODS
from speculation.model_drafting import NATIVE_CACHES, drafting_llm

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
    "oracle": {"method": "oracle", "branches": 2},
    "wrong": {"method": "wrong", "branches": 2},
}
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
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=6, max_size=40, unique=True),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True),
        "min_tokens": st.integers(0, 4), "logprobs": st.just(2), "n": st.just(2)}
    for name in draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)):
        found[name] = draw(optional[name])
    if "n" in found and found["temperature"] == 0.0:
        del found["n"]
    found["min_tokens"] = min(found.get("min_tokens", 0), found["max_tokens"])
    return found | {"on_empty_support": "stop"}


REQUEST = st.fixed_dictionaries({
    "prompt": st.tuples(st.integers(0, 2**32), st.integers(1, 60), st.booleans()),
    "params": sampling(),
    "wish": st.none() | st.sampled_from(sorted(WISHES)),
    "k": st.integers(1, 8), "nodes": st.integers(8, 40), "adaptive": st.booleans()})
CIRCUMSTANCES = st.fixed_dictionaries({
    "max_prefill_chunk": st.sampled_from([None, 1, 7, 32]), "schedule_ahead": st.booleans(),
    "enable_prefix_caching": st.booleans(), "crowded": st.booleans(),
    "preemption": st.sampled_from(["recompute", "swap"]), "host_cache": st.sampled_from([0.0, 0.01])})


def prompt_of(recipe: tuple[int, int, bool]) -> list[int]:
    """Random, or repeating itself so that look-ups find something."""
    seed, length, repeats = recipe
    luck = random.Random(seed)
    period = luck.randrange(1, 7) if repeats else length
    own = [luck.randrange(VOCAB) for _ in range(period)]
    return [own[i % period] for i in range(length)]


@functools.lru_cache(maxsize=4096)
def alone(kind: str, prompt: tuple[int, ...], params: str) -> list[tuple[list[int], str | None, Any]]:
    out = drafting_llm(kind, enable_prefix_caching=False).generate([list(prompt)], given_params(json.loads(params)))[0]
    assert out.error is None
    return [(one.token_ids, one.finish_reason, one.logprobs) for one in out.outputs]


def given_params(raw: dict[str, Any]) -> SamplingParams:
    bias = raw.get("logit_bias")
    if bias:  # JSON has made texts of its keys
        raw = raw | {"logit_bias": {int(token): value for token, value in bias.items()}}
    return SamplingParams(ignore_eos=True, **raw)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("matrix") / "some.store"
    luck = random.Random(3)
    write_datastore(path, [[luck.randrange(VOCAB) for _ in range(300)] for _ in range(4)], VOCAB)
    return str(path)


def completed(request: dict[str, Any], expected: list[tuple[list[int], str | None, Any]], store: str) -> Any:
    if request["wish"] is None:
        return None
    wish = WISHES[request["wish"]] | {"k": request["k"], "nodes": max(request["nodes"], request["k"]),
                                      "adaptive": request["adaptive"]}
    if wish["method"] == "rest":
        wish["datastore"] = store
    if wish["method"] in ("oracle", "wrong"):
        wish["tokens"] = expected[0][0]
    return wish


def check(kind: str, requests: list[dict[str, Any]], around: dict[str, Any], store: str) -> None:
    torch.set_num_threads(1)
    prompts = [prompt_of(request["prompt"]) for request in requests]
    expected = [alone(kind, tuple(prompt), json.dumps(request["params"], sort_keys=True))
                for prompt, request in zip(prompts, requests)]
    options = dict(around)
    if not options["enable_prefix_caching"]:
        options.pop("host_cache", None)
    if options.pop("crowded"):
        options |= {"kv_blocks": 24, "max_model_len": 96, "watermark": 0.0}
    llm = drafting_llm(kind, **options)
    wishes = [completed(request, want, store) for request, want in zip(requests, expected)]
    for _ in range(2):  # the second time the prefix cache and the drafters remember the first
        outs = llm.generate(prompts, [given_params(request["params"]) for request in requests], speculation=wishes)
        for request, want, out in zip(requests, expected, outs):
            assert out.error is None
            assert [(one.token_ids, one.finish_reason, one.logprobs) for one in out.outputs] == want, request
            assert request["wish"] is None or out.speculation.failure is None, out.speculation.failure
        llm.engine.cache.check([])


@pytest.mark.parametrize("kind", ["llama", *NATIVE])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
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


@pytest.mark.parametrize("name", sorted(WISHES))
@pytest.mark.parametrize("kind", [*NATIVE, *SLOW])
def test_each_drafter_in_company(kind: str, name: str, store: str) -> None:
    """One drafter for three requests of different kinds, beside one without."""
    styles: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 16}, {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 14},
        {"temperature": 1.1, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.3,
         "logit_bias": {"5": 1.5}, "no_repeat_ngram_size": 3, "seed": 6, "max_tokens": 15}]
    requests = [{"prompt": (seed, 30, seed % 2 == 1), "params": style, "wish": name, "k": 4, "nodes": 20,
                 "adaptive": False} for seed, style in enumerate(styles)]
    requests.append(requests[1] | {"wish": None, "prompt": (9, 20, False)})
    check(kind, requests, {"max_prefill_chunk": 7, "schedule_ahead": True, "enable_prefix_caching": True,
                           "crowded": False}, store)


