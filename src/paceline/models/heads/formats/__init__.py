"""Checkpoints of heads: which formats there are, read into one form and written in one."""
