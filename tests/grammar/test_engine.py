"""Structured requests beside everything else an engine does: company, preemption, samples, stops, bounds, traces."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import pytest
from small_tokenizers import sentencepiece_like

from engine.tiny import tiny_llm, tiny_model
from grammar.structured import BEGIN, END, PROMPT, TOOL, structured_llm, token, tokenizer
from paceline import SamplingParams
from paceline.bench.schemas import SCHEMAS
from paceline.engine.replay import replay_on
from paceline.engine.rows.sample_rows import masked_by_host
from paceline.engine.schedule.sequence import Placement
from paceline.errors import EmptySupportError, GrammarError, RequestError
from paceline.models.tokenizer import Tokenizer
from paceline.sampling.trace import Trace
from pairwise import each

PERSON = {"json_schema": SCHEMAS["person"], "max_tokens": 600}


def person(text: str) -> Any:
    value = json.loads(text)
    jsonschema.validate(value, SCHEMAS["person"])
    return value


def tokens_of(outs: list[Any]) -> list[list[int]]:
    return [one.token_ids for out in outs for one in out.outputs]


MIXED = [SamplingParams(seed=1, **PERSON), SamplingParams(seed=2, max_tokens=30, ignore_eos=True),
         SamplingParams(seed=3, regex="[a-z]{20,30}", max_tokens=200), SamplingParams(seed=4, max_tokens=30),
         SamplingParams(seed=5, json_schema=SCHEMAS["contact_list"], max_tokens=40),
         SamplingParams(seed=6, choice=["yes", "no"], temperature=0.0)]
PROMPTS = [f"{PROMPT} {'again ' * n}" for n in range(len(MIXED))]


@functools.cache
def alone() -> list[list[int]]:
    """Each of them by itself."""
    llm = structured_llm(enable_prefix_caching=False)
    return tokens_of([llm.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, MIXED)])


@each(options={"plain": {}, "chunks": {"max_prefill_chunk": 3}, "ahead": {"schedule_ahead": True},
               "preempted": {"kv_blocks": 20, "max_model_len": 152, "watermark": 0.0}},
      speculation={"plain": None, "drafted": {"method": "auto", "adaptive": False}})
def test_company_and_circumstances_change_nothing(options: dict[str, Any], speculation: Any) -> None:
    llm = structured_llm(**options)
    outs = llm.generate(PROMPTS, MIXED, speculation=speculation)
    assert all(out.error is None for out in outs)
    assert tokens_of(outs) == alone()
    if "kv_blocks" in options:
        assert llm.engine.scheduler.preemptions > 0
    llm.engine.cache.check([])
    person(outs[0].outputs[0].text)
    assert re.fullmatch("[a-z]{20,30}", outs[2].outputs[0].text)


METHODS = {
    "ngram": {"method": "ngram"}, "suffix": {"method": "suffix", "tree": True}, "lookahead": {"method": "lookahead"},
    "merge": {"method": "merge", "drafters": ["ngram", "suffix"]}, "auto": {"method": "auto", "adaptive": True},
    "exit": {"method": "exit"}, "exit tree": {"method": "exit", "branches": [2, 2]}, "skip": {"method": "skip"}}


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_drafter(method: str) -> None:
    outs = structured_llm().generate(PROMPTS, MIXED, speculation={"adaptive": False} | METHODS[method])
    assert all(out.error is None and out.speculation.failure is None for out in outs)
    assert tokens_of(outs) == alone()
    assert any(origin.drafter == "grammar" for origin in outs[0].speculation.provenance)


@pytest.mark.parametrize("verify", ["rejection", "multi-round", "without-replacement", "typical"])
def test_sampled_drafts_keep_to_the_structure(verify: str) -> None:
    wish = {"method": "exit", "verify": verify, "adaptive": False, "k": 4}
    if verify in ("multi-round", "without-replacement"):
        wish["branches"] = 2
    outs = structured_llm().generate([PROMPT] * 3, [SamplingParams(seed=seed, **PERSON) for seed in range(3)],
                                     speculation=wish)
    for out in outs:
        assert out.error is None and out.outputs[0].finish_reason == "stop" and out.speculation.failure is None
        person(out.outputs[0].text)


@pytest.mark.parametrize("speculation", [None, {"method": "auto", "adaptive": False}], ids=["plain", "drafted"])
def test_samples_are_the_ones_they_are_alone(speculation: Any) -> None:
    out = structured_llm().generate([PROMPT], SamplingParams(n=4, seed=7, **PERSON), speculation=speculation)[0]
    texts = {one.text for one in out.outputs}
    assert len(texts) == 4
    for text in texts:
        person(text)
    single = structured_llm().generate([PROMPT], SamplingParams(seed=7, **PERSON))[0]
    assert out.outputs[0].token_ids == single.outputs[0].token_ids


def test_greedy_too() -> None:
    params = SamplingParams(temperature=0.0, json_schema=SCHEMAS["address"], max_tokens=400)
    plain = structured_llm().generate([PROMPT], params)[0]
    drafted = structured_llm().generate([PROMPT], params, speculation="auto")[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    jsonschema.validate(json.loads(plain.outputs[0].text), SCHEMAS["address"])


# ------------------------------------------------------------------------------------------------ where a text ends

def test_the_text_ends_with_the_structure() -> None:
    """Without a token for the end: there is nothing to decide."""
    out = structured_llm().generate([PROMPT], SamplingParams(choice=["abc"], seed=1))[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("abc", "stop", None)
    assert token(END) not in out.token_ids


def test_where_a_structure_may_go_on_the_model_ends_it() -> None:
    outs = structured_llm().generate([PROMPT] * 20, [SamplingParams(regex="a*", seed=seed, max_tokens=2000)
                                                     for seed in range(20)])
    assert {out.outputs[0].finish_reason for out in outs} == {"stop"}
    assert all(out.outputs[0].token_ids[-1] == token(END) for out in outs)
    assert all(re.fullmatch("a*", out.outputs[0].text) for out in outs)


def test_with_ignore_eos_only_the_structure_ends_it() -> None:
    params = [SamplingParams(regex="a+", seed=1, max_tokens=40, ignore_eos=True),
              SamplingParams(regex="a{60}", seed=1, max_tokens=80, ignore_eos=True)]
    endless, closed = structured_llm().generate([PROMPT] * 2, params)
    assert endless.outputs[0].finish_reason == "length" and token(END) not in endless.outputs[0].token_ids
    assert closed.outputs[0].finish_reason == "stop" and closed.outputs[0].text == "a" * 60


def test_a_special_stop_token_is_an_end_like_others() -> None:
    params = SamplingParams(regex="b*", seed=1, max_tokens=500, stop_token_ids=[token(TOOL)], ignore_eos=True)
    out = structured_llm().generate([PROMPT], params)[0].outputs[0]
    assert out.finish_reason == "stop" and out.stop_reason == token(TOOL)
    assert not {token(BEGIN), token(END)}.intersection(out.token_ids)


def test_min_tokens_keeps_the_end_away() -> None:
    outs = structured_llm().generate([PROMPT] * 8, [SamplingParams(
        regex="a*", seed=seed, min_tokens=30, max_tokens=2000) for seed in range(8)])
    assert all(len(out.outputs[0].token_ids) >= 30 and out.outputs[0].finish_reason == "stop" for out in outs)


def test_stop_strings_cut_a_structured_text() -> None:
    schema = {"type": "string", "pattern": "^ab{5}cd{5}$"}
    out = structured_llm().generate([PROMPT], SamplingParams(json_schema=schema, stop=["c"], seed=1, max_tokens=60))[0]
    assert out.outputs[0].text.strip() == '"abbbbb' and out.outputs[0].stop_reason == "c"


def test_too_few_tokens_end_with_length() -> None:
    out = structured_llm().generate([PROMPT], SamplingParams(regex="a{50}", max_tokens=3, seed=1))[0].outputs[0]
    assert out.finish_reason == "length" and set(out.text) == {"a"}


# ------------------------------------------------------------------------------------------------ other controls

def test_bias_and_allowed_ids_act_inside_the_structure() -> None:
    heavy = {token("b"): 50.0, token("z"): 100.0}
    out = structured_llm().generate([PROMPT], SamplingParams(regex="(a|b){9}", logit_bias=heavy, seed=1,
                                                             allowed_token_ids=[token("a"), token("b"), token("z")]))[0]
    assert out.outputs[0].text == "b" * 9


@pytest.mark.parametrize("speculation", [None, {"method": "auto", "adaptive": False}], ids=["plain", "drafted"])
@pytest.mark.parametrize(("policy", "finish", "text"), [
    ("error", "error", "aa"), ("stop", "stop", "aa"), ("unmasked", "length", None)])
def test_empty_support_follows_the_declared_policy(policy: str, finish: str, text: str | None,
                                                   speculation: Any) -> None:
    """The structure wants a c, which the allowed ids lack."""
    params = SamplingParams(regex="[ax][ax][cy]", allowed_token_ids=[token("a"), token("b")], max_tokens=12, seed=2,
                            on_empty_support=policy, ignore_eos=True)
    llm = structured_llm()
    out, other = llm.generate([PROMPT] * 2, [params, SamplingParams(seed=2, **PERSON)], speculation=speculation)
    assert out.outputs[0].finish_reason == finish
    assert text is None or out.outputs[0].text == text
    if policy == "error":
        assert isinstance(out.error, EmptySupportError) and "regex" in str(out.error)
    else:
        assert out.error is None
    if policy == "unmasked":
        assert out.outputs[0].text.startswith("aa") and len(out.outputs[0].token_ids) == 12
        plain = structured_llm().generate([PROMPT], params)[0]
        assert out.outputs[0].token_ids == plain.outputs[0].token_ids
    person(other.outputs[0].text)
    llm.engine.cache.check([])


def test_a_closed_structure_before_min_tokens_is_empty_support() -> None:
    out = structured_llm().generate([PROMPT, PROMPT], [SamplingParams(choice=["abc"], min_tokens=30, max_tokens=40),
                                                       SamplingParams(max_tokens=2)])[0]
    assert isinstance(out.error, EmptySupportError) and out.outputs[0].text == "abc"
    stopped = structured_llm().generate([PROMPT], SamplingParams(choice=["abc"], min_tokens=30, max_tokens=40,
                                                                 on_empty_support="stop"))[0]
    assert stopped.error is None and stopped.outputs[0].finish_reason == "stop"


def test_logprobs_and_traces_name_the_grammar_and_replay() -> None:
    llm = structured_llm()
    out = llm.generate([PROMPT], SamplingParams(seed=5, logprobs=2, trace=True, **PERSON),
                       speculation={"method": "auto", "adaptive": False})[0]
    assert out.outputs[0].logprobs is not None and len(out.outputs[0].logprobs) == len(out.outputs[0].token_ids)
    assert all("grammar" in one.processors for one in out.trace.tokens)
    assert any(one.drafter == "grammar" and one.support == 1 for one in out.trace.tokens)
    again = replay_on(structured_llm().engine, Trace.from_json(out.trace.to_json()))
    assert again.equal


def test_a_structured_sequence_never_runs_freely_on_a_device() -> None:
    """Before its grammar is there, too: a device may draw its tokens, each behind the host's word, and may not go on
    without it."""
    llm = structured_llm()
    names = [llm.engine.add(PROMPT, params) for params in (SamplingParams(choice=["a"]), SamplingParams())]
    sequences = [llm.engine.scheduler.sequences(name)[0] for name in names]
    assert [masked_by_host(seq) for seq in sequences] == [True, False]
    assert [seq.placement for seq in sequences] == [Placement.AHEAD, Placement.FREE]
    for name in names:
        llm.engine.cancel(name)


def test_where_a_space_begins_a_word_texts_have_it_and_match() -> None:
    """Of tokenizers in the manner of SentencePiece, too: they take the space off a text's first word, and the text of a
    request goes on from its prompt."""
    pieces = Tokenizer(sentencepiece_like()[0])
    llm = tiny_llm(tiny_model(vocab_size=pieces.vocab_size), pieces)
    outs = llm.generate(["The quick brown"] * 3 + [[1]], [
        SamplingParams(regex=" (yes|no)"), SamplingParams(choice=[" fox jumps"]),
        SamplingParams(choice=[" fox jumps"], stop=[" fox"]), SamplingParams(regex=" (yes|no)")])
    texts = [out.outputs[0].text for out in outs]
    assert texts[0] in (" yes", " no") and texts[1] == " fox jumps" and texts[3] in (" yes", " no")
    assert texts[2] == "" and outs[2].outputs[0].stop_reason == " fox"


def test_models_without_a_tokenizer_refuse() -> None:
    with pytest.raises(GrammarError, match="tokenizer") as caught:
        tiny_llm(tiny_model()).generate([[1, 2]], SamplingParams(regex="a"))
    assert caught.value.param == "regex" and isinstance(caught.value, RequestError)


def test_the_tokenizer_is_what_these_tests_take_it_for() -> None:
    assert tokenizer().special_ids == {token(END), token(BEGIN), token(TOOL)}
    assert len(tokenizer().encode('"name"', add_special=False)) < 4
