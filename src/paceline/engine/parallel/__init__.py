"""A model that several ranks hold together: rank 0 runs the engine, the others follow its calls."""
