"""The rules in the engine: what is promised of a text that was drafted under each of them."""

from __future__ import annotations

import functools
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

import pairwise as cuts
from engine.tiny import VOCAB, tiny_llm, tiny_model
from paceline import SamplingParams
from paceline.engine.decide import randomness
from paceline.errors import RequestError
from paceline.speculation.tree import DraftTree
from speculation.bigrams import BigramDrafter, register, tables
from speculation.statistics import chi_square, sigmas

PROMPT = [(i * 31 + 7) % VOCAB for i in range(20)]
EXACT = ("coupled", "rejection", "multi-round", "without-replacement")
SAMPLED = {"rejection": BigramDrafter(tables(VOCAB, 1), (1, 1, 1)),
           "multi-round": BigramDrafter(tables(VOCAB, 1), (2, 2)),
           "without-replacement": BigramDrafter(tables(VOCAB, 1), (3, 1), replace=False)}
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, top_k=20, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def wish(rule: str, **more: Any) -> dict[str, Any]:
    return {"method": "bigram", "verify": rule, "k": 4, "adaptive": False} | more


@functools.cache
def plain(params: SamplingParams) -> list[int]:
    return tiny_llm().generate([PROMPT], params)[0].outputs[0].token_ids


# -------------------------------------------------------------------------------------------------- equality

@cuts.pairwise(rule=EXACT, method=["oracle", "wrong"], branches=[1, 3], params={"seeded": SEEDED, "greedy": GREEDY})
def test_deterministic_drafts_leave_the_text_of_plain_decoding(rule: str, method: str, branches: int,
                                                               params: SamplingParams) -> None:
    draft = {"method": method, "tokens": plain(params), "k": 4, "branches": branches, "verify": rule}
    out = tiny_llm().generate([PROMPT], params, speculation=draft)[0]
    assert out.error is None and out.speculation.failure is None
    assert out.outputs[0].token_ids == plain(params)
    assert out.speculation.cycles > 0 and out.speculation.verify == rule and not out.speculation.lossy


@pytest.mark.parametrize("rule", SAMPLED)
def test_sampled_drafts_leave_a_greedy_text_alone(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, SAMPLED[rule])
    out = tiny_llm().generate([PROMPT], GREEDY, speculation=wish(rule))[0]
    assert out.speculation.failure is None and out.speculation.cycles > 0
    assert out.outputs[0].token_ids == plain(GREEDY)


@pytest.mark.parametrize("rule", SAMPLED)
def test_a_seed_gives_one_text_alone_or_in_company(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, SAMPLED[rule])
    alone = tiny_llm().generate([PROMPT], SEEDED, speculation=wish(rule))[0]
    wishes = [None, wish(rule), wish(rule)]
    company = tiny_llm().generate([PROMPT[::-1], PROMPT, PROMPT[3:]], SEEDED, speculation=wishes)
    assert company[1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert alone.speculation.failure is None


def test_typical_acceptance_is_labelled_and_greedy_under_greedy() -> None:
    script = plain(GREEDY)
    draft = {"method": "oracle", "tokens": script, "k": 4, "branches": 2, "verify": "typical"}
    out = tiny_llm().generate([PROMPT], GREEDY, speculation=draft)[0]
    assert out.outputs[0].token_ids == script and out.speculation.accepted > 0
    assert out.speculation.lossy and out.speculation.as_dict()["lossy"] is True
    assert out.speculation.as_dict()["verify"] == "typical"


def test_typical_acceptance_keeps_likely_drafts_that_were_not_drawn() -> None:
    """Otherwise the label would be there for nothing: a script from another seed is kept as far as it is likely."""
    calm = SamplingParams(max_tokens=12, temperature=0.9, top_k=3, seed=5, ignore_eos=True)
    other = SamplingParams(max_tokens=12, temperature=0.9, top_k=3, seed=6, ignore_eos=True)
    script = plain(other)
    assert script != plain(calm)
    out = tiny_llm().generate([PROMPT], calm, speculation={"method": "oracle", "tokens": script, "k": 4,
                                                           "verify": "typical"})[0]
    assert out.outputs[0].token_ids != plain(calm)


# -------------------------------------------------------------------------------------------------- the noise

@pytest.mark.parametrize("rule", SAMPLED)
def test_no_draw_is_used_twice_and_all_know_their_cycle(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, SAMPLED[rule])
    used: list[tuple[str, int, int, int]] = []
    accept, residual = randomness.accept_uniform, randomness.residual_uniform

    def noted(seed: int, position: int, index: int = 0, *, cycle: int) -> float:
        used.append(("accept", position, index, cycle))
        return accept(seed, position, index, cycle=cycle)

    def noted_residual(seed: int, position: int, index: int = 0, *, cycle: int) -> float:
        used.append(("residual", position, index, cycle))
        return residual(seed, position, index, cycle=cycle)

    monkeypatch.setattr(randomness, "accept_uniform", noted)
    monkeypatch.setattr(randomness, "residual_uniform", noted_residual)
    out = tiny_llm().generate([PROMPT], SEEDED, speculation=wish(rule))[0]
    assert used and len(set(used)) == len(used)
    # A cycle ends with the token that was not accepted, and there the next begins.
    starts = {len(PROMPT) + 1 + i for i, origin in enumerate(out.speculation.provenance)
              if origin.outcome != "accepted"}
    assert {cycle for *_, cycle in used} <= starts
    assert all(position >= cycle for _, position, _, cycle in used)


def test_a_drafter_never_hears_what_the_target_would_have_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the rules for sampled drafts it could bend the text with that; under the coupled one it cannot."""
    for rule, heard in (("rejection", False), ("coupled", True)):
        drafter = BigramDrafter(tables(VOCAB, 1))
        register(monkeypatch, drafter)
        tiny_llm().generate([PROMPT], SEEDED, speculation=wish(rule))
        assert any(seen.chosen for seen in drafter.seen) == heard


# -------------------------------------------------------------------------------------------------- refusals

def test_a_tree_that_rejection_cannot_verify_switches_the_drafter_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """For that request alone: the same drafter goes on for the one whose rule takes trees."""
    register(monkeypatch, SAMPLED["multi-round"])
    wishes = [wish("rejection"), wish("multi-round")]
    off, on = tiny_llm().generate([PROMPT, PROMPT], SEEDED, speculation=wishes)
    assert "multi-round" in off.speculation.failure and off.speculation.cycles == 0
    assert off.outputs[0].token_ids == plain(SEEDED)
    assert on.speculation.failure is None and on.speculation.cycles > 0


def test_a_q_that_is_no_distribution_switches_the_drafter_off(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, BigramDrafter(tables(VOCAB, 1) * 1.1))
    out = tiny_llm().generate([PROMPT], SEEDED, speculation=wish("rejection"))[0]
    assert "sum to 1" in out.speculation.failure
    assert out.outputs[0].token_ids == plain(SEEDED)


# -------------------------------------------------------------------------------------------------- provenance

class Crew(BigramDrafter):
    """Says of each node who proposed it."""

    def tree(self, text: list[int], seed: int, depth: int) -> DraftTree:
        tree = super().tree(text, seed, depth)
        tree.sources = [f"rider {node}" for node in range(len(tree))]
        return tree


def test_every_token_knows_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Crew(tables(VOCAB, 1), (2, 1)))
    params = SamplingParams(max_tokens=60, temperature=1.5, seed=3, ignore_eos=True, trace=True)
    out = tiny_llm().generate([PROMPT], params, speculation=wish("multi-round"))[0]
    provenance = out.speculation.provenance
    assert len(provenance) == 60
    assert {origin.outcome for origin in provenance} >= {"plain", "accepted", "corrected"}
    for origin in provenance:
        assert (origin.drafter in {f"rider {node}" for node in range(4)}) == (origin.outcome == "accepted")
    assert [(token.outcome, token.drafter) for token in out.trace.tokens] == provenance


# -------------------------------------------------------------------------------------------------- a grammar

class Alternating:
    """Even and odd tokens in turn, and never two tokens in a row that differ by less than 3."""

    def __init__(self, broken_after: int = 1000, empty_after: int = 1000) -> None:
        self._text: list[int] = []
        self._broken, self._empty = broken_after, empty_after

    def mask(self, path: Any) -> np.ndarray | None:
        text = [*self._text, *path]
        if len(text) >= self._broken:
            raise ValueError("out of states")
        if not text:
            return None
        ids = np.arange(VOCAB)
        allowed = (ids % 2 != text[-1] % 2) & (abs(ids - text[-1]) >= 3)
        return allowed & (len(text) < self._empty)

    def append(self, tokens: Any) -> None:
        self._text += tokens

    def forced(self) -> list[int]:
        return []


def with_grammar(draft: Any, params: SamplingParams, **limits: int) -> Any:
    llm = tiny_llm()
    name = llm.engine.add(PROMPT, params, speculation=draft)
    llm.engine.scheduler.sequences(name)[0].state.grammar = Alternating(**limits)
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.cache.check([])
    return llm.engine.take(name).snapshot()


@pytest.mark.parametrize("params", [SEEDED, GREEDY], ids=["seeded", "greedy"])
@pytest.mark.parametrize("method", ["oracle", "wrong"])
@pytest.mark.parametrize("branches", [1, 3])
def test_a_grammar_holds_at_every_draft_node(params: SamplingParams, method: str, branches: int) -> None:
    free = with_grammar(None, params).outputs[0].token_ids
    assert all(a % 2 != b % 2 and abs(a - b) >= 3 for a, b in pairwise(free))
    assert free != plain(params)
    out = with_grammar({"method": method, "tokens": free, "k": 4, "branches": branches}, params)
    assert out.outputs[0].token_ids == free
    assert out.speculation.accepted > 8 if method == "oracle" else out.speculation.accepted == 0


@pytest.mark.parametrize("rule", SAMPLED)
def test_masked_drafts_never_pass(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter knows nothing of the grammar and its drafts break it all the time."""
    register(monkeypatch, SAMPLED[rule])
    hot = SamplingParams(max_tokens=60, temperature=3.0, seed=2, ignore_eos=True)
    out = with_grammar(wish(rule), hot)
    text = out.outputs[0].token_ids
    assert len(text) == 60 and all(a % 2 != b % 2 and abs(a - b) >= 3 for a, b in pairwise(text))
    assert out.speculation.accepted > 0


@pytest.mark.parametrize("draft", [None, "oracle", "bigram"])
def test_a_grammar_that_fails_ends_the_text_where_it_fails(draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not earlier: rows further down a draft fail at once, and hurt nobody until the text gets there."""
    register(monkeypatch, SAMPLED["rejection"])
    script = with_grammar(None, SEEDED).outputs[0].token_ids
    asked = {None: None, "bigram": wish("rejection"), "oracle": {"method": "oracle", "tokens": script, "k": 4}}[draft]
    out = with_grammar(asked, SEEDED, broken_after=7)
    assert isinstance(out.error, RequestError) and "out of states" in str(out.error)
    assert len(out.outputs[0].token_ids) == 7 and out.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("draft", [None, "oracle", "bigram"])
def test_a_text_that_can_only_stop_stops_there(draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, SAMPLED["rejection"])
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=5, ignore_eos=True, on_empty_support="stop")
    script = with_grammar(None, params).outputs[0].token_ids
    asked = {None: None, "bigram": wish("rejection"), "oracle": {"method": "oracle", "tokens": script, "k": 4}}[draft]
    out = with_grammar(asked, params, empty_after=7)
    assert out.error is None and out.outputs[0].finish_reason == "stop" and len(out.outputs[0].token_ids) == 7


# -------------------------------------------------------------------------------------------------- the law, end to end

SIZE = 5
START = [1, 4, 2]
PORTION = 400
LEAST = 1e-6


@functools.cache
def small_model() -> Any:
    return tiny_model("llama", vocab_size=SIZE)


@functools.cache
def conditionals() -> dict[tuple[int, ...], np.ndarray]:
    """The target's next-token law after START and up to three tokens, read off plain decoding."""
    contexts = [context for length in range(4) for context in product(range(SIZE), repeat=length)]
    outs = tiny_llm(small_model()).generate([[*START, *context] for context in contexts], SamplingParams(
        max_tokens=1, logprobs=SIZE, seed=0, temperature=1.0))
    laws = [np.exp([out.outputs[0].logprobs[0].top[token] for token in range(SIZE)]) for out in outs]
    return {context: law / law.sum() for context, law in zip(contexts, laws)}


def conditional(context: tuple[int, ...]) -> np.ndarray:
    return conditionals()[context]


def three_gram_law() -> np.ndarray:
    """Of the second, third and fourth token: the first comes with the prompt and was never drafted."""
    law = np.zeros((SIZE,) * 3)
    for first in range(SIZE):
        for a in range(SIZE):
            for b in range(SIZE):
                path = conditional(())[first] * conditional((first,))[a] * conditional((first, a))[b]
                law[a, b] += path * conditional((first, a, b))
    return law


def three_grams(rule: str, count: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """How often each came as second, third and fourth token of `count` texts."""
    shape = {"rejection": (1, 1, 1), "multi-round": (2, 1), "without-replacement": (2, 1)}[rule]
    register(monkeypatch, BigramDrafter(tables(SIZE, 9, 2.0), shape, replace=rule != "without-replacement"))
    llm = tiny_llm(small_model(), max_num_seqs=128, max_batch_tokens=2048, deterministic=False)
    counts = np.zeros((SIZE,) * 3)
    accepted = 0
    for begin in range(0, count, PORTION):
        params = [SamplingParams(max_tokens=5, temperature=1.0, seed=seed, ignore_eos=True)
                  for seed in range(begin, begin + PORTION)]
        for out in llm.generate([START] * PORTION, params, speculation=wish(rule, k=3)):
            assert out.speculation.failure is None
            counts[tuple(out.outputs[0].token_ids[1:4])] += 1
            accepted += out.speculation.accepted
    assert accepted > count / 4
    return counts


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.full)])
def test_the_joint_law_of_three_tokens(rule: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chi_square(three_grams(rule, count, monkeypatch), three_gram_law()) > LEAST


def test_the_joint_law_would_show_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every possible draft accepted: the text then follows the drafter."""
    monkeypatch.setattr(randomness, "accept_uniform", lambda *place, **cycle: 0.0)
    assert chi_square(three_grams("rejection", 400, monkeypatch), three_gram_law()) < LEAST


def test_acceptance_is_what_the_overlap_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft of every text, over all seeds: alpha is the overlap of p and q after the token before it."""
    q = tables(SIZE, 9, 2.0)
    register(monkeypatch, BigramDrafter(q, (1,)))
    llm = tiny_llm(small_model(), max_num_seqs=128, max_batch_tokens=2048, deterministic=False)
    params = [SamplingParams(max_tokens=3, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(400)]
    outs = llm.generate([START] * 400, params, speculation=wish("rejection", k=1))
    hits = sum(out.speculation.provenance[1].outcome == "accepted" for out in outs)
    alpha = sum(conditional(())[first] * np.minimum(conditional((first,)), q[first]).sum() for first in range(SIZE))
    assert sigmas(hits, 400, float(alpha)) < 5.0
