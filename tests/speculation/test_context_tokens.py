"""Heads of the whole vocabulary in packed engines: they draft from the draft vocabulary and from the tokens of the
request's own text, and from nobody else's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.tiny import VOCAB, tiny_llm
from paceline import SamplingParams
from paceline.engine.drafting import context_tokens
from paceline.engine.drafting.context_tokens import ContextTokens
from paceline.engine.drafting.heads import HeadModel
from paceline.kernels import cpu
from paceline.llm import LLM
from paceline.models.heads.build import build_head, widened
from speculation.model_drafting import Watch, target
from speculation.trained_heads import MOST_TOKENS, head_config, random_head, random_tensors

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built")
OUTSIDE = [token for token in range(VOCAB) if token % 3 == 1 or token > 90]
KNOWN = [token for token in range(VOCAB) if token not in OUTSIDE]
PROMPTS = [[*KNOWN[5:30], *OUTSIDE[:14], *KNOWN[9:16]], [*OUTSIDE[10:34], *KNOWN[:9]], KNOWN[:20]]


def whole_head(kind: str, every: bool = False) -> Any:
    """One that has learned over all tokens (of `random_head`); every: it drafts from all of them."""
    model = target("native")
    config = replace(head_config(kind, model), whole_vocabulary=True)
    tensors = random_tensors(config)
    assert (tensors["d2t"] + torch.arange(config.draft_vocab_size)).tolist() == KNOWN
    if every:
        config, tensors = widened(config, tensors, "here")  # type: ignore[assignment]
    return build_head(config, tensors, model, MOST_TOKENS)


def engine(head: Any, **options: Any) -> LLM:
    return tiny_llm(target("native"), trained={"it": head}, **({"kv_blocks": 200, "block_size": 4} | options))


def kept(llm: LLM) -> int:
    model: Any = next(iter(llm.engine.draft_models._head_models.values()))
    return len(model._context)


def restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head that drafts from all tokens: draft vocabulary and the text's own alone."""
    sampled = HeadModel._sampled

    def masked(self: Any, logits: torch.Tensor, confidence: Any, further: Any, rows: list[int], places: Any) -> Any:
        logits = logits[torch.tensor(rows)]
        for own, place in zip(logits, places):
            own[sorted(set(OUTSIDE) - set(place.seq.tokens))] = -torch.inf
        confidence = None if confidence is None else confidence[torch.tensor(rows)]
        return sampled(self, logits, confidence, None, list(range(len(rows))), places)

    monkeypatch.setattr(HeadModel, "_sampled", masked)
    monkeypatch.setattr(HeadModel, "chains", lambda *_: None)


def drafts(llm: LLM, wish: dict[str, Any], params: Any, prompts: Any = PROMPTS) -> tuple[list[Any], list[Any]]:
    """What was proposed after which texts, and the texts."""
    watch = Watch(llm, wish)
    outs = llm.generate(prompts, params, speculation=wish)
    assert all(out.speculation is not None and out.speculation.failure is None for out in outs)
    proposals = [(tokens, tree.tokens, tree.parents) for tokens, tree in watch.proposals if tree is not None]
    return sorted(proposals), [[one.token_ids for one in out.outputs] for out in outs]


WISHES = {
    "dspark": {"method": "dspark", "k": 4},
    "dspark tree": {"method": "dspark", "tree": True, "top_k": 3, "k": 3, "nodes": 9},
    "dflash branches": {"method": "dflash", "branches": 2, "k": 3},
    "eagle3": {"method": "eagle3", "k": 3},
    "eagle3 tree": {"method": "eagle3", "tree": True, "top_k": 3, "k": 3, "nodes": 9},
    "mtp": {"method": "mtp", "k": 3},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_drafts_are_those_of_all_tokens_less_what_is_in_neither(wish: dict[str, Any], temperature: float,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    wish = wish | {"adaptive": False}
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=3)
    plain = [[out.outputs[0].token_ids] for out in tiny_llm(target("native")).generate(PROMPTS, params)]
    llm = engine(whole_head(wish["method"]))
    found, texts = drafts(llm, wish, params)
    assert texts == plain and kept(llm) == 0
    restricted(monkeypatch)
    expected, texts = drafts(engine(whole_head(wish["method"], every=True)), wish, params)
    assert texts == plain and found == expected
    assert any(set(tokens) & set(OUTSIDE) for _, tokens, _ in found)
    assert all(set(tokens) & set(OUTSIDE) <= set(before) for before, tokens, _ in found)


@pytest.mark.parametrize("verify", ["rejection", "without-replacement"])
def test_rules_that_read_what_was_sampled_from(verify: str) -> None:
    wish = {"method": "dspark", "k": 4, "verify": verify, "adaptive": False}
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=3)
    found, _ = drafts(engine(whole_head("dspark")), wish, params)
    assert any(set(tokens) & set(OUTSIDE) for _, tokens, _ in found)
    assert all(set(tokens) & set(OUTSIDE) <= set(before) for before, tokens, _ in found)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_preempted_and_shared_and_several_at_once(kind: str) -> None:
    """Prompts that begin alike, three samples each, too many for the cache: nothing goes from one to another."""
    prompts = [PROMPTS[0][:24] + [token] * 3 + PROMPTS[0][24:] for token in OUTSIDE[-4:]]
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=5, n=3)
    wish = {"method": kind, "k": 3, "adaptive": False}
    plain = [[one.token_ids for one in out.outputs] for out in tiny_llm(target("native")).generate(prompts, params)]
    llm = engine(whole_head(kind), kv_blocks=40)
    for _ in range(2):
        found, texts = drafts(llm, wish, params, prompts)
        assert texts == plain and kept(llm) == 0
        assert any(set(tokens) & set(OUTSIDE) for _, tokens, _ in found)
        assert all(set(tokens) & set(OUTSIDE) <= set(before) for before, tokens, _ in found)
    assert llm.engine.metrics.preemptions > 0


def test_a_head_of_the_draft_vocabulary_keeps_to_it() -> None:
    wish = {"method": "dspark", "k": 4, "adaptive": False}
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    found, _ = drafts(engine(random_head("dspark", target("native"))), wish, params)
    assert found and not any(set(tokens) & set(OUTSIDE) for _, tokens, _ in found)


class Text:
    """What is read of a sequence."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)


def test_a_text_is_looked_at_once() -> None:
    context = ContextTokens(whole_head("dspark"))
    one, other = Text(KNOWN), Text(KNOWN[:3])
    seqs: Any = [one, other]
    assert context.of(seqs) is None, "nothing to add: rounds are opened as if there were no such thing"
    one.tokens += [OUTSIDE[4], KNOWN[1], OUTSIDE[2], OUTSIDE[4]]
    further = context.of(seqs)
    assert further is not None and further.ids.tolist() == [[OUTSIDE[2], OUTSIDE[4]], [0, 0]]
    one.tokens[:] = [OUTSIDE[9]] * len(one.tokens)  # which nobody does
    other.tokens.append(OUTSIDE[7])
    one.tokens += [OUTSIDE[2], OUTSIDE[5]]
    further = context.of(seqs)
    assert further is not None
    assert further.ids.tolist() == [[OUTSIDE[2], OUTSIDE[4], OUTSIDE[5]], [OUTSIDE[7], 0, 0]]
    assert len(context) == 2
    for seq in seqs:
        context.release(seq)
    assert len(context) == 0


def test_of_many_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_tokens, "MOST", 4)
    seq: Any = Text([OUTSIDE[place] for place in (0, 1, 2, 3, 4, 5, 1, 4)])
    further = ContextTokens(whole_head("dspark")).of([seq])
    assert further is not None and further.ids.tolist() == [[OUTSIDE[place] for place in (3, 5, 1, 4)]]
