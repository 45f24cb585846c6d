"""What bench, quantize, doctor and the checks on a card share: the machine, a scorer of texts, times of kernels."""
