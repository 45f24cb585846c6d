"""Rotary position embeddings: one table of cosines and sines, a function of the position alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from paceline.config import available_memory
from paceline.errors import ConfigError, ModelFormatError
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.fields import Fields, shown

FILLED_AT_ONCE = 4096
"""Rows of a table that are computed together."""


class Rope:
    """cos and sin for every position below `max_model_len`, float32, in the form Kernels.rotate takes. The table has
    its place for all of them and never moves: captured steps read it. On a CPU its rows are computed when a position
    near them is first asked for, and memory that nobody wrote to is not taken: of a context of 131,072 tokens few
    engines see the end."""

    def __init__(self, config: ModelConfig, max_model_len: int, device: torch.device,
                 factors: torch.Tensor | None = None) -> None:
        """`factors` [rotary_dim / 2] divide the frequencies (kind "factors": the rope_freqs.weight of a
        GGUF file)."""
        self._frequencies, self._amplitude = inverse_frequencies(config, max_model_len)
        if factors is not None:
            self._frequencies = self._frequencies / factors.float().cpu()
            if not _usable(self._frequencies):
                raise _unusable(config.rope)
        try:
            self._cos, self._sin = (torch.empty((max_model_len, 1, config.rope.rotary_dim), device=device)
                                    for _ in range(2))
        except RuntimeError as problem:
            raise _too_long(max_model_len) from problem
        self._filled = 0
        self._on_demand = device.type == "cpu"
        if not self._on_demand:
            self._fill(max_model_len)

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each pair once: [max_model_len, rotary_dim / 2]."""
        if 4 * self._cos.nbytes > available_memory():  # both, and what they are computed from
            raise _too_long(len(self._cos))
        return self._rows(0, len(self._cos))

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[N] int64 -> cos, sin, each [N, 1, rotary_dim]."""
        if self._on_demand and self._filled < len(self._cos) and len(positions):
            self._fill(int(positions.max()) + 1)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _fill(self, rows: int) -> None:
        while self._filled < min(rows, len(self._cos)):
            first, last = self._filled, min(self._filled + FILLED_AT_ONCE, len(self._cos))
            cos, sin = self._rows(first, last)
            self._cos[first:last, 0] = torch.cat((cos, cos), dim=-1).to(self._cos.device)
            self._sin[first:last, 0] = torch.cat((-sin, sin), dim=-1).to(self._sin.device)
            self._filled = last

    def _rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(first, last, dtype=torch.float32)[:, None] * self._frequencies
        return angles.cos() * self._amplitude, angles.sin() * self._amplitude


def inverse_frequencies(config: ModelConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] float32 and the factor on cos and sin.

    The "dynamic" kind is defined by the longest sequence seen so far, so the same row would get other bits in other
    company. Here the length is the engine's max_model_len (if beyond the model's own), the same for every request:
    up to the original length and at full length it is what the definition says.
    """
    rope = config.rope
    scale = _KINDS.get(rope.kind)
    if scale is None:
        raise ModelFormatError(f"rope_type {rope.kind!r} is not supported; supported are "
                               f"{', '.join(sorted(set(_KINDS) - {'none'}))}.")
    try:
        frequencies, amplitude = scale(config, max_model_len)
        if 0 < rope.theta < math.inf and 0 < amplitude < math.inf and _usable(frequencies):
            return frequencies, amplitude
    except ModelFormatError:
        raise
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as problem:  # the last by torch
        raise _unusable(rope) from problem
    raise _unusable(rope)


def _too_long(positions: int) -> ConfigError:
    return ConfigError(f"There is no memory for the rotations of {positions:,} positions, which the model's files "
                       "claim or max_model_len asks for: set max_model_len to fewer.")


def _usable(frequencies: torch.Tensor) -> bool:
    return bool((frequencies.isfinite() & (frequencies >= 0)).all())


def _unusable(rope: RopeConfig) -> ModelFormatError:
    return ModelFormatError(f"rope_type {rope.kind!r} with rope_theta {rope.theta} and {shown(dict(rope.settings))} "
                            "gives rotations that are no numbers: the model's config is broken, download it again.")


def _powers(rope: RopeConfig, theta: float | None = None) -> torch.Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    return (theta or rope.theta) ** exponents


def _default(config: ModelConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(config.rope), 1.0


def _linear(config: ModelConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(config.rope) / _number(config, "factor"), 1.0


def _dynamic(config: ModelConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    rope = config.rope
    factor = _number(config, "factor")
    stretch = max(max_model_len, config.max_position_embeddings) / config.max_position_embeddings
    base = rope.theta * (factor * stretch - (factor - 1)) ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return 1.0 / _powers(rope, base), 1.0


def _llama3(config: ModelConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    factor = _number(config, "factor")
    low, high = _number(config, "low_freq_factor"), _number(config, "high_freq_factor")
    original = _number(config, "original_max_position_embeddings")
    plain = 1.0 / _powers(config.rope)
    turns = original * plain / (2 * math.pi)
    """How often a feature turns within the original context: many -> keep, few -> slow down, blend in between."""
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / factor + blend * plain, 1.0


def _yarn(config: ModelConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    rope = config.rope
    original = _number(config, "original_max_position_embeddings", float(config.max_position_embeddings))
    factor = _number(config, "factor", config.max_position_embeddings / original)

    def feature(turns: float) -> float:
        """The (fractional) feature that turns this often within the original context."""
        return rope.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = feature(_number(config, "beta_fast", 32.0))
    high = feature(_number(config, "beta_slow", 1.0))
    if rope.settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    slow = ramp.clamp(0, 1)
    plain = 1.0 / _powers(rope)
    return plain / factor * slow + plain * (1 - slow), _yarn_amplitude(rope.settings, factor)


def _yarn_amplitude(settings: Any, factor: float) -> float:
    def amplitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    read = Fields(settings, "rope scaling 'yarn'")
    if read.get("attention_factor") is not None:
        return read.positive("attention_factor")
    mscale, over = read.number("mscale", 0.0), read.number("mscale_all_dim", 0.0)
    return amplitude(mscale) / amplitude(over) if mscale and over else amplitude(1.0)


def _longrope(config: ModelConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """One list of divisors for texts within the original length, another for longer ones. As with "dynamic", what
    decides is the engine's length, the same for every request."""
    settings = config.rope.settings
    original = _number(config, "original_max_position_embeddings")
    key = "long_factor" if max_model_len > original else "short_factor"
    divisors, pairs = settings.get(key), config.rope.rotary_dim // 2
    if not isinstance(divisors, list) or len(divisors) != pairs:
        raise ModelFormatError(f"rope scaling 'longrope' needs a list of {pairs} numbers for {key}, got "
                               f"{shown(divisors)}.")
    factor = _number(config, "factor", config.max_position_embeddings / original)
    amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return (1.0 / (torch.tensor(divisors, dtype=torch.float32) * _powers(config.rope)),
            _number(config, "attention_factor", amplitude))


_KINDS: dict[str, Callable[[ModelConfig, int], tuple[torch.Tensor, float]]] = {
    "default": _default, "none": _default, "factors": _default, "linear": _linear, "dynamic": _dynamic,
    "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
}


def _number(config: ModelConfig, key: str, default: float | None = None) -> float:
    return Fields(config.rope.settings, f"rope scaling {config.rope.kind!r}").positive(key, default)
