"""Models by name: the catalogue, what is on this machine, and how the rest gets here. Nothing of it needs torch."""
