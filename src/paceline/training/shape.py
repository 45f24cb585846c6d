"""The shape of the head to train, from the options and the target's."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.heads.config import HeadConfig
from paceline.training.networks.llama import LlamaShape
from paceline.training.options import TrainOptions


def default_taps(kind: str, layers: int) -> tuple[int, ...]:
    """Early, middle and late; the last state of all where a head sees one."""
    if kind in ("dspark", "eagle3"):
        return tuple(sorted({min(2, layers), layers // 2, max(0, layers - 3)}))
    return (layers,)


def choose_taps(options: TrainOptions, target: ModelConfig) -> tuple[int, ...]:
    taps = options.taps or default_taps(options.kind, target.num_layers)
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= target.num_layers:
        raise ConfigError(f"--taps are layers from 0 to {target.num_layers}, ascending, got "
                          f"{','.join(map(str, taps))}.")
    return taps


def shaped_like(options: TrainOptions, head: HeadConfig) -> TrainOptions:
    """With the shape of a head that is trained further, where nothing else was said."""
    layers = head.num_layers if options.kind == "dspark" else None
    return replace(options, taps=options.taps or head.taps, layers=options.layers or layers,
                   intermediate=options.intermediate or head.intermediate_size or None)


def going_on(config: HeadConfig, head: HeadConfig) -> HeadConfig:
    """`config`, where it is this head that is trained further: others publish heads with attention, norms and positions
    unlike their target's, and the weights mean nothing under those of the target."""
    return replace(config, num_heads=head.num_heads, num_kv_heads=head.num_kv_heads, head_dim=head.head_dim,
                   norm_eps=head.norm_eps, rope_theta=head.rope_theta)


def draft_shape(options: TrainOptions, target: ModelConfig) -> LlamaShape:
    """Of a draft model: the target's width, few layers."""
    if target.latent is not None or target.rope.kind != "default" or target.learned_positions:
        raise ConfigError("Draft models are made for targets with plain rotary positions and attention, and this one "
                          "has others: train a head instead.")
    return LlamaShape(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size,
        num_layers=options.layers or max(1, target.num_layers // 5), num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads, head_dim=target.head_dim,
        intermediate_size=options.intermediate or target.intermediate_size, norm_eps=target.norm_eps,
        rope_theta=target.rope.theta, positions=target.max_position_embeddings, tied=target.tie_word_embeddings)


def head_config(options: TrainOptions, target: ModelConfig, draft_vocab: int, mask: int | None, tokenizer: str | None,
                name: str) -> HeadConfig:
    if target.latent is not None:
        raise ConfigError("Heads for targets with latent attention (MLA) are not trained yet: name another --model.")
    attends = options.kind in ("dspark", "eagle3", "mtp")
    kind = {"dspark": {"block_size": options.block, "mask_token_id": mask, "markov_rank": options.markov_rank,
                       "confidence_head": True, "confidence_head_with_markov": options.markov_rank > 0,
                       "num_layers": options.layers or 2, "speculative_tokens": options.block},
            "eagle3": {"speculative_tokens": options.depth}, "mtp": {"speculative_tokens": options.depth},
            "medusa": {"heads": options.depth, "speculative_tokens": options.depth},
            "hydra": {"heads": options.depth, "speculative_tokens": options.depth}}[options.kind]
    shape = {"num_heads": target.num_heads, "num_kv_heads": target.num_kv_heads, "head_dim": target.head_dim,
             "intermediate_size": options.intermediate or target.intermediate_size,
             "window": options.prompt_tokens + options.new_tokens} if attends else {}  # no text is longer
    return HeadConfig(kind=options.kind, hidden_size=target.hidden_size, vocab_size=target.vocab_size,
                      draft_vocab_size=draft_vocab, taps=choose_taps(options, target), norm_eps=target.norm_eps,
                      rope_theta=target.rope.theta, max_position_embeddings=target.max_position_embeddings,
                      whole_vocabulary=options.whole and draft_vocab < target.vocab_size, tokenizer=tokenizer,
                      target=name, **shape, **kind)  # type: ignore[arg-type]
