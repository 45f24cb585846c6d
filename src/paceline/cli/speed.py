"""How quickly answers came, in a line for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.request import RequestOutput
    from paceline.speculation.stats import SpeculationStats


def speed(outs: Sequence[RequestOutput], seconds: float) -> str:
    """Of one call: all tokens over all of its time, and how they were drafted."""
    tokens = sum(len(completion.token_ids) for out in outs for completion in out.outputs)
    parts = [f"{tokens} tokens"]
    if tokens and seconds > 0:
        parts.append(f"{tokens / seconds:.1f} tok/s")
    found = drafting([out.speculation for out in outs if out.speculation is not None])
    if found is not None:
        parts.append(found)
    if len(outs) == 1 and outs[0].metrics is not None and outs[0].metrics.ttft is not None:
        parts.append(f"first after {outs[0].metrics.ttft:.2f} s")
    return " · ".join(parts)


def drafting(stats: Sequence[SpeculationStats]) -> str | None:
    """Tokens a step, by which method, and whose drafts were taken; None: nobody speculated."""
    if not stats:
        return None
    steps = sum(one.cycles + one.plain for one in stats)
    tokens = sum(one.emitted + one.plain for one in stats)
    methods = sorted({one.method for one in stats})
    takers = sorted({origin.drafter for one in stats for origin in one.provenance if origin.drafter} - {*methods})
    by = ", ".join(methods) + (f": {', '.join(takers)}" if takers else "")
    failed = sorted({one.failure for one in stats if one.failure})
    return f"{tokens / steps if steps else 1.0:.2f} tokens a step ({by})" + "".join(f" · {one}" for one in failed)
