"""Tokens beside the draft vocabulary: their logits are those of the head that drafts from all tokens there are, in
chains and in trees, and the greedy chain of one native call knows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness import Rows
from head_models import CONFIGS, MAX_LEN, VOCAB, DraftHand, choices, longest, target, tensors
from test_head_trees import LEVELS, TEXTS, forked

from paceline.kernels import cpu
from paceline.models.heads.build import build_head, widened
from paceline.models.heads.further import MOST, Further, FurtherTokens
from paceline.models.heads.interface import GREEDY, Draw
from paceline.sampling.noise import gumbel, token_bits

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
NAMES = pytest.mark.parametrize("name", ["dspark", "dspark without confidence or norms of heads", "dspark gated",
                                         "dspark rnn", "eagle3", "eagle1", "mtp"])
FEW = 40


def heads(name: str) -> tuple[Any, Any]:
    """One that drafts from some tokens, and the same one drafting from all of them."""
    config = replace(CONFIGS[name], draft_vocab_size=FEW, whole_vocabulary=True)
    own = {"d2t": tensors("dspark")["d2t"]} | tensors(name)
    whole, padded = widened(config, own, "here")
    model = target(packed=True)
    return build_head(config, own, model, MAX_LEN), build_head(whole, padded, model, MAX_LEN)


def outside(head: Any) -> list[int]:
    return sorted(set(range(VOCAB)) - set(head.target_ids.tolist()))


def further_of(head: Any) -> Further:
    """Some for the one line, others for the other, the first one's being more."""
    lines = [head.further_tokens() for _ in TEXTS]
    for line, tokens in zip(lines, (outside(head)[3:40], outside(head)[:5][::-1])):
        line.add(tokens)
    return Further(lines)


def begun(head: Any, threads: int = 1) -> tuple[DraftHand, list[Any]]:
    from paceline.kernels.cpu.backend import NativeKernels
    hand = DraftHand(target(packed=True), head, NativeKernels(threads))
    seqs = [hand.new() for _ in TEXTS]
    hand.step([Rows(seq, tokens[:-1]) for seq, tokens in zip(seqs, TEXTS)])
    return hand, seqs


def compare(found: torch.Tensor, every: torch.Tensor, ids: torch.Tensor, further: list[int]) -> None:
    """found [draft vocabulary, then this line's tokens, then what others have more]."""
    columns = torch.cat((ids, torch.tensor(further)))
    torch.testing.assert_close(found[:len(columns)], every[columns], atol=2e-3, rtol=2e-3)
    assert (found[len(columns):] == -torch.inf).all()


@NAMES
def test_logits_are_those_of_the_whole_vocabulary(name: str) -> None:
    few, every = heads(name)
    assert few.drafts_further and not every.drafts_further
    further = further_of(few)
    drafted = choices(TEXTS, longest(CONFIGS[name]))
    anchors = [tokens[-1] for tokens in TEXTS]
    found, sure = (hand := begun(few))[0].draft(hand[1], anchors, drafted, further)
    expected, as_sure = (hand := begun(every))[0].draft(hand[1], anchors, drafted)
    assert found.shape[-1] == FEW + 37 and expected.shape[-1] == VOCAB
    for line, own in enumerate((outside(few)[3:40], outside(few)[:5][::-1])):
        for slot in range(found.shape[1]):
            compare(found[line, slot], expected[line, slot], few.target_ids, own)
    assert sure is None or torch.equal(sure, as_sure)


@NAMES
@torch.inference_mode()
def test_lines_that_part_take_their_tokens_along(name: str) -> None:
    few, every = heads(name)
    further = further_of(few)
    depth = min(len(LEVELS) + 1, CONFIGS[name].depth or 99)
    found, expected = forked(*begun(few), depth, further), forked(*begun(every), depth)
    assert {member for member, _, _ in found[2:]} == {0, 1}
    for (member, tokens, logits), (_, same, whole) in zip(found, expected, strict=True):
        assert tokens == same
        compare(logits, whole, few.target_ids, (outside(few)[3:40], outside(few)[:5][::-1])[member])


@pytest.mark.parametrize("threads", [1, 3])
def test_the_greedy_tokens_of_a_block_in_one_call(threads: int) -> None:
    few, every = heads("dspark")
    hand, seqs = begun(few, threads)
    previous, depth, further = [tokens[-1] for tokens in TEXTS], longest(CONFIGS["dspark"]), further_of(few)
    found = hand.open(seqs, previous, depth, further).chain(previous, [0.0, 0.0])
    reference, its = begun(every, threads)
    slowly = reference.open(its, previous, depth)
    allowed = torch.full((2, VOCAB), -torch.inf)
    for line, own in enumerate((outside(few)[3:40], outside(few)[:5])):
        allowed[line, [*few.target_ids.tolist(), *own]] = 0.0
    beside = 0
    assert len(found) == depth
    for best in found:
        logits, _ = slowly.logits(torch.tensor(previous))
        assert list(best.tokens) == (logits + allowed).argmax(-1).tolist()
        beside += sum(token in outside(few) for token in best.tokens)
        previous = list(best.tokens)
    assert 0 < beside < 2 * depth


def test_the_oldest_tokens_make_room() -> None:
    source = target(packed=True).head.weight
    tokens = FurtherTokens(source)
    for begin in range(0, MOST + 21, 7):  # ids are few here, and may come again
        tokens.add([place % VOCAB for place in range(begin, begin + 7)])
    count = (MOST + 21 + 6) // 7 * 7
    expected = [place % VOCAB for place in range(count)]
    assert len(tokens.ids) == MOST and tokens.weight.shape == (MOST, source.shape[1])
    assert np.roll(tokens.ids, -(count % MOST)).tolist() == expected[-MOST:]
    rows = tokens.weight.rows(torch.arange(MOST))
    torch.testing.assert_close(rows, source.rows(torch.from_numpy(tokens.ids)), atol=1e-3, rtol=1e-3)


def test_further_tokens_are_drawn_too() -> None:
    few, _ = heads("dspark")
    hand, seqs = begun(few, 1)
    previous, depth, further = [tokens[-1] for tokens in TEXTS], longest(CONFIGS["dspark"]), further_of(few)
    # So hot that noise alone decides: by it, of all that the line can draft, the best.
    found = hand.open(seqs, previous, depth, further).chain(previous, [0.0, 0.0], [Draw(1e9, 5, 30), GREEDY])
    known = np.array([*few.target_ids.tolist(), *outside(few)[3:40]])
    drawn = [int(known[gumbel(token_bits(5, 30 + slot, known)).argmax()]) for slot in range(depth)]
    assert [best.tokens[0] for best in found] == drawn
    assert set(drawn) & set(outside(few))
