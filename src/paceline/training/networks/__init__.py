"""Draft heads as torch modules, for training. Parameters have the names of the speculators format."""
