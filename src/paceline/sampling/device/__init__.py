"""The sampling pipeline of a device: request state in its tables, tokens without a host round trip.

`state` seats the running requests; a backend samples, or, where it has no kernels for it, `sampler` does.
"""
