"""DSpark's network: what a block sees, and that it drafts as was published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import published
import pytest
import torch

from paceline.llm import LLM
from paceline.models.heads.config import HeadConfig
from paceline.training.loss import Judge, Weights
from paceline.training.networks.build import build_network
from paceline.training.networks.dspark import DSpark, attend, draw_anchors
from paceline.training.shards import Text
from paceline.training.target import Batch, Target


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    llm = LLM(str(target_folder), device="cpu", kernels="eager", max_model_len=96)
    return Target(llm, (1, 2, 4), 256, compiles=False)


@pytest.fixture(scope="module")
def network(target: Target) -> DSpark:
    shape = target.config
    config = HeadConfig(kind="dspark", hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, draft_vocab_size=90,
                        taps=(1, 2, 4), num_layers=2, num_heads=4, num_kv_heads=2, head_dim=12, intermediate_size=64,
                        norm_eps=1e-5, block_size=4, mask_token_id=3, markov_rank=5, confidence_head=True)
    torch.manual_seed(0)
    found = build_network(config, Judge(target, torch.arange(0, 180, 2), Weights(0.1, 0.9), compiles=False))
    assert isinstance(found, DSpark)
    for one in found.parameters():
        torch.nn.init.normal_(one, std=0.3)
    found.calibrate(torch.randn(50, 3 * shape.hidden_size) * torch.arange(1, 3 * shape.hidden_size + 1))
    return found


def some_batch(target: Target) -> Batch:
    drawn = np.random.default_rng(0)
    return target.batch([Text(place, drawn.integers(0, 180, length).astype(np.int32), 7)
                         for place, length in enumerate((30, 21))])


def test_attention_is_one_softmax_over_context_and_block() -> None:
    torch.manual_seed(0)
    size, count, block, heads, groups, dim, length = 2, 3, 4, 4, 2, 6, 11
    q = torch.randn(size, count, block, heads, dim)
    keys, values = torch.randn(2, size, length, groups, dim)
    own_keys, own_values = torch.randn(2, size, count, block, groups, dim)
    anchors = torch.tensor([[0, 4, 10], [3, 3, 7]])
    out = attend(q, keys, values, own_keys, own_values, anchors).view(size, count, block, heads, dim)
    for b in range(size):
        for a in range(count):
            before = int(anchors[b, a])
            k = torch.cat([keys[b, :before], own_keys[b, a]]).repeat_interleave(heads // groups, 1)
            v = torch.cat([values[b, :before], own_values[b, a]]).repeat_interleave(heads // groups, 1)
            weights = (torch.einsum("khd,thd->hkt", q[b, a], k) * dim ** -0.5).softmax(-1)
            torch.testing.assert_close(out[b, a], torch.einsum("hkt,thd->khd", weights, v))


def test_a_block_sees_nothing_from_its_anchor_on(target: Target, network: DSpark) -> None:
    batch = some_batch(target)
    anchors = torch.tensor([[9, 14], [8, 12]])
    hidden = network.hidden(batch, target.states(batch), anchors)
    tokens = batch.tokens.clone()
    tokens[0, 15:] = 5  # behind both anchors
    changed = Batch(tokens, batch.lengths, batch.prompts, batch.answer_tokens)
    torch.testing.assert_close(network.hidden(changed, target.states(changed), anchors), hidden)
    tokens[0, 10:] = 6  # behind the first, before the second
    changed = Batch(tokens, batch.lengths, batch.prompts, batch.answer_tokens)
    after = network.hidden(changed, target.states(changed), anchors)
    torch.testing.assert_close(after[0, 0], hidden[0, 0])
    assert not torch.allclose(after[0, 1], hidden[0, 1])


def test_anchors_are_of_answers_and_differ(target: Target) -> None:
    batch = some_batch(target)
    anchors, there = draw_anchors(batch, 16, torch.Generator().manual_seed(1))
    assert there.sum(1).tolist() == [16, 13]  # the second answer has 14 tokens, the last of which nothing follows
    for row, own, length in zip(anchors, there, batch.lengths):
        found = row[own].tolist()
        assert len(set(found)) == len(found) and min(found) >= 7 and max(found) < length - 1


def test_gradients_reach_every_parameter(target: Target, network: DSpark) -> None:
    batch = some_batch(target)
    told = network.learn(batch, target.states(batch), torch.Generator().manual_seed(0), 6)
    assert told["accepted"].shape == (4,) and told["accepted"].min() >= 0.0 and told["accepted"].max() <= 1.0
    for name, one in network.named_parameters():
        assert one.grad is not None and one.grad.abs().sum() > 0, name
    network.zero_grad()


def test_logits_and_confidence_are_as_published(target: Target, network: DSpark) -> None:
    batch = some_batch(target)
    states = target.states(batch)
    ids, width = network._judge.ids, target.config.hidden_size
    tensors = network.exported() | {"d2t": ids - torch.arange(len(ids))}
    embedding = target.embed(torch.arange(target.config.vocab_size)).double()
    assert network.markov_head is not None
    for anchor in (1, 8, 19):
        tokens = batch.tokens[0].tolist()
        tapped = {tap: states.taps[0, :anchor, place * width:(place + 1) * width]
                  for place, tap in enumerate((1, 2, 4))}
        known = published.Text(embedding, target.head.double(), target.final_norm.double(), 1e-5, tokens[:anchor + 1],
                               tapped)
        wanted, confidence = published.Published(network.config, tensors, known).draft(tokens[anchor + 1:anchor + 4])
        hidden = network.hidden(batch, states, torch.full((2, 1), anchor))[0, 0]
        markov = network.markov_head.markov_w1(batch.tokens[0, anchor:anchor + 4])
        logits = network._judge.logits(hidden, markov, network.markov_head.markov_w2.weight)
        torch.testing.assert_close(logits.double(), wanted, rtol=1e-3, atol=1e-3)
        assert confidence is not None
        torch.testing.assert_close(network.confidence(hidden, markov).sigmoid().double(), confidence, rtol=1e-3,
                                   atol=1e-4)


def test_runs_are_what_a_round_would_draft(target: Target, network: DSpark) -> None:
    """Token by token, from the head's own drafts."""
    batch = some_batch(target)
    states = target.states(batch)
    runs = network.runs(batch, states, at_once=5)
    ids = network._judge.ids
    assert network.markov_head is not None
    with torch.no_grad():
        for text in range(2):
            for anchor in range(int(batch.lengths[text]) - 1):
                anchors = torch.full((2, 1), anchor)
                hidden = network.hidden(batch, states, anchors)[text, 0]
                token, right = batch.tokens[text, anchor], 0
                for slot in range(4):
                    logits = hidden[slot] @ network._judge.rows.T + network.markov_head.markov_w2(
                        network.markov_head.markov_w1(token))
                    token = ids[logits.argmax()]
                    place = anchor + 1 + slot
                    if place >= batch.lengths[text] or token != batch.tokens[text, place]:
                        break
                    right += 1
                assert runs[text, anchor] == right


def test_padding_ends_where_the_target_does(target_folder: Path) -> None:
    llm = LLM(str(target_folder), device="cpu", kernels="eager", max_model_len=40)
    short = Target(llm, (1,), 64, compiles=False)
    batch = short.batch([Text(0, np.arange(39, dtype=np.int32), 5)])
    assert batch.tokens.shape == (1, 40) and short.states(batch).final.isfinite().all()
