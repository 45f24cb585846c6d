"""The default model itself: right answers, transformers' logits, and the promise on real weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.bench.peers import TransformersPeer
from paceline.engine.replay import replay
from paceline.measure.agreement import judge
from paceline.measure.perplexity import Scorer

pytestmark = pytest.mark.real_model
WINDOW = 200
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
OPENING = """
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a
wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood,
this truth is so well fixed in the minds of the surrounding families, that he is considered the rightful
property of some one or other of their daughters. "My dear Mr. Bennet," said his lady to him one day, "have you
heard that Netherfield Park is let at last?" Mr. Bennet replied that he had not. "But it is," returned she; "for
Mrs. Long has just been here, and she told me all about it." Mr. Bennet made no answer. "Do you not want to know
who has taken it?" cried his wife impatiently. "You want to tell me, and I have no objection to hearing it."
This was invitation enough. "Why, my dear, you must know, Mrs. Long says that Netherfield is taken by a young
man of large fortune from the north of England; that he came down on Monday in a chaise and four to see the
place, and was so much delighted with it, that he agreed with Mr. Morris immediately; that he is to take
possession before Michaelmas, and some of his servants are to be in the house by the end of next week." "What is
his name?" "Bingley." "Is he married or single?" "Oh! Single, my dear, to be sure! A single man of large
fortune; four or five thousand a year. What a fine thing for our girls!"
""".replace("\n", " ").strip()
"""Of Pride and Prejudice, which is in the public domain."""
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> LLM:
    """As a user gets it: native kernels where they were built."""
    return LLM(str(default_model_path), max_model_len=1024)


@pytest.fixture(scope="module")
def floats(default_model_path: Path) -> LLM:
    """The file's weights in floats."""
    return LLM(str(default_model_path), max_model_len=256, kernels="eager")


@pytest.fixture(scope="module", params=["auto", "reference"])
def exact(request: pytest.FixtureRequest, default_model_path: Path) -> LLM:
    return LLM(str(default_model_path), max_model_len=512, deterministic=True, kernels=request.param)


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    out = llm.chat(QUESTION, GREEDY)[0]
    assert "Paris" in out.outputs[0].text
    assert out.outputs[0].finish_reason == "stop"


def test_greedy_tokens_in_floats_equal_transformers(floats: LLM, default_model_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for name in ("normal_", "uniform_"):  # a hundred million random numbers, for weights that the file has
            patch.setattr(torch.Tensor, name, lambda tensor, *_, **__: tensor)
        peer = TransformersPeer(str(default_model_path))
    texts = ("The quick brown fox", "def fibonacci(n):\n", "In 1984, 2 + 2 =")
    prompts = [floats.engine.tokenizer.encode(text)[:4] for text in texts]  # type: ignore[union-attr]
    ours = floats.generate(prompts, replace(GREEDY, max_tokens=6, ignore_eos=True))
    assert [out.outputs[0].token_ids for out in ours] == peer.generate(prompts, 6)


def test_speculation_crowds_chunks_and_warm_caches_change_nothing(exact: LLM) -> None:
    params = SamplingParams(max_tokens=7, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
    short = replace(params, max_tokens=2)
    prompt = "Once upon a time, in a village by the sea, there lived"
    alone = exact.generate([prompt], params)[0].outputs[0].token_ids
    crowd = ["Hello", prompt, "1, 2, 3, 4,"]
    wish = [None, {"method": "oracle", "tokens": alone, "k": 5, "branches": 2}, None]
    torch.set_num_threads(2)
    try:
        out = exact.generate(crowd, [short, params, short], speculation=wish)[1]
    finally:
        torch.set_num_threads(1)
    assert out.outputs[0].token_ids == alone
    assert out.speculation.accepted > 4


@pytest.mark.parametrize("exact", ["auto", pytest.param("reference", marks=pytest.mark.full)], indirect=True)
def test_a_trace_of_it_replays(exact: LLM, default_model_path: Path, tmp_path: Path) -> None:
    out = exact.generate(["My favourite colour is"], SamplingParams(max_tokens=3, seed=5, trace=True))[0]
    path = tmp_path / "trace.json"
    path.write_text(out.trace.to_json())
    assert json.loads(path.read_text())["setup"]["kernels"] == exact.engine.kernels.name
    report = replay(path, model=str(default_model_path))
    assert report.equal and report.same_model


def test_native_kernels_stay_close_to_the_files_weights_in_floats(llm: LLM, floats: LLM) -> None:
    if llm.engine.kernels.name != "native":
        pytest.skip("the native kernels are not built here (no C++ compiler)")
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    means = [sum(s.raw for s in model.generate([OPENING[:371]], score)[0].prompt_logprobs[1:])
             for model in (llm, floats)]
    assert abs(means[0] - means[1]) / 80 < 0.03


def test_by_default_it_says_what_the_files_weights_say_in_floats(llm: LLM, floats: LLM) -> None:
    """Perplexity hides errors of both signs; agreement does not. Measured here: .0015 and 98.2 % of the positions;
    with the file's 4-bit blocks as they are and an int8 cache .0028."""
    if llm.engine.kernels.name != "native":
        pytest.skip("the native kernels are not built here (no C++ compiler)")
    tokens = llm.engine.tokenizer.encode(OPENING, add_special=False)  # type: ignore[union-attr]
    reference, found = (Scorer(one.engine.model, one.engine.kernels, WINDOW, one.engine.runner.storage.dtype)
                        for one in (floats, llm))
    judged = judge(found, tokens, WINDOW, judge(reference, tokens, WINDOW).best)
    assert len(tokens) > 300
    assert judged.kl < 0.0025, judged.kl
    assert judged.top1 > 0.96, judged.top1
