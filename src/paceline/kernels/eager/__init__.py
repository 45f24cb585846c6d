"""The eager backend: plain torch, the fastest calls we know. Same maths as the reference, bits depend on the batch."""

from paceline.kernels.eager.backend import EagerKernels

__all__ = ["EagerKernels"]
