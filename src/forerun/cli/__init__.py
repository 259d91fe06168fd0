"""The command line: one module a command. Modules here import nothing heavy until a command runs."""

from forerun.cli.app import main

__all__ = ["main"]
