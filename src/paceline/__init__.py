"""Paceline: LLM inference with speculative decoding as the first-class citizen."""

__version__ = "0.1.0"
