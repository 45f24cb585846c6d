"""The command line. Importing it must stay cheap: torch and the engine are imported inside the commands."""
