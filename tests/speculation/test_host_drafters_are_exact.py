"""ngram, suffix, lookahead, rest, prediction, specinfer and merge on a real engine: they change nothing but speed."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.tiny import BASE, SHAPES, VOCAB, RandomWeights, tiny_llm
from paceline import SamplingParams
from paceline.kernels import cpu
from paceline.llm import LLM
from paceline.models.config import ModelConfig
from paceline.models.native import NativeDecoder
from paceline.models.registry import build
from paceline.speculation.datastore import write_datastore
from pairwise import each

NEW = 28
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 99},
    "controlled": {"temperature": 1.0, "top_k": 30, "min_p": 0.01, "repetition_penalty": 1.1, "frequency_penalty": 0.2,
                   "logit_bias": {4: 1.0}, "no_repeat_ngram_size": 4, "seed": 99},
}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "suffix tree": {"method": "suffix", "tree": True, "factor": 3.0},
    "lookahead": {"method": "lookahead"},
    "rest": {"method": "rest"},
    "rest chain": {"method": "rest", "chain": True},
    "prediction": {"method": "prediction"},
    "specinfer": {"method": "specinfer", "drafters": ["ngram", "lookahead", {"method": "rest"}]},
    "merge": {"method": "merge", "drafters": ["ngram", "suffix", "lookahead"]},
    "merge of merges": {"method": "merge", "drafters": [{"method": "merge", "drafters": ["ngram", "suffix"]},
                                                        {"method": "rest"}]},
}
KERNELS = ["reference", pytest.param("native", marks=pytest.mark.skipif(
    cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)"))]
REPETITIVE = [token for _ in range(6) for token in (3, 8, 13, 21, 34, 55)]


@functools.cache
def model(kernels: str, gain: float = 1.5) -> Any:
    torch.set_num_threads(1)
    shape = ModelConfig.from_dict(BASE | SHAPES["llama"])
    if kernels == "native":  # which wants heads of at least 16
        shape = ModelConfig.from_dict(BASE | SHAPES["llama"] | {"hidden_size": 64, "intermediate_size": 96})
        return NativeDecoder(shape, RandomWeights(gain), shape.max_position_embeddings, threads=1)
    return build(shape, RandomWeights(gain), shape.max_position_embeddings)


def params(style: str) -> SamplingParams:
    return SamplingParams(max_tokens=NEW, ignore_eos=True, **STYLES[style])


@functools.cache
def plain(kernels: str, style: str, gain: float = 1.5) -> list[int]:
    out = tiny_llm(model(kernels, gain)).generate([REPETITIVE], params(style))[0]
    assert out.error is None and len(out.outputs[0].token_ids) == NEW
    return out.outputs[0].token_ids


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Half true and half false: the beginning of each text, then something else."""
    path = tmp_path_factory.mktemp("rest") / "half.store"
    built = ["reference"] if cpu.load() is None else ["reference", "native"]
    texts = [[*REPETITIVE, *plain(kernels, style)[:NEW // 2], *range(40, 60)] for kernels in built for style in STYLES]
    write_datastore(path, texts, VOCAB)
    return str(path)


def completed(wish: dict[str, Any], store: str) -> dict[str, Any]:
    """With the datastore's path wherever a rest stands, and with a prediction that is right for a while."""
    if "drafters" in wish:
        parts = [part if isinstance(part, str) else completed(part, store) for part in wish["drafters"]]
        return wish | {"drafters": parts}
    if wish["method"] == "prediction":
        return wish | {"tokens": [*plain("reference", "seeded")[:NEW // 2], *range(40, 60)]}
    return wish | {"datastore": store} if wish["method"] == "rest" else wish


def drafted(llm: LLM, style: str, wish: dict[str, Any], **more: Any) -> Any:
    out = llm.generate([REPETITIVE], params(style), speculation=wish | {"adaptive": False, "k": 7} | more)[0]
    assert out.error is None and out.speculation.failure is None
    llm.engine.cache.check([])
    return out


@each(method=list(METHODS), kernels=KERNELS, style=list(STYLES))
def test_tokens_are_those_of_plain_decoding(kernels: str, method: str, style: str, store: str) -> None:
    out = drafted(tiny_llm(model(kernels)), style, completed(METHODS[method], store))
    assert out.outputs[0].token_ids == plain(kernels, style)
    assert out.speculation.drafted > 0


@pytest.mark.parametrize("method", ["ngram", "suffix", "suffix tree", "lookahead", "specinfer", "merge"])
def test_a_calm_model_on_a_repetitive_prompt_is_drafted_well(method: str, store: str) -> None:
    out = drafted(tiny_llm(model("reference", 0.5)), "greedy", completed(METHODS[method], store))
    assert out.outputs[0].token_ids == plain("reference", "greedy", 0.5)
    assert out.speculation.accepted >= NEW // 2


def test_lookahead_finds_what_no_look_up_could() -> None:
    """At some temperature nothing in the text repeats, yet the target's own probes foresee part of it."""
    llm = tiny_llm(model("reference", 0.5))
    ahead, looked_up = (drafted(llm, "seeded", {"method": method}) for method in ("lookahead", "ngram"))
    assert ahead.speculation.accepted > looked_up.speculation.accepted
    assert ahead.speculation.accepted > NEW // 8


def test_a_datastore_of_the_answer_is_accepted(store: str) -> None:
    out = drafted(tiny_llm(model("reference")), "seeded", {"method": "rest", "datastore": store})
    assert out.speculation.accepted >= NEW // 3


@pytest.mark.parametrize("options", [{}, {"schedule_ahead": True}, {"kv_blocks": 40, "max_model_len": 100,
                                                                    "watermark": 0.0}])
def test_all_of_them_in_one_batch(options: dict[str, Any], store: str) -> None:
    """Every method and none, every style, side by side, twice over; ahead of commit, and short of blocks."""
    llm = tiny_llm(model("reference"), **options)
    cases = list(itertools.product([None, *METHODS], STYLES))
    wishes = [None if method is None else completed(METHODS[method], store) | {"adaptive": False, "k": 7}
              for method, _ in cases]
    outs = llm.generate([REPETITIVE] * len(cases), [params(style) for _, style in cases], speculation=wishes)
    for (method, style), out in zip(cases, outs):
        assert out.error is None
        assert out.outputs[0].token_ids == plain("reference", style), (method, style)
        assert method is None or out.speculation.failure is None
    if "kv_blocks" in options:
        assert llm.engine.metrics.preemptions > 0, "this case is meant to run out of blocks"
    llm.engine.cache.check([])


@pytest.mark.parametrize("method", METHODS)
def test_adaptive_budgets_change_nothing_either(method: str, store: str) -> None:
    llm = tiny_llm(model("reference"))
    out = llm.generate([REPETITIVE], params("seeded"), speculation=completed(METHODS[method], store))[0]
    assert out.outputs[0].token_ids == plain("reference", "seeded")


def test_samples_of_one_request() -> None:
    """Several sequences of a request share a drafter and go their own ways."""
    asked = SamplingParams(n=3, max_tokens=NEW, temperature=0.9, seed=5, ignore_eos=True)
    llm = tiny_llm(model("reference"))
    want = [one.token_ids for one in llm.generate([REPETITIVE], asked)[0].outputs]
    assert len({tuple(tokens) for tokens in want}) == 3
    for method in ("ngram", "suffix", "lookahead", "merge"):
        out = llm.generate([REPETITIVE], asked, speculation=METHODS[method] | {"adaptive": False, "k": 7})[0]
        assert [one.token_ids for one in out.outputs] == want and out.speculation.failure is None


def test_accepted_tokens_name_their_drafter() -> None:
    out = drafted(tiny_llm(model("reference", 0.5)), "greedy", METHODS["merge"])
    named = {origin.drafter for origin in out.speculation.provenance if origin.outcome == "accepted"}
    assert named and named <= {"ngram", "suffix", "lookahead"}


def test_a_salted_request_neither_gives_nor_takes() -> None:
    """What one request wrote helps the next, unless their salts differ."""
    llm = tiny_llm(model("reference"))
    wish = {"method": "suffix", "adaptive": False, "k": 7}
    accepted = []
    for salt in ("a", "a", "b"):
        asked = SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.8, seed=3, cache_salt=salt)
        accepted.append(llm.generate([REPETITIVE], asked, speculation=wish)[0].speculation.accepted)
    assert accepted[1] > NEW // 2 > accepted[0] == accepted[2]


def test_a_bad_datastore_fails_its_request_alone(tmp_path: Path) -> None:
    bad = tmp_path / "bad.store"
    bad.write_bytes(b"nothing of the kind")
    llm = tiny_llm(model("reference"))
    good = llm.engine.add(REPETITIVE, params("greedy"))
    with pytest.raises(ValueError, match="not a datastore"):
        llm.engine.add(REPETITIVE, params("greedy"), speculation={"method": "rest", "datastore": str(bad)})
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.engine.take(good).emitters[0].finish_reason == "length"
