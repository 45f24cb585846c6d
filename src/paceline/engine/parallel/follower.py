"""Follower: a rank that has no requests, only its share of the model and calls to follow."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.engine.parallel.calls import Call, Described, Share, receive
from paceline.parallel.communicator import Communicator

NextCall = Callable[[], tuple[Call, Described] | None]


@torch.inference_mode()
def follow(share: Share, ranks: Communicator, next_call: NextCall) -> None:
    """Make rank 0's calls until there are no more (None)."""
    while (told := next_call()) is not None:
        call, tensors = told
        call.carry_out(share, receive(ranks, tensors, share.device))
