"""Mistakes that others have made with heads, made on purpose: the comparison with what was published shows each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import Rows
from head_models import CONFIGS, DraftHand, choices, longest, made, published, target, text

from paceline.kernels import select
from paceline.models.heads import chain
from paceline.models.heads.chain import Eagle3Head
from paceline.models.heads.layer import DraftLayer

EAGER = select(False, torch.device("cpu"))
TOKENS = text(8, 15)
Patch = Any


def compared(name: str, head: Any) -> None:
    hand = DraftHand(target(), head, EAGER)
    seq = hand.new()
    for begin in range(0, len(TOKENS) - 1, 5):
        hand.step([Rows(seq, TOKENS[begin:min(begin + 5, len(TOKENS) - 1)])])
    drafted = choices([seq], longest(CONFIGS[name]))
    logits, sure = hand.draft([seq], [TOKENS[-1]], drafted)
    expected, published_sure = published(name, TOKENS, tapped_by=EAGER).draft(drafted[0])
    torch.testing.assert_close(logits[0].double(), expected, atol=2e-4, rtol=1e-4)
    if sure is not None:
        torch.testing.assert_close(sure[0].double(), published_sure, atol=2e-4, rtol=1e-4)


def transposed(head: Any, _: Patch) -> None:
    """A square matrix, so that no shape tells."""
    layer: DraftLayer = getattr(head, "layer", None) or head.layers[0]
    layer.out.weight = layer.out.weight.T.contiguous()  # type: ignore[union-attr]


def no_context_norm(head: Any, _: Patch) -> None:
    head.hidden_norm = None


def context_normed_as_the_stream(head: Any, patch: Patch) -> None:
    """What the target's hidden states become is not normed by each layer again."""
    keep = DraftLayer.keep

    def again(self: DraftLayer, kv: torch.Tensor, turned: Any, slots: Any, planes: Any, kernels: Any) -> None:
        keep(self, kernels.norm(kv, replace(head.norms[self.index], weight=torch.ones(kv.shape[1]))), turned, slots,
             planes, kernels)

    patch.setattr(DraftLayer, "keep", again)


def causal_block(head: Any, _: Patch) -> None:
    passes = head.passes
    head.passes = lambda depth: tuple(replace(one, mutual=False) for one in passes(depth))


def taps_off_by_one(head: Any, _: Patch) -> None:
    head.config = replace(head.config, taps=tuple(tap + 1 for tap in head.config.taps))


def other_way_of_sampling(head: Any, _: Patch) -> None:
    head.config = replace(head.config, sample_from_anchor=False)


def markov_of_the_draft_ids(head: Any, _: Patch) -> None:
    """W1 is asked for the target's ids."""
    embed = head.markov.embed
    head.markov.embed = lambda tokens: embed(tokens % head.config.draft_vocab_size)


def confidence_without_the_token(head: Any, _: Patch) -> None:
    width = head.config.hidden_size
    head.confidence.weight = head.confidence.weight.clone()
    head.confidence.weight[:, width:] = 0


def extra_norm_on_the_way_back(head: Any, _: Patch) -> None:
    """Cost EAGLE's acceptance .57 -> .13 once."""
    leave = head.leave

    def normed(x: torch.Tensor, kernels: Any) -> Any:
        feature, logits = leave(x, kernels)
        return kernels.norm(feature, head.hidden_norm), logits

    head.leave = normed


def embedding_and_feature_swapped(head: Any, _: Patch) -> None:
    enter = head.enter

    def swapped(tokens: torch.Tensor, feature: torch.Tensor, kernels: Any) -> Any:
        x, norm, onto = enter(tokens, feature, kernels)
        return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1), norm, onto

    head.enter = swapped


def the_feature_of_the_token_itself(head: Any, _: Patch) -> None:
    """An entry is made of the feature before it."""
    store = head.store
    head.store = lambda tapped, rows, planes, kernels: store(
        tapped, replace(rows, before=rows.view.slots), planes, kernels)


def the_first_token_is_seen(_: Any, patch: Patch) -> None:
    """It has no entry."""
    patch.setattr(chain, "replace", lambda view, **changes: replace(view, **(changes | {"first": 0})))


def no_final_norm(head: Any, _: Patch) -> None:
    """What the target's head reads is normed."""
    borrowed = head._target
    head._target = type("Bare", (), {"norm": None, "embed": borrowed.embed, "head": borrowed.head})()


def normed_residual(head: Any, _: Patch) -> None:
    head.config = replace(head.config, norm_before_residual=True)


def heads_in_another_order(head: Any, _: Patch) -> None:
    head.blocks = head.blocks[::-1]


MUTATIONS: list[tuple[str, Callable[[Any, Patch], None]]] = [
    *((name, transposed) for name in ("dspark", "dflash", "eagle3", "eagle1", "mtp")),
    *(("dspark", mutation) for mutation in (
        no_context_norm, context_normed_as_the_stream, causal_block, taps_off_by_one, other_way_of_sampling,
        markov_of_the_draft_ids, confidence_without_the_token)),
    *(("eagle3", mutation) for mutation in (
        extra_norm_on_the_way_back, embedding_and_feature_swapped, the_feature_of_the_token_itself,
        the_first_token_is_seen, normed_residual, taps_off_by_one)),
    *((name, no_final_norm) for name in ("eagle1", "mtp", "medusa", "hydra")),
    *((name, the_first_token_is_seen) for name in ("eagle1", "mtp")),
    ("mtp", the_feature_of_the_token_itself), ("medusa", heads_in_another_order),
]


@pytest.mark.parametrize(("name", "mutation"), MUTATIONS, ids=[f"{name}: {one.__name__}" for name, one in MUTATIONS])
def test_a_mistake_shows(name, mutation, monkeypatch):
    compared(name, made(name))
    head = made(name)
    mutation(head, monkeypatch)
    with pytest.raises(AssertionError):
        compared(name, head)


def test_what_is_mutated_is_there():
    assert isinstance(made("eagle3"), Eagle3Head)
