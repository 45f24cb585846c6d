"""Paceline beyond one process."""
