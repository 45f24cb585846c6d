"""PEFT as the oracle: what it trained and saved, we read and apply as it does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from oracles import Oracle, oracle, text
from safetensors.torch import load_file, save_file

from engine.tiny import tiny_llm
from paceline import SamplingParams
from paceline.errors import ModelFormatError

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"r": 8, "lora_alpha": 12, "target_modules": "all-linear"},
    "patterns": {"r": 4, "use_rslora": True, "target_modules": r".*\.(self_attn\.[kqo]|mlp\.(up|down))_proj",
                 "rank_pattern": {"up_proj": 2, r"layers\.1\.self_attn\.k_proj": 7},
                 "alpha_pattern": {"down_proj": 3}},
    "some layers": {"r": 3, "target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [0, 2],
                    "exclude_modules": ["layers.2.mlp.gate_proj"]},
    "head": {"r": 4, "target_modules": ["lm_head", "k_proj"]},
}


def trained(theirs: Any, folder: Path, **config: Any) -> Any:
    """Their model with an adapter that does something, saved."""
    torch.manual_seed(5)
    made = peft.get_peft_model(copy.deepcopy(theirs), peft.LoraConfig(**config)).eval()
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(folder, save_embedding_layers=False)
    return made


def compare(subject: Oracle, folder: Path, renamed: Callable[[str], str] = str, **config: Any) -> None:
    """`renamed`: the name of a factor in the file, from the one that PEFT gave it."""
    tokens = text(30)
    made = trained(subject.theirs, folder, **config)
    path = folder / "adapter_model.safetensors"
    save_file({renamed(name): tensor for name, tensor in load_file(path).items()}, path)
    with torch.inference_mode():
        want = made(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    llm = tiny_llm(subject.ours, max_model_len=128)
    llm.load_adapter("own", str(folder))
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    plain, ours = (llm.generate([tokens], score, adapter=name)[0].prompt_logprobs for name in (None, "own"))
    got = torch.tensor([entry.raw for entry in ours[1:]])
    torch.testing.assert_close(got, want[torch.arange(29), tokens[1:]], atol=1e-4, rtol=1e-4)
    assert (got - torch.tensor([entry.raw for entry in plain[1:]])).abs().max() > 0.1, "the adapter makes a difference"


@pytest.mark.parametrize("case", CONFIGS)
def test_scores_are_peft_s(case: str, tmp_path: Path) -> None:
    compare(oracle("llama"), tmp_path, **CONFIGS[case])


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_neox-sequential", "llama-biased-tied",
                                  "mistral", "olmo2", "phi3", "qwen2", "qwen3"])
def test_every_linear_layer_of_an_architecture(name: str, tmp_path: Path) -> None:
    """By the names that transformers has for them, and with outputs in its order."""
    compare(oracle(name), tmp_path, r=4, target_modules="all-linear", fan_in_fan_out=name == "gpt2")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_attention_of_mixtures(name: str, tmp_path: Path) -> None:
    compare(oracle(name), tmp_path, r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])


SEEING = {"old": ("base_model.model.language_model.model.", "base_model.model.language_model.lm_head"),
          "new": ("base_model.model.model.language_model.", "base_model.model.lm_head")}
"""What the names of layers and head begin with in adapters for Gemma 3 that also sees."""


def as_part(name: str, form: str) -> str:
    layers, head = SEEING[form]
    return name.replace("base_model.model.model.", layers).replace("base_model.model.lm_head", head)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("form", SEEING)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj", "lm_head"]], ids=["all", "some"])
def test_adapters_for_a_model_that_also_sees_are_for_its_text_part(form: str, targets: Any, tmp_path: Path) -> None:
    compare(oracle("gemma3"), tmp_path, lambda name: as_part(name, form), r=4, target_modules=targets)


@pytest.mark.parametrize("form", SEEING)
def test_what_is_for_the_eyes_is_refused_by_name(form: str, tmp_path: Path) -> None:
    """And so is a text part of which something is missing, by the names that the adapter has for it."""
    subject = oracle("gemma3")
    trained(subject.theirs, tmp_path, r=4, target_modules=["q_proj"])
    path, eye = tmp_path / "adapter_model.safetensors", "base_model.model.vision_tower.encoder.layers.0.q_proj"
    factors = {as_part(name, form): tensor for name, tensor in load_file(path).items()}
    save_file(factors | {f"{eye}.lora_{factor}.weight": torch.ones(4, 4) for factor in "AB"}, path)
    llm = tiny_llm(subject.ours, max_model_len=128)
    with pytest.raises(ModelFormatError, match=r"no linear layer .* named 'vision_tower\S+q_proj'\."):
        llm.load_adapter("own", str(tmp_path))
    save_file({name: tensor for name, tensor in factors.items() if "layers.1." not in name}, path)
    with pytest.raises(ModelFormatError, match=r"nothing was found for '\S*language_model\S*layers\.1\S+q_proj'\."):
        llm.load_adapter("own", str(tmp_path))


def test_latent_attention_refuses_by_name(tmp_path: Path) -> None:
    subject = oracle("deepseek_v2")
    trained(subject.theirs, tmp_path, r=4, target_modules=["q_a_proj", "kv_b_proj"])
    with pytest.raises(ModelFormatError, match=r"no linear layer .* 'model\.layers\.0\.self_attn\.kv_b_proj'"):
        tiny_llm(subject.ours, max_model_len=128).load_adapter("own", str(tmp_path))
