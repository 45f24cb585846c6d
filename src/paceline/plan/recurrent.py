"""Layers whose memory of a text is a state of fixed size: gated delta nets, Mamba-2 and short convolutions."""

from __future__ import annotations

from paceline.models.fields import Fields
from paceline.plan.shape import Mixer


def gated_delta(read: Fields, hidden: int) -> Mixer:
    """Qwen3-Next: each value head has a matrix of key by value features; a convolution of width 4 goes before."""
    keys = read.count("linear_num_key_heads") * read.count("linear_key_head_dim")
    heads, size = read.count("linear_num_value_heads"), read.count("linear_value_head_dim")
    values, width = heads * size, read.count("linear_conv_kernel_dim", 4)
    mixed = 2 * keys + values
    parameters = hidden * (mixed + values + 2 * heads) + mixed * width + 2 * heads + size + values * hidden
    return Mixer(parameters, "recurrent", state=heads * read.count("linear_key_head_dim") * size + mixed * (width - 1))


def mamba(read: Fields, hidden: int) -> Mixer:
    """Mamba-2, in the words of Granite and Falcon-H1, of Nemotron-H, or its own."""
    heads, size = _either(read, "mamba_n_heads", "mamba_num_heads", "num_heads"), _either(
        read, "mamba_d_head", "mamba_head_dim", "head_dim")
    state, groups = _either(read, "mamba_d_state", "ssm_state_size", "state_size"), _either(
        read, "mamba_n_groups", "n_groups")
    width = _either(read, "mamba_d_conv", "conv_kernel")
    inner = heads * size
    mixed = inner + 2 * groups * state
    parameters = hidden * (inner + mixed + heads) + mixed * (width + 1) + 3 * heads + inner + inner * hidden
    return Mixer(parameters, "recurrent", state=inner * state + mixed * (width - 1))


def short_convolution(read: Fields, hidden: int) -> Mixer:
    """LFM2: a gated convolution over the last few tokens."""
    width = read.count("conv_L_cache", 3)
    return Mixer(4 * hidden * hidden + hidden * width, "recurrent", state=hidden * (width - 1))


def _either(read: Fields, *keys: str) -> int:
    """The first of several names for one thing; an error names the first."""
    return read.count(next((key for key in keys if read.get(key) is not None), keys[0]))
