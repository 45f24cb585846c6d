"""What a device samples, or has sampled, and the host has not read yet."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.decide.sampled import Sampled
from paceline.engine.execute.graphs.moment import Moment
from paceline.engine.schedule.step import RowGroup
from paceline.kernels.device.repeats import IDLE, ROUND
from paceline.speculation.stats import Round
from paceline.speculation.verify import Verdict

MOST_REPEATS = 16
"""How often a step may be repeated before the host looks."""


class Fetched:
    """Copies of device tensors on the host, under way; the tensors may be overwritten by whatever is launched next."""

    def __init__(self, tensors: Seq[torch.Tensor]) -> None:
        self._copies = [_copy(tensor) for tensor in tensors]
        self.ended = Moment(tensors[0].device)

    def arrays(self) -> list[NDArray[np.int32]]:
        """Waits for the device."""
        self.ended.wait()
        return [copy.numpy() for copy in self._copies]


class RepeatedInFlight:
    """A step that runs several times by itself. Made before the first of them is launched."""

    def __init__(self, repeat: int, device: torch.device) -> None:
        self._repeat = repeat
        self._fetched: Fetched | None = None
        self._drafted = False
        self.began = Moment(device)

    def sampled(self, tokens: torch.Tensor) -> None:
        """They were launched, all of them, and leave their tokens [repeats, groups] int32 here."""
        self._fetched = Fetched([tokens])

    def drafted(self, rounds: torch.Tensor) -> None:
        """The same for a step with drafts, which leaves rounds [repeats, groups, ...] int32 (repeats.ROUND)."""
        self.sampled(rounds)
        self._drafted = True

    def read(self) -> list[Sampled]:
        assert self._fetched is not None
        (found,) = self._fetched.arrays()
        if self._drafted:
            return _joined(found.transpose(1, 0, 2))
        return [Sampled(own if own[-1] != IDLE else own[:own.index(IDLE)]) for own in found.T.tolist()]

    @property
    def ended(self) -> Moment:
        assert self._fetched is not None
        return self._fetched.ended

    @property
    def seconds(self) -> float:
        """How long the device took for one repeat; known when the tokens have been read."""
        return self.began.until(self.ended) / self._repeat


class TokensInFlight:
    """One token for every group that samples."""

    def __init__(self, out: Seq[torch.Tensor], first: Seq[int]) -> None:
        """`out`: tokens [R] and, where somebody asked, scores [R, ...]. `first`: each group's row among them, -1 where
        it samples none."""
        self._fetched = Fetched(out)
        self._first = first
        self.ended = self._fetched.ended

    def read(self) -> list[Sampled]:
        tokens, *scores = self._fetched.arrays()
        found: list[int] = tokens.tolist()
        return [Sampled([]) if row < 0 else Sampled([found[row]], [scores[0][row]] if scores else None)
                for row in self._first]


class VerdictsInFlight:
    """What drafts come to, and one token for groups without one."""

    def __init__(self, out: Seq[torch.Tensor], groups: Seq[RowGroup], rows: int) -> None:
        """`out`: tokens [R], verdicts packed for `rows` groups (kernels.device.operands.Verdicts), and scores [R, ...]
        where somebody asked."""
        self._fetched = Fetched(out)
        self._groups = groups
        self._rows = rows
        self.ended = self._fetched.ended

    def read(self) -> list[Sampled]:
        tokens, packed, *scores = self._fetched.arrays()
        count = self._rows
        accepted, bonus = packed[:2 * count].reshape(2, count)
        texts, rows = packed[2 * count:].reshape(2, count, -1)
        found: list[Sampled] = []
        place = first = 0
        for group in self._groups:
            size = group.sampled_rows
            if not size:
                found.append(Sampled([]))
                continue
            length = int(accepted[place]) + 1
            path = (rows[place, :length] - first).tolist()
            verdict = Verdict(texts[place, :length].tolist(), path, path[1:], bool(bonus[place]))
            found.append(Sampled(verdict.tokens, list(scores[0][rows[place, :length]]) if scores else None,
                                 None if group.draft is None else verdict, tokens[first:first + size].tolist()))
            place += 1
            first += size
        return found


def _joined(rounds: NDArray[np.int32]) -> list[Sampled]:
    """What each group sampled, time after time, until it came to its end. All groups at once: there are many rounds,
    and each is little."""
    accepted = rounds[..., 0]
    ran = accepted != IDLE
    found = rounds[..., ROUND:]
    tokens: list[int] = found[ran[..., None] & (np.arange(found.shape[2]) <= accepted[..., None])].tolist()
    ends = np.where(ran, accepted + 1, 0).sum(1).cumsum().tolist()
    told = rounds[..., [1, 0, 2]].tolist()
    begins = [0, *ends[:-1]]
    return [Sampled(tokens[begin:end], rounds=[Round(*one) for one in own[:count]])
            for begin, end, own, count in zip(begins, ends, told, ran.sum(1).tolist())]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return copy
