"""What a person sees: text coloured by the origin of its tokens, notes on stderr, bars while something loads."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from forerun.errors import OptionError
from forerun.models.files import Progress, no_progress
from forerun.types import Source

# Of middling brightness, at least 3.8 to 1 against white and against black; blue and orange look apart to all eyes.
_STYLES: dict[Source, str] = {"draft": "38;5;32", "bonus": "38;5;163", "resample": "38;5;166", "plain": ""}
_MEANINGS: dict[Source, str] = {
    "draft": "drafted and accepted",
    "bonus": "bonus",
    "resample": "resampled",
    "plain": "plain",
}
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def use_color(choice: str, stream: TextIO) -> bool:
    """Say whether `stream` is written to in colour. Raises OptionError."""
    if choice not in ("auto", "always", "never"):
        raise OptionError(f"--color is {choice!r}; expected auto, always or never")
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Writer:
    """Writes an answer as it comes."""

    def __init__(self, stream: TextIO, *, color: bool) -> None:
        self._stream = stream
        self._color = color
        self._is_terminal = stream.isatty()
        self._ends_line = True

    def write(self, spans: Iterable[tuple[str, Source]]) -> None:
        for text, source in spans:
            self._ends_line = text.endswith("\n")
            safe = text.translate(_CONTROLS) if self._is_terminal else text  # a model must not drive the terminal
            self._stream.write(paint(safe, source) if self._color else safe)
        self._stream.flush()

    def end_line(self) -> None:
        """Begin a new line unless one has just begun."""
        if not self._ends_line:
            self._stream.write("\n")
            self._stream.flush()
        self._ends_line = True


class Silence(Writer):
    """Writes nothing: for those who only want the result."""

    def __init__(self) -> None:
        super().__init__(sys.stderr, color=False)

    def write(self, spans: Iterable[tuple[str, Source]]) -> None:
        pass


def paint(text: str, source: Source) -> str:
    """Return text in the colour of its origin; the colour ends with each line."""
    style = _STYLES[source]
    return "\n".join(f"\x1b[{style}m{line}\x1b[0m" if style and line else line for line in text.split("\n"))


def legend() -> str:
    return "colours: " + " · ".join(paint(meaning, source) for source, meaning in _MEANINGS.items())


def note(text: str) -> None:
    """Say something beside the answer."""
    print(text, file=sys.stderr, flush=True)


def print_json(document: Any) -> None:
    """Print a document in one line; what the encoding of stdout lacks is escaped the way of JSON."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(document, ensure_ascii=not is_utf8), flush=True)


def human_size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if size >= 99.5 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _amount(done: int, total: int | None) -> str:
    """Bytes or tensors: nobody has 100,000 tensors."""
    if total is None:
        return ""
    return f"{done} of {total}" if total < 100_000 else f"{human_size(done)} of {human_size(total)}"


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield a progress callback that draws bars on stderr, where that is a terminal, and clears them at the end."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(),
               TextColumn("{task.fields[amount]}"), TimeElapsedColumn())  # fmt: skip
    with Bars(*columns, console=Console(file=sys.stderr), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                for task in tasks.values():
                    bars.update(task, visible=False)
                tasks[label] = bars.add_task(label, total=total, amount="")
            bars.update(tasks[label], completed=done, total=total, amount=_amount(done, total))

        yield show
