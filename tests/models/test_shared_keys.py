"""Layers that read another layer's keys and values: transformers' Llama with its attention told to do so."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from harness import DictWeights, Hand, Rows
from oracles import VOCAB, text

from paceline.cache.storage import KVStorage, bytes_per_token
from paceline.errors import ModelFormatError
from paceline.kernels import select
from paceline.kernels.trees import ancestry
from paceline.models.config import ModelConfig
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.weights import Weights
from paceline.models.native import unsupported
from paceline.models.registry import build

CPU = torch.device("cpu")
REFERENCE, EAGER = select(True, CPU), select(False, CPU)
BOTH = pytest.mark.parametrize("kernels", [REFERENCE, EAGER], ids=["reference", "eager"])
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
KINDS = {"llama": (transformers.LlamaConfig, {}),
         "qwen3": (transformers.Qwen3Config, {
             "sliding_window": 11, "use_sliding_window": True,
             "layer_types": ["full_attention", "sliding_attention"] * 3})}
SOURCES = {"llama": [0, 1, 2, 3, 3, 3], "qwen3": [0, 1, 2, 3, 2, 3]}


@cache
def models(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """Theirs, ours and the config.json: the last two of six layers have no keys of their own."""
    make, more = KINDS[kind]
    torch.manual_seed(5)
    theirs = transformers.AutoModelForCausalLM.from_config(make(**SHAPE, **more), attn_implementation="eager").eval()
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer, source in enumerate(SOURCES[kind]):
        attention = theirs.model.layers[layer].self_attn
        if source == layer:
            share(attention, made, layer)
        else:
            read(attention, made, source)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        with open_checkpoint(folder) as checkpoint:
            raw = dict(checkpoint.config) | {"num_kv_shared_layers": 2}
            weights = Weights(checkpoint, torch.float32, "cpu")
            ours = build(ModelConfig.from_dict(raw), weights, 256)
            parts = ["k_norm", "k_proj", "v_proj"] if kind == "qwen3" else ["k_proj", "v_proj"]
            assert weights.unused() == [f"model.layers.{layer}.self_attn.{part}.weight" for layer in (4, 5)
                                        for part in parts]
    return theirs, ours, raw


def share(attention: Any, made: dict[int, Any], layer: int) -> None:
    """Keep what this layer's projections of keys and values give."""
    last = "k_norm" if hasattr(attention, "k_norm") else "k_proj"
    keys, values = getattr(attention, last), attention.v_proj
    keys.register_forward_hook(lambda *call: made.update({layer: (call[-1], None)}))
    values.register_forward_hook(lambda *call: made.update({layer: (made[layer][0], call[-1])}))


def read(attention: Any, made: dict[int, Any], source: int) -> None:
    """Give those of another layer instead; keys are rotated afterwards, by position, so in both layers alike."""
    last = "k_norm" if hasattr(attention, "k_norm") else "k_proj"
    getattr(attention, last).register_forward_hook(lambda *_: made[source][0])
    attention.v_proj.register_forward_hook(lambda *_: made[source][1])


@torch.inference_mode()
def expected(kind: str, tokens: list[int]) -> torch.Tensor:
    return models(kind)[0](torch.tensor([tokens]), use_cache=False).logits[0]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@BOTH
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("chunk", [None, 7, 1])
def test_prompts_in_chunks_equal_transformers(kind, kernels, chunk):
    tokens = text(60 if chunk != 1 else 24)
    close(Hand(models(kind)[1], kernels).run(tokens, chunk), expected(kind, tokens))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_rows_of_a_tree_have_the_bits_of_their_chains(kind):
    hand = Hand(models(kind)[1], REFERENCE)
    prompt, parents = text(33), [-1, 0, 0, 1, 1, 2, 4]
    tokens, seq = text(7, seed=3), hand.new()
    hand.step([Rows(seq, prompt)])
    got = hand.step([Rows(seq, tokens, parents)])[0]
    for row, path in enumerate(ancestry(parents)):
        chain = hand.run(prompt + [tokens[node] for node in path], 9)[-1]
        assert torch.equal(got[row], chain)


def test_only_the_owners_take_room():
    groups = models("llama")[1].cache_groups
    assert [(group.layers, group.readers) for group in groups] == [((0, 1, 2, 3), ((4, 3), (5, 3)))]
    assert bytes_per_token(groups, torch.float32) == 2 * 4 * 2 * 16 * 4
    assert KVStorage(groups, [5], 4, torch.float32, CPU).bytes == 2 * 4 * 2 * 16 * 4 * 20
    assert [(group.window, group.layers, group.readers) for group in models("qwen3")[1].cache_groups] == [
        (None, (0, 2), ((4, 2),)), (11, (1, 3), ((5, 3),))]


@pytest.mark.parametrize(("change", "named"), [
    ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"), ({"num_kv_shared_layers": 5}, "layer 1 .*window"),
    ({"num_kv_shared_layers": -1}, "num_kv_shared_layers")])
def test_layers_that_nobody_can_share_with_are_named(change, named):
    with pytest.raises(ModelFormatError, match=named):
        ModelConfig.from_dict(models("qwen3")[2] | change)


def test_one_matrix_for_queries_keys_and_values_is_refused():
    raw = SHAPE | {"model_type": "phi3", "num_kv_shared_layers": 6 - 1}
    tensors = {"model.embed_tokens.weight": torch.zeros(VOCAB, 48)}
    for layer in range(6):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.input_layernorm.weight": torch.ones(48),
                    f"{prefix}.post_attention_layernorm.weight": torch.ones(48),
                    f"{prefix}.self_attn.qkv_proj.weight": torch.zeros(160, 48),
                    f"{prefix}.self_attn.o_proj.weight": torch.zeros(48, 96),
                    f"{prefix}.mlp.gate_up_proj.weight": torch.zeros(160, 48),
                    f"{prefix}.mlp.down_proj.weight": torch.zeros(48, 80)}
    with pytest.raises(ModelFormatError, match="num_kv_shared_layers"):
        build(ModelConfig.from_dict(raw), DictWeights(tensors), 64)


def test_native_code_leaves_such_models_to_torch():
    assert "read the keys of others" in str(unsupported(ModelConfig.from_dict(models("llama")[2])))
