"""Triton kernels for CUDA; tested on the CPU through Triton's interpreter. Importing this needs no Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from paceline.kernels.triton.backend import TritonKernels


def load(deterministic: bool, device: torch.device) -> TritonKernels:
    """The backend for a CUDA device (or, with TRITON_INTERPRET=1, for tests on the CPU)."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ConfigError("The CUDA kernels need Triton, which comes with torch's CUDA builds for Linux: install such "
                          "a build, or run on the CPU with device='cpu'.") from error
    from paceline.kernels.triton.backend import TritonKernels

    return TritonKernels(deterministic, device)
