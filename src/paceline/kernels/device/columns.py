"""The table of running requests that the kernels read: one row of 64-bit words per seat. Plain numbers, no Triton.

Real parameters are float64 bit patterns, so that one table and one copy hold everything.
"""

from __future__ import annotations

SEED, FLAGS, TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P, REPETITION, PRESENCE, FREQUENCY = range(9)
LISTED = 9
"""How many entries of the seat's list of biased tokens always count."""
LISTED_EARLY = 10
"""How many count while the position is below EARLY_UNTIL: those and the stop tokens that min_tokens keeps out."""
EARLY_UNTIL = 11
LOOKUP = 12
"""How the seat's text is searched for a draft: the shortest n-gram, 256 times the longest, 65536 times the tokens that
may be drafted, and lookup.ALWAYS if so many are wanted wherever something matches. 0: it is not. Or the number of the
head that drafts instead (lookup.HeadDraft)."""
ADAPTER = 13
"""The slot of the seat's adapter, or low_rank.NOBODY."""
COLUMNS = 16

GREEDY, RANKED, NUCLEUS, FLOORED = 1, 2, 4, 8
"""Flags: temperature 0; top-k, top-p, min-p are on (never together with GREEDY)."""
PENALISED, BIASED, MASKED = 16, 32, 64
"""Flags: penalties, the list of biased tokens, the seat's own mask act on the logits."""

EMPTY, NAN = -1, -2
"""In place of a row's token: no token is above -inf; some logit is not a number."""

BINS = 16
"""Windows below a row's best score into which a selection first sorts its tokens."""
