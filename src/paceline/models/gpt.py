"""GPT-2 and GPT-NeoX (Pythia): layer norms, biases everywhere, a feed-forward without a gate."""

from __future__ import annotations

from paceline.kernels.operands import Norm
from paceline.models.decoder import Decoder
from paceline.models.layers import MLP, Attention
from paceline.models.translate import TRANSPOSED, by_head, translate
from paceline.models.weight_source import WeightSource


class _GPT(Decoder):
    def load_norm(self, weights: WeightSource, name: str, size: int | None = None) -> Norm:
        shape = (size or self.config.hidden_size,)
        return Norm(weights.take(f"{name}.weight", shape), self.config.norm_eps, centred=True,
                    bias=weights.take(f"{name}.bias", shape))

    def attention(self, weights: WeightSource, layer: int) -> Attention:
        bias = self.config.attention_bias
        return Attention(self.config, weights, layer, qkv_bias=bias, out_bias=bias, fused=True)

    def feed_forward(self, weights: WeightSource, layer: int) -> MLP:
        return MLP(self.config, weights, f"model.layers.{layer}.mlp", bias=self.config.mlp_bias)


class GPT2(_GPT):
    """Learned positions; matrices are stored with inputs first."""

    def translated(self, weights: WeightSource) -> WeightSource:
        words = {"model.layers.": "h.", "model.embed_tokens": "wte", "model.embed_positions": "wpe",
                 "model.norm": "ln_f", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
                 "self_attn.qkv_proj": "attn.c_attn", "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc",
                 "mlp.down_proj": "mlp.c_proj"}
        layouts = {f"{name}.weight": TRANSPOSED for name in ("c_attn", "c_proj", "c_fc")}
        return translate(weights, words, layouts, prefixes=("transformer.", ""))


class GPTNeoX(_GPT):
    """Attention and feed-forward side by side; part of each head rotates; queries, keys and values head by head."""

    def translated(self, weights: WeightSource) -> WeightSource:
        words = {"model.layers.": "gpt_neox.layers.", "model.embed_tokens": "gpt_neox.embed_in",
                 "model.norm": "gpt_neox.final_layer_norm", "lm_head": "embed_out",
                 "self_attn.qkv_proj": "attention.query_key_value", "self_attn.o_proj": "attention.dense",
                 "mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
        heads = by_head(self.config.num_heads)
        return translate(weights, words, {"query_key_value.weight": heads, "query_key_value.bias": heads})
