"""Numeric primitives. Importing this package does not import torch: the scheduler reads kernels.groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from paceline.kernels.interface import Kernels


def select(deterministic: bool, device: torch.device) -> Kernels:
    """The backend for a device: reference when bits must not depend on the batch, eager (fast) otherwise."""
    if deterministic:
        from paceline.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    from paceline.kernels.eager import EagerKernels

    return EagerKernels()
