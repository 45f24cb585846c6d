"""The whole drafter interface: begin, propose, observe, release. And what a drafter is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import RequestError
from paceline.kernels.device.lookup import DeviceDraft
from paceline.speculation.exploration import Allowance
from paceline.speculation.models import DraftModels
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter asks of the engine and what kind of drafts it makes."""

    taps: tuple[int, ...] = ()
    """Layers whose incoming hidden states it reads, in Observation.hidden; the number of layers: what leaves the last
    one. On a device, steps of its sequences are launched kernel by kernel."""
    samples: bool = False
    """Drafts are sampled (trees carry q); otherwise they are deterministic."""
    runs_model: bool = False
    """A proposal takes forward passes of some model: it is dear, less so for many sequences together."""
    host: bool = True
    """Runs on the host and needs the last token there."""
    lookup: DeviceDraft | None = None
    """Its drafts are looked up in the text in this way, or made by this head, or by whichever of both promises more,
    which a device can do by itself where there is one."""
    probes: bool = False
    """Its trees hold nodes that are there to be observed, not to be accepted: take or leave them whole."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a drafter may propose for one sequence in one step: no deeper, no more nodes. Both at least 1.

    `price` and `pace` say what it costs, in tokens, for drafters that weigh it themselves; 0 while unknown. A node is
    worth proposing if it is accepted with a probability above `price`; a second spent drafting costs `pace` tokens.
    """

    depth: int
    nodes: int
    price: float = 0.0
    pace: float = 0.0
    allowance: Allowance | None = None
    """What drafters made of others may spend on trying one that should not pay; None: as they like."""


@dataclass(slots=True)
class Observation:
    """What came of a step: the tokens now committed and, of the draft's nodes, those accepted."""

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    draft: DraftTree | None = None
    """The draft as it was verified; None: the step had none."""
    chosen: list[int] = field(default_factory=list)
    """What the target itself samples after the last committed token (chosen[0]) and after each node of the draft
    (chosen[1 + node]), accepted or not: a window of probe nodes reads its harvest here. Coupled rule only."""
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """By layer, for those that Needs.taps names: [n, h] of the n tokens that the step computed and that stand, the last
    of them the one before the newest. Of a prompt that is its last chunk: who needs all of a text, whatever was cached
    of it, keeps it beside the cache, as trained heads do (engine/execute/target_heads.py)."""
    overlaps: Sequence[float] = ()
    """Of each sampled token that was tested: the sum of min(p, q). Rules that read q only."""


class Drafter(Protocol):
    name: str
    needs: Needs

    def begin(self, sequence: DraftedSequence) -> None:
        """A sequence starts; its prompt is in `tokens`."""

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        """For each sequence a tree within its budget, continuing its `tokens`; None: nothing to say. Called with all
        sequences that share this drafter object and are to be drafted now."""

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        """New tokens of the sequence are final (already in `tokens`). Of steps that it was not asked about it may hear
        together, before it is asked again."""

    def release(self, sequence: DraftedSequence) -> None:
        """The sequence is gone; forget it."""


class WeighsItself:
    """Base of drafters made of others that ask some of them only where that should win more than it costs."""

    weighed = 0.0
    """Seconds that the last round spent so: who asks the drafter has no need to weigh them again."""


def _no_build(wish: Any) -> Drafter:
    raise RequestError("Drafters made of other drafters can only be built by an engine.", "speculation")


def _no_fingerprint() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What the engine lends to the builders of drafters."""

    vocab_size: int
    shared: MutableMapping[str, Any] = field(default_factory=dict)
    """What the drafters of all requests of an engine hold in common (a global suffix tree, an open datastore, a
    loaded draft model), by a name its builder chooses. Lives as long as the engine."""
    build: Callable[[Any], Drafter] = _no_build
    """Makes the drafter of a sub-wish (a method's name or a dict with a "method"), for drafters made of others."""
    models: DraftModels | None = None
    """The models that drafters can run."""
    fingerprint: Callable[[], str | None] = _no_fingerprint
    """Of the target's tokenizer (Tokenizer.fingerprint); None: it has none."""
