"""Triton kernels of the sampler: from logits to tokens, log-probabilities and verdicts, all on the device."""
