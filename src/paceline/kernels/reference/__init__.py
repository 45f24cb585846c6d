"""The reference backend: torch ops arranged so that every reduction has one fixed order. The oracle of the rest."""

from paceline.kernels.reference.backend import ReferenceKernels

__all__ = ["ReferenceKernels"]
