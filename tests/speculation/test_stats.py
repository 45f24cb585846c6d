"""What speculation did: counts as Spec-Bench counts, where the time went, and what it won against plain decoding."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tiny import VOCAB, tiny_llm
from paceline import LLM, SamplingParams
from paceline.speculation.stats import Round, SpeculationStats

PROMPT = [(i * 31 + 7) % VOCAB for i in range(40)]
GREEDY = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)


@pytest.fixture
def llm() -> LLM:
    return tiny_llm()


def script(llm: LLM) -> list[int]:
    tokens: list[int] = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    return tokens


def test_accepted_length_counts_the_bonus_and_a_plain_step_counts_one() -> None:
    stats = SpeculationStats("x")
    assert stats.mean_accepted_length == stats.tokens_per_step == 1.0 and stats.net_speed is None
    stats.record(depth=4, path=4, drafted=4, emitted=5)
    stats.record(depth=4, path=0, drafted=4, emitted=1)
    stats.plain += 4
    assert stats.mean_accepted_length == 3.0
    assert stats.tokens_per_step == 10 / 6
    assert stats.as_dict()["acceptance_by_position"] == [0.5] * 4


def test_conditional_acceptance_counts_the_drafts_that_got_there() -> None:
    stats = SpeculationStats("x")
    stats.record(depth=3, path=3, drafted=3, emitted=4)
    stats.record(depth=3, path=1, drafted=3, emitted=2)
    stats.record(depth=1, path=1, drafted=1, emitted=2)  # right as far as it went: it says nothing of depth 2
    stats.record(depth=3, path=0, drafted=3, emitted=1)
    assert stats.conditional_acceptance == [3 / 4, 1 / 2, 1.0]
    assert stats.acceptance_by_position == [3 / 4, 1 / 3, 1 / 3]
    never = SpeculationStats("x")
    never.record(depth=2, path=0, drafted=2, emitted=1)
    assert never.conditional_acceptance == [0.0], "nothing is known of a depth that was never reached"


def test_net_speed_is_what_plain_decoding_would_have_taken_over_what_was_spent() -> None:
    stats = SpeculationStats("x")
    stats.spend(draft=0.1, verify=0.5, sample=0.1, whole=0.8, plain=1.2)
    stats.spend(draft=0.1, verify=0.5, sample=0.1, whole=0.8, plain=0.4)
    assert stats.net_speed == pytest.approx(1.0)
    figures = stats.as_dict()
    assert (figures["draft_s"], figures["verify_s"], figures["sample_s"]) == pytest.approx((0.2, 1.0, 0.2))


def test_requests_add_up_as_if_they_had_been_one() -> None:
    cycles = [(2, 1, 2, 2), (4, 4, 4, 5), (3, 0, 7, 1)]
    whole, first, second = (SpeculationStats("x", plain=plain) for plain in (5, 3, 2))
    for stats, some in ((whole, cycles), (first, cycles[:1]), (second, cycles[1:])):
        for cycle in some:
            stats.record(*cycle)
            stats.spend(0.25, 0.5, 0.125, 1.0, 2.0)
    first.add(second)
    assert first.as_dict() == whole.as_dict()
    assert second.by_depth == [1, 1, 1, 1], "what was added is not changed"


def test_an_oracle_counts_every_token_but_the_first(llm: LLM) -> None:
    wish = {"method": "oracle", "tokens": script(llm), "k": 4}
    out = llm.generate([PROMPT], GREEDY, speculation=wish)[0]
    stats = out.speculation
    assert stats.emitted + stats.plain == 20, "the first token comes with the prompt"
    assert stats.cycles == 4 and stats.accepted == 16 and stats.mean_accepted_length == 5.0
    assert stats.tokens_per_step == 5.0
    assert stats.as_dict()["acceptance_by_position"] == [1.0] * 4


def test_steps_without_a_draft_are_counted_as_plain(llm: LLM) -> None:
    half = script(llm)[:10]
    stats = llm.generate([PROMPT], GREEDY, speculation={"method": "oracle", "tokens": half, "k": 4})[0].speculation
    assert stats.emitted + stats.plain == 20 and stats.plain >= 10
    assert stats.tokens_per_step < stats.mean_accepted_length
    assert len(stats.provenance) == 21
    assert sum(token.outcome == "plain" for token in stats.provenance) == stats.plain + 1


def test_time_is_split_and_adds_up(llm: LLM) -> None:
    wish = {"method": "oracle", "tokens": script(llm), "k": 4}
    stats = llm.generate([PROMPT], GREEDY, speculation=wish)[0].speculation
    assert stats.draft_s > 0 and stats.verify_s > 0 and stats.sample_s > 0
    assert stats.draft_s + stats.verify_s + stats.sample_s <= stats.spent_s
    assert stats.net_speed is not None and stats.net_speed > 0
    total = llm.metrics()
    assert total["draft_s"] > 0 and total["schedule_s"] >= 0
    json.dumps(stats.as_dict())


def test_time_of_a_shared_step_is_shared(llm: LLM) -> None:
    tokens = script(llm)
    wishes = [{"method": "oracle", "tokens": tokens, "k": 4}, {"method": "wrong", "tokens": tokens, "k": 4}, None]
    before = llm.engine.metrics.decode_s
    outs = llm.generate([PROMPT] * 3, GREEDY, speculation=wishes)
    spent = llm.engine.metrics.decode_s - before
    assert outs[2].speculation is None
    assert 0 < sum(out.speculation.spent_s for out in outs[:2]) < spent


def test_the_engine_adds_up_all_requests_by_method(llm: LLM) -> None:
    tokens = script(llm)
    outs = llm.generate([PROMPT] * 3, GREEDY, speculation=[
        {"method": "oracle", "tokens": tokens, "k": 4}, {"method": "oracle", "tokens": tokens, "k": 2},
        {"method": "wrong", "tokens": tokens, "k": 3}])
    report = llm.metrics()
    oracle, wrong = report["speculation"]["oracle"], report["speculation"]["wrong"]
    for name in ("cycles", "drafted", "accepted", "plain"):
        assert oracle[name] == sum(getattr(out.speculation, name) for out in outs[:2])
    assert wrong["accepted"] == 0 and wrong["mean_accepted_length"] == 1.0
    assert report["drafted"] == oracle["drafted"] + wrong["drafted"]
    assert report["accepted"] == oracle["accepted"]
    json.dumps(report)


def test_step_cost_is_learned_from_steps_that_decode(llm: LLM) -> None:
    curve = llm.engine.cost.table
    llm.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0.0))
    assert not curve.measured
    llm.generate([PROMPT], GREEDY)
    assert curve.measured and set(curve._points) == {1}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8), st.data())
def test_rounds_of_a_device_count_like_cycles(made: list[tuple[int, int]], data: st.DataObject) -> None:
    """Of the last one there may be a part: the text ended inside its draft, which has no token of its own then."""
    rounds = [Round(drafted, min(drafted, accepted), 1) for drafted, accepted in made]
    tokens = sum(one.accepted + 1 for one in rounds)
    if rounds and rounds[-1].accepted and data.draw(st.booleans()):
        tokens -= 1
    one_by_one, together = SpeculationStats("ngram"), SpeculationStats("ngram")
    left = tokens
    for drafted, accepted, _ in rounds:
        emitted = min(accepted + 1, left)
        left -= emitted
        if drafted:
            one_by_one.record(drafted, accepted, drafted, emitted)
        else:
            one_by_one.plain += emitted
    together.record_rounds(rounds, tokens)
    assert together == one_by_one
