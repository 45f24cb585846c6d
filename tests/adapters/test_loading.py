"""What an adapter's files may say, and what is refused, by name, before anything runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adapters.adapter_files import ATTENTION, MLP, factors, shapes_of, tiny_model, write_adapter
from engine.tiny import tiny_llm
from paceline.errors import ConfigError, ModelFormatError, ModelNotFoundError, RequestError
from paceline.models.load.adapters import Targets, read_adapter

MODEL = tiny_model()
SHAPES = shapes_of(MODEL, ATTENTION + MLP)
TENSORS = factors(SHAPES, "loading")
Q = "model.layers.0.self_attn.q_proj"


def test_factors_come_with_their_scale(tmp_path: Path) -> None:
    read = read_adapter(write_adapter(tmp_path, TENSORS, lora_alpha=6))
    assert set(read.pairs) == set(SHAPES)
    pair = read.pairs[Q]
    assert pair.scale == 1.5
    assert torch.equal(pair.a, TENSORS[f"base_model.model.{Q}.lora_A.weight"])


def test_rank_stabilised_adapters_divide_by_the_root(tmp_path: Path) -> None:
    read = read_adapter(write_adapter(tmp_path, TENSORS, use_rslora=True, lora_alpha=6))
    assert read.pairs[Q].scale == 6 / math.sqrt(4)


def test_patterns_give_modules_ranks_and_alphas_of_their_own(tmp_path: Path) -> None:
    tensors = factors(SHAPES, "patterns", rank=lambda module: 2 if module.endswith("q_proj") else 4)
    read = read_adapter(write_adapter(tmp_path, tensors, rank_pattern={"q_proj": 2},
                                      alpha_pattern={r"layers\.1\.self_attn\.q_proj": 8, "k_proj": 3}))
    assert read.pairs[Q].scale == 2 / 2
    assert read.pairs["model.layers.1.self_attn.q_proj"].scale == 8 / 2
    assert read.pairs["model.layers.2.self_attn.k_proj"].scale == 3 / 4


@pytest.mark.parametrize("targets", [ATTENTION + MLP, list(SHAPES), "all-linear", r".*\.(self_attn|mlp)\..*_proj"],
                         ids=["ends", "names", "all-linear", "pattern"])
def test_target_modules_in_every_form(tmp_path: Path, targets: Any) -> None:
    llm = tiny_llm(MODEL)
    llm.load_adapter("own", str(write_adapter(tmp_path, TENSORS, target_modules=targets)))
    assert llm.engine.adapters.names == ["own"]


@pytest.mark.parametrize(("targets", "module", "taken"), [
    (Targets(("q_proj",), layers=(1,)), "model.layers.1.self_attn.q_proj", True),
    (Targets(("q_proj",), layers=(1,)), "model.layers.2.self_attn.q_proj", False),
    (Targets(("q_proj",), layers=(1,), layers_pattern=("h",)), "model.layers.1.self_attn.q_proj", False),
    (Targets(("q_proj",), exclude=("layers.1.self_attn.q_proj",)), "model.layers.1.self_attn.q_proj", False),
    (Targets(("q_proj",), exclude=r".*\.1\..*"), "model.layers.2.self_attn.q_proj", True),
    (Targets("all-linear"), "lm_head", False),
    (Targets(("proj",)), "model.layers.1.self_attn.q_proj", False),
])
def test_what_is_targeted(targets: Targets, module: str, taken: bool) -> None:
    assert targets.take(module) is taken


@pytest.mark.parametrize(("setting", "names"), [
    ({"use_dora": True}, "use_dora"),
    ({"lora_bias": True}, "lora_bias"),
    ({"bias": "all"}, "bias 'all'"),
    ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"target_parameters": ["experts.w1"]}, "target_parameters"),
    ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
    ({"peft_type": "IA3"}, "IA3"),
    ({"r": 0}, "r of"),
    ({"r": 3}, "rank 3"),
    ({"lora_alpha": "two"}, "lora_alpha"),
    ({"target_modules": None}, "target_modules"),
    ({"target_modules": "(["}, "regular expression"),
    ({"target_modules": ["q_proj"]}, "model.layers.0.mlp.down_proj"),
    ({"a_setting_to_come": 3}, "a_setting_to_come"),
])
def test_refused_by_name(tmp_path: Path, setting: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelFormatError) as refusal:
        read_adapter(write_adapter(tmp_path, TENSORS, **setting))
    assert names in str(refusal.value)


@pytest.mark.parametrize("name", [
    f"base_model.model.{Q}.lora_magnitude_vector", "base_model.model.model.embed_tokens.lora_embedding_A",
    "base_model.model.lm_head.weight", f"base_model.model.{Q}.lora_B.bias", f"{Q}.lora_A.weight"])
def test_tensors_that_are_no_factors_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFormatError, match="no low-rank factors") as refusal:
        read_adapter(write_adapter(tmp_path, TENSORS | {name: torch.ones(4)}))
    assert name in str(refusal.value)


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)
    half = dict(TENSORS)
    del half[f"base_model.model.{Q}.lora_B.weight"]
    with pytest.raises(ModelFormatError, match=f"one of the two factors of '{Q}'"):
        read_adapter(write_adapter(tmp_path / "half", half))
    with pytest.raises(ModelFormatError, match="no tensors"):
        read_adapter(write_adapter(tmp_path / "empty", {}))
    with pytest.raises(ModelFormatError, match="no finite numbers"):
        read_adapter(write_adapter(tmp_path / "nan", {name: tensor * math.nan for name, tensor in TENSORS.items()}))
    with pytest.raises(ModelFormatError, match="I64"):
        read_adapter(write_adapter(tmp_path / "whole", {name: tensor.long() for name, tensor in TENSORS.items()}))
    cut = write_adapter(tmp_path / "cut", TENSORS) / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    with pytest.raises(ModelFormatError, match="truncated"):
        read_adapter(cut.parent)
    (cut.parent / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelFormatError, match="object"):
        read_adapter(cut.parent)


def refusal_of(folder: Path, model: Any = MODEL) -> str:
    llm = tiny_llm(model)
    with pytest.raises(ModelFormatError, match="does not fit this model") as refusal:
        llm.load_adapter("own", str(folder))
    assert llm.engine.adapters.names == []
    return str(refusal.value)


def test_an_adapter_of_a_wider_model_is_refused_with_the_sizes(tmp_path: Path) -> None:
    other = tiny_model(hidden_size=48, num_attention_heads=6)
    told = refusal_of(write_adapter(tmp_path, factors(shapes_of(other, ATTENTION + MLP), "wide")))
    assert "of another size are" in told
    assert f"'{Q}' (48 to 48; the model's: 32 to 32)" in told


@pytest.mark.parametrize(("layers", "said"), [(4, "model.layers.3."), (2, "nothing was found for 'model.layers.2.")])
def test_an_adapter_of_a_deeper_or_shallower_model_is_refused(tmp_path: Path, layers: int, said: str) -> None:
    other = tiny_model(num_hidden_layers=layers)
    assert said in refusal_of(write_adapter(tmp_path, factors(shapes_of(other, ATTENTION + MLP), "deep")))


def test_modules_the_model_lacks_are_named(tmp_path: Path) -> None:
    tensors = factors({"transformer.h.0.attn.c_attn": (96, 32)}, "foreign")
    told = refusal_of(write_adapter(tmp_path, tensors, target_modules=["c_attn"]))
    assert "'transformer.h.0.attn.c_attn'" in told


def test_experts_take_no_adapter_and_say_so(tmp_path: Path) -> None:
    expert = "model.layers.0.block_sparse_moe.experts.0.w1"
    told = refusal_of(write_adapter(tmp_path, factors({expert: (48, 32)}, "expert"), target_modules=["w1"]),
                      tiny_model("mixtral"))
    assert expert in told


def test_names(tmp_path: Path) -> None:
    llm = tiny_llm(MODEL)
    path = str(write_adapter(tmp_path, TENSORS))
    llm.load_adapter("own", path)
    with pytest.raises(ConfigError, match="already"):
        llm.load_adapter("own", path)
    with pytest.raises(RequestError, match="There is no adapter 'other'; loaded: 'own'") as refusal:
        llm.generate([[1, 2, 3]], adapter="other")
    assert refusal.value.param == "adapter"
    outs = llm.generate([[1, 2, 3], [1, 2, 3]], adapter=["other", "own"])
    assert [out.error is None for out in outs] == [False, True]


def test_contents_are_the_identity(tmp_path: Path) -> None:
    one = read_adapter(write_adapter(tmp_path / "one", TENSORS))
    assert read_adapter(write_adapter(tmp_path / "same", TENSORS)).revision == one.revision
    assert read_adapter(write_adapter(tmp_path / "alpha", TENSORS, lora_alpha=3)).revision != one.revision
    changed = {name: tensor.clone() for name, tensor in TENSORS.items()}
    changed[f"base_model.model.{Q}.lora_A.weight"][0, 0] += 1e-3
    assert read_adapter(write_adapter(tmp_path / "weights", changed)).revision != one.revision


def test_half_precision_factors_are_read(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, TENSORS)
    save_file({name: tensor.bfloat16() for name, tensor in TENSORS.items()}, folder / "adapter_model.safetensors")
    pair = read_adapter(folder).pairs[Q]
    assert pair.a.dtype == torch.float32
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == len(pair.a)
