"""A config.json becomes a ModelConfig, or an error that names the key."""

from __future__ import annotations

import pytest

from paceline.errors import ModelFormatError
from paceline.models.config import ModelConfig

LEAST = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 24, "max_position_embeddings": 128}


def test_what_a_config_may_leave_out():
    config = ModelConfig.from_dict(LEAST)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta, config.rope.rotary_dim) == (4, 4, 10000.0, 4)
    assert config.windows == (None, None, None)
    assert not config.tie_word_embeddings and not config.attention_bias and not config.num_experts


@pytest.mark.parametrize("key", sorted(LEAST))
def test_a_missing_key_is_named(key):
    with pytest.raises(ModelFormatError, match=key):
        ModelConfig.from_dict({name: value for name, value in LEAST.items() if name != key})


@pytest.mark.parametrize(("change", "named"), [
    ({"num_hidden_layers": 0}, "num_hidden_layers"), ({"hidden_size": "big"}, "hidden_size"),
    ({"vocab_size": True}, "vocab_size"), ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
    ({"hidden_act": "gelu"}, "hidden_act"), ({"head_dim": 5}, "even"),
    ({"rope_theta": "x"}, "rope_theta"), ({"rope_scaling": 4}, "rope_scaling"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differs by layer type"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
    ({"num_local_experts": 4}, "num_experts_per_tok"), ({"num_local_experts": 4, "num_experts_per_tok": 5}, "between"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
    ({"layer_types": ["chunked_attention"] * 3, "sliding_window": 8}, "chunked_attention"),
])
def test_a_contradiction_is_named(change, named):
    with pytest.raises(ModelFormatError, match=named):
        ModelConfig.from_dict({**LEAST, **change})


@pytest.mark.parametrize(("change", "windows"), [
    ({"model_type": "llama", "sliding_window": 8}, (None, None, None)),
    ({"model_type": "mistral", "sliding_window": 8}, (8, 8, 8)),
    ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
    ({"model_type": "mixtral", "sliding_window": 8}, (8, 8, 8)),
    ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, (None, None, None)),
    ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 8)),
    ({"model_type": "qwen3", "sliding_window": 8,
      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (8, None, 8)),
])
def test_which_layers_have_a_window(change, windows):
    assert ModelConfig.from_dict({**LEAST, **change}).windows == windows
