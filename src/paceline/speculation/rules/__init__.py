"""Verification rules, one thought a file; paceline.speculation.verify lists them by name."""
