"""A record of one answer on disk, for those who study drafters. What is written survives the death of the process.

    meta.json    settings, versions, totals, each round in short with what the controller decided; `complete` is false
                 until the end. Always whole: it is replaced in one go, at most once a second
    tokens.csv   one row a token, written out after each round

What it does *not* know: how the answer is made. It is handed the pieces of the stream.
"""

import csv
import io
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

from forerun import __version__
from forerun.errors import OptionError
from forerun.models.files import write_atomically
from forerun.types import Output, Piece, SpeculationStats

COLUMNS = ("step", "round", "source", "position", "token_id", "p_target", "p_draft", "logprob")
FILES = ("meta.json", "tokens.csv")
_PACKAGES = ("numpy", "tokenizers", "torch", "transformers")
_REFRESH_S = 1.0


def check_folder(folder: Path) -> None:
    """Raises OptionError where a record can't be written; changes nothing."""
    for name in FILES:
        if (folder / name).exists():
            raise OptionError(f"{folder} holds a record already ({name}); name another folder or remove that one")
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise OptionError(f"can't write a record to {folder}: {above} is not a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise OptionError(f"can't write a record to {folder}: no permission to write in {above}")


class Recorder:
    """Writes the record of one answer: `add` each piece of the stream, the last one included, then `close`.

    The request must ask for log-probabilities.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """`settings` go into meta.json as they are. Raises OptionError."""
        check_folder(folder)
        self._folder = folder
        self._settings = dict(settings)
        self._rounds: list[dict[str, Any]] = []
        self._stats = SpeculationStats()
        self._step = 0
        self._is_complete = False
        self._started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._started_s = self._refreshed_s = perf_counter()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._tokens = (folder / "tokens.csv").open("x", encoding="ascii", newline="")
            self._tokens.write(",".join(COLUMNS) + "\n")
            self._tokens.flush()
            self._write_meta(None)
        except OSError as error:
            raise OptionError(f"can't write a record to {folder}: {error.strerror or error}") from error

    def add(self, piece: Piece) -> None:
        """Write down what one round brought. Raises OSError."""
        rows = io.StringIO()
        writer = csv.writer(rows, lineterminator="\n")
        assert piece.logprobs is not None or not piece.tokens
        for trace, logprob in zip(piece.tokens, piece.logprobs or (), strict=True):
            values = (trace.p_target, trace.p_draft, logprob.logprob)
            numbers = ("" if value is None else repr(value) for value in values)
            writer.writerow((self._step, trace.round, trace.source, trace.position, trace.token_id, *numbers))
            self._step += 1
        self._tokens.write(rows.getvalue())
        self._tokens.flush()
        now = perf_counter()
        if piece.tokens:
            counts = {name: getattr(piece.stats, name) for name in ("proposed", "reached", "accepted", "emitted")}
            one = {"round": piece.tokens[0].round, "end_s": round(now - self._started_s, 6), **counts}
            if piece.decision is not None:
                one["decision"] = piece.decision._asdict()
            self._rounds.append(one)
        self._stats += piece.stats
        self._is_complete = piece.output is not None
        if self._is_complete or now - self._refreshed_s > _REFRESH_S:
            self._write_meta(piece.output)
            self._refreshed_s = now

    def close(self) -> None:
        """End the record; one whose last piece never came stays incomplete. Raises OSError."""
        self._tokens.close()
        if not self._is_complete:
            self._write_meta(None)

    def _write_meta(self, output: Output | None) -> None:
        meta: dict[str, Any] = {
            "complete": output is not None,
            "started_at": self._started_at,
            **self._settings,
            "versions": _versions(),
            "totals": self._stats.as_dict(),
            "rounds": self._rounds,
        }
        if output is not None:
            meta["text"] = output.text
            meta["finish_reason"] = output.finish_reason
            meta["usage"] = {"prompt_tokens": output.prompt_tokens, "completion_tokens": output.completion_tokens}
            meta["timing"] = {"prefill_s": output.prefill_s, "decode_s": output.decode_s}
        write_atomically(self._folder / "meta.json", json.dumps(meta, indent=1).encode())


def _versions() -> dict[str, str]:
    versions = {"forerun": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
