"""The commands together, and what becomes of an error: one line on stderr and an exit status.

Statuses: 0 done, 1 the engine failed, 2 a mistake that the user can mend, 130 Ctrl-C, 141 nobody reads the output.
"""

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from forerun import __version__
from forerun.bench.command import bench
from forerun.cli.chat import chat
from forerun.cli.generate import generate
from forerun.cli.models import models
from forerun.errors import ForerunError, UserError

UsageError = typer.BadParameter.__base__ or typer.BadParameter  # typer exports only the subclass
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(name="forerun", add_completion=False, epilog="FORERUN_DEBUG=1 shows where an error comes from.")
app.command()(generate)
app.command()(chat)
app.command()(bench)
app.add_typer(models)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def _forerun(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """A large language model writes 2 to 4 times faster, and writes the same."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        _prepare()
        command = typer.main.get_command(app)
        with command.make_context("forerun", arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        return _close_stdout(done.exit_code)
    except (Exception, KeyboardInterrupt) as error:
        status, message = _explain(error)
        with suppress(OSError):
            if is_debugging():
                traceback.print_exception(error)
            if message:
                print(f"forerun: error: {' '.join(message.split())}", file=sys.stderr)
        return _close_stdout(status)
    return 0


def is_debugging() -> bool:
    return os.environ.get("FORERUN_DEBUG") == "1"


def _prepare() -> None:
    """Let no library chatter, and no character that the terminal lacks end the program."""
    if sys.stdout is None:  # it was closed before we began
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not is_debugging() and not sys.warnoptions:
        warnings.simplefilter("ignore")
    with suppress(AttributeError):  # a stream that was replaced by something simpler
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]


def _explain(error: BaseException) -> tuple[int, str | None]:
    """Return exit status and message."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return 130, None
    if isinstance(error, BrokenPipeError):
        return 141, None
    if isinstance(error, UsageError):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "forerun"
        return 2, f"{error.format_message()} (see {command} --help)"  # type: ignore[attr-defined]
    if isinstance(error, ForerunError):
        return 2 if isinstance(error, UserError) else 1, str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        advice = "; free some and try again" if error.errno in _NO_SPACE else ""
        return 2, f"{where}{error.strerror or error}{advice}"
    if _is_out_of_memory(error):
        return 2, "out of memory; take a smaller model, another --dtype, fewer --max-tokens or a shorter prompt"
    return 1, f"internal error: {type(error).__name__}: {error}; FORERUN_DEBUG=1 shows where"


def _is_out_of_memory(error: BaseException) -> bool:
    """Torch has an error of its own for a GPU, and only a text for a CPU."""
    texts = ("can't allocate memory", "not enough memory")
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(text in str(error) for text in texts)
    )


def _close_stdout(status: int) -> int:
    """Flush stdout; if that fails, drop what is left of it, so that the interpreter doesn't complain at its end."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())
            os.close(devnull)
        if status == 0:
            status, message = _explain(error)
            print(f"forerun: error: {message}", file=sys.stderr)
    return status
