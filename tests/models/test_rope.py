"""Rotary scalings agree with transformers and depend on nothing but the position."""

from __future__ import annotations

import math

import pytest
import torch
from harness import DictWeights, Hand
from oracles import SCALINGS, oracle, text

from paceline.errors import ModelFormatError
from paceline.kernels import select
from paceline.models.config import ModelConfig
from paceline.models.registry import build
from paceline.models.rope import FILLED_AT_ONCE, Rope, inverse_frequencies

EAGER = select(False, torch.device("cpu"))


@pytest.mark.parametrize("kind", [kind for kind in SCALINGS if kind != "dynamic"])
def test_scaled_logits_agree_with_transformers(kind):
    case, tokens = oracle(f"rope-{kind}"), text(150)
    torch.testing.assert_close(Hand(case.ours, EAGER).run(tokens, 64), case.logits(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [64, 150])
def test_dynamic_agrees_within_the_original_length_and_at_full_length(length):
    """The model was made for 64 positions; an engine for `length` uses the frequencies of a sequence that long."""
    case, tokens = oracle("rope-dynamic", max_model_len=length), text(length)
    torch.testing.assert_close(Hand(case.ours, EAGER).run(tokens, 40), case.logits(tokens), atol=1e-4, rtol=0)


def test_dynamic_does_not_depend_on_the_length_of_a_request():
    case = oracle("rope-dynamic", max_model_len=150)
    tokens = text(150)
    hand = Hand(case.ours, select(True, torch.device("cpu")))
    assert torch.equal(hand.run(tokens[:20]), hand.run(tokens)[:20])


def test_both_spellings_of_a_scaled_rope_mean_the_same():
    raw = dict(oracle("rope-yarn").raw)
    new = {key: value for key, value in raw.items() if key not in ("rope_theta", "rope_scaling")}
    old = {key: value for key, value in raw.items() if key != "rope_parameters"}
    old["rope_scaling"] = {"type" if key == "rope_type" else key: value for key, value in old["rope_scaling"].items()}
    assert "rope_parameters" in new and "rope_theta" in old
    theirs, ours = (inverse_frequencies(ModelConfig.from_dict(config), 256) for config in (new, old))
    assert torch.equal(theirs[0], ours[0]) and theirs[1] == ours[1]
    assert ours[1] != 1.0


def test_factors_divide_the_frequencies_like_the_llama3_scaling_they_were_made_from():
    scaled = ModelConfig.from_dict(oracle("rope-llama3").raw)
    plain = ModelConfig.from_dict(oracle("llama").raw)
    factors = inverse_frequencies(plain, 256)[0] / inverse_frequencies(scaled, 256)[0]
    assert factors.max() > 2
    cpu = torch.device("cpu")
    ours, theirs = Rope(plain, 256, cpu, factors), Rope(scaled, 256, cpu)
    positions = torch.arange(0, 256, 5)
    for left, right in zip(ours.at(positions), theirs.at(positions)):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=0)


def test_a_model_of_kind_factors_takes_them_from_its_weights():
    case = oracle("llama")
    config = ModelConfig.from_dict({**case.raw, "rope_parameters": None, "rope_scaling": {"rope_type": "factors"}})
    tensors = dict(case.theirs.state_dict())
    halved = build(config, DictWeights({**tensors, "rope_freqs.weight": torch.full((8,), 2.0)}), 64)
    linear = {"rope_type": "linear", "factor": 2.0}
    by_name = build(ModelConfig.from_dict({**case.raw, "rope_parameters": None, "rope_scaling": linear}),
                    DictWeights(tensors), 64)
    tokens = text(30)
    assert torch.equal(Hand(halved, EAGER).run(tokens), Hand(by_name, EAGER).run(tokens))


def test_rows_are_computed_when_they_are_needed_and_have_the_bits_of_a_whole_table():
    config, cpu = ModelConfig.from_dict(oracle("rope-llama3").raw), torch.device("cpu")
    length = 3 * FILLED_AT_ONCE + 77
    frequencies, amplitude = inverse_frequencies(config, length)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    whole = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    rope, place = Rope(config, length, cpu), None
    for filled, positions in ((FILLED_AT_ONCE, [0, 5]), (FILLED_AT_ONCE, []), (2 * FILLED_AT_ONCE, [FILLED_AT_ONCE, 9]),
                              (length, [length - 1, FILLED_AT_ONCE]), (length, list(range(0, length, 7)))):
        at = torch.tensor(positions, dtype=torch.int64)
        for got, want in zip(rope.at(at), whole):
            assert torch.equal(got, want[at])
        assert rope._filled == filled
        assert place in (None, rope._cos.data_ptr()), "a table stays where it is"
        place = rope._cos.data_ptr()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rope.halves(), (cos, sin)))


def test_partial_rotation_leaves_the_other_features_alone():
    config = ModelConfig.from_dict({**oracle("llama").raw, "partial_rotary_factor": 0.5})
    assert config.rope.rotary_dim == 8
    cos, sin = Rope(config, 16, torch.device("cpu")).at(torch.tensor([3, 9]))
    x = torch.randn(2, 4, 16)
    for kernels in (EAGER, select(True, torch.device("cpu"))):
        turned = kernels.rotate(x, cos, sin)
        assert torch.equal(turned[..., 8:], x[..., 8:])
        torch.testing.assert_close(turned[..., :8].norm(dim=-1), x[..., :8].norm(dim=-1))
        assert not torch.allclose(turned[..., :8], x[..., :8])


@pytest.mark.parametrize(("scaling", "named"), [
    ({"rope_type": "longrope"}, "longrope"), ({"rope_type": "linear"}, "factor"),
    ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    *(({"rope_type": kind, "factor": factor}, "factor must be a positive number")
      for kind in ("linear", "dynamic", "yarn") for factor in (math.nan, math.inf, 0.0)),
    ({"rope_type": "yarn", "factor": 4.0, "attention_factor": math.nan}, "attention_factor must"),
    ({"rope_type": "yarn", "factor": 4.0, "mscale": math.nan, "mscale_all_dim": 1.0}, "mscale must"),
    ({"rope_type": "yarn", "factor": 4.0, "attention_factor": "much"}, "attention_factor must"),
    ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "no numbers"),
    ({"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [0.0] * 8}, "no numbers"),
    ({"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": ["a"] * 8}, "no numbers"),
    ({"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [10 ** 400] * 8}, "no numbers"),
    ({"rope_type": "linear", "factor": 10 ** 400}, "factor must be a positive number"),
    ({"rope_type": "yarn", "factor": 4.0, "mscale": [1], "mscale_all_dim": 1.0}, "mscale must")])
def test_an_unknown_or_incomplete_scaling_is_named(scaling, named):
    config = ModelConfig.from_dict({**oracle("llama").raw, "rope_parameters": None, "rope_scaling": scaling})
    with pytest.raises(ModelFormatError, match=named):
        inverse_frequencies(config, 64)
