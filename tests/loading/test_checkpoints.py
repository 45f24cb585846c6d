"""Checkpoints: the same names, shapes and values whatever the file format; faults name the tensor or key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import write_folder, write_gguf

from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.models.load import Weights, check_vocabulary, open_checkpoint

RNG = np.random.default_rng(11)
CONFIG = {"model_type": "llama", "vocab_size": 8}


def random(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def tensors_of(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(random(4, 6)) for name in names}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What converters do to the q and k rows of Llama models: pair up the two rotary halves of each head."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


# -- safetensors folders ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shards", [1, 2])
def test_folder_gives_every_tensor_of_every_shard(tmp_path: Path, shards: int) -> None:
    parts = [tensors_of("a.weight", "b.weight"), tensors_of("c.weight")]
    whole = {**parts[0], **parts[1]}
    folder = write_folder(tmp_path / "m", CONFIG, parts if shards == 2 else [whole])
    with open_checkpoint(folder) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(whole)
        for name, expected in whole.items():
            assert checkpoint.has(name) and checkpoint.shape(name) == (4, 6)
            assert torch.equal(checkpoint.tensor(name, torch.float32), expected)
            assert checkpoint.tensor(name, torch.bfloat16).dtype == torch.bfloat16
            assert checkpoint.packed(name) is None
        assert not checkpoint.has("d.weight")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, [tensors_of("a"), tensors_of("b")])
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"no file model-00002-of-00002\.safetensors.*'b'"):
        open_checkpoint(folder)


def test_a_tensor_the_index_promises_but_no_shard_holds_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, [tensors_of("a"), tensors_of("b")])
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match="'ghost' is not in"):
        open_checkpoint(folder)


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, [tensors_of("a"), tensors_of("b")])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ModelFormatError, match="no file name"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_truncated_safetensors_are_refused(tmp_path: Path, keep: int) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, [tensors_of("a", "b")])
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is truncated or corrupt.*download it again"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("files", "hint"), [
    ({}, "neither config.json nor"),
    ({"config.json": "{}"}, "no safetensors file"),
    ({"config.json": "{ not json"}, "config.json is not readable JSON"),
    ({"config.json": "[]"}, "does not hold an object"),
    ({"config.json": '{"quantization_config": {"quant_method": "gptq"}}'}, "no safetensors file"),
    ({"config.json": "{}", "x.safetensors": "", "y.safetensors": ""}, "several safetensors files"),
    ({"config.json": "{}", "model.safetensors.index.json": "{}"}, "no 'weight_map'"),
    ({"a.gguf": "", "b.gguf": ""}, "several GGUF files"),
])
def test_incomplete_folders_say_what_is_missing(tmp_path: Path, files: dict[str, str], hint: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelFormatError, match=hint):
        open_checkpoint(tmp_path)


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelFormatError, match=r"weights\.bin is not a \.gguf"):
        open_checkpoint(tmp_path / "weights.bin")


def test_nested_rope_settings_get_their_flat_names(tmp_path: Path) -> None:
    nested = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    config = open_checkpoint(write_folder(tmp_path / "a", nested, [tensors_of("a")])).config
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    plain = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    config = open_checkpoint(write_folder(tmp_path / "b", plain, [tensors_of("a")])).config
    assert config["rope_theta"] == 1e4 and not config.get("rope_scaling")


def test_revision_tells_contents_apart(tmp_path: Path) -> None:
    tensors = tensors_of("a", "b")
    changed = {**tensors, "b": tensors["b"] + 1}
    one = open_checkpoint(write_folder(tmp_path / "one", CONFIG, [tensors])).revision
    same = open_checkpoint(write_folder(tmp_path / "same", CONFIG, [tensors])).revision
    other_config = open_checkpoint(write_folder(tmp_path / "config", {**CONFIG, "x": 1}, [tensors])).revision
    other_weights = open_checkpoint(write_folder(tmp_path / "weights", CONFIG, [changed])).revision
    assert one == same and len({one, other_config, other_weights}) == 3


# -- Weights ---------------------------------------------------------------------------------------------------------

def weights_of(tmp_path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Weights:
    return Weights(open_checkpoint(write_folder(tmp_path / "m", {**CONFIG, **config}, [tensors])), torch.float32)


def test_take_gives_the_engines_dtype_and_remembers(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.ones(3),
               "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    weights = weights_of(tmp_path, tensors)
    taken = weights.take("a", (2, 3))
    assert taken.dtype == torch.float32 and taken.is_contiguous()
    assert weights.take("a", (2, 3), torch.float64).dtype == torch.float64
    assert weights.unused() == ["b"]


def test_a_tied_head_is_not_reported_as_unused(tmp_path: Path) -> None:
    assert weights_of(tmp_path, tensors_of("lm_head.weight"), tie_word_embeddings=True).unused() == []


@pytest.mark.parametrize(("config", "head", "unused"), [
    ({"model_type": "gpt2"}, "lm_head.weight", False),
    ({"model_type": "gemma3", "text_config": {}}, "language_model.lm_head.weight", False),
    ({"model_type": "gpt_neox", "tie_word_embeddings": True}, "embed_out.weight", False),
    ({"model_type": "gpt_neox"}, "embed_out.weight", True),
    ({"model_type": "gemma2", "tie_word_embeddings": False}, "lm_head.weight", True)])
def test_a_head_is_tied_as_its_family_says_under_its_own_name(tmp_path: Path, config: dict[str, Any], head: str,
                                                              unused: bool) -> None:
    assert weights_of(tmp_path, tensors_of(head), **config).unused() == [head] * unused


@pytest.mark.parametrize(("name", "shape", "hint"), [
    ("missing", (1,), "tensor 'missing' is missing"),
    ("wide", (4, 7), r"tensor 'wide'.*\[4, 6\].*\[4, 7\]"),
    ("whole", (3,), "tensor 'whole'.*I64"),
])
def test_what_does_not_fit_is_an_error_that_names_the_tensor(tmp_path: Path, name: str, shape: tuple[int, ...],
                                                             hint: str) -> None:
    weights = weights_of(tmp_path, {"wide": torch.ones(4, 6), "whole": torch.ones(3, dtype=torch.int64)})
    with pytest.raises(ModelFormatError, match=hint):
        weights.take(name, shape)


def test_vocabulary_may_be_padded_but_not_short(tmp_path: Path) -> None:
    weights = weights_of(tmp_path, {"model.embed_tokens.weight": torch.ones(8, 4)})
    check_vocabulary(weights.checkpoint, 8)
    check_vocabulary(weights.checkpoint, 5)
    with pytest.raises(ModelFormatError, match=r"'model\.embed_tokens\.weight'.*8 rows.*up to 8"):
        check_vocabulary(weights.checkpoint, 9)
    check_vocabulary(weights.checkpoint, 9, added=1)  # as Gemma 3's text models, with a token for images
    with pytest.raises(ModelFormatError, match=r"8 rows.*up to 9"):
        check_vocabulary(weights.checkpoint, 10, added=1)


# -- GGUF ------------------------------------------------------------------------------------------------------------

def gguf_layer(kind: str = "F32") -> dict[str, tuple[np.ndarray, str]]:
    return {"token_embd.weight": (random(8, 32), kind), "output_norm.weight": (random(32), "F32"),
            "blk.0.attn_norm.weight": (random(32), "F32"), "blk.0.attn_q.weight": (random(32, 32), kind),
            "blk.0.attn_k.weight": (random(16, 32), kind), "blk.0.attn_v.weight": (random(16, 32), kind),
            "blk.0.attn_output.weight": (random(32, 32), kind), "blk.0.ffn_norm.weight": (random(32), "F32"),
            "blk.0.ffn_gate.weight": (random(64, 32), kind), "blk.0.ffn_up.weight": (random(64, 32), kind),
            "blk.0.ffn_down.weight": (random(32, 64), kind)}


def test_gguf_config_in_hugging_face_terms(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    path = write_gguf(tmp_path / "m.gguf", metadata=ends,
                      tensors=gguf_layer())
    assert open_checkpoint(path).config == {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "hidden_act": "silu", "rope_theta": 5e4, "rope_scaling": None, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "vocab_size": 8, "tie_word_embeddings": True, "attention_bias": False,
        "sliding_window": None, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(("architecture", "metadata", "expected"), [
    ("llama", {"attention.sliding_window": 16}, {"model_type": "mistral", "sliding_window": 16}),
    ("llama", {"expert_count": 4, "expert_used_count": 2},
     {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2", {}, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}),
    ("qwen3", {"attention.key_length": 16}, {"model_type": "qwen3", "head_dim": 16}),
    ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
     {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope.scale_linear": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("qwen2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
     {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("llama", {"attention.head_count_kv": None, "rope.freq_base": None},
     {"num_key_value_heads": 4, "rope_theta": 10000.0}),
])
def test_gguf_architectures_and_rope(tmp_path: Path, architecture: str, metadata: dict[str, Any],
                                     expected: dict[str, Any]) -> None:
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, metadata)).config
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize(("architecture", "metadata", "hint"), [
    ("mamba", {}, "general.architecture 'mamba'"),
    ("llama", {"block_count": None}, r"llama\.block_count"),
    ("llama", {"attention.head_count": [4, 4]}, r"llama\.attention\.head_count'.*a positive whole number"),
    ("llama", {"rope.dimension_count": 4}, r"llama\.rope\.dimension_count"),
    ("llama", {"rope.scaling.type": "longrope"}, "longrope"),
    ("llama", {"rope.scaling.type": "yarn"}, r"rope\.scaling\.factor"),
    ("qwen3", {"expert_count": 8}, r"qwen3\.expert_count"),
])
def test_gguf_metadata_that_is_not_understood_is_named(tmp_path: Path, architecture: str, metadata: dict[str, Any],
                                                       hint: str) -> None:
    with pytest.raises(ModelFormatError, match=hint):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, metadata))


def test_a_gguf_without_embedding_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"token_embd\.weight"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors={"x": (random(32), "F32")}))


def test_llama_rows_lose_their_rotary_interleaving(tmp_path: Path) -> None:
    original = gguf_layer()
    stored = dict(original)
    for name, heads in (("blk.0.attn_q.weight", 4), ("blk.0.attn_k.weight", 2)):
        stored[name] = (interleave(original[name][0], heads), "F32")
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=stored))
    for theirs, ours in (("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"),
                         ("attn_v", "self_attn.v_proj"), ("attn_output", "self_attn.o_proj"),
                         ("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj"),
                         ("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
        found = checkpoint.tensor(f"model.layers.0.{ours}.weight")
        assert np.array_equal(found.numpy(), original[f"blk.0.{theirs}.weight"][0]), theirs
    assert checkpoint.has("model.embed_tokens.weight") and checkpoint.has("model.norm.weight")
    assert not checkpoint.has("lm_head.weight")


def test_qwen_rows_are_stored_as_they_are(tmp_path: Path) -> None:
    tensors = {**gguf_layer(), "blk.0.attn_q.bias": (random(32), "F32"), "blk.0.attn_q_norm.weight": (random(8), "F32"),
               "output.weight": (random(8, 32), "F32")}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen3", tensors=tensors))
    for theirs, ours in (("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
                         ("blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"),
                         ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
                         ("output.weight", "lm_head.weight")):
        assert np.array_equal(checkpoint.tensor(ours).numpy(), tensors[theirs][0])
    assert checkpoint.config["tie_word_embeddings"] is False and checkpoint.config["attention_bias"] is True


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_packed_rows_are_in_the_order_of_the_tensor(tmp_path: Path, kind: str) -> None:
    from paceline.models.load.dequant import dequantize
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=gguf_layer(kind)))
    for name in checkpoint.names():
        packed = checkpoint.packed(name)
        if len(checkpoint.shape(name)) != 2:
            assert packed is None
            continue
        assert packed is not None
        stored, rows = packed
        assert stored == kind == checkpoint.stored_type(name)
        assert not rows.flags.writeable and rows.shape[0] == checkpoint.shape(name)[0]
        assert torch.equal(dequantize(rows, stored, checkpoint.shape(name)), checkpoint.tensor(name)), name


@pytest.mark.parametrize("merged", [True, False])
def test_experts_have_one_name_each_merged_or_not(tmp_path: Path, merged: bool) -> None:
    parts = {"ffn_gate": random(4, 64, 32), "ffn_down": random(4, 32, 64), "ffn_up": random(4, 64, 32)}
    tensors = {"token_embd.weight": (random(8, 32), "F32"), "blk.0.ffn_gate_inp.weight": (random(4, 32), "F32")}
    for part, stack in parts.items():
        if merged:
            tensors[f"blk.0.{part}_exps.weight"] = (stack, "Q8_0")
        else:
            tensors.update({f"blk.0.{part}.{expert}.weight": (stack[expert], "Q8_0") for expert in range(4)})
    checkpoint = open_checkpoint(write_gguf(
        tmp_path / "m.gguf", metadata={"expert_count": 4, "expert_used_count": 2}, tensors=tensors))
    assert checkpoint.shape("model.layers.0.block_sparse_moe.gate.weight") == (4, 32)
    for part, ours in (("ffn_gate", "w1"), ("ffn_down", "w2"), ("ffn_up", "w3")):
        for expert in range(4):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.{ours}.weight"
            assert checkpoint.shape(name) == parts[part].shape[1:]
            assert np.abs(checkpoint.tensor(name).numpy() - parts[part][expert]).max() < 0.05
            packed = checkpoint.packed(name)
            assert packed is not None and packed[1].shape[0] == parts[part].shape[1]


def test_llama3_frequency_factors_are_announced_and_exposed(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (random(8, 32), "F32"), "rope_freqs.weight": (random(4), "F32")}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "factors"}
    assert np.array_equal(checkpoint.tensor("rope_freqs.weight").numpy(), tensors["rope_freqs.weight"][0])


def test_an_unreadable_type_fails_only_when_the_tensor_is_taken(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (random(8, 32), "F32"), "output.weight": (random(8, 256), "TQ2_0")}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    assert Weights(checkpoint).take("model.embed_tokens.weight", (8, 32)).shape == (8, 32)
    with pytest.raises(ModelFormatError, match=r"'lm_head\.weight' is stored as TQ2_0.*Q4_K"):
        Weights(checkpoint).take("lm_head.weight", (8, 256))


def test_gguf_revision_tells_contents_apart(tmp_path: Path) -> None:
    tensors = gguf_layer()
    one = open_checkpoint(write_gguf(tmp_path / "one.gguf", tensors=tensors)).revision
    same = open_checkpoint(write_gguf(tmp_path / "same.gguf", tensors=tensors)).revision
    tensors["output_norm.weight"] = (random(32), "F32")
    assert one == same != open_checkpoint(write_gguf(tmp_path / "other.gguf", tensors=tensors)).revision


def test_a_folder_with_one_gguf_file_is_that_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    assert open_checkpoint(tmp_path).path == path
