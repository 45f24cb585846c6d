# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A row of logits as the kernels see it: where it is read, scores, keys that order tokens, weights that add up exactly.

A key is one int64 a token: the score's bits mapped so that better is larger, above the token id turned round so that
the lowest wins a tie. A set of tokens that is a prefix of the order "best first" is then everything from some key on,
and the best of many programs is one atomic maximum, whichever comes first.

A weight exp(score - best) is an int64 in units of 2^-44. Integers add up to the same sum in every order, so sums may be
split over programs and gathered by atomic additions and still not depend on the batch or on scheduling.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.device import columns

COLUMNS = tl.constexpr(columns.COLUMNS)
FLAGS = tl.constexpr(columns.FLAGS)
TEMPERATURE = tl.constexpr(columns.TEMPERATURE)
EDITED = tl.constexpr(columns.PENALISED | columns.BIASED | columns.MASKED)

LOWEST = tl.constexpr(-(1 << 63))
"""Below the key of every token: nothing found yet."""
NOT_A_NUMBER = tl.constexpr((1 << 63) - 1)
"""Above the key of every token: some logit of the row is NaN."""
MOST = tl.constexpr(3.4028234663852886e38)
UNIT = tl.constexpr(17592186044416.0)
"""Units of weight in 1."""
ID_MASK = tl.constexpr(0x7FFFFFFF)


@triton.jit
def parameter(table, seat, COLUMN: tl.constexpr):
    """An integer parameter of a seat."""
    return tl.load(table + seat * COLUMNS + COLUMN)


@triton.jit
def real(table, seat, COLUMN: tl.constexpr):
    """A real parameter of a seat, float64."""
    return tl.load(table + seat * COLUMNS + COLUMN).to(tl.float64, bitcast=True)


@triton.jit
def is_edited(flags, row_masked, row, ROW_MASKS: tl.constexpr):
    """Whether the edit kernel wrote this row: then it is read from there."""
    edited = (flags & EDITED) != 0
    if ROW_MASKS:
        edited = edited | (tl.load(row_masked + row) != 0)
    return edited


@triton.jit
def load_logits(logits, stride, edited, from_edited, row, tokens, width, EDITS: tl.constexpr):
    """Logits of some tokens of a row as float32, -inf beyond the vocabulary."""
    inside = tokens < width
    at = row.to(tl.int64)
    if EDITS:
        if from_edited:
            x = tl.load(edited + at * width + tokens, mask=inside, other=float("-inf"))
        else:
            x = tl.load(logits + at * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(logits + at * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    return x


@triton.jit
def scaled(x, temperature):
    """Scores: logits / temperature (float32, rounded once), finite where the logit is above -inf."""
    return tl.minimum(tl.maximum(tl.div_rn(x, temperature), -MOST), MOST)


@triton.jit
def ordered(x):
    """float32 -> int32 that ascends with it; -0 and 0 are one."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return tl.where(bits < 0, bits ^ ID_MASK, bits)


@triton.jit
def key_of(score, token):
    return (ordered(score).to(tl.int64) << 32) | (token ^ ID_MASK).to(tl.int64)


@triton.jit
def token_of(key):
    return (key & ID_MASK).to(tl.int32) ^ ID_MASK


@triton.jit
def score_of(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ ID_MASK, bits).to(tl.float32, bitcast=True)


@triton.jit
def weight(gap):
    """exp(-gap) in units of weight, for gaps >= 0: the exponential of native/sampler.cpp where that does not fuse."""
    x = tl.maximum(-gap, -86.0)
    shifted = x * 1.44269504 + 12582912.0  # rounds to a whole number
    n = shifted - 12582912.0
    x = n * -0.693359375 + x
    x = n * 2.12194440e-4 + x
    y = x * 1.393378354e-3 + 8.363269443e-3
    y = y * x + 4.166646371e-2
    y = y * x + 1.666657644e-1
    y = y * x + 0.5
    y = y * x * x + x
    # The whole number stands in the low bits of `shifted`: moved up, it is what the exponent lacks.
    bits = (y + 1.0).to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return (bits.to(tl.float32, bitcast=True) * UNIT).to(tl.int64)
