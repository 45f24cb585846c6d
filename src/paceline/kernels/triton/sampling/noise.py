# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Sampling noise on the device: Philox4x32-10 bits and standard Gumbel noise, bit for bit those of native/noise.h.

Logarithms are written out in float64, whose additions, multiplications and divisions round alike everywhere as long as
no compiler fuses them: every kernel that calls these is launched with enable_fp_fusion=False.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quad_words(quad, seed, position):
    """Target bits (purpose 0) of the four tokens 4 * quad + 0..3 at one position: four uint32 tensors like `quad`.

    `seed` and `position` are int64 scalars; the seed's 64 bits count, whatever its sign.
    """
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    w0 = quad.to(tl.uint32)
    # Scalars until they meet the tokens: half of the first two rounds is done once.
    w1 = position.to(tl.uint32)
    w2 = tl.full((), 0, tl.uint32)
    w3 = tl.full((), 0, tl.uint32)
    for _ in tl.static_range(10):
        high_a = tl.umulhi(w0, 0xD2511F53)
        high_b = tl.umulhi(w2, 0xCD9E8D57)
        low_a = w0 * 0xD2511F53
        low_b = w2 * 0xCD9E8D57
        w0 = high_b ^ w1 ^ key0
        w1 = low_b
        w2 = high_a ^ w3 ^ key1
        w3 = low_a
        key0 = key0 + 0x9E3779B9
        key1 = key1 + 0xBB67AE85
    return w0, w1, w2, w3


@triton.jit
def token_bits(first, seed, position, BLOCK: tl.constexpr):
    """Target bits [BLOCK] uint32 of tokens first .. first + BLOCK - 1; `first` and BLOCK are multiples of four."""
    w0, w1, w2, w3 = quad_words(first // 4 + tl.arange(0, BLOCK // 4), seed, position)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def natural_log(x):
    """Logarithm of normal positive float64 numbers, to about 1e-12 of itself."""
    # x = m * 2^e with m between the roots of 1/2 and 2; then log m = 2 artanh((m - 1) / (m + 1)).
    bits = x.to(tl.int64, bitcast=True)
    e = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = (bits - (e << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * (1.0 / 17.0) + 1.0 / 15.0
    for i in tl.static_range(7):
        series = series * z + 1.0 / (13 - 2 * i)
    return e.to(tl.float64) * 0.69314718055994530942 + 2.0 * s * series


@triton.jit
def gumbel(bits):
    """Standard Gumbel noise, float32, of uint32 bits: larger bits, smaller noise."""
    v = bits.to(tl.float32)
    v = v + 0.5
    v = v * 2.3283064365386962890625e-10
    v = tl.minimum(v, 0.999999940395355224609375)
    # v is a multiple of 2^-33, so 1 - v is exact.
    e = (-natural_log(1.0 - v.to(tl.float64))).to(tl.float32)
    return (-natural_log(e.to(tl.float64))).to(tl.float32)
