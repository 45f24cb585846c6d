"""The default model itself: its checksum, config, weights and tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from small_tokenizers import EDGES, texts
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from paceline.models.chat import ChatTemplate
from paceline.models.load import Checkpoint, Weights, check_vocabulary, open_checkpoint
from paceline.models.load.gguf import GGUFFile
from paceline.models.tokenizer import Tokenizer

pytestmark = pytest.mark.real_model

LOST = "\x04\x06\x13\x14\x16\x1d"
"""Control characters whose bytes SmolLM2's vocabulary lacks; it also lacks the lead bytes of the empty planes 4-11."""


@pytest.fixture(scope="module")
def checkpoint(default_model_path: Path) -> Checkpoint:
    return open_checkpoint(default_model_path)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    made = Tokenizer.from_checkpoint(checkpoint)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def truth(checkpoint: Checkpoint) -> Backend:
    """SmolLM2's own tokenizer.json, put together here from its definition and the file's vocabulary."""
    file = checkpoint.file  # type: ignore[attr-defined]
    tokens = file.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges")]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tokens[:17])
    return backend


def representable(text: str) -> bool:
    return not any(character in LOST or 0x40000 <= ord(character) < 0xC0000 for character in text)


def test_config(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("llama", 30, 576)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["rope_theta"], config["rms_norm_eps"], config["vocab_size"]) == (1e5, 1e-5, 49152)
    assert config["max_position_embeddings"] == 8192 and config["tie_word_embeddings"] is True


def test_opening_does_not_parse_the_vocabulary(default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GGUFFile, "_strings")
    file = GGUFFile(default_model_path)
    assert file.length("tokenizer.ggml.tokens") == 49152
    with pytest.raises(AttributeError):
        file.get("tokenizer.ggml.tokens")


@pytest.mark.parametrize(("theirs", "ours", "heads"), [
    ("token_embd", "model.embed_tokens", 0), ("blk.7.ffn_down", "model.layers.7.mlp.down_proj", 0),
    ("blk.29.attn_q", "model.layers.29.self_attn.q_proj", 9), ("blk.0.attn_k", "model.layers.0.self_attn.k_proj", 3)])
def test_weights_are_bit_equal_to_the_reference(checkpoint: Checkpoint, default_model_path: Path, theirs: str,
                                                ours: str, heads: int) -> None:
    file = GGUFFile(default_model_path)
    info = file.tensors[f"{theirs}.weight"]
    expected = gguf.quants.dequantize(file.data(info), gguf.GGMLQuantizationType[info.format.name])
    if heads:
        expected = expected.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(expected.shape)
    found = Weights(checkpoint).take(f"{ours}.weight", expected.shape)
    assert torch.equal(found, torch.from_numpy(np.ascontiguousarray(expected)))


def test_vocabulary_fits(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    check_vocabulary(checkpoint, tokenizer.vocab_size)
    assert tokenizer.eos_ids == {2} and tokenizer.bos_id == 1 and tokenizer.special_ids == set(range(17))


@pytest.mark.parametrize(("text", "ids"), [
    ("Hello 1234", [19556, 216, 33, 34, 35, 36]), ("<|im_start|>user\n", [1, 4093, 198])])
def test_known_splits(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text, parse_special=True) == ids
    assert (tokenizer.encode(text) == ids) == ("<|" not in text)  # text is text


@given(text=texts())
def test_equal_to_the_real_tokenizer(tokenizer: Tokenizer, truth: Backend, text: str) -> None:
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == truth.encode(text).ids
    assert tokenizer.decode(ids, False) == truth.decode(ids, skip_special_tokens=False)


@given(text=texts().filter(representable))
def test_round_trip_is_exact_streamed_or_not(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text
    detokenizer = tokenizer.detokenizer(skip_special=False)
    assert detokenizer.extend(ids) + detokenizer.flush() == text


def test_round_trip_of_the_edges(tokenizer: Tokenizer) -> None:
    for text in EDGES:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_chat_template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    template = ChatTemplate.from_checkpoint(checkpoint, tokenizer)
    assert template.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
