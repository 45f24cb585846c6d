"""Rounding a model to few bits: calibration, AWQ's search, the files it writes, and what it costs."""
