"""Shadows: what they compare, whom they never touch, and what becomes of an alarm."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.tiny import VOCAB, tiny_engine
from paceline import LLM, SamplingParams
from paceline.engine.core import Engine
from paceline.engine.records.record import Record
from paceline.models.adapters import Adapter
from paceline.request import Tenant, TokenLogprob
from paceline.sampling.noise import gumbel, token_bits
from paceline.watch.acceptance import WARM_UP
from paceline.watch.alarm import DISTRIBUTION, TEXT
from paceline.watch.shadow import EXACT_KL, Shadow
from paceline.watch.watch import MOST_TRIES, DriftWatch
from paceline.watch.witness import MethodLaws, RequestWitness, divergence
from speculation.bigrams import BigramDrafter, register
from watch import faults
from watch.faults import CHAIN, Q, serve, watched_llm, wish

PROMPT = [(i * 31 + 7) % VOCAB for i in range(30)] * 2
ORACLE = {"method": "ngram", "k": 3, "adaptive": False}


def watched(share: float = 1.0, action: str = "off", **options: Any) -> tuple[Engine, DriftWatch]:
    engine = tiny_engine(**options)
    return engine, DriftWatch(engine, share, action, seed=0)


def finish(engine: Engine, watch: DriftWatch, until: Callable[[], bool] = lambda: False) -> None:
    while (engine.has_work or watch.pending) and not until():
        watch.make_way()
        engine.step()
        watch.attend()


def ask(engine: Engine, max_tokens: int = 24, **more: Any) -> str:
    params = {"temperature": 0.9, "seed": 3, "ignore_eos": True, "max_tokens": max_tokens} | more.pop("params", {})
    return engine.add(PROMPT, SamplingParams(**params), **{"speculation": ORACLE} | more)


@pytest.mark.parametrize("params", [
    {"temperature": 0.0}, {"temperature": 1.1, "top_p": 0.9, "repetition_penalty": 1.2}, {"n": 3}, {"logprobs": 2},
    {"stop_token_ids": tuple(range(0, VOCAB, 9)), "min_tokens": 5}, {"best_of": 2}, {"trace": True, "timeout_s": 60.0},
], ids=["greedy", "controlled", "samples", "scored", "stopped", "best of", "traced"])
def test_the_shadow_of_a_sound_text_is_equal(params: dict[str, Any]) -> None:
    engine, watch = watched()
    name = ask(engine, params=params)
    finish(engine, watch)
    assert watch.outcomes == {"equal": 1} and not watch.alarms
    assert watch.tokens["ngram"] == sum(len(one.token_ids) for one in engine.take(name).emitters)
    engine.cache.check([])


def test_a_text_that_nothing_was_drafted_for_has_no_shadow() -> None:
    engine, watch = watched()
    novel = engine.add([(i * 31 + 7) % VOCAB for i in range(30)],
                       SamplingParams(temperature=0.9, seed=3, ignore_eos=True, max_tokens=3),
                       speculation={"method": "ngram", "k": 3, "adaptive": False, "min_n": 3})
    finish(engine, watch)
    assert engine.take(novel).speculation.cycles == 0
    assert watch.watched == 1 and not watch.outcomes and not watch.spent
    ask(engine)
    finish(engine, watch)
    assert watch.outcomes == {"equal": 1}


def test_a_device_that_drafts_by_itself_is_watched_too() -> None:
    engine, watch = watched(kernels="stepped")
    ask(engine, 40)
    finish(engine, watch)
    assert watch.outcomes == {"equal": 1} and watch.tokens["ngram"] == 40


def test_a_text_that_its_client_left_is_compared_as_far_as_it_came() -> None:
    engine, watch = watched()
    name = ask(engine, 40)
    while engine.record(name).metrics.output_tokens < 10:
        engine.step()
    engine.cancel(name)
    finish(engine, watch)
    assert watch.outcomes == {"equal": 1} and watch.tokens["ngram"] == engine.take(name).metrics.output_tokens


def test_distributions_of_verify_steps_are_those_of_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for rule in ("coupled", "rejection"):
        register(monkeypatch, BigramDrafter(Q, CHAIN))
        llm = watched_llm()
        serve(llm, wish(rule), 2)
        assert llm.watch is not None
        kl = llm.watch.report()["kl"]
        assert kl["positions"] >= 2 and kl["highest"] == 0.0 and not llm.watch.alarms


def test_a_verify_step_that_sees_another_distribution_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text cannot show it under a rule that goes by q: it follows what the step saw."""
    register(monkeypatch, BigramDrafter(Q, CHAIN))
    llm = watched_llm()
    decide = llm.engine.decider.decide

    def bent(step: Any, out: Any) -> Any:
        for group, first in zip(step.groups, out.first):
            if group.draft is not None:
                with torch.inference_mode():
                    out.logits[first:first + len(group.tokens)] *= 1.1
        return decide(step, out)

    monkeypatch.setattr(llm.engine.decider, "decide", bent)
    serve(llm, wish("rejection"), 1)
    assert llm.watch is not None and llm.watch.alarms[0].kind == DISTRIBUTION


def test_an_alarm_switches_the_method_off_and_says_why(monkeypatch: pytest.MonkeyPatch,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    llm = watched_llm("off")
    speculation = faults.taken_unseen(monkeypatch)
    with caplog.at_level(logging.ERROR, "paceline.watch"):
        serve(llm, speculation, 1)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "paceline.watch"]
    assert "method bigram" in line and "seed 0" in line and "paceline replay" in line and "drafts no more" in line
    assert list(llm.engine.suspended) == ["bigram"]
    again = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=1.0, seed=1, ignore_eos=True),
                         speculation=speculation)[0]
    plain = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=1.0, seed=1, ignore_eos=True))[0]
    assert again.speculation.cycles == 0 and "drift watch" in again.speculation.failure
    assert again.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize("kernels", ["reference", "stepped"])
def test_those_that_run_go_on_plainly_when_their_method_is_switched_off(kernels: str) -> None:
    """Also where a device looks drafts up by itself."""
    plain, _ = watched(0.0)
    want = ask(plain, 60, speculation=None)
    finish(plain, DriftWatch(plain, 0.0))
    engine, watch = watched(0.0, kernels=kernels)
    name = ask(engine, 60)
    while engine.record(name).metrics.output_tokens < 12:
        engine.step()
    assert bool(engine.scheduler.sequences(name)[0].lookup) == (kernels == "stepped")
    engine.suspend("ngram", "a test")
    stats = engine.record(name).speculation
    assert stats is not None
    finish(engine, watch, lambda: not engine.scheduler.sequences(name)[0].lookup)
    cycles = stats.cycles
    finish(engine, watch)
    assert stats.failure == "a test" and stats.cycles == cycles and stats.plain > 20
    assert engine.record(name).emitters[0].token_ids == plain.record(want).emitters[0].token_ids


def test_an_alarm_that_is_only_reported_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = watched_llm("report")
    serve(llm, faults.taken_unseen(monkeypatch), 1)
    assert llm.watch is not None and llm.watch.alarms[0].kind == TEXT and not llm.engine.suspended


# -------------------------------------------------------------------------------------------------- nobody notices

class Onlooker:
    """What an observer of the engine is told."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def admitted(self, record: Record) -> None:
        self.seen.append(record.request.id)

    def stepped(self, *_: Any) -> None:
        pass

    def closed(self, record: Record) -> None:
        self.seen.append(record.request.id)


def test_shadows_are_on_nobodys_account() -> None:
    engine, watch = watched()
    onlooker = Onlooker()
    engine.observers.add(onlooker)
    name = ask(engine, tenant=Tenant("anna"))
    finish(engine, watch)
    assert watch.outcomes["equal"] == 1 and watch.spent > 24
    report = engine.report()
    assert (report["requests"], report["output_tokens"], report["prompt_tokens"]) == (1, 24, len(PROMPT))
    assert report["finished"] == {"length": 1} and onlooker.seen == [name, name]
    engine.take(name)
    assert not engine._records


def test_a_shadow_stays_in_the_scope_of_its_original() -> None:
    """Same tenant, same salt, same prompt: nothing of it can be found by anybody else."""
    engine, watch = watched()
    ask(engine, tenant=Tenant("anna"), params={"cache_salt": "pepper"})
    finish(engine, watch, lambda: watch._running is not None)
    (shadow,) = [engine.record(name).request for name in engine._records if name.startswith("shadow-")]
    assert shadow.tenant == Tenant("anna") and shadow.params.cache_salt == "pepper" and shadow.prompt == PROMPT
    assert shadow.speculation is None and shadow.params.priority == -(1 << 31) and shadow.shadow
    finish(engine, watch)


def test_what_a_client_would_notice_is_left_out_of_a_shadow() -> None:
    called: list[int] = []
    engine, watch = watched()
    ask(engine, params={"interrupt": lambda text, tokens: bool(called.append(len(tokens)))})
    finish(engine, watch)
    assert watch.outcomes == {"equal": 1} and called == sorted(called)


def steps_of(engine: Engine, watch: DriftWatch | None, name: str) -> int:
    while engine.record(name).open:
        if watch is not None:
            watch.make_way()
        engine.step()
        if watch is not None:
            watch.attend()
    return engine.record(name).metrics.steps


def test_a_request_takes_as_many_steps_beside_a_shadow_as_alone() -> None:
    alone = tiny_engine()
    want = steps_of(alone, None, ask(alone, 16, speculation=None))
    engine, watch = watched()
    ask(engine, 40)
    finish(engine, watch, lambda: watch._running is not None and bool(
        engine.scheduler.sequences(watch._running.id)[0].output_len))
    name = ask(engine, 16, speculation=None)
    assert steps_of(engine, watch, name) == want
    finish(engine, watch)
    assert watch.outcomes == {"equal": 1}


@pytest.mark.parametrize("seats", [1, 2])
def test_a_shadow_gives_its_seat_up_at_once(seats: int) -> None:
    engine, watch = watched(max_num_seqs=seats)
    ask(engine, 40)
    finish(engine, watch, lambda: watch._running is not None and engine.scheduler.running != [])
    name = ask(engine, 10, speculation=None)
    if seats == 2:
        ask(engine, 10, speculation=None)
    watch.make_way()
    assert watch._running is None and watch.outcomes["interrupted"] == 1
    engine.step()
    assert engine.record(name).metrics.first_scheduled is not None
    finish(engine, watch)
    assert watch.outcomes["equal"] >= 1, "it runs when there is room again"


def test_a_shadow_that_only_queues_takes_no_place_of_others() -> None:
    engine, watch = watched(max_queue=1)
    ask(engine, 10)
    finish(engine, watch, lambda: watch._running is not None)
    ask(engine, 10, speculation=None)  # QueueFullError, if it were still there
    finish(engine, watch)
    assert watch.outcomes["equal"] == 1


def test_a_shadow_that_is_always_in_the_way_is_given_up() -> None:
    engine, watch = watched(max_num_seqs=1)
    ask(engine, 40)
    for _ in range(MOST_TRIES):
        finish(engine, watch, lambda: watch._running is not None and bool(engine.scheduler.running))
        ask(engine, 3, speculation=None)
        watch.make_way()
    finish(engine, watch)
    assert watch.outcomes == {"interrupted": MOST_TRIES} and not watch.pending


@pytest.mark.parametrize("options", [{"max_num_seqs": 4}, {"kv_blocks": 6}], ids=["seats", "blocks"])
def test_a_shadow_for_which_there_will_never_be_room_is_not_waited_for(options: dict[str, int]) -> None:
    """Nor does it keep those behind it from running."""
    engine, watch = watched(block_size=16, **options)
    ask(engine, 12, params={"n": 3})
    finish(engine, watch)
    assert watch.outcomes == {"skipped": 1}
    engine.add(PROMPT[:4] * 3, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True), speculation=ORACLE)
    finish(engine, watch)
    assert watch.outcomes == {"skipped": 1, "equal": 1}


def test_a_shadow_of_several_samples_that_finds_no_blocks_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its further samples have no seats while the prompt is read, and its work is lost all the same."""
    monkeypatch.setattr(DriftWatch, "_fits", lambda *_: True, raising=False)
    engine, watch = watched(kv_blocks=6, block_size=16, max_prefill_chunk=8)
    ask(engine, 8, params={"n": 2})
    passes = iter(range(200))
    finish(engine, watch, lambda: next(passes) == 199)
    assert not watch.pending and watch.outcomes == {"interrupted": MOST_TRIES}


def test_samples_of_a_shadow_do_not_hide_those_who_wait() -> None:
    engine, watch = watched(max_num_seqs=16, max_prefill_chunk=16, enable_prefix_caching=False)
    ask(engine, 8, params={"n": 4})
    finish(engine, watch, lambda: watch._running is not None and bool(engine.scheduler.running))
    ask(engine, 8, speculation=None)
    assert engine.report()["waiting"] == 1
    watch.make_way()
    assert watch._running is None and watch.outcomes == {"interrupted": 1}


def test_a_call_does_not_wait_for_a_shadow_that_waits_for_a_stream() -> None:
    llm = LLM.from_engine(tiny_engine(max_num_seqs=2, watch_share=1.0))
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
    stream = llm.stream(PROMPT, params)
    next(stream)
    llm.generate([PROMPT], SamplingParams(max_tokens=24, seed=1, ignore_eos=True), speculation=ORACLE)
    assert not next(stream).finished and llm.watch is not None and llm.watch.pending
    stream.close()  # type: ignore[attr-defined]


def test_a_client_of_the_lowest_priority_comes_before_a_shadow() -> None:
    engine, watch = watched()
    ask(engine)
    finish(engine, watch, lambda: watch._running is not None)
    name = ask(engine, speculation=None, params={"priority": -(1 << 31)})
    assert next(seq.request.id for seq in engine.scheduler.waiting) == name


def test_a_shadow_is_in_no_count_of_the_cache_or_of_preemptions() -> None:
    engine, watch = watched()
    ask(engine)
    finish(engine, watch, lambda: watch._running is not None)
    before = engine.report()
    assert before["waiting"] == 0 and engine.has_work
    finish(engine, watch, lambda: bool(engine.scheduler.running))
    engine.scheduler.preempt(engine.scheduler.running[0])
    finish(engine, watch)
    after = engine.report()
    names = ("preemptions", "cache_hit_tokens", "cache_looked_up_tokens")
    assert [after[name] for name in names] == [before[name] for name in names] and watch.outcomes == {"equal": 1}


def test_a_shadow_with_an_adapter_that_is_another_by_now_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text would be another's."""
    engine, watch = watched()
    loaded = {"lora": Adapter("lora", "one", 0)}
    monkeypatch.setattr(engine.adapters, "_loaded", loaded)
    name = ask(engine, adapter="lora")
    while engine.record(name).open:
        engine.step()
    loaded["lora"] = Adapter("lora", "two", 0)
    finish(engine, watch)
    assert watch.outcomes == {"skipped": 1}


class Scores(list[Any]):
    """A list that one can ask after."""


def test_what_waits_for_a_shadow_is_not_the_whole_record() -> None:
    engine, watch = watched()
    name = ask(engine, params={"prompt_logprobs": 5})
    while engine.record(name).open:
        engine.step()
    scores = Scores(engine.record(name).prompt_logprobs or ())
    engine.record(name).prompt_logprobs, kept = scores, weakref.ref(scores)
    engine.take(name)
    del scores
    gc.collect()
    assert watch.pending and kept() is None


def test_no_shadow_starts_while_the_engine_is_busy() -> None:
    engine, watch = watched(max_num_seqs=4)
    short = ask(engine, 12)
    others = [ask(engine, 30, speculation=None) for _ in range(3)]
    while engine.record(others[0]).metrics.output_tokens < 20:
        watch.make_way()
        engine.step()
        watch.attend()
        assert watch._running is None
    assert not engine.record(short).open and watch.pending
    finish(engine, watch)
    assert watch.outcomes == {"equal": 1}


def test_nothing_is_watched_unless_asked_for() -> None:
    assert LLM.from_engine(tiny_engine()).watch is None
    assert LLM.from_engine(tiny_engine(watch_share=0.5)).watch is not None


def test_ties_are_no_fault_of_kernels_that_promise_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = watched_llm(deterministic=False)
    serve(llm, faults.taken_unseen(monkeypatch), 2)
    assert llm.watch is not None and llm.watch.alarms and "nats apart" in llm.watch.alarms[0].evidence
    sound = watched_llm(deterministic=False)
    monkeypatch.undo()
    register(monkeypatch, BigramDrafter(Q, CHAIN))
    serve(sound, wish("coupled"), 4)
    assert sound.watch is not None and not sound.watch.alarms


NEAR = TokenLogprob(1, -1.0, -1.0, 1, {1: -1.0, 2: -1.1, 3: -4.0})


@pytest.mark.parametrize(("params", "token", "tie"), [
    ({"temperature": 0.0}, 2, True), ({"temperature": 0.0}, 3, False), ({"temperature": 0.0}, 9, False),
    ({"temperature": 0.01}, 2, True), ({"temperature": 0.0, "logit_bias": {3: 3.0}}, 3, True),
    ({"temperature": 50.0, "top_k": 20}, 9, True),
], ids=["near", "far", "unlisted", "cool", "moved", "noise outweighs what is unlisted"])
def test_what_is_a_tie_where_bits_are_not_promised(params: dict[str, Any], token: int, tie: bool) -> None:
    engine, watch = watched()
    name = ask(engine, 1, params=params)
    finish(engine, watch)
    record = engine.take(name)
    shadow = Shadow(record, RequestWitness(MethodLaws("coupled", random.Random(0)), "coupled"), exact=False)
    # The smallest seed whose noise is for the token.
    seed = next(seed for seed in range(100) if np.diff(gumbel(token_bits(seed, len(PROMPT), [1, token])))[0] > 1.0)
    shadow.texts = [shadow.texts[0]._replace(seed=seed, token_ids=[token])]
    record.emitters[0].token_ids[:] = [1]
    record.emitters[0].logprobs = [NEAR]
    outcome = shadow.judge(record)
    assert outcome.difference is not None and outcome.tie is tie


def test_scores_that_were_rounded_are_not_apart() -> None:
    """All but all of the probability is one token's: what is left is rounding."""
    sharp = TokenLogprob(1, -2e-6, 0.0, 1, {1: -2e-6, 2: -40.0})
    assert divergence(sharp, TokenLogprob(1, 0.0, 0.0, 1, {1: 0.0, 2: -40.0})) < EXACT_KL


def test_a_watch_that_has_failed_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, watch = watched()
    first, second = ask(engine, 8), ask(engine, 16)
    while engine.record(first).open:
        engine.step()
    monkeypatch.setattr(DriftWatch, "_attend", lambda *_: 1 // 0)
    finish(engine, watch)
    assert not engine.record(second).open and not watch._waiting


def test_a_shadow_that_cannot_be_judged_ends_the_watch_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, watch = watched()
    monkeypatch.setattr("paceline.watch.shadow.Shadow.judge", lambda *_: 1 // 0)
    ask(engine)
    finish(engine, watch)
    name = ask(engine)
    finish(engine, watch)
    assert engine.record(name).error is None and engine.record(name).metrics.output_tokens == 24
    assert not watch.pending and watch.watched == 1
    engine.cache.check([])


def test_a_watch_that_breaks_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, BigramDrafter(Q, CHAIN))
    llm = watched_llm()
    monkeypatch.setattr("paceline.watch.witness.MethodLaws.verified", lambda *_: 1 // 0)
    out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12, temperature=1.0, seed=0, ignore_eos=True),
                       speculation=wish("rejection"))[0]
    assert out.error is None and len(out.outputs[0].token_ids) == 12


def test_acceptance_that_changes_is_told_and_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """Traffic that changes does it too: it has a counter of its own, and nothing is switched off."""
    engine, watch = watched(share=0.0)
    told = engine.record(ask(engine, 8))
    while told.open:
        engine.step()
    stats = told.speculation
    assert stats is not None and not watch.changed
    with caplog.at_level(logging.INFO, "paceline"):
        for number in range(2 * WARM_UP):
            stats.by_depth[:] = [8 if number < WARM_UP else 1]
            stats.reached_by_depth[:] = [10]
            watch.closed(told)
            if watch.changed:
                break
    (change,) = watch.changes
    assert (change.direction, change.before, round(change.after, 2)) == ("fell", 0.8, 0.1)
    assert watch.changed == {("fell", "ngram"): 1} and number < WARM_UP + 10
    assert not watch.alarms and not watch.raised and not engine.suspended
    report = watch.report()
    assert report["changed"] == [{"direction": "fell", "method": "ngram", "count": 1}] and report["alarms"] == []
    (line,) = [one for one in caplog.records if "acceptance fell" in one.getMessage()]
    assert line.levelno == logging.INFO and "no alarm" in line.getMessage()
