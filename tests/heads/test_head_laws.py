"""What comes out of a cycle with a head, all ways enumerated that its draws and the verification can fall: the target's
law. And under the coupled rule, where one key is one text: that text, for every key of a set."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness import Rows
from head_models import CONFIGS, MAX_LEN, TARGET, DraftHand, RandomWeights, tensors_of

from engine.tiny import tiny_llm
from paceline import SamplingParams
from paceline.kernels import select
from paceline.models.config import ModelConfig
from paceline.models.heads.build import build_head
from paceline.models.heads.config import HeadConfig
from paceline.models.registry import build
from paceline.speculation.branching import Branching
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES
from speculation.enumeration import Fork, Table, cycle_law, deviation
from speculation.test_draft_shapes import TableModel, drafted

VOCAB, DEPTH = 5, 2
TEXT = [2, 0, 4, 1, 3, 3]
"""Its last token is the one that drafts begin behind."""
KERNELS = select(False, torch.device("cpu"))
SMALL: dict[str, HeadConfig] = {
    name: replace(CONFIGS[name], vocab_size=VOCAB, draft_vocab_size=VOCAB - 1, **more)
    for name, more in {"dspark": {"block_size": DEPTH, "markov_rank": 8, "mask_token_id": 3},
                       "dflash": {"block_size": DEPTH + 1, "mask_token_id": 3}, "eagle3": {}, "eagle1": {}, "mtp": {},
                       "medusa": {}, "hydra": {}}.items()}
"""Of every kind one: all of them sample their drafts, and no rule refuses any."""
BLIND = ("dflash", "medusa")
"""What these draft hangs on how deep a token lies, and not on the drafts before it."""


@functools.cache
def model() -> Any:
    weights: Any = RandomWeights()
    return build(ModelConfig.from_dict(TARGET | {"vocab_size": VOCAB}), weights, MAX_LEN)


@functools.cache
def head(name: str) -> Any:
    return build_head(SMALL[name], tensors_of(SMALL[name]), model(), MAX_LEN)


def read(name: str) -> tuple[DraftHand, Any]:
    """All but the last token of the text, in a cache of its own."""
    hand = DraftHand(model(), head(name), KERNELS)
    seq = hand.new()
    hand.step([Rows(seq, TEXT[:-1])])
    return hand, seq


def shares(logits: torch.Tensor) -> np.ndarray:
    return torch.softmax(logits.double(), -1).numpy()


@functools.cache
def drafted_by(name: str) -> Table:
    """The head's q after its own drafts, over the target's tokens: those that it does not know have nothing."""
    hand, seq = read(name)
    ids = (torch.arange(VOCAB - 1) + tensors_of(SMALL[name])["d2t"]).numpy()

    @functools.cache
    def q(path: tuple[int, ...]) -> np.ndarray:
        found = np.zeros(VOCAB)
        found[ids] = shares(hand.draft([seq], [TEXT[-1]], [list(path)])[0][0, -1])
        return found

    return q


@functools.cache
def verified(name: str) -> Table:
    """The target's p behind a draft that it reads in one step."""

    @functools.cache
    def p(path: tuple[int, ...]) -> np.ndarray:
        hand, seq = read(name)
        return shares(hand.step([Rows(seq, [TEXT[-1], *path])])[0][-1])

    return p


@functools.cache
def plain(name: str) -> Table:
    """The target's p where it decodes token by token."""

    @functools.cache
    def p(path: tuple[int, ...]) -> np.ndarray:
        hand, seq = read(name)
        return shares([hand.step([Rows(seq, [token])])[0][-1] for token in (TEXT[-1], *path)][-1])

    return p


@pytest.mark.parametrize("name", sorted(SMALL))
def test_under_rejection_the_text_has_the_targets_law(name: str) -> None:
    q, p = drafted_by(name), plain(name)
    drawn = {(token,): share for token, share in enumerate(q(()))}
    assert deviation(drawn, p, 1) > 0.05, "the head's law is another one"
    moved = abs(q((0,)) - q((2,))).max()
    assert moved == 0 if name in BLIND else moved > 1e-3, "its drafts hang on those before them, where they can"
    assert abs(q((0,)) - q(())).max() > 1e-3, "and on how deep they lie"

    def draft(fork: Fork, declared: Table) -> DraftTree:
        return drafted(TableModel(declared, fork), Branching((1,) * DEPTH), DEPTH, DEPTH, "rejection")

    emitted = cycle_law(RULES["rejection"].verify, draft, verified(name), q)
    assert {len(tokens) for tokens in emitted} == {*range(1, DEPTH + 2)}, "drafts are refused everywhere, or nowhere"
    assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-9)
    assert deviation(emitted, p, DEPTH + 1) < 1e-6


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_law_that_is_declared_and_not_drawn_from_shows(name: str) -> None:
    """So what is tested above can fail: the same drafts, said to come from a flat law."""
    q, p = drafted_by(name), plain(name)

    def draft(fork: Fork, declared: Table) -> DraftTree:
        tree = drafted(TableModel(declared, fork), Branching((1,) * DEPTH), DEPTH, DEPTH, "rejection")
        return replace(tree, q=[np.full(VOCAB, 1 / VOCAB) for _ in tree.tokens])

    assert deviation(cycle_law(RULES["rejection"].verify, draft, verified(name), q), p, DEPTH + 1) > 0.001


@pytest.mark.parametrize("name", sorted(SMALL))
def test_under_the_coupled_rule_a_dynamic_tree_leaves_the_text_of_every_key(name: str) -> None:
    llm = tiny_llm(model(), trained={"it": head(name)}, block_size=4, kv_blocks=200, max_model_len=100)
    wish = {"method": name, "tree": True, "top_k": 2, "k": DEPTH, "nodes": 5, "adaptive": False}
    params = [SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, seed=key)
              for temperature in (0.7, 1.3) for key in range(16)]
    prompts = [TEXT] * len(params)
    texts = [out.outputs[0].token_ids for out in llm.generate(prompts, params, speculation=None)]
    assert len({tuple(text) for text in texts}) > len(texts) // 2, "keys tell texts apart"
    outs = llm.generate(prompts, params, speculation=wish)
    assert [out.outputs[0].token_ids for out in outs] == texts
    stats = [out.speculation for out in outs]
    assert all(stat is not None and stat.failure is None and stat.drafted for stat in stats)
    accepted = sum(stat.accepted for stat in stats if stat is not None)
    assert 0 < accepted < sum(map(len, texts))
