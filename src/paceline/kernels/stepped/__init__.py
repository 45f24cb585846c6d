"""The device path in plain torch on the CPU: to test and to debug what the engine does with a device."""

from paceline.kernels.stepped.backend import SteppedKernels

__all__ = ["SteppedKernels"]
