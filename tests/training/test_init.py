"""--init with heads that others published: trained further as what they are, or refused with what stands against it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_models import tensors_of
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.formats.read import read_head
from paceline.training.news import News
from paceline.training.run import train

OWN = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 24, "norm_eps": 1e-6, "rope_theta": 500.0}
"""Unlike the target's 4 heads of 12 features, though the matrices have the very same shapes."""


@pytest.fixture
def target_config(target_folder: Path) -> ModelConfig:
    return ModelConfig.from_dict(json.loads((target_folder / "config.json").read_text()))


@pytest.fixture
def official(target_config: ModelConfig, tmp_path: Path) -> Callable[..., tuple[Path, dict[str, torch.Tensor]]]:
    """Writes an EAGLE-3 head for the target as its authors publish theirs; what is given changes its HeadConfig."""

    def write(**changes: Any) -> tuple[Path, dict[str, torch.Tensor]]:
        shape: dict[str, Any] = {
            "kind": "eagle3", "hidden_size": target_config.hidden_size, "vocab_size": target_config.vocab_size,
            "draft_vocab_size": 64, "taps": (0, 1, 4), "intermediate_size": 40, "own_lm_head": True, **OWN, **changes}
        config = HeadConfig(**shape)
        tensors, path = tensors_of(config), tmp_path / "official"
        path.mkdir()
        (path / "config.json").write_text(json.dumps({
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "qwen3" if config.qk_norm else "llama",
            "hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "num_hidden_layers": 1,
            "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim, "intermediate_size": config.intermediate_size,
            "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling,
            "max_position_embeddings": 2048, "draft_vocab_size": 64, "tie_word_embeddings": False,
            "norm_before_residual": config.norm_before_residual, "norm_before_fc": config.norm_before_fc,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.taps), "use_aux_hidden_state": True}}))
        save_file({name.replace("layers.0.", "midlayer."): tensor.contiguous() for name, tensor in tensors.items()},
                  path / "model.safetensors")
        return path, tensors

    return write


def test_an_official_head_is_trained_further(options: Any, official: Any, target_config: ModelConfig,
                                             heard: list[News]) -> None:
    """By a step of next to nothing, so what is written is what was read, and reads the target in its own way."""
    path, tensors = official()
    chosen = options("eagle3", init=path, steps=1, lr=1e-12, answers=12)
    assert train(chosen, heard.append)["steps"] == 1
    assert [news.text for news in heard if "has output matrices of its own: they are left behind" in news.text]
    found = read_head(chosen.out / "head", target_config)
    assert {name: getattr(found.config, name) for name in OWN} == OWN
    assert (found.config.taps, found.config.intermediate_size) == ((0, 1, 4), 40)
    assert found.tensors.keys() - {"t2d"} == tensors.keys() - {"lm_head.weight"}
    assert torch.equal(found.tensors["d2t"].long(), tensors["d2t"])
    for name in found.tensors.keys() - {"d2t", "t2d"}:
        torch.testing.assert_close(found.tensors[name].float(), tensors[name], rtol=1e-3, atol=1e-4, msg=name)
    assert train(replace(chosen, steps=2), heard.append)["steps"] == 2  # goes on from its checkpoint


@pytest.mark.parametrize(("changes", "named"), [
    ({"norm_before_residual": True}, "norm_before_residual"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    ({"qk_norm": True}, r"layers\.0\.self_attn\.k_norm\.weight, layers\.0\.self_attn\.q_norm\.weight"),
    ({"norm_before_fc": True, "fc_bias": True}, r"fc\.bias, input_norm\.weight"),
])
def test_what_is_not_trained_here_is_not_left_out(options: Any, official: Any, heard: list[News],
                                                  changes: dict[str, Any], named: str) -> None:
    """Without it the other weights would draft badly, and a report would say so after hours."""
    path, _ = official(**changes)
    with pytest.raises(ConfigError, match=rf"--init: that head has {named}, which .* begin without --init"):
        train(options("eagle3", init=path, steps=1), heard.append)
    assert not heard  # before anything else was done
