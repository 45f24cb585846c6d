"""Greedy chains of a head in one go: the drafts of asking token by token, and the text of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.engine.drafting.heads import HeadModel
from paceline.kernels import cpu
from paceline.models.heads.slots import SlotChain

FAMILY = Path(__file__).parents[1] / "family"
TEXTS = ["The king said to her that", "It was a dark", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", "She looked at the door and"]
pytestmark = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(FAMILY / "target"), device="cpu", kernels="native", kv_blocks=200, block_size=8,
               heads=[str(FAMILY / "dspark")])


def drafted(llm: LLM, params: Any, wish: Any) -> tuple[list[Any], list[Any]]:
    outs = llm.generate(TEXTS, params, speculation=wish)
    assert all(out.speculation is None or out.speculation.failure is None for out in outs)
    told = [[out.speculation.drafted, *((token.drafter, token.outcome) for token in out.speculation.provenance)]
            for out in outs if out.speculation is not None]
    return [out.outputs[0].token_ids for out in outs], told


@pytest.mark.parametrize("options", [{}, {"min_confidence": 0.5}], ids=str)
def test_in_one_go_or_token_by_token(llm: LLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    wish = {"method": "dspark", "k": 4, "adaptive": False, **options}
    plain, _ = drafted(llm, params, None)
    calls: list[int] = []
    chain = SlotChain.chain

    def counted(self: SlotChain, *given: Any) -> Any:
        calls.append(len(given[2]))
        return chain(self, *given)

    monkeypatch.setattr(SlotChain, "chain", counted)
    texts, at_once = drafted(llm, params, wish)
    assert texts == plain and max(calls) == len(TEXTS)
    del calls[:]
    monkeypatch.setattr(HeadModel, "chains", lambda *_: None)
    texts, by_token = drafted(llm, params, wish)
    assert texts == plain and not calls and at_once == by_token


def test_greedy_and_sampled_lines_share_a_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(max_tokens=16, temperature=0.8 * (number % 2), seed=number, ignore_eos=True)
              for number in range(len(TEXTS))]
    plain, _ = drafted(llm, params, None)
    temperatures: list[set[float]] = []
    chain = SlotChain.chain

    def watched(self: SlotChain, *given: Any) -> Any:
        temperatures.append({draw.temperature for draw in given[3]})
        return chain(self, *given)

    monkeypatch.setattr(SlotChain, "chain", watched)
    texts, told = drafted(llm, params, {"method": "dspark", "k": 4, "adaptive": False})
    assert texts == plain and all(told)
    assert {0.0, 0.8} in temperatures
