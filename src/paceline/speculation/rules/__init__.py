"""Verification rules, one thought per file; paceline.speculation.verify lists them by name."""
