"""The native CPU kernels: C++ under native/, built when Paceline is installed. Everything runs without them."""

from paceline.kernels.cpu.backend import NativeKernels
from paceline.kernels.cpu.drafting import DraftKernels
from paceline.kernels.cpu.library import HOW_TO_BUILD, load, require

__all__ = ["HOW_TO_BUILD", "DraftKernels", "NativeKernels", "load", "require"]
