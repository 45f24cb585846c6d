"""Sizes of models: the published numbers of parameters and cache bytes, and what the engine itself builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.tiny import BASE, SHAPES, RandomWeights
from paceline.errors import ConfigError, ModelFormatError, ModelNotFoundError
from paceline.models.config import ModelConfig
from paceline.models.registry import build
from paceline.plan.known import KNOWN, find_shape, known_shape
from paceline.plan.read import read_shape
from paceline.plan.shape import ModelShape, coverage

GIB = 1 << 30
PUBLISHED = {
    "smollm2-135m": 134_515_008, "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400, "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704, "qwen2.5-7b": 7_615_616_512, "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624, "gemma-2b": 2_506_172_416, "gemma-2-9b": 9_241_705_984,
    "deepseek-v2": 235_741_434_880, "deepseek-v3": 671_026_419_200, "gpt-oss-20b": 20_914_757_184,
    "lfm2-1.2b": 1_170_340_608, "mamba2-2.7b": 2_702_599_680, "gpt2": 124_439_808,
}


def known(name: str) -> ModelShape:
    found = known_shape(name)
    assert found is not None
    return found


class CountingWeights(RandomWeights):
    """Notes the size of every tensor that is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        values = super().take(name, shape, dtype)
        self.sizes[name] = values.numel()
        return values


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    assert known(name).parameters == PUBLISHED[name]


def test_parameters_by_the_formula() -> None:
    """2VD + 3DFL + (2DNH + 2DKH)L; VD where embeddings are tied. Norms are all that it leaves out."""
    v, d, f, layers, n, k, h = 128256, 4096, 14336, 32, 32, 8, 128
    formula = 2 * v * d + 3 * d * f * layers + (2 * d * n * h + 2 * d * k * h) * layers
    assert known("llama-3.1-8b").parameters - formula == (2 * layers + 1) * d
    tied = read_shape({**KNOWN["llama-3.1-8b"], "tie_word_embeddings": True})
    assert known("llama-3.1-8b").parameters - tied.parameters == v * d


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_and_caches_are_those_the_engine_has(name: str) -> None:
    raw = BASE | SHAPES[name]
    weights = CountingWeights()
    config = ModelConfig.from_dict(raw)
    model = build(config, weights, config.max_position_embeddings)
    shape = read_shape(raw)
    assert shape.parameters == sum(weights.sizes.values())
    assert [mixer.window for mixer in shape.mixers] == list(config.windows)
    own = [layer for layer in range(config.num_layers) if config.kv_source(layer) == layer]
    planes = 1 if config.latent is not None else 2
    assert shape.cache_bytes_per_token() == 2 * len(own) * planes * config.num_kv_heads * config.head_dim
    assert model.config is config


@pytest.mark.parametrize(("name", "tokens", "gib"), [
    ("llama-2-7b", 4096, 2.0), ("llama-3-70b", 4096, 1.25), ("deepseek-v2", 4096, 0.264)])
def test_cache_of_one_text(name: str, tokens: int, gib: float) -> None:
    assert known(name).cache_bytes(tokens, "float16") / GIB == pytest.approx(gib, abs=5e-4)


def test_cache_bytes_by_the_formulas() -> None:
    """2 L H_kv d bytes; L (d_c + d_r) bytes for latents, without the factor 2."""
    shape = {**KNOWN["llama-2-7b"], "num_key_value_heads": 8}
    assert 8 * read_shape(shape).cache_bytes(8192) == pytest.approx(8.59e9, rel=1e-3)
    assert 8 * known("llama-2-7b").cache_bytes(8192) == pytest.approx(34.36e9, rel=1e-3)
    assert known("deepseek-v2").cache_bytes_per_token() == 60 * (512 + 64) * 2
    assert known("deepseek-v2").cache_bytes(4096) == pytest.approx(0.283e9, rel=1e-3)


def test_kinds_of_attention() -> None:
    assert known("llama-2-7b").kinds == ("mha",)
    assert known("gemma-2b").kinds == ("mqa",)
    assert known("llama-3-8b").kinds == ("gqa",)
    assert known("deepseek-v3").kinds == ("mla",)
    assert known("qwen3-next-80b-a3b").kinds == ("recurrent", "gqa")


def test_cache_formats() -> None:
    shape = known("llama-3-8b")
    full = shape.cache_bytes_per_token("float16")
    assert shape.cache_bytes_per_token("float32") == 2 * full
    assert shape.cache_bytes_per_token("fp8") == full / 2
    # int8 has a float32 scale for every head's key and value.
    assert shape.cache_bytes_per_token("int8") == full / 2 + 32 * 2 * 8 * 4
    with pytest.raises(ConfigError, match="kv_dtype must be one of"):
        shape.cache_bytes_per_token("q4")


def test_windows_bound_the_cache() -> None:
    mistral = known("mistral-7b")
    assert mistral.cache_bytes(4096) == mistral.cache_bytes(32768)
    gemma = known("gemma-3-27b")
    everything = sum(mixer.cached * 2 * 32768 for mixer in gemma.mixers)
    assert gemma.cache_bytes(32768) < 0.2 * everything


def test_shared_caches_are_kept_once_and_read_by_all() -> None:
    plain = read_shape(KNOWN["llama-3-8b"])
    shared = read_shape({**KNOWN["llama-3-8b"], "num_kv_shared_layers": 16})
    assert shared.cache_bytes(1000) == plain.cache_bytes(1000) / 2
    assert shared.attention_bytes(1000) == plain.attention_bytes(1000)


def test_recurrent_state_does_not_grow() -> None:
    shape = known("mamba2-2.7b")
    assert shape.cache_bytes(1) == shape.cache_bytes(100_000) == shape.state_bytes > 0
    # A head of Qwen3-Next has 64 KB of state.
    qwen = read_shape({**KNOWN["qwen3-next-80b-a3b"], "linear_conv_kernel_dim": 1})
    assert qwen.state_bytes == 36 * 32 * 65536


def test_experts_that_are_read() -> None:
    assert coverage(8, 2, 1) == 2
    assert coverage(8, 2, 2) == pytest.approx(3.5)
    assert coverage(128, 8, 10_000) == pytest.approx(128)
    mixture = known("mixtral-8x7b")
    assert mixture.active == pytest.approx(12.75e9, rel=1e-3)
    assert mixture.read_bytes(1) < mixture.read_bytes(4) < mixture.read_bytes(100) < mixture.weight_bytes()


def test_fewer_bits_leave_the_head_in_sixteen() -> None:
    shape = known("llama-3.1-8b")
    assert shape.weight_bytes("bfloat16") == 2 * shape.parameters
    assert shape.weight_bytes("fp8") == shape.body + 2 * 2 * shape.embedding
    # W4A16 moves about 1/3.6 of bf16's bytes, head and all.
    assert 2.9 < shape.read_bytes(1, "bfloat16") / shape.read_bytes(1, "int4") < 3.6


@pytest.mark.parametrize(("written", "name"), [
    ("meta-llama/Llama-2-13b-chat-hf", "llama-2-13b"), ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"), ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
    ("google/gemma-2-9b-it", "gemma-2-9b"), ("openai/gpt-oss-20b", "gpt-oss-20b")])
def test_hub_ids_of_known_models_need_no_network(written: str, name: str) -> None:
    assert find_shape(written).name == name


def test_every_known_model_has_a_plausible_size() -> None:
    for name in KNOWN:
        shape = known(name)
        assert 0 < shape.active <= shape.parameters, name
        assert shape.cache_bytes(1000) > 0, name


def test_config_files_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(KNOWN["llama-2-7b"]))
    assert find_shape(str(folder)).parameters == find_shape(str(folder / "config.json")).parameters == (
        PUBLISHED["llama-2-7b"])
    assert find_shape(str(folder)).name == "mine"


def test_a_text_model_inside_another_is_found() -> None:
    inner = dict(KNOWN["qwen3-8b"])
    assert read_shape({"model_type": "qwen3_vl", "text_config": inner}).parameters == PUBLISHED["qwen3-8b"]


@pytest.mark.parametrize(("change", "said"), [
    ({"hidden_size": None}, "has no hidden_size"), ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
    ({"num_attention_heads": 30}, "must be a multiple of"), ({"vocab_size": "many"}, "vocab_size must be"),
    ({"num_kv_shared_layers": 32}, "must leave one"), ({"layer_types": ["quantum"] * 32}, "must list all 32"),
    ({"num_local_experts": 4, "num_experts_per_tok": 5}, "must not exceed"),
    ({"layer_types": ["mamba"] * 32}, "has no mamba_n_heads")])
def test_configs_that_make_no_sense(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFormatError, match=said) as error:
        read_shape({**KNOWN["llama-3-8b"], **change}, "mine")
    assert "config.json of mine" in str(error.value)


def test_unknown_models_name_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*llama-2-13b"):
        find_shape("llama2-13b")
    with pytest.raises(ConfigError, match="known are"):
        find_shape("zzzzzzzz")
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        (tmp_path / "x.txt").write_text("")
        find_shape(str(tmp_path / "x.txt"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFoundError, match=r"config\.json of 'somebody/something'.*cannot be reached"):
        find_shape("somebody/something")
