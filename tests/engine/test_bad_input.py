"""A user's mistake is a typed error with a sentence, and in a batch it is that request's alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import write_model

from engine.tiny import VOCAB, tiny_llm, tiny_model
from paceline import LLM, PacelineError, SamplingParams
from paceline.bench.null_model import byte_tokenizer
from paceline.config import EngineOptions
from paceline.engine.build import ModelFiles, engine_for
from paceline.errors import ConfigError, ModelFormatError, ModelNotFoundError, NotYetError, RequestError


@pytest.mark.parametrize(("wish", "param"), [
    ({"top_p": 0.0}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"n": 0}, "n"), ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"), ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"), ({"stop": ["ok", ""]}, "stop"), ({"stop": ""}, "stop"),
    ({"top_k": -1}, "top_k"), ({"min_p": 1.1}, "min_p"), ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"seed": -1}, "seed"), ({"seed": 1 << 64}, "seed"), ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"logit_bias": {"a": 1.0}}, "logit_bias"),
    ({"logit_bias": {3: float("nan")}}, "logit_bias"), ({"timeout_s": 0}, "timeout_s"), ({"logprobs": -1}, "logprobs"),
    ({"n": 1.5}, "n"), ({"n": True}, "n"), ({"bad_words": [""]}, "bad_words"),
    ({"on_empty_support": "cry"}, "on_empty_support"), ({"stop": 5}, "stop"), ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"logit_bias": [1]}, "logit_bias"), ({"temperature": 10**400}, "temperature"),
    ({"logit_bias": {3: 10**400}}, "logit_bias"), ({"cache_salt": ["me"]}, "cache_salt"),
    ({"timeout_s": "5"}, "timeout_s"),
])
def test_impossible_parameters_name_the_parameter(wish: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wish)
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize("wish", [{"interrupt": "policy"}])
def test_what_comes_later_is_refused_by_name(wish: dict[str, Any]) -> None:
    with pytest.raises(NotYetError):
        SamplingParams(**wish)


@pytest.mark.parametrize(("prompt", "words"), [
    ([], "empty"), ([VOCAB], "out of range"), ([-1], "out of range"), ([1.5], "out of range"),
    (list(range(50)) * 20, "489 too many"), ("text", "without a tokenizer"), (b"text", "not bytes"),
    (7.5, "a list of"),
])
def test_bad_prompts(prompt: Any, words: str) -> None:
    llm = tiny_llm()
    with pytest.raises(RequestError, match=words):
        llm.generate([prompt], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, b"text"])
def test_what_is_no_list_of_prompts(prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        tiny_llm().generate(prompts)


def test_no_prompts_no_outputs() -> None:
    assert tiny_llm().generate([]) == []


@pytest.mark.parametrize("wish", [{"logprobs": 1 << 70}, {"prompt_logprobs": 1 << 70}])
def test_more_alternatives_than_tokens_are_all_tokens(wish: dict[str, int]) -> None:
    outs = tiny_llm().generate([[1, 2, 3], [4, 5]], [SamplingParams(max_tokens=2, **wish), SamplingParams()])
    assert [out.error for out in outs] == [None, None]
    scores = outs[0].outputs[0].logprobs or outs[0].prompt_logprobs
    assert scores is not None and scores[1] is not None and len(scores[1].top) == VOCAB


def test_empty_text() -> None:
    llm = tiny_llm(tiny_model(vocab_size=256), byte_tokenizer())
    with pytest.raises(RequestError, match="empty"):
        llm.generate([""])


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_parameter_ids_out_of_range(name: str) -> None:
    value = {VOCAB: 1.0} if name == "logit_bias" else [VOCAB]
    with pytest.raises(RequestError, match=name):
        tiny_llm().generate([[1]], SamplingParams(**{name: value}))


def test_in_a_batch_one_bad_request_fails_alone() -> None:
    llm = tiny_llm()
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    outs = llm.generate([[1, 2], [VOCAB + 3], [5], []], greedy)
    assert [out.error is None for out in outs] == [True, False, True, False]
    assert outs[1].outputs[0].finish_reason == "error"
    assert isinstance(outs[1].error, RequestError)
    assert outs[0].outputs[0].token_ids == llm.generate([[1, 2]], greedy)[0].outputs[0].token_ids
    llm.engine.cache.check([])


def test_params_list_of_the_wrong_length() -> None:
    with pytest.raises(RequestError, match="one for each"):
        tiny_llm().generate([[1], [2]], [SamplingParams()])


@pytest.mark.parametrize(("options", "error"), [
    ({"blok_size": 3}, ConfigError), ({"block_size": 0}, ConfigError), ({"kv_blocks": 0}, ConfigError),
    ({"max_batch_tokens": 0}, ConfigError), ({"dtype": "int3"}, ConfigError), ({"device": "abacus"}, ConfigError),
    ({"device": None}, ConfigError), ({"capture": "sometimes"}, ConfigError),
    ({"quantization": "int4"}, NotYetError), ({"kv_dtype": "int4"}, NotYetError), ({"watermark": 1.0}, ConfigError),
    ({"watermark": "low"}, ConfigError), ({"max_queue": "long"}, ConfigError), ({"max_queue": 0}, ConfigError),
    ({"speculation": "teleport"}, RequestError), ({"speculation": "retrieval-kv"}, NotYetError),
])
def test_impossible_options(tmp_path: Path, options: dict[str, Any], error: type[PacelineError]) -> None:
    with pytest.raises(error):
        LLM(str(tmp_path), **options)


def test_an_unknown_option_suggests_the_known_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        LLM(str(tmp_path), blocksize=4)


def test_a_cache_too_small_for_the_asked_length() -> None:
    with pytest.raises(ConfigError, match="raise kv_blocks"):
        tiny_llm(kv_blocks=4, max_model_len=200)


def test_an_int8_cache_is_refused_where_torch_runs_the_model() -> None:
    with pytest.raises(ConfigError, match="native"):
        tiny_llm(kv_dtype="int8")


def test_unknown_models(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        LLM("no-such-model")
    with pytest.raises(ModelNotFoundError):
        LLM(str(tmp_path / "missing.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00")
    with pytest.raises(ModelFormatError):
        LLM(str(tmp_path / "broken.gguf"))


def test_an_unknown_method_is_answered_with_those_there_are() -> None:
    with pytest.raises(RequestError, match=r"auto.*ngram.*suffix"):
        tiny_llm().generate([[1]], SamplingParams(max_tokens=2), speculation="teleport")
    with pytest.raises(RequestError, match="'suffix'"):
        tiny_llm().generate([[1]], SamplingParams(max_tokens=2), speculation="sufix")


@pytest.mark.parametrize(("wish", "error"), [
    ("eagle3", RequestError), ("retrieval-kv", NotYetError), ("teleport", RequestError),
    (5, RequestError),
    ({"k": 3}, RequestError), ({"method": "oracle", "tokens": [1], "k": 0}, RequestError),
    ({"method": "oracle", "tokens": [1], "k": 10**9}, RequestError), ({"method": "oracle"}, RequestError),
    ({"method": "oracle", "tokens": [VOCAB]}, RequestError),
    ({"method": "oracle", "tokens": [1], "x": 1}, RequestError),
    ({"method": "oracle", "tokens": [1], "verify": "block"}, NotYetError),
    ({"method": "oracle", "tokens": [1], "verify": "guess"}, RequestError),
    ({"method": "wrong", "tokens": [1], "branches": 0}, RequestError),
])
def test_bad_speculation(wish: Any, error: type[PacelineError]) -> None:
    with pytest.raises(error):
        tiny_llm().generate([[1]], SamplingParams(max_tokens=2), speculation=wish)


@pytest.mark.parametrize("end", [-1, VOCAB, 10 ** 9])
def test_an_end_of_text_that_no_token_can_be_is_refused(end: int) -> None:
    with pytest.raises(ModelFormatError, match=f"eos_token_id {end} is out of range"):
        engine_for(tiny_model(), None, EngineOptions.of(kv_blocks=40, deterministic=True), device=torch.device("cpu"),
                   eos_ids=frozenset({3, end}))


def test_a_draft_model_says_where_its_cache_is_not_what_was_asked_for(tmp_path: Path,
                                                                      caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path)
    options = EngineOptions.of(model=str(folder), kv_dtype="int8", kernels="auto")
    with caplog.at_level(logging.WARNING, "paceline"):
        loaded = ModelFiles(options, folder, torch.device("cpu"), torch.float32).load(str(folder), 64)
    assert loaded.kv_dtype != torch.int8
    assert [record.getMessage() for record in caplog.records if "kv_dtype='int8' is not there" in record.getMessage()]
