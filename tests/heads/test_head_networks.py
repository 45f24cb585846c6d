"""Every kind of head against what was published of it, in float64: cold, in chunks, after a rollback, after a tree, in
company; and what is wrong with a head shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import Rows
from head_models import CONFIGS, MAX_LEN, VOCAB, DraftHand, choices, longest, made, published, tensors, text

from paceline.kernels import cpu, select
from paceline.kernels.stepped import SteppedKernels
from paceline.models.heads.build import build_head

CPU = torch.device("cpu")
BACKENDS: dict[str, Any] = {"eager": select(False, CPU), "reference": select(True, CPU), "stepped": SteppedKernels()}
EXACT = {"atol": 2e-4, "rtol": 1e-4}
NAMES = pytest.mark.parametrize("name", sorted(CONFIGS))
EACH = pytest.mark.parametrize("kernels", list(BACKENDS.values()), ids=list(BACKENDS))
TEXTS = [text(1, 23), text(2, 9), text(3, 2)]
"""The last token of each is its anchor; the shortest has one token before it."""


def run(name: str, kernels: Any, hand: DraftHand, seqs: list[Any], texts: list[list[int]]) -> None:
    """Drafts for these texts, of which all but the anchors were read, are the published ones."""
    drafted = choices(seqs, longest(CONFIGS[name]))
    logits, confidence = hand.draft(seqs, [tokens[-1] for tokens in texts], drafted)
    assert logits.dtype == torch.float32 and logits.shape[2] == CONFIGS[name].draft_vocab_size
    for index, (tokens, chosen) in enumerate(zip(texts, drafted)):
        expected, sure = published(name, tokens, tapped_by=kernels).draft(chosen)
        torch.testing.assert_close(logits[index].double(), expected, **EXACT)
        assert (sure is None) == (confidence is None)
        if sure is not None:
            torch.testing.assert_close(confidence[index].double(), sure, **EXACT)


def begun(name: str, kernels: Any, texts: list[list[int]], chunk: int = 99) -> tuple[DraftHand, list[Any]]:
    hand = DraftHand(made_target(), made(name), kernels)
    seqs = [hand.new() for _ in texts]
    for begin in range(0, max(map(len, texts)) - 1, chunk):
        groups = [Rows(seq, tokens[begin:min(begin + chunk, len(tokens) - 1)]) for seq, tokens in zip(seqs, texts)]
        hand.step([rows for rows in groups if rows.tokens])
    return hand, seqs


def made_target() -> Any:
    from head_models import target
    return target()


@NAMES
@EACH
def test_a_cold_prompt(name, kernels):
    run(name, kernels, *begun(name, kernels, TEXTS), TEXTS)


@NAMES
@EACH
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_prompt_in_chunks(name, kernels, chunk):
    run(name, kernels, *begun(name, kernels, TEXTS, chunk), TEXTS)


@NAMES
@EACH
def test_after_drafts_that_were_rejected(name, kernels):
    """A round writes beyond what is committed; a verify step over it is rolled back; what follows is as if neither had
    been."""
    hand, seqs = begun(name, kernels, TEXTS)
    anchors = [tokens[-1] for tokens in TEXTS]
    hand.draft(seqs, anchors, choices(seqs, longest(CONFIGS[name])))
    wrong = [text(50 + index, 3) for index in range(len(seqs))]
    kept = [seq.tokens for seq in seqs]
    hand.step([Rows(seq, [anchor, *tail]) for seq, anchor, tail in zip(seqs, anchors, wrong)])
    texts = []
    for seq, before, anchor, tail in zip(seqs, kept, anchors, wrong):
        seq.tokens = [*before, anchor, tail[0]]  # one draft token was right
        texts.append([*seq.tokens, 7])
    run(name, kernels, hand, seqs, texts)


@NAMES
@EACH
def test_after_a_path_of_a_tree_was_accepted(name, kernels):
    hand, seqs = begun(name, kernels, TEXTS)
    rows = [Rows(seq, [tokens[-1], 11, 12, 13, 14, 15], [-1, 0, 0, 1, 2, 4]) for seq, tokens in zip(seqs, TEXTS)]
    hand.step(rows)
    for group in rows:
        hand.accept(group, [0, 2, 4])
    run(name, kernels, hand, seqs, [[*tokens, 12, 14, 5] for tokens in TEXTS])


@NAMES
def test_drafts_have_the_same_bits_in_any_company(name):
    kernels = BACKENDS["reference"]
    hand, seqs = begun(name, kernels, TEXTS)
    drafted = choices(seqs, longest(CONFIGS[name]))
    together, _ = hand.draft(seqs, [tokens[-1] for tokens in TEXTS], drafted)
    for index, tokens in enumerate(TEXTS):
        alone, own = begun(name, kernels, [tokens], chunk=4)
        assert torch.equal(alone.draft(own, [tokens[-1]], [drafted[index]])[0][0], together[index])


@NAMES
@pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
@pytest.mark.parametrize("cache", [torch.float32, torch.float16, torch.int8])
def test_in_8_bits_on_native_kernels(name, cache):
    """Close to what was published, with the rounding of weights and activations: the right tokens lead, and bits do not
    depend on chunks."""
    from head_models import target

    from paceline.kernels.cpu.backend import NativeKernels
    from paceline.kernels.packed import PackedWeight
    kernels, model = NativeKernels(2), target(packed=True)
    results = []
    for chunk in (99, 4):
        head = made(name, packed=True)
        assert isinstance(head.lm_head.weight, PackedWeight)
        hand = DraftHand(model, head, kernels, cache)
        seq, tokens = hand.new(), TEXTS[0]
        for begin in range(0, len(tokens) - 1, chunk):
            hand.step([Rows(seq, tokens[begin:min(begin + chunk, len(tokens) - 1)])])
        drafted = choices([seq], longest(CONFIGS[name]))
        results.append(hand.draft([seq], [tokens[-1]], drafted)[0][0])
    assert torch.equal(results[0], results[1])
    expected, _ = published(name, TEXTS[0], packed=True, tapped_by=kernels).draft(drafted[0])
    error = (results[0].double() - expected).pow(2).mean().sqrt() / expected.std()
    assert error < 0.05, error


PARTS = [(name, key) for name in sorted(CONFIGS) for key in tensors(name) if key != "d2t"]


@pytest.mark.parametrize(("name", "key"), PARTS, ids=[f"{name}: {key}" for name, key in PARTS])
def test_every_tensor_matters(name, key):
    """A tensor that is another one changes what is drafted, and just as it changes what was published: no norm is left
    out, no matrix transposed or mistaken for another."""
    kernels, tokens = BACKENDS["eager"], text(4, 12)
    old = tensors(name)[key]
    new = {key: old.flip(0) * 1.5 + 0.1}
    drafted = choices([0], longest(CONFIGS[name]))
    found = []
    for changed in ({}, new):
        hand = DraftHand(made_target(), made(name, changed=changed), kernels)
        seq = hand.new()
        hand.step([Rows(seq, tokens[:-1])])
        logits, sure = hand.draft([seq], [tokens[-1]], drafted)
        expected, published_sure = published(name, tokens, tapped_by=kernels, changed=changed).draft(drafted[0])
        torch.testing.assert_close(logits[0].double(), expected, **EXACT)
        if sure is not None:
            torch.testing.assert_close(sure[0].double(), published_sure, **EXACT)
        found.append(logits[0] if sure is None else torch.cat((logits[0], sure[0][:, None]), dim=1))
    assert not torch.allclose(found[0], found[1], atol=1e-2)


@NAMES
def test_draft_ids_stand_for_the_targets(name):
    head, config = made(name), CONFIGS[name]
    if not config.reduced:
        assert head.target_ids is None
        return
    ids = head.target_ids
    assert ids.shape == (config.draft_vocab_size,) and ids.dtype == torch.int64 and ids.max() < VOCAB
    assert torch.equal(ids, torch.arange(len(ids)) + tensors(name)["d2t"])


def test_a_block_may_be_shorter_where_there_is_no_room():
    kernels, name = BACKENDS["eager"], "dspark"
    hand, seqs = begun(name, kernels, TEXTS[:1])
    whole = hand.head.passes(2)[0]
    assert whole.rows == CONFIGS[name].block_size and whole.mutual
    hand.head.passes = lambda depth: (type(whole)(0, 3, mutual=True),)  # type: ignore[method-assign]
    logits, _ = hand.draft(seqs, [TEXTS[0][-1]], [[5, 6]])
    assert logits.shape == (1, 3, 40) and logits.isfinite().all()


@pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
@NAMES
def test_beside_a_model_that_runs_whole_in_native_code(name):
    """Its embedding, head and norm are borrowed as they are packed there."""
    from head_models import MAX_LEN, TARGET, RandomWeights

    from paceline.kernels.cpu.backend import NativeKernels
    from paceline.models.config import ModelConfig
    from paceline.models.heads.build import build_head
    from paceline.models.native import NativeDecoder
    model = NativeDecoder(ModelConfig.from_dict(TARGET), RandomWeights(), MAX_LEN, threads=1)
    kernels, tokens = NativeKernels(1), TEXTS[0]
    head = build_head(CONFIGS[name], tensors(name), model, MAX_LEN)
    hand = DraftHand(model, head, kernels)
    seq = hand.new()
    hand.step([Rows(seq, tokens[:-1])])
    drafted = choices([seq], longest(CONFIGS[name]))
    found = hand.draft([seq], [tokens[-1]], drafted)[0][0]
    expected, _ = published(name, tokens, packed=True, tapped_by=kernels).draft(drafted[0])
    error = (found.double() - expected).pow(2).mean().sqrt() / expected.std()
    assert error < 0.1, error  # another rounding of the target's own layers as well


@pytest.mark.parametrize("name", ["dspark", "eagle3"])
def test_a_head_of_the_whole_vocabulary_drafts_from_all_of_it(name):
    """Where it is not packed. What is said of the draft vocabulary stays as it was."""
    found = []
    for config in (CONFIGS[name], replace(CONFIGS[name], whole_vocabulary=True)):
        hand = DraftHand(made_target(), build_head(config, tensors(name), made_target(), MAX_LEN), BACKENDS["eager"])
        seq = hand.new()
        hand.step([Rows(seq, TEXTS[0][:-1])])
        found.append((hand.head.target_ids, *hand.draft([seq], TEXTS[0][-1:], choices([seq], 3))))
    (ids, few, sure), (no_ids, every, as_sure) = found
    assert no_ids is None and every.shape[-1] == VOCAB
    torch.testing.assert_close(every[..., ids], few)
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[ids] = False
    assert every[..., others].isfinite().all() and (every[..., others].std(-1) > 0).all()
    assert sure is None or torch.equal(sure, as_sure)
