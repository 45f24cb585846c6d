"""Placement: who samples a sequence's tokens; a device, with the host's word on what is masked or without it, or the
host."""

from __future__ import annotations

from collections.abc import Callable

from paceline.engine.rows.sample_rows import masked_by_host
from paceline.engine.schedule.sequence import Placement, Sequence
from paceline.engine.schedule.step import RowGroup


def place(seq: Sequence, make_room: Callable[[Sequence], bool], drafted: bool, lookup: int = 0) -> None:
    """Say who samples a new sequence's tokens, and how far a device may run ahead of the host meanwhile. `make_room`:
    whether the device has room for what that takes. `drafted`: there is a drafter; `lookup`: whose drafts a device can
    look up by itself (Sequence.lookup)."""
    if not samples_on_device(seq) or not make_room(seq):
        seq.placement = Placement.HOST
        return
    waits = drafted and (masked_by_host(seq) or seq.emitter.scored or not lookup)
    seq.placement = _on_device(seq, waits)
    seq.lookup = lookup if drafted and seq.placement is Placement.FREE else 0


def place_without_drafter(seq: Sequence) -> None:
    """It has lost its drafter, for whose sake alone the device may have waited for the host."""
    if seq.placement is not Placement.HOST:
        seq.placement = _on_device(seq, waits=False)


def _on_device(seq: Sequence, waits: bool) -> Placement:
    """`waits`: the host has to know its tokens before there can be another step of it."""
    if waits or seq.request.params.interrupt is not None:
        return Placement.DEVICE
    if masked_by_host(seq):
        return Placement.AHEAD
    return Placement.UNMASKED if seq.emitter.scored else Placement.FREE


def samples_on_device(seq: Sequence) -> bool:
    """Whether a device can sample the tokens of this sequence, if the host says before each what it masks. Traces tell
    what every sample was made of, masks are lifted by the host alone, and what is chosen among several by their scores
    must not depend on who computed these: a device rounds them to float32."""
    params = seq.request.params
    masked = seq.state.allowed is not None or masked_by_host(seq)
    lifted = params.on_empty_support == "unmasked" and masked
    return not (params.trace or params.chosen_at_end or lifted)


def decided_on_device(group: RowGroup) -> bool:
    """Whether a device can decide all that a group yields: nothing, one token, or what becomes of a draft under the
    coupled rule. Further samples have no seat yet, and a prompt's scores and its embedding are the host's."""
    seq, request, rows = group.seq, group.seq.request, group.sampled_rows
    of_prompt = request.params.prompt_logprobs is not None or request.params.pooling is not None
    if of_prompt and group.start < seq.prompt_len:
        return False
    if not rows:
        return True
    if seq.placement is Placement.HOST or group.siblings or request.max_tokens == 0:
        return False
    if group.draft is None:
        return rows == 1
    return rows == len(group.draft) + 1 == len(group.tokens) and seq.rule == "coupled"
