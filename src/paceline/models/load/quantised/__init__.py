"""Safetensors whose matrices are in few bits: AWQ, GPTQ, compressed-tensors, bitsandbytes' int8, outlier columns."""
