"""Training of draft heads: answers made by the target itself, its states tapped on the fly, a small network that learns
to foresee them."""
