"""The command line: a command's options and what it does stand together."""

from langevin.cli.main import main

__all__ = ["main"]
