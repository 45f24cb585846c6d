"""DeepSeek's parts: latent attention against its unfolded form, what its cache takes, how rows find their experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from harness import DictWeights, Hand, Rows
from oracles import oracle, text

from paceline.cache.storage import KVStorage, bytes_per_token
from paceline.errors import ConfigError, ModelFormatError
from paceline.kernels import select
from paceline.models.config import ModelConfig
from paceline.models.mla import LatentAttention
from paceline.models.routing import GroupedRouter, RoutingRule

CPU = torch.device("cpu")
REFERENCE, EAGER = select(True, CPU), select(False, CPU)
NAMES = ["deepseek_v2", "deepseek_v2-lite", "deepseek_v3"]
RANK, ROPE, NOPE, VALUE, HEADS = 24, 8, 12, 10, 6


@pytest.mark.parametrize("name", NAMES)
def test_a_token_takes_d_c_and_d_r_elements_a_layer_and_no_more(name):
    """Three layers of 24 + 8 elements; keys and values unfolded would take 6 heads of 12 + 8 + 10."""
    groups = oracle(name).ours.cache_groups
    assert [(group.layers, group.kv_heads, group.head_dim, group.latent) for group in groups] == [
        ((0, 1, 2), 1, RANK + ROPE, RANK)]
    for dtype in (torch.float32, torch.float16):
        assert bytes_per_token(groups, dtype) == 3 * (RANK + ROPE) * dtype.itemsize
        storage = KVStorage(groups, [7], 4, dtype, CPU)
        assert storage.bytes == bytes_per_token(groups, dtype) * 7 * 4
        assert sum(len(planes) for planes in storage.planes) == 3


def naive(attention: LatentAttention, x: torch.Tensor, unfold: torch.Tensor, cos: torch.Tensor,
          sin: torch.Tensor) -> torch.Tensor:
    """Attention of a text's rows with keys and values of every head unfolded from the latents, in float64."""
    kept = attention.keys(x, REFERENCE, cos, sin)[:, 0].double()
    latent, turned = kept[:, :RANK], kept[:, RANK:]
    unfolded = (latent @ unfold.double().T).view(len(x), HEADS, NOPE + VALUE)
    keys = torch.cat((unfolded[..., :NOPE], turned[:, None].expand(-1, HEADS, -1)), -1)
    q = attention.queries_by_head(x, REFERENCE).double()
    q = torch.cat((q[..., :NOPE], attention.turned(q[..., NOPE:].float(), REFERENCE, cos, sin).double()), -1)
    scores = torch.einsum("nhd,mhd->hnm", q, keys) * attention.scale
    scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), unfolded[..., NOPE:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernels", [REFERENCE, EAGER], ids=["reference", "eager"])
def test_the_absorbed_form_is_the_unfolded_one(name, kernels):
    case = oracle(name)
    hand = Hand(case.ours, kernels)
    context = hand.forward([Rows(hand.new(), text(40))])
    torch.manual_seed(0)
    x = torch.randn(40, 48)
    cos, sin = case.ours.rope.at(context.layout.positions)
    for layer, block in enumerate(case.ours.blocks):
        attention = block.attention
        unfold = case.theirs.model.layers[layer].self_attn.kv_b_proj.weight.detach()
        expected = naive(attention, x, unfold, cos, sin)
        kernels.store_keys(context.keys[layer], context.view(layer).slots, attention.keys(x, kernels, cos, sin))
        mixed = kernels.attend(attention.queries(x, kernels, cos, sin), context.keys[layer], context.values[layer],
                               context.layout, context.view(layer), attention.scale)
        got = kernels.linear_by_head(mixed, attention.out_of_latent).double()
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_nothing_as_wide_as_the_heads_keys_is_made_of_the_context():
    """Decoding touches kv_b_proj's two halves once a row, whatever the context: no product has a row for each of the
    tokens before it."""
    seen: list[int] = []

    class Watching(type(EAGER)):  # type: ignore[misc]
        def linear_by_head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[0])
            return super().linear_by_head(x, weight)

        def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
            seen.append(x.shape[0])
            return super().linear(x, weight, bias)

    hand = Hand(oracle("deepseek_v3").ours, Watching())
    seq = hand.new()
    hand.step([Rows(seq, text(50))])
    seen.clear()
    hand.step([Rows(seq, [3])])
    assert seen and max(seen) == 1


@pytest.mark.parametrize("name", NAMES)
def test_rows_find_the_experts_that_transformers_finds(name):
    """The gates alone, over many rows: whom they choose and what they weigh."""
    case = oracle(name)
    torch.manual_seed(1)
    x = torch.randn(200, 48) * 3
    for ours, theirs in zip(case.ours.blocks[1:], case.theirs.model.layers[1:]):
        with torch.inference_mode():
            _, their_weights, their_ids = theirs.mlp.gate(x)
        weights, ids = ours.mlp.router(x, REFERENCE)
        order, their_order = ids.argsort(-1), their_ids.argsort(-1)
        assert torch.equal(ids.gather(1, order), their_ids.gather(1, their_order))
        torch.testing.assert_close(weights.gather(1, order), their_weights.gather(1, their_order), atol=1e-5, rtol=1e-5)


def test_ties_go_to_the_lowest_group_and_expert():
    router = GroupedRouter(torch.zeros(8, 4), None, RoutingRule(chosen=3, groups=4, kept=2))
    weights, ids = router(torch.randn(5, 4), REFERENCE)
    assert ids.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights, torch.full((5, 3), 1 / 8))


def test_a_correction_chooses_and_does_not_weigh():
    rule = RoutingRule(chosen=1, sigmoid=True, scale=2.0)
    correction = torch.tensor([0.0, 0.0, 5.0, 0.0])
    weights, ids = GroupedRouter(torch.zeros(4, 2), correction, rule)(torch.randn(3, 2), EAGER)
    assert ids.tolist() == [[2]] * 3
    assert weights.tolist() == [[1.0]] * 3


def test_a_row_is_routed_alike_in_any_company():
    router = GroupedRouter(torch.randn(12, 48), torch.randn(12), oracle("deepseek_v3").ours.config.expert_layers.rule)
    x = torch.randn(40, 48)
    together = router(x, REFERENCE)
    for row in range(40):
        alone = router(x[row:row + 1], REFERENCE)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together))


@pytest.mark.parametrize("name", NAMES)
def test_which_layers_are_mixtures(name):
    raw = oracle(name).raw | {"num_hidden_layers": 6, "first_k_dense_replace": 2, "moe_layer_freq": 2}
    mixtures = ModelConfig.from_dict(raw).expert_layers
    assert mixtures is not None and [mixtures.at(layer) for layer in range(6)] == [False, False, True, False, True,
                                                                                  False]


SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 24,
         "moe_intermediate_size": 8, "max_position_embeddings": 128, "n_routed_experts": 32, "kv_lora_rank": 8,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6, "q_lora_rank": None}


@pytest.mark.parametrize(("kind", "said"), [
    ("V3", {}), ("V3", {"norm_topk_prob": None}), ("V3", {"rope_interleave": None}),
    ("V3", {"routed_scaling_factor": 1.5}), ("V2", {"num_experts_per_tok": 3}),
    ("V2", {"num_experts_per_tok": 3, "norm_topk_prob": None})])
def test_rules_that_a_config_leaves_out_are_transformers_own(kind, said):
    theirs = getattr(transformers, f"Deepseek{kind}Config")(**SIZES, **said)
    config = ModelConfig.from_dict({**SIZES, **said, "model_type": theirs.model_type})
    mixtures, rule = config.expert_layers, config.expert_layers.rule
    assert [mixtures.at(layer) for layer in range(6)] == [layer >= theirs.first_k_dense_replace for layer in range(6)]
    assert (rule.chosen, mixtures.shared, rule.normalise, rule.scale) == (
        theirs.num_experts_per_tok, theirs.n_shared_experts, bool(theirs.norm_topk_prob), theirs.routed_scaling_factor)
    assert (rule.groups, rule.kept) == ((theirs.n_group, theirs.topk_group) if kind == "V3" else (1, 1))
    assert rule.sigmoid is mixtures.corrected is (kind == "V3")
    assert config.latent.interleaved is bool(getattr(theirs, "rope_interleave", True))
    assert config.rope.theta == theirs.rope_parameters["rope_theta"] and config.rope.kind == "default"


@pytest.mark.parametrize(("name", "change", "named"), [
    ("deepseek_v2", {"qk_nope_head_dim": None}, "qk_nope_head_dim"),
    ("deepseek_v2", {"v_head_dim": 0}, "v_head_dim"),
    ("deepseek_v2", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
    ("deepseek_v2", {"topk_method": "loudest"}, "'loudest'.*greedy"),
    ("deepseek_v2", {"scoring_func": "tanh"}, "'tanh'.*softmax"),
    ("deepseek_v3", {"n_group": 5}, "n_group"),
    ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 4}, "topk_group"),
    ("deepseek_v3", {"moe_intermediate_size": None}, "moe_intermediate_size"),
])
def test_a_contradiction_is_named(name, change, named):
    with pytest.raises(ModelFormatError, match=named):
        ModelConfig.from_dict(oracle(name).raw | change)


def test_a_model_without_a_latent_is_refused():
    config = ModelConfig.from_dict(oracle("deepseek_v3").raw | {"kv_lora_rank": None})
    with pytest.raises(ModelFormatError, match="kv_lora_rank"):
        LatentAttention(config, DictWeights({}), 0)


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_an_8_bit_latent_cache_is_refused(kv_dtype):
    from paceline.config import EngineOptions
    from paceline.engine.build import engine_for

    options = EngineOptions.of(kv_dtype=kv_dtype, kv_blocks=20)
    with pytest.raises(ConfigError, match=f"kv_dtype='{kv_dtype}'.*latent.*kv_dtype='auto'"):
        engine_for(oracle("deepseek_v3").ours, None, options, device=CPU)
