"""What the kernels of a repeated step read and write, on the device. A step of G groups runs several times by itself;
each time a group has one row, or one and those of the draft that the device found for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.device.lookup import LOOK_BACK, MOST_DRAFTED

IDLE = -3
"""In place of a token, or of how many drafts were accepted: the group did not run this time."""
ROUND = 3
"""Values of a round before its tokens: drafts accepted (or IDLE), drafted, and how many tokens had matched."""

_LEVELS = (LOOK_BACK + 1) * MOST_DRAFTED


@dataclass(frozen=True, slots=True)
class RepeatInputs:
    """Filled by the host once for all times; views of `data`, int64."""

    data: Tensor
    seats: Tensor
    """[G]; -1: padding."""
    ends: Tensor
    """[G] the first position that the group must not write: from there on it rests."""
    levels: Tensor
    """[LOOK_BACK + 1, MOST_DRAFTED] how likely each token of a draft is to be reached and accepted where so many tokens
    matched, as a level (lookup.HIGHEST); 0: it is not drafted. A level never rises along a draft."""
    time: Tensor
    """[1] how often the step has run."""

    @staticmethod
    def size(groups: int) -> int:
        return 2 * groups + _LEVELS + 1

    @staticmethod
    def over(data: Tensor) -> RepeatInputs:
        groups = (len(data) - _LEVELS - 1) // 2
        return RepeatInputs(data, data[:groups], data[groups:2 * groups],
                            data[2 * groups:-1].view(LOOK_BACK + 1, MOST_DRAFTED), data[-1:])


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was found for each group, int32."""

    tokens: Tensor
    """[G, most]."""
    levels: Tensor
    """[G, most] how likely each is to be reached and accepted (lookup.HIGHEST); never rising."""
    found: Tensor
    """[G] how many of those count."""
    matched: Tensor
    """[G] how many tokens before them equal those at the text's end; -1: they were not looked up."""
    taken: Tensor
    """[G] how many have rows in this step."""

    @staticmethod
    def of(groups: int, most: int, device: torch.device) -> Drafts:
        assert most <= MOST_DRAFTED
        return Drafts(*torch.zeros((2, groups, most), dtype=torch.int32, device=device),
                      *torch.zeros((3, groups), dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class RepeatRows:
    """The R rows of one time, as model and sampler read them. Padding: slot -1, seat -1."""

    tokens: Tensor
    """[R] int64."""
    rope_positions: Tensor
    """[R] int64."""
    slots: Tensor
    """[R] int64, of one cache group."""
    positions: Tensor
    """[R] int64, of what is sampled."""
    seats: Tensor
    """[R] int32."""
    parents: Tensor
    """[R] int32: the row above in its group; -1: it is the first."""
    offsets: Tensor
    """[G + 1] int32: each group's first row. Written, as `parents`, where there are drafts."""

    @staticmethod
    def of(rows: int, groups: int, device: torch.device) -> RepeatRows:
        tokens, rope_positions, slots, positions = torch.zeros((4, rows), dtype=torch.int64, device=device)
        seats, parents = torch.full((2, rows), -1, dtype=torch.int32, device=device)
        offsets = torch.zeros(groups + 1, dtype=torch.int32, device=device)
        return RepeatRows(tokens, rope_positions, slots, positions, seats, parents, offsets)
