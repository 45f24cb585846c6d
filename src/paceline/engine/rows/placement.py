"""Who draws: a device, behind the host's word or without it, or the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.engine.rows.sample_rows import masked_by_host
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.step import RowGroup

if TYPE_CHECKING:
    from paceline.engine.execute.graphs.seats import DeviceSeats


def place(seq: Sequence, seats: DeviceSeats | None, drafted: bool) -> None:
    """Say who draws a new sequence's tokens, and whether a device may run ahead of the host meanwhile."""
    seq.on_device = samples_on_device(seq) and (seats is None or seats.make_room(seq))
    seq.runs_ahead = seq.on_device and not drafted and seq.request.params.interrupt is None
    seq.free_running = seq.runs_ahead and not masked_by_host(seq)


def samples_on_device(seq: Sequence) -> bool:
    """Whether a device can draw the tokens of this sequence, if the host says before each what it bars. Traces tell
    what every draw was made of, masks are lifted by the host alone, and what is chosen among several by their scores
    must not depend on who computed these: a device rounds them to float32."""
    params = seq.request.params
    masked = seq.state.allowed is not None or masked_by_host(seq)
    lifted = params.on_empty_support == "unmasked" and masked
    return not (params.trace or params.chosen_at_end or lifted or seq.adapter)


def decided_on_device(group: RowGroup) -> bool:
    """Whether a device can decide all that a group yields: nothing, one token, or what becomes of a draft under the
    coupled rule. Further samples have no seat yet, and a prompt's scores are the host's."""
    seq, request = group.seq, group.seq.request
    draws = len(group.tokens) - group.logits_from
    if request.params.prompt_logprobs is not None and group.start < seq.prompt_len:
        return False
    if not draws:
        return True
    if not seq.on_device or group.siblings or request.max_tokens == 0:
        return False
    if group.draft is None:
        return draws == 1
    return draws == len(group.draft) + 1 == len(group.tokens) and seq.rule == "coupled"
