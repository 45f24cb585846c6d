"""Every kind of network: it computes what was published, and learns in all its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
import torch

from paceline.llm import LLM
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.tensors import check
from paceline.training.loss import Judge, Weights, compare
from paceline.training.networks.build import build_network
from paceline.training.networks.parts import TapProjection
from paceline.training.networks.slots import SlotHead, draw_anchors
from paceline.training.shards import Text
from paceline.training.target import Batch, Target

TAPS = (1, 2, 4)
DEPTH = 4
CHANGES: dict[str, dict[str, Any]] = {
    "dspark": {"num_layers": 2, "block_size": DEPTH, "mask_token_id": 3, "markov_rank": 5, "confidence_head": True},
    "eagle3": {}, "mtp": {}, "medusa": {"heads": DEPTH}, "hydra": {"heads": DEPTH, "num_layers": 2}}


@pytest.fixture(scope="module")
def llm(target_folder: Path) -> LLM:
    return LLM(str(target_folder), device="cpu", kernels="eager", max_model_len=96)


@pytest.fixture(scope="module", params=CHANGES)
def network(llm: LLM, request: pytest.FixtureRequest) -> SlotHead:
    taps = TAPS if request.param in ("dspark", "eagle3") else TAPS[-1:]
    target = Target(llm, taps, 256, compiles=False)
    shape = target.config
    config = HeadConfig(kind=request.param, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size,
                        draft_vocab_size=90, taps=taps, num_heads=4, num_kv_heads=2, head_dim=12, intermediate_size=64,
                        norm_eps=1e-5, speculative_tokens=DEPTH, **CHANGES[request.param])
    torch.manual_seed(0)
    found = build_network(config, Judge(target, torch.arange(0, 180, 2), Weights(0.1, 0.9), compiles=False))
    for one in found.parameters():
        torch.nn.init.normal_(one, std=0.3)
    found.calibrate(torch.randn(50, len(taps) * shape.hidden_size) * torch.arange(1, len(taps) * shape.hidden_size + 1))
    return found


def some_batch(target: Target) -> Batch:
    drawn = np.random.default_rng(0)
    return target.batch([Text(place, drawn.integers(0, 180, length).astype(np.int32), 7)
                         for place, length in enumerate((30, 21))])


def logits_of(network: SlotHead, batch: Batch, states: Any, anchor: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of the first text, told its tokens."""
    hidden = network.hidden(batch, states, torch.full((2, 1), anchor))[0, 0]
    markov, up = network.markov(batch.tokens[0, anchor:anchor + DEPTH])
    guess = network.confidence(hidden, markov)
    return network._judge.logits(hidden, markov, up), guess if guess is None else guess.sigmoid()


def test_drafts_are_as_published(network: SlotHead) -> None:
    target, config = network._judge.target, network.config
    batch = some_batch(target)
    states = target.states(batch)
    ids, width = network._judge.ids, config.hidden_size
    tensors = network.exported() | {"d2t": ids - torch.arange(len(ids))}
    check(config, tensors, "what was exported")
    embedding = target.embed(torch.arange(target.config.vocab_size)).double()
    tokens = batch.tokens[0].tolist()
    for anchor in (2, 8, 19):
        tapped = {tap: states.taps[0, :anchor, place * width:(place + 1) * width]
                  for place, tap in enumerate(config.taps)}
        known = published.Text(embedding, target.head.double(), target.final_norm.double(), 1e-5, tokens[:anchor + 1],
                               tapped)
        wanted, confidence = published.Published(config, tensors, known).draft(tokens[anchor + 1:anchor + DEPTH])
        logits, guess = logits_of(network, batch, states, anchor)
        torch.testing.assert_close(logits.double(), wanted, rtol=2e-3, atol=2e-3)
        assert (guess is None) == (confidence is None)
        if guess is not None:
            torch.testing.assert_close(guess.double(), confidence, rtol=1e-3, atol=1e-4)


def test_nothing_behind_the_anchor_is_seen_but_the_tokens_before_a_slot(network: SlotHead) -> None:
    target = network._judge.target
    batch = some_batch(target)
    before, _ = logits_of(network, batch, target.states(batch), 9)
    for slot in range(DEPTH):
        tokens = batch.tokens.clone()
        tokens[0, 9 + slot + 1:] = 5  # behind what this slot is told
        changed = Batch(tokens, batch.lengths, batch.prompts, batch.answer_tokens)
        after, _ = logits_of(network, changed, target.states(changed), 9)
        torch.testing.assert_close(after[:slot + 1], before[:slot + 1])


def test_gradients_reach_every_parameter(network: SlotHead) -> None:
    target = network._judge.target
    batch = some_batch(target)
    told = network.learn(batch, target.states(batch), torch.Generator().manual_seed(0), 6)
    assert told["accepted"].shape == (DEPTH,) and told["accepted"].min() >= 0.0 and told["accepted"].max() <= 1.0
    for name, one in network.named_parameters():
        assert one.grad is not None and one.grad.abs().sum() > 0, name
    network.zero_grad()


def test_only_what_is_in_the_text_goes_into_the_loss(network: SlotHead, monkeypatch: pytest.MonkeyPatch) -> None:
    target = network._judge.target
    batch = some_batch(target)
    seen: list[tuple[int, torch.Tensor]] = []
    loss = Judge.loss

    def heard(self: Judge, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = loss(self, *given)
        seen.append((len(given[0]), out[1]))
        return out

    monkeypatch.setattr(Judge, "loss", heard)
    told = network.learn(batch, target.states(batch), torch.Generator().manual_seed(0), 64)  # every place of answers
    network.zero_grad()
    (rows, accepted), = seen
    slots = [sum(max(0, answer - 1 - slot) for answer in (23, 14)) for slot in range(DEPTH)]
    assert rows == sum(slots)
    assert (told["accepted"] * torch.tensor(slots)).sum().item() == pytest.approx(accepted.sum().item(), rel=1e-5)


def test_nothing_is_likely_outside_answers(network: SlotHead) -> None:
    batch = some_batch(network._judge.target)
    states = network._judge.target.states(batch)
    places = torch.arange(batch.tokens.shape[1]).expand(2, 1, -1)
    _, normaliser = network._teacher(batch, states, places, torch.arange(places.numel()))
    outside = ~batch.answers.flatten()
    assert outside.any() and normaliser[outside].eq(torch.inf).all() and normaliser[~outside].isfinite().all()
    _, accepted, slope = compare(torch.zeros(1, 5), torch.ones(1, 5), normaliser[outside][:1], torch.ones(1), 0.1, 0.9,
                                 torch.float32)
    assert accepted.item() == 0.0 and slope.isfinite().all()


def test_features_are_scaled_by_powers_of_two() -> None:
    fc = TapProjection(6, 2)
    rows = torch.randn(100, 6) * torch.tensor([0.003, 0.3, 1.0, 7.0, 130.0, 25000.0])
    fc.calibrate(rows)
    assert torch.equal(fc.scale.frexp().mantissa, torch.full((6,), 0.5))
    size = (rows * fc.scale).square().mean(0).sqrt()
    assert size.min() > 0.70 and size.max() < 1.42
    narrow = rows.bfloat16()
    assert torch.equal((narrow * fc.scale.bfloat16()).float(), narrow.float() * fc.scale)


def test_runs_are_what_a_round_would_draft(network: SlotHead) -> None:
    """Token by token, fed with the head's own drafts, on texts that hold some of them."""
    target = network._judge.target
    batch = some_batch(target)
    ids = network._judge.ids
    tokens = batch.tokens.clone()
    for anchor in range(8, 20):  # where a draft of two tokens would be right
        logits, _ = logits_of(network, batch := Batch(tokens, batch.lengths, batch.prompts, batch.answer_tokens),
                              target.states(batch), anchor)
        tokens[0, anchor + 1] = ids[logits[0].argmax()]
    states = target.states(batch)
    runs = network.runs(batch, states, at_once=5)
    assert runs[0].max() > 0
    for anchor in range(1, 29):
        own, right = tokens[0].clone(), 0
        for slot in range(DEPTH):
            fed = torch.stack([own, tokens[1]])
            logits, _ = logits_of(network, Batch(fed, batch.lengths, batch.prompts, 0), states, anchor)
            place = anchor + 1 + slot
            if place >= 30 or ids[logits[slot].argmax()] != tokens[0, place]:
                break
            own[place], right = ids[logits[slot].argmax()], right + 1
        assert runs[0, anchor] == right


def test_what_is_exported_is_taken_again(network: SlotHead) -> None:
    before = network.exported()
    kept = {name: one.detach().clone() for name, one in network.named_parameters()}
    with torch.no_grad():
        for one in network.parameters():
            one.zero_()
    network.take(before)
    for name, one in network.named_parameters():
        torch.testing.assert_close(one.detach(), kept[name])


def test_anchors_are_of_answers_and_differ(llm: LLM) -> None:
    batch = some_batch(Target(llm, (1,), 256, compiles=False))
    anchors, there = draw_anchors(batch, 16, torch.Generator().manual_seed(1))
    assert there.sum(1).tolist() == [16, 13]  # the second answer has 14 tokens, the last of which nothing follows
    for row, own, length in zip(anchors, there, batch.lengths):
        found = row[own].tolist()
        assert len(set(found)) == len(found) and min(found) >= 7 and max(found) < length - 1


def test_padding_ends_where_the_target_does(target_folder: Path) -> None:
    short = Target(LLM(str(target_folder), device="cpu", kernels="eager", max_model_len=40), (1,), 64, compiles=False)
    batch = short.batch([Text(0, np.arange(39, dtype=np.int32), 5)])
    assert short.padded(39) == 40 and short.padded(1) == 32
    assert batch.tokens.shape == (1, 40) and short.states(batch).final.isfinite().all()
