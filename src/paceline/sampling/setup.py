"""Setup: what, beside the request, decides the bits of a text."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

LONGEST = 1 << 22
"""Tokens of a context: more would only be written to have somebody run out of memory."""
NOTED = frozenset({"tensor_parallel_size", "version", "torch", "processor", "chat_template"})
"""What is not meant to change a text, and may be where to look if one changed all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Of an engine. Names no files: a trace may go to strangers."""

    model: str = ""
    """Revision of the weights and their config (Checkpoint.revision)."""
    tokenizer: str | None = None
    """Its fingerprint: it cuts texts, finds stop strings and reads structures."""
    eos: str = ""
    """Token ids that end a text, ascending."""
    device: str = "cpu"
    dtype: str = "float32"
    """That the weights were read as, which says how they were rounded before native code packed them, too."""
    kv_dtype: str = "float32"
    quantization: str | None = None
    """Of the native path's weights: "int8" or "blocks"; None: they are floats."""
    kernels: str = ""
    """Which backend computed the logits: bits are promised within one."""
    native_forward: bool = False
    """The whole forward ran in native code, which rounds elsewhere than torch on native kernels."""
    deterministic: bool = True
    """Bits depend on no company. Without it texts are the same up to numerical ties."""
    max_model_len: int = 0
    """Where texts end."""
    built_for: int = 0
    """Positions that the model was built for: more where the cache holds fewer. Some models rotate by it."""
    tensor_parallel_size: int = 1
    """Ranks that held the model: the bits are those of one but where kernels promise none, and with latent attention
    of few heads a rank."""
    chat_template: str | None = None
    """A hash; the prompt's tokens are in the trace already."""
    processor: str = ""
    """The set of instructions, or the card."""
    torch: str = ""
    version: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}

    @classmethod
    def from_dict(cls, found: Any) -> Setup:
        """A ValueError says what is wrong."""
        wanted = {spec.name: type(spec.default) for spec in fields(cls)}
        if not isinstance(found, dict) or set(found) != set(wanted):
            raise ValueError(f"it must be an object with {', '.join(wanted)}")
        for name, kind in wanted.items():
            value = found[name]
            right = value is None or isinstance(value, str) if kind is type(None) else type(value) is kind
            if not right:
                raise ValueError(f"its {name} must be {'text or null' if kind is type(None) else kind.__name__}")
        for name in ("max_model_len", "built_for", "tensor_parallel_size"):
            if not 0 <= found[name] <= LONGEST:
                raise ValueError(f"its {name} must be 0 to {LONGEST}")
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that a trace says otherwise than what is here."""

    field: str
    trace: str
    here: str

    def __str__(self) -> str:
        return f"{self.field}: trace: {self.trace}, here: {self.here}"


def differences(trace: Setup, here: Setup) -> tuple[list[Difference], list[Difference]]:
    """Field by field: those that decide a text, and those worth noting."""
    found = [Difference(spec.name, str(getattr(trace, spec.name)), str(getattr(here, spec.name)))
             for spec in fields(Setup) if getattr(trace, spec.name) != getattr(here, spec.name)]
    return [one for one in found if one.field not in NOTED], [one for one in found if one.field in NOTED]
