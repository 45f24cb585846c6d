"""Paceline beyond one process: replicas, routing, streams that move."""
