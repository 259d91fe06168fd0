"""Files that are whole or not there: written under another name in the same folder, then renamed."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from forerun.errors import DownloadError

Progress = Callable[[str, int, int | None], None]  # what is done, how much of it, how much in all if known: bytes


def no_progress(label: str, done: int, total: int | None) -> None:
    """A progress callback that does nothing."""


def disk_error(name: str, folder: Path, error: OSError) -> DownloadError:
    """Return the error of a download of `name` that can't be written to `folder`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(f"no space left in {folder} for {name}: free some or choose another cache folder")
    return DownloadError(f"can't write {name} to {folder}: {error.strerror or error}")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that becomes `path` when the block ends and vanishes if it fails. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path`, or nothing. Raises OSError."""
    with atomic_file(path) as file:
        file.write(data)
