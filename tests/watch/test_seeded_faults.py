"""Every fault that METHODS names is caught, within the number of tokens that docs/drift.md states."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.speculation.verify import without_replacement
from paceline.watch.alarm import ACCEPTED, DRAFTED, EMITTED, TEXT
from speculation.bigrams import BigramDrafter, register
from watch import faults
from watch.faults import CHAIN, Leaning, Q, prompts, serve, set_rule, tokens_until_alarm, watched_llm, wish

DOCS = Path(__file__).parents[2] / "docs" / "drift.md"
Seed = Callable[[Any], dict[str, Any]]

CAUGHT: dict[str, tuple[Seed, set[str], int]] = {
    "1": (faults.resample_from_p, {EMITTED}, 1000),
    "2": (faults.longest_row_then_again, {EMITTED}, 2000),
    "3": (faults.argmax_as_sample, {DRAFTED}, 200),
    "4": (faults.argmax_at_the_root, {EMITTED, ACCEPTED}, 200),
    "5": (faults.first_q, {EMITTED}, 1200),
    "6": (faults.drawn_from_less, {DRAFTED}, 400),
    "6, reversed": (faults.drawn_from_more, {DRAFTED}, 400),
    "7": (faults.looked_at_and_left_out, {DRAFTED}, 600),
    "8": (faults.shared_uniforms, {EMITTED}, 3000),
    "9": (faults.the_same_noise_again, {DRAFTED, ACCEPTED}, 500),
    "10": (faults.u_may_be_zero, {EMITTED, ACCEPTED}, 200),
}
"""Number of the fault: how it is made, which law shows it first, and the tokens of text within which it does."""


@pytest.mark.parametrize("number", CAUGHT)
def test_a_seeded_fault_is_caught(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, kinds, most = CAUGHT[number]
    speculation = seed(monkeypatch)
    llm = watched_llm(deterministic=False)
    found = tokens_until_alarm(llm, speculation, most, **{"top_k": 4} if number == "10" else {})
    assert found is not None and found <= most
    assert llm.watch is not None and llm.watch.alarms[0].kind in kinds


def test_a_draft_that_its_own_q_rules_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sixth fault reversed, where the truncation leaves nothing of what it cuts: no statistics are needed."""
    speculation = faults.drawn_from_more(monkeypatch, least=0.0, shape=(1,))
    llm = watched_llm(deterministic=False)
    params = [SamplingParams(max_tokens=40, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(16)]
    outs = llm.generate(prompts(16), params, speculation=speculation)
    assert all(out.error is None and len(out.outputs[0].token_ids) == 40 for out in outs)
    failures = [out.speculation.failure for out in outs if out.speculation.failure is not None]
    assert len(failures) >= 12 and all("from a q that gives it no probability" in why for why in failures)
    assert llm.watch is not None and llm.watch.watched == 16 and not llm.watch.alarms


def test_the_docs_state_the_same_numbers() -> None:
    rows = re.findall(r"^\| (\d+(?:, reversed)?) \|.*\| ([\d,]+) \|$", DOCS.read_text(), re.MULTILINE)
    assert {number: int(most.replace(",", "")) for number, most in rows} == {
        number: most for number, (_, _, most) in CAUGHT.items()}


def test_a_text_that_is_not_the_plain_one_is_caught_by_its_first_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = watched_llm()
    serve(llm, faults.taken_unseen(monkeypatch), 1)
    assert llm.watch is not None
    (alarm,) = llm.watch.alarms
    assert alarm.kind == TEXT and alarm.tokens <= 40 and "is not the one of plain decoding" in alarm.evidence


def leaning() -> Leaning:
    drafter = Leaning(Q)
    drafter.fresh = True
    return drafter


CLEAN = {"rejection": lambda: BigramDrafter(Q, CHAIN), "multi-round": lambda: BigramDrafter(Q, (2, 1)),
         "without-replacement": lambda: BigramDrafter(Q, (2, 1), replace=False)}


@pytest.mark.parametrize("rule", ["rejection", *(pytest.param(rule, marks=pytest.mark.full) for rule in CLEAN
                                                 if rule != "rejection")])
def test_the_same_without_a_fault_is_silent(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, CLEAN[rule]())
    assert tokens_until_alarm(watched_llm(deterministic=False), wish(rule), 600) is None


def test_a_drafter_that_leans_on_what_it_drafted_is_sound_with_fresh_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, leaning())
    assert tokens_until_alarm(watched_llm(deterministic=False), wish("rejection"), 600) is None


@pytest.mark.full
def test_the_reduced_q_is_sound_where_the_first_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = faults.first_q(monkeypatch)
    set_rule(monkeypatch, "without-replacement", without_replacement)
    assert tokens_until_alarm(watched_llm(deterministic=False), speculation, 600) is None
