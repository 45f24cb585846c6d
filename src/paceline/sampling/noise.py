"""The noise: every random number of a request as a pure function of (seed, position, token, purpose).

Philox4x32 with 10 rounds. No generator has state, so the order of execution, the batch and the scheduling cannot
change a sample. Bits are the same everywhere; `gumbel` is evaluated elementwise by kernels whose result does not
depend on where in an array an element stands (tests/sampling/test_noise.py holds them to it).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

TARGET, PRIVATE_DRAFT, ACCEPT, RESIDUAL, DRAFTER = range(5)
"""Purposes: what noise is for. Different purposes never share bits."""

GUMBEL_MIN, GUMBEL_MAX = -2.8116, 22.8740
"""Bounds of `gumbel` over all 2^32 inputs, rounded outwards."""

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64) * np.arange(10, dtype=np.uint64)[:, None, None]
"""What each of the ten rounds adds to the two halves of the key."""
_MASK, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)
_CHUNK = 1 << 13
"""Counters worked on at once: their temporaries stay in the second-level cache."""

Words = NDArray[np.uint32]


def philox(counter: tuple[Any, Any, Any, Any], key: Any) -> Words:
    """Philox4x32-10: counter words and a 64-bit key, each an int or an [n] array -> [4, n] output words."""
    inputs = [np.asarray(x, dtype=np.uint64).reshape(-1) for x in (*counter, key)]
    n = max(map(len, inputs)) if all(map(len, inputs)) else 0
    out = np.empty((4, n), dtype=np.uint32)
    if 0 < n <= _CHUNK:
        _rounds(inputs, out)
        return out
    for at in range(0, n, _CHUNK):
        _rounds([x if len(x) == 1 else x[at:at + _CHUNK] for x in inputs], out[:, at:at + _CHUNK])
    return out


def _rounds(inputs: list[NDArray[np.uint64]], out: Words) -> None:
    # x holds the words that get multiplied (0 and 2), y the other two (1 and 3): a round is one multiplication of
    # both at once, and halves of the 64-bit products are read through a 32-bit view instead of shifted out. Two
    # buffers take turns, because the low halves of one product live on as y while the next is made.
    c0, c1, c2, c3, key = inputs
    n = out.shape[1]
    x = np.empty((2, n), dtype=np.uint32)
    y = np.empty((2, n), dtype=np.uint32)
    x[0], x[1], y[0], y[1] = c0, c2, c1, c3
    halves = np.empty((2, len(key)), dtype=np.uint64)
    np.bitwise_and(key, _MASK, out=halves[0])
    np.right_shift(key, _SHIFT, out=halves[1])
    products = np.empty((2, 2, n), dtype=np.uint64)
    words = products.view(np.uint32).reshape(2, 2, n, 2)
    even, odd = ((products[i], words[i, ::-1, :, _LOW], words[i, ::-1, :, _HIGH]) for i in (0, 1))
    for i, round_key in enumerate((halves + _WEYL).astype(np.uint32)):
        product, low, high = odd if i & 1 else even
        np.multiply(x, _MULTIPLIERS, out=product)
        np.bitwise_xor(y, round_key, out=x)
        np.bitwise_xor(x, high, out=x)
        y = low
    out[0::2], out[1::2] = x, y


def token_bits(seed: Any, position: Any, token: Any, *, purpose: int = TARGET, level: int = 0,
               cycle: Any = 0) -> Words:
    """The 32 bits of each (seed, absolute position, target token id); arrays broadcast, the result is flat.

    `cycle` is the absolute position where the drafting cycle started; 0 for the target's own samples.
    """
    tokens = np.asarray(token, dtype=np.int64).reshape(-1)
    words = philox((tokens >> 2, position, purpose | level << 8, cycle), seed)
    bits: Words = words[tokens & 3, np.arange(words.shape[1])]
    return bits


def lucky_tokens(seed: int, position: int, width: int, limit: int) -> tuple[NDArray[np.int64], Words]:
    """Tokens below `width` whose target bits are at most `limit`, ascending, and their bits.

    Looks at the whole vocabulary, four tokens to an evaluation of the generator.
    """
    words = philox((np.arange((width + 3) // 4), position, TARGET, 0), seed).T
    quad, lane = (words <= np.uint32(limit)).nonzero()
    tokens = quad * 4 + lane
    inside = tokens < width
    return tokens[inside], words[quad, lane][inside]


def gumbel(bits: Words) -> NDArray[np.float32]:
    """Standard Gumbel noise of each 32-bit word, in float32: larger bits, smaller noise."""
    v = bits.astype(np.float32)
    v += np.float32(0.5)
    v *= np.float32(2.0**-32)
    np.minimum(v, np.float32(1.0 - 2.0**-24), out=v)
    np.negative(v, out=v)
    # torch's logarithms take one path for every element of a contiguous array, its last few included.
    torch.from_numpy(v).log1p_().neg_().log_().neg_()
    return v


def uniform(bits: Words) -> NDArray[np.float32]:
    """A uniform in [0, 1) of each word, exact in float32."""
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def sample_seed(seed: int, index: int) -> int:
    """The 64-bit seed of sample `index` of a request; sample 0 uses the request's own."""
    if index == 0:
        return seed
    words = philox((index, 0, 0xFFFFFFFF, 0), seed)
    return int(words[0, 0]) | int(words[1, 0]) << 32


def scalar_bits(seed: int, position: int, index: int, purpose: int, *, cycle: int, level: int = 0) -> int:
    """The bits of a number that belongs to no token: the `index`-th of its purpose at this position."""
    # The generator in plain integers: for a single number arrays would cost ten times as much.
    x, y = (index >> 2, purpose | level << 8), (position, cycle)
    low, high = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = x[0] * 0xD2511F53, x[1] * 0xCD9E8D57
        x, y = ((b >> 32) ^ y[0] ^ low, (a >> 32) ^ y[1] ^ high), (b & 0xFFFFFFFF, a & 0xFFFFFFFF)
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return (x[0], y[0], x[1], y[1])[index & 3]


def accept_uniform(seed: int, position: int, index: int = 0, *, cycle: int, level: int = 0) -> float:
    """The uniform of an accept test. Accept iff it is < p/q: strict, so that p = 0 never passes."""
    return (scalar_bits(seed, position, index, ACCEPT, cycle=cycle, level=level) >> 8) * 2.0**-24


def residual_uniform(seed: int, position: int, index: int = 0, *, cycle: int, level: int = 0) -> float:
    """The uniform, strictly between 0 and 1, that picks a token from what a rejection left."""
    return (scalar_bits(seed, position, index, RESIDUAL, cycle=cycle, level=level) + 0.5) * 2.0**-32
