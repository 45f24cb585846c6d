"""The sampling pipeline on a CUDA device: request state in device tensors, tokens without a host round trip.

`state` holds the running requests, `sampler` draws. Nothing here is imported unless a device asks for it: the kernels
need Triton, the package does not.
"""
