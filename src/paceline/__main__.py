"""`python -m paceline` is the command `paceline`."""

import sys


def run() -> int:
    try:
        from paceline.cli.main import main
    except ModuleNotFoundError as missing:
        # The engine runs from a bare source tree; only the command line needs these two.
        if missing.name not in ("typer", "rich"):
            raise
        print(f"error: the command line needs the package {missing.name}: pip install typer rich", file=sys.stderr)
        return 2
    return main()


if __name__ == "__main__":
    sys.exit(run())
