"""What a model would need and how fast it would be, before it is loaded: see docs/plan.md."""
