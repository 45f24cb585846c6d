"""What a model offers: layers a..b, taps, cache groups, a shared head; and the tutorial's facts about caches."""

from __future__ import annotations

import pytest
import torch
from harness import DictWeights, Hand, Rows
from oracles import oracle, text

from paceline.errors import ModelFormatError
from paceline.kernels import select
from paceline.models.config import ModelConfig
from paceline.models.registry import build

REFERENCE = select(True, torch.device("cpu"))
EAGER = select(False, torch.device("cpu"))


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_layers_in_two_parts_equal_the_whole_run(cut):
    model = oracle("qwen2").ours
    tokens = text(30)

    def context():
        hand = Hand(model, REFERENCE)
        return hand.forward([Rows(hand.new(), tokens)])

    ids = torch.tensor(tokens)
    whole = model.forward(ids, context())
    parts = context()
    assert torch.equal(model.layers(model.layers(model.embed(ids), parts, 0, cut), parts, cut), whole)


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_taps_equal_the_hidden_states_of_transformers(name):
    case, tokens = oracle(name), text(25)
    hand = Hand(case.ours, EAGER)
    context = hand.forward([Rows(hand.new(), tokens)], frozenset({0, 2, 3}))
    leaving = case.ours.forward(torch.tensor(tokens), context)
    with torch.inference_mode():
        theirs = case.theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert sorted(context.tapped) == [0, 2, 3]
    for layer in (0, 2):
        torch.testing.assert_close(context.tapped[layer], theirs[layer][0], atol=1e-4, rtol=0)
    # transformers reports the last one after its final norm; the tap is before it.
    assert torch.equal(context.tapped[3], leaving)
    normed = case.theirs.model.norm(leaving).detach()
    torch.testing.assert_close(normed, theirs[3][0], atol=1e-4, rtol=0)


def test_taps_of_a_part_are_those_it_passes():
    model = oracle("llama").ours
    hand = Hand(model, EAGER)
    context = hand.forward([Rows(hand.new(), text(5))], frozenset({0, 1, 2, 3}))
    hidden = model.embed(torch.tensor(text(5)))
    model.layers(hidden, context, 1, 2)
    assert sorted(context.tapped) == [1]


def test_a_tied_head_is_the_embedding_itself():
    tied, untied = oracle("llama-biased-tied").ours, oracle("llama").ours
    assert tied.head.weight is tied.embedding
    assert untied.head.weight.data_ptr() != untied.embedding.data_ptr()


def test_cache_groups_follow_the_windows():
    llama, mistral, qwen2 = (oracle(name).ours.cache_groups for name in ("llama", "mistral", "qwen2"))
    assert [(group.layers, group.window) for group in llama] == [((0, 1, 2), None)]
    assert [(group.layers, group.window) for group in mistral] == [((0, 1, 2), 13)]
    assert [(group.layers, group.window) for group in qwen2] == [((0,), None), ((1, 2), 11)]


def test_windowed_layers_forget_what_lies_before_the_window():
    """One layer of window 13 sees 13 tokens: the last row cannot tell what came before them."""
    model = oracle("mistral").ours
    for kernels in (REFERENCE, EAGER):
        hidden = []
        for first in (text(20, seed=1), text(20, seed=2)):
            hand = Hand(model, kernels)
            tokens = first + text(13, seed=3)
            hidden.append(model.layers(model.embed(torch.tensor(tokens)),
                                       hand.forward([Rows(hand.new(), tokens)]), 0, 1))
        assert torch.equal(hidden[0][-1], hidden[1][-1])
        assert not torch.equal(hidden[0][-2], hidden[1][-2])


@pytest.mark.parametrize(("name", "kv_heads"), [("llama-mha", 6), ("llama", 2), ("llama-mqa", 1)])
def test_mha_gqa_mqa_cache_sizes_by_formula(name, kv_heads):
    """Bytes a token = 2 (keys and values) x layers x KV heads x head size x bytes an element."""
    model = oracle(name).ours
    (group,) = model.cache_groups
    assert group.bytes_per_token(4) == 2 * 3 * kv_heads * 16 * 4
    hand = Hand(model, EAGER, blocks=10, block_size=4)
    assert hand.storage.bytes == group.bytes_per_token(4) * 40
    torch.testing.assert_close(hand.run(text(20)), oracle(name).logits(text(20)), atol=1e-4, rtol=0)


def test_cached_decode_equals_recompute():
    hand = Hand(oracle("llama").ours, REFERENCE)
    seq, tokens = hand.new(), text(12)
    cached = hand.step([Rows(seq, tokens)])[0][-1]
    for _ in range(10):
        tokens = tokens + [int(cached.argmax())]
        cached = hand.step([Rows(seq, tokens[-1:])])[0][-1]
        assert torch.equal(cached, hand.run(tokens)[-1])


def test_an_unsupported_model_type_is_named_with_the_supported():
    config = ModelConfig.from_dict({**oracle("llama").raw, "model_type": "bloom"})
    with pytest.raises(ModelFormatError, match=r"'bloom'.*gemma2.*gpt2.*llama, mistral, mixtral.*qwen2, qwen3"):
        build(config, DictWeights({}), 16)


def test_what_is_captured_is_not_a_question_of_the_cache():
    """Latents and windows are read by captured steps; experts are chosen on the host."""
    dense = ModelConfig.from_dict({**oracle("deepseek_v2").raw, "n_routed_experts": None, "num_hidden_layers": 1})
    weights = DictWeights(dict(oracle("deepseek_v2").theirs.state_dict()))
    assert build(dense, weights, 16).capturable and oracle("mistral").ours.capturable
    assert not oracle("deepseek_v2").ours.capturable and not oracle("mixtral").ours.capturable
