"""The rows of a head's passes laid out: as a text goes on, or in lines.

Lines are the paths of a tree that a head drafts, each of which sees the text and its own tokens alone.

Tokens at one depth of a tree share a position and need slots of their own: what is written of the n-th token that the
head reads beyond the text lies at the n-th position behind it, as the rows of a verified tree do. Which slots a line
sees is written down position by position, so that to a kernel it is a text like any other, in blocks of one token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from paceline.engine.schedule.sequence import Sequence
from paceline.kernels.layout import GroupView, Layout


@dataclass(frozen=True, slots=True)
class Line:
    """A sequence's anchor and the drafted tokens below it that the head has read, or is about to read, one a pass."""

    member: int
    """Its sequence's place in the round."""
    places: tuple[int, ...]
    """Physical positions of what is written of them, the anchor first; only the first and the number of them matter
    to heads that write nothing."""


def blocks_layout(starts: Seq[int], rows: int, seqs: Seq[Sequence], table: np.ndarray, block_size: int,
                  window: int | None) -> Layout:
    """A pass over `rows` rows of each sequence, from its position in `starts` on, where the text has its slots."""
    seats = np.array([seq.allocation.seat for seq in seqs], dtype=np.int64)
    places = np.array(starts, dtype=np.int64)[:, None] + np.arange(rows)
    pages = places // block_size
    slots = table[seats[:, None], pages] * block_size + (places - pages * block_size)
    view = GroupView(torch.from_numpy(table[seats, :int(pages.max()) + 1]), torch.from_numpy(slots.reshape(-1)), window)
    return Layout(torch.from_numpy(places.reshape(-1)), list(range(0, len(seqs) * rows + 1, rows)), list(starts),
                  [None] * len(seqs), block_size, [view])


def lines_layout(lines: Seq[Line], seqs: Seq[Sequence], table: np.ndarray, block_size: int,
                 window: int | None) -> Layout:
    """A pass over the last token of each line. `seqs`: by member. `table`: blocks by seat."""
    positions = [line.places[0] + len(line.places) - 1 for line in lines]
    seen = np.zeros((len(lines), max(positions) + 1), dtype=np.int64)
    texts: dict[int, np.ndarray] = {}
    for row, line in zip(seen, lines):
        anchor, blocks = line.places[0], table[seqs[line.member].allocation.seat]
        if line.member not in texts:
            texts[line.member] = _slots(np.arange(anchor), blocks, block_size)
        row[:anchor] = texts[line.member]
        row[anchor:anchor + len(line.places)] = _slots(np.array(line.places), blocks, block_size)
    own = seen[np.arange(len(lines)), positions]
    view = GroupView(torch.from_numpy(seen), torch.from_numpy(own), window)
    return Layout(torch.tensor(positions, dtype=torch.int64), list(range(len(lines) + 1)), positions,
                  [None] * len(lines), 1, [view])


def _slots(places: np.ndarray, blocks: np.ndarray, block_size: int) -> np.ndarray:
    """Of positions; 0 for those whose block is not held any more."""
    pages = blocks[places // block_size].astype(np.int64)
    slots: np.ndarray = np.where(pages > 0, pages * block_size + places % block_size, 0)
    return slots
