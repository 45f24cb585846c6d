"""What a CUDA card has, what fits it, and why something does not: the same words for the engine and for `doctor`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.config import GIB
from paceline.errors import ConfigError

LEAST = (8, 0)
"""Compute capability that Triton's kernels and bfloat16 need."""
LEAST_FP8 = (8, 9)
SPARE = GIB
"""Kept for captured steps and what a step computes with."""
BYTES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class Card:
    """One device. Memory in bytes."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int

    def __str__(self) -> str:
        return (f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]}, {self.free / GIB:.1f} of "
                f"{self.total / GIB:.1f} GiB free)")

    def parameters(self, dtype: torch.dtype) -> int:
        """How many weights fit with some room for a cache."""
        return max(0, (self.free - SPARE) * 9 // 10) // dtype.itemsize

    @property
    def fits(self) -> str:
        """What model sizes fit now, for people."""
        return (f"models of up to about {self.parameters(torch.bfloat16) / 1e9:.1f} billion parameters in bfloat16 or "
                f"float16, {self.parameters(torch.float32) / 1e9:.1f} in float32")


def inspect_card(device: torch.device) -> Card:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return Card(properties.name, (properties.major, properties.minor), int(total), int(free))


def unsupported(card: Card, kernels: str = "auto", dtype: torch.dtype = torch.bfloat16,
                kv_dtype: str = "auto") -> str | None:
    """Why a card cannot run what was asked for, with what it can; None: it can."""
    if card.capability < LEAST and kernels in ("auto", "triton"):
        return (f"{card}: the CUDA kernels need compute capability {LEAST[0]}.{LEAST[1]} or more (A100, RTX 30 and "
                "later). Use kernels='eager' with dtype='float16' or 'float32', or device='cpu'.")
    if card.capability < LEAST and dtype == torch.bfloat16:
        return f"{card}: bfloat16 needs compute capability 8.0 or more. Use dtype='float16' or 'float32'."
    if kv_dtype == "fp8" and card.capability < LEAST_FP8:
        return (f"{card}: kv_dtype='fp8' needs compute capability {LEAST_FP8[0]}.{LEAST_FP8[1]} or more (RTX 40, L4, "
                "H100 and later). Use kv_dtype='auto' or 'float16'.")
    return None


def check_card(card: Card, kernels: str, dtype: torch.dtype, kv_dtype: str) -> None:
    reason = unsupported(card, kernels, dtype, kv_dtype)
    if reason is not None:
        raise ConfigError(reason)


def check_weights(card: Card, parameters: int, dtype: torch.dtype) -> None:
    """Refuse weights that cannot fit before any of them is read."""
    if parameters > card.parameters(dtype):
        raise ConfigError(no_room(card, parameters, dtype))


def no_room(card: Card, parameters: int, dtype: torch.dtype) -> str:
    name = BYTES.get(dtype, str(dtype))
    half = " dtype='bfloat16' takes half." if dtype == torch.float32 else ""
    return (f"The weights take {parameters * dtype.itemsize / GIB:.1f} GiB in {name} and there is {card}, which holds "
            f"{card.fits}.{half} Free memory on the card, choose a smaller model, or use device='cpu'.")
