"""A config.json becomes a ModelConfig, or an error that names the key."""

from __future__ import annotations

import copy
import math

import pytest
import transformers

from paceline.errors import ModelFormatError
from paceline.models.config import ModelConfig

LEAST = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 24, "max_position_embeddings": 128}


def test_what_a_config_may_leave_out():
    config = ModelConfig.from_dict(LEAST)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta, config.rope.rotary_dim) == (4, 4, 10000.0, 4)
    assert config.windows == (None, None, None)
    assert not config.tie_word_embeddings and not config.attention_bias and not config.num_experts


def test_the_context_is_what_the_list_for_short_texts_serves():
    long = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    assert ModelConfig.from_dict(LEAST).context == 128
    assert ModelConfig.from_dict(LEAST | {"rope_scaling": long, "original_max_position_embeddings": 32}).context == 32


@pytest.mark.parametrize("key", sorted(LEAST))
def test_a_missing_key_is_named(key):
    with pytest.raises(ModelFormatError, match=key):
        ModelConfig.from_dict({name: value for name, value in LEAST.items() if name != key})


@pytest.mark.parametrize(("change", "named"), [
    ({"num_hidden_layers": 0}, "num_hidden_layers"), ({"hidden_size": "big"}, "hidden_size"),
    ({"vocab_size": True}, "vocab_size"), ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
    ({"hidden_act": "mish"}, r"hidden_act 'mish'.*silu.*gelu"), ({"head_dim": 5}, "even"),
    ({"rope_theta": "x"}, "rope_theta"), ({"rope_scaling": 4}, "rope_scaling"),
    ({"rope_parameters": {"chunked_attention": {"rope_theta": 1.0}}}, "differs by layer type.*chunked_attention"),
    ({"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}}, "full_attention"),
    ({"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
    ({"final_logit_softcapping": "30"}, "final_logit_softcapping must be a positive number"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
    ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"), ({"scale_attn_weights": False}, "only True"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ({"num_local_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 1}, "mlp_only_layers"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps"), ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps"), ({"attn_logit_softcapping": math.inf}, "attn_logit_softcapping"),
    *(({"rope_theta": theta}, "rope_theta must be a positive") for theta in (0, 0.0, -1.0, math.nan, math.inf)),
    *(({"rope_local_base_freq": theta}, "rope_theta must be a positive") for theta in (0, math.nan)),
    ({"rope_parameters": {"full_attention": {"rope_theta": 0}}}, "rope_theta must be a positive"),
    ({"partial_rotary_factor": 0}, "partial_rotary_factor"), ({"partial_rotary_factor": math.nan}, "partial_rotary"),
    ({"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
      "routed_scaling_factor": math.nan}, "routed_scaling_factor"),
    ({"num_local_experts": 4}, "num_experts_per_tok"), ({"num_local_experts": 4, "num_experts_per_tok": 5}, "between"),
    ({"layer_types": ["full_attention"]}, "layer_types"), ({"layer_types": [["full_attention"]] * 3}, "layer_types"),
    ({"num_hidden_layers": 10 ** 9}, "num_hidden_layers must be a whole number from 1 to"),
    ({"max_position_embeddings": 10 ** 15}, "max_position_embeddings"), ({"vocab_size": 10 ** 30}, "vocab_size"),
    ({"num_local_experts": 10 ** 9, "num_experts_per_tok": 2}, "num_local_experts"),
    ({"num_attention_heads": 0}, "num_attention_heads"), ({"num_key_value_heads": 0}, "num_key_value_heads"),
    ({"head_dim": 0}, "head_dim"), ({"head_dim": 3.5}, "head_dim"), ({"hidden_act": ["silu"]}, "hidden_act"),
    ({"model_type": ["llama"]}, "model_type"), ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true"),
    ({"attention_bias": 3}, "attention_bias"), ({"use_parallel_residual": {}}, "use_parallel_residual"),
    ({"rms_norm_eps": 10 ** 400}, "rms_norm_eps"), ({"rope_theta": 10 ** 400}, "rope_theta"),
    ({"partial_rotary_factor": 1e308}, "rotary embeddings need"), ({"rope_scaling": {"rope_type": 7}}, "rope_type"),
    ({"norm_offset": math.nan}, "norm_offset"), ({"norm_offset": "x"}, "norm_offset"),
    ({"query_pre_attn_scalar": math.nan}, "query_pre_attn_scalar"),
    ({"model_type": "gpt2", "hidden_size": {}, "intermediate_size": None}, "hidden_size"),
    ({"model_type": "mistral", "sliding_window": -1}, "sliding_window"),
    ({"model_type": "mistral", "sliding_window": "8"}, "sliding_window"),
    ({"sliding_window_pattern": -1}, "sliding_window_pattern"), ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
    ({"model_type": "qwen2", "use_sliding_window": "yes", "sliding_window": 8}, "use_sliding_window"),
    *(({"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8} | more, named) for more, named in (
        ({"n_shared_experts": "2"}, "n_shared_experts"), ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor"), ({"topk_method": []}, "topk_method"),
        ({"scoring_func": {}}, "scoring_func"), ({"norm_topk_prob": "no"}, "norm_topk_prob"),
        ({"n_routed_experts": 10 ** 9}, "n_routed_experts"))),
    *(({"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4} | more, named)
      for more, named in (({"kv_lora_rank": "8"}, "kv_lora_rank"), ({"q_lora_rank": 0}, "q_lora_rank"),
                          ({"rope_interleave": 2}, "rope_interleave"))),
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


GEMMA3 = {"model_type": "gemma3_text", "hidden_size": 16, "num_hidden_layers": 7, "intermediate_size": 24,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024}


def test_gemma_says_little_and_means_much():
    """What the published files of the 4B model leave out."""
    config = ModelConfig.from_dict(GEMMA3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.windows == (1024,) * 5 + (None, 1024)
    assert config.tie_word_embeddings and config.activation == "gelu_tanh" and config.attention_scale == 1 / 16
    assert (config.rope.theta, config.rope.kind) == (1e6, "linear")
    assert config.local_rope is not None and (config.local_rope.theta, config.local_rope.kind) == (1e4, "default")
    assert (config.score_cap, config.logit_cap) == (0.0, 0.0)


def test_the_text_part_of_a_model_that_also_sees():
    both = ModelConfig.from_dict({"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {"hidden_size": 9}})
    assert both == ModelConfig.from_dict(GEMMA3)


def test_gemma2_caps_and_alternates():
    config = ModelConfig.from_dict({**LEAST, "model_type": "gemma2", "num_attention_heads": 8, "hidden_act": "gelu",
                                    "hidden_activation": "gelu_pytorch_tanh"})
    assert config.windows == (4096, None, 4096)
    assert (config.score_cap, config.logit_cap, config.activation) == (50.0, 30.0, "gelu_tanh")
    assert ModelConfig.from_dict({**LEAST, "model_type": "gemma2", "num_attention_heads": 8,
                                  "attn_logit_softcapping": None}).score_cap == 0.0


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral",
                                        "mixtral", "olmo2", "phi3", "qwen3", "qwen3_moe"])
def test_null_says_nothing(model_type):
    """Where transformers gives null no meaning of its own: it refuses some of these, and ignores others."""
    least = {**LEAST, "model_type": model_type, "num_attention_heads": 8, "hidden_size": 64, "num_local_experts": 8,
             "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    for key in ("attention_bias", "head_dim", "hidden_act", "hidden_activation", "layer_norm_eps", "layer_types",
                "mlp_only_layers", "num_key_value_heads", "query_pre_attn_scalar", "rms_norm_eps", "rope_parameters",
                "rope_local_base_freq", "rope_scaling", "rope_theta", "rotary_pct", "sliding_window_pattern",
                "tie_word_embeddings", "use_parallel_residual"):
        assert ModelConfig.from_dict({**least, key: None}) == ModelConfig.from_dict(least), key
    if model_type == "mixtral":
        assert ModelConfig.from_dict({**least, "norm_topk_prob": None}).renormalise_experts


@pytest.mark.parametrize("key", ["sliding_window", "attn_logit_softcapping", "final_logit_softcapping"])
def test_null_switches_off_where_transformers_says_so(key):
    least = {**LEAST, "num_attention_heads": 8}
    theirs = transformers.Gemma2Config(**{**least, key: None})
    config = ModelConfig.from_dict({**least, "model_type": "gemma2", key: None})
    ours = {"sliding_window": config.windows[0], "attn_logit_softcapping": config.score_cap or None,
            "final_logit_softcapping": config.logit_cap or None}
    assert ours == {name: getattr(theirs, name) for name in ours}


@pytest.mark.parametrize("parts", [
    {"full_attention": {"rope_type": "linear", "factor": 8.0}},
    {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": None},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}])
def test_what_gemma3_means_by_rope_parameters_that_say_little(parts):
    theirs = transformers.Gemma3TextConfig(rope_parameters=copy.deepcopy(parts)).rope_parameters
    config = ModelConfig.from_dict({**GEMMA3, "rope_scaling": None, "rope_parameters": parts})
    for kind, rope in (("full_attention", config.rope), ("sliding_attention", config.local_rope)):
        assert (rope.theta, rope.kind, rope.settings.get("factor")) == (
            theirs[kind]["rope_theta"], theirs[kind]["rope_type"], theirs[kind].get("factor"))


def test_gpt2_and_gpt_neox_have_their_own_words():
    gpt2 = ModelConfig.from_dict({"model_type": "gpt2", "vocab_size": 32, "n_embd": 16, "n_layer": 3, "n_head": 4,
                                  "n_positions": 128, "n_inner": None, "layer_norm_epsilon": 1e-4})
    assert (gpt2.hidden_size, gpt2.intermediate_size, gpt2.num_kv_heads, gpt2.norm_eps) == (16, 64, 4, 1e-4)
    assert gpt2.learned_positions and gpt2.rope.rotary_dim == 0 and gpt2.tie_word_embeddings
    neox = ModelConfig.from_dict({**LEAST, "model_type": "gpt_neox", "head_dim": 16, "rotary_pct": 0.5,
                                  "rotary_emb_base": 500, "layer_norm_eps": 1e-4})
    assert (neox.rope.rotary_dim, neox.rope.theta, neox.norm_eps) == (8, 500.0, 1e-4)
    assert neox.parallel_residual and neox.activation == "gelu" and not neox.tie_word_embeddings


def test_which_layers_of_qwen3_moe_are_mixtures():
    experts = {**LEAST, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 4,
               "moe_intermediate_size": 12}
    config = ModelConfig.from_dict(
        {**experts, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert (config.num_experts, config.expert_size, config.renormalise_experts) == (8, 12, False)
    assert config.dense_layers == {0, 2, 3, 4}
