"""Trained draft heads: small networks that read the target's hidden states and draft its next tokens."""
