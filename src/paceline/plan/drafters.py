"""What drafters cost, and what they are known to get accepted: a drafter is a small model, or hardly anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from paceline.plan.hardware import Hardware
from paceline.plan.heads import HeadShape, attending, block, chain, networks, thin
from paceline.plan.roofline import Roofline
from paceline.plan.shape import CACHE_BITS, ModelShape
from paceline.plan.speculation import acceptance_of

DRAFT_VOCABULARY = 32_000
HOST_S = 50e-6
"""Seconds a sequence's look-up takes the host."""
NATIVE = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose forward native code can run whole (models.native, which needs torch)."""
DRAFT_CACHE = "its own, in the target's kv_dtype"
_TARGET_CACHE = "the target's: its kv_dtype is the drafter's too"
_PLANES = "planes beside the target's, one entry a token"


@dataclass(frozen=True)
class Drafter:
    """A model as `shape` runs once for every drafted token, a trained head as it says."""

    name: str
    acceptance: float
    """Typical, of what was published; measure your own with --prompts."""
    source: str
    shape: ModelShape | HeadShape | None = None
    dtype: str | None = None
    """Of its weights; None: the target's."""
    cache: str = "none"
    """Where it keeps what it knows of a text, and what must agree with the target."""
    most: int = 64
    """Tokens it can draft, deep."""
    own_weights: bool = True
    """It is a model beside the target, not a part of it."""
    vocab: int | None = None
    """That has to equal the target's; None: it has no choice."""
    on_card: bool = False
    """A card looks its drafts up by itself, as a part of the step that verifies them."""
    wish: Mapping[str, str] | None = None
    """By which an engine is asked for it; None: by its name."""

    def cost(self, hardware: Hardware, dtype: str, kv_dtype: str, batch: int, context: int, k: int) -> float:
        """Seconds to draft K tokens for each of `batch` sequences."""
        if self.shape is None:
            return 0.0 if self.on_card and hardware.kind == "card" else HOST_S * batch
        if isinstance(self.shape, HeadShape):
            return self.shape.seconds(hardware, self.dtype or dtype, kv_dtype, batch, context, k)
        return k * Roofline(self.shape, hardware, self.dtype or dtype, kv_dtype).decode(batch, context)

    def weight_bytes(self, dtype: str) -> float:
        return self.shape.weight_bytes(self.dtype or dtype) if self.shape is not None and self.own_weights else 0.0

    def cache_bytes(self, tokens: int, kv_dtype: str) -> float:
        """Of one sequence."""
        shares = self.shape is None or not self.own_weights
        return 0.0 if shares or self.shape is None else self.shape.cache_bytes(tokens, kv_dtype)

    def disagreements(self, target: ModelShape) -> list[str]:
        """Why it cannot draft for this target, a sentence each."""
        if self.vocab is None or self.vocab == target.vocab:
            return []
        return [f"{self.name} has a vocabulary of {self.vocab} tokens and {target.name} one of {target.vocab}: a draft "
                "model needs the target's own tokenizer; choose one of the same family."]

    def cache_limits(self, kv_dtype: str, hardware: Hardware) -> list[str]:
        """Why its own cache cannot have the target's format, a sentence each. The engine keeps it in a wider one then
        (ModelFiles.load), so that it drafts all the same and takes more than is counted."""
        shape = self.shape
        if not isinstance(shape, ModelShape) or self.vocab is None or CACHE_BITS[kv_dtype] >= 16:
            return []  # heads keep their planes in 16 bits or more
        if "mla" in shape.kinds:
            why = "the latent of MLA is key and value at once and stays in 16 bits or more"
        elif (kv_dtype, hardware.kind) == ("int8", "cpu") and (shape.is_mixture or shape.model_type not in NATIVE):
            why = f"the native CPU path, which alone has int8, does not run {shape.model_type} models whole"
        else:
            return []
        return [f"The cache of {self.name} cannot be in {kv_dtype}: {why}. The engine keeps it in a wider "
                "format, which is not counted here: choose another draft model, or a wider --kv-dtype for both."]


def _some_layers(target: ModelShape, share: float) -> ModelShape:
    """Every so manieth layer, the same share of each kind."""
    count = max(1, round(len(target.layers) * share))
    step = len(target.layers) / count
    return replace(target, layers=tuple(target.layers[int(place * step)] for place in range(count)))


METHODS: Mapping[str, Callable[[ModelShape], Drafter]] = {
    "ngram": lambda target: Drafter("ngram", acceptance_of(1.75, 10), "prompt look-up: 1.75 tokens on Spec-Bench",
                                    on_card=True),
    "suffix": lambda target: Drafter("suffix", acceptance_of(1.82, 10), "as look-ups in a datastore: 1.82 tokens on "
                                     "Spec-Bench; far more where texts repeat"),
    "rest": lambda target: Drafter("rest", acceptance_of(1.82, 10), "1.82 tokens on Spec-Bench"),
    "lookahead": lambda target: Drafter("lookahead", acceptance_of(1.64, 5), "1.64 tokens on Spec-Bench"),
    "auto": lambda target: Drafter("auto", acceptance_of(1.82, 10), "look-ups alone; a trained head adds to it",
                                   on_card=True),
    "medusa": lambda target: Drafter("medusa", acceptance_of(2.31, 4), "2.31 tokens on Spec-Bench, a head a token",
                                     networks(target, 4, False), cache=_PLANES, most=4),
    "hydra": lambda target: Drafter("hydra", acceptance_of(3.26, 4), "3.26 tokens on Spec-Bench, a head a token",
                                    networks(target, 4, True), cache=_PLANES, most=4),
    "eagle1": lambda target: Drafter("eagle1", acceptance_of(3.58, 7), "3.58 tokens on Spec-Bench, with trees",
                                     chain(target, thin(target), target.vocab, 2, False), cache=_PLANES),
    "eagle3": lambda target: Drafter("eagle3", acceptance_of(3.53, 7), "3.53 tokens at K 7, chains, MT-bench",
                                     chain(target, thin(target), DRAFT_VOCABULARY, 3, True), cache=_PLANES),
    "mtp": lambda target: Drafter("mtp", 0.85, "85 to 90 % of the second token (DeepSeek-V3)",
                                  chain(target, attending(target), target.vocab, 2, False), cache=_PLANES),
    "dflash": lambda target: Drafter("dflash", acceptance_of(3.07, 7), "3.07 tokens at block 7, MT-Bench",
                                     block(target, 5, DRAFT_VOCABULARY, 7), cache=_PLANES, most=7),
    "dspark": lambda target: Drafter("dspark", acceptance_of(3.64, 7), "3.64 tokens at block 7, MT-Bench",
                                     block(target, 5, DRAFT_VOCABULARY, 7), cache=_PLANES, most=7),
    "skip": lambda target: Drafter("skip", 0.85, "about 45 % of the layers left out (SWIFT)",
                                   _some_layers(target, 0.55), cache=_TARGET_CACHE, own_weights=False),
    "exit": lambda target: Drafter("exit", 0.65, "a third of the layers (LayerSkip)", _some_layers(target, 1 / 3),
                                   cache=_TARGET_CACHE, own_weights=False),
    "precision": lambda target: Drafter("precision", 0.9, "the same weights in 4 bits", target, dtype="int4",
                                        cache=_TARGET_CACHE),
}
"""Methods of Paceline that cost something of their own; the others are made of these."""
