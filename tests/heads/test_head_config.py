"""HeadConfig says what is wrong with it, and which target it belongs to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from head_models import CONFIGS, TARGET, VOCAB

from paceline.errors import ModelFormatError
from paceline.models.config import ModelConfig


@pytest.mark.parametrize(("name", "changes", "sentence"), [
    ("dspark", {"kind": "lookahead"}, "'lookahead' is not supported; supported are"),
    ("dspark", {"hidden_size": 0}, "needs hidden_size to be a positive"),
    ("dspark", {"draft_vocab_size": VOCAB + 1}, "at most the target's vocabulary"),
    ("dspark", {"taps": ()}, "needs taps"),
    ("dspark", {"taps": (-1,)}, "needs taps"),
    ("dspark", {"norm_eps": 0.0}, "positive norm_eps"),
    ("dspark", {"num_kv_heads": 3}, "multiple of num_kv_heads"),
    ("dspark", {"head_dim": 15}, "head_dim to be even"),
    ("dspark", {"intermediate_size": 0}, "intermediate_size"),
    ("dspark", {"block_size": 0}, "block_size"),
    ("dflash", {"block_size": 1}, "block_size"),
    ("dspark", {"mask_token_id": None}, "mask_token_id"),
    ("dspark", {"mask_token_id": VOCAB}, "mask_token_id"),
    ("dspark", {"markov_head_type": "bilinear"}, "markov_head_type"),
    ("dspark", {"markov_rank": -1}, "markov_rank"),
    ("dspark", {"markov_rank": 0}, "confidence_head_with_markov"),
    ("dflash", {"markov_rank": 4}, "call it dspark"),
    ("eagle3", {"window": 0}, "window to be at least 1"),
    ("eagle3", {"num_layers": 2}, "num_layers to be 1"),
    ("eagle1", {"taps": (1, 2)}, "one layer"),
    ("medusa", {"heads": 0}, "heads to be at least 1"),
    ("hydra", {"num_layers": 0}, "num_layers"),
])
def test_what_cannot_be_is_refused(name, changes, sentence):
    with pytest.raises(ModelFormatError, match=sentence):
        replace(CONFIGS[name], **changes)


def test_how_many_tokens_a_round_can_draft():
    assert CONFIGS["dspark"].depth == 5 and CONFIGS["dflash"].depth == 4
    assert CONFIGS["medusa"].depth == 3 and CONFIGS["eagle3"].depth is None
    assert replace(CONFIGS["medusa"], num_layers=0).depth == 3


def test_how_far_back_it_sees():
    head = replace(CONFIGS["eagle3"], window=96)
    assert [head.sees(window) for window in (None, 32, 128)] == [96, 32, 96]
    assert [CONFIGS["eagle3"].sees(window) for window in (None, 32)] == [None, 32]


def test_the_target_it_belongs_to():
    head, target = replace(CONFIGS["eagle3"], tokenizer="abc", target="x/y"), ModelConfig.from_dict(TARGET)
    head.check_target(target)
    head.check_target(target, "abc")
    with pytest.raises(ModelFormatError, match=r"vocab_size 96, and the model's is 100.*x/y"):
        head.check_target(ModelConfig.from_dict(TARGET | {"vocab_size": 100}))
    with pytest.raises(ModelFormatError, match=r"reads layer 3 of its target, and the model has 2.*x/y"):
        head.check_target(ModelConfig.from_dict(TARGET | {"num_hidden_layers": 2}))
    with pytest.raises(ModelFormatError, match="another tokenizer"):
        head.check_target(target, "def")
