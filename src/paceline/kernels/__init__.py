"""Numeric primitives. Importing this package does not import torch: the scheduler reads kernels.groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from paceline.kernels.interface import Kernels


def select(deterministic: bool | None, device: torch.device, wish: str = "auto") -> Kernels:
    """The backend for models written in torch, by name or what suits the device: Triton's on CUDA, whose bits
    do not depend on the batch unless `deterministic` is False; on a CPU the reference where it is True, eager (fast)
    otherwise. "stepped": the reference through the device path, in torch on the CPU."""
    if wish == "auto":
        wish = "triton" if device.type == "cuda" else "reference" if deterministic else "eager"
    if wish == "triton":
        from paceline.kernels.triton import load

        return load(deterministic is not False, device)
    if wish == "reference":
        from paceline.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    if wish == "stepped":
        from paceline.errors import ConfigError
        from paceline.kernels.stepped import SteppedKernels

        if device.type != "cpu":
            raise ConfigError("kernels='stepped' runs on the CPU only: use device='cpu' or kernels='auto'.")
        return SteppedKernels()
    from paceline.kernels.eager import EagerKernels

    return EagerKernels()
