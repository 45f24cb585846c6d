"""Paceline beyond one process: replicas on Ray, routing, streams that move."""
