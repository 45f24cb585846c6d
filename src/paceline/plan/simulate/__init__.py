"""A fleet on paper: the real scheduler, cache and router, a virtual clock, and costs of steps in place of a model."""
