"""Running the command line: in this process on the toy model, or in one of its own."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import forerun.engine.llm
from forerun.cli import main
from tests.cli import toy

ROOT = Path(__file__).parents[2]


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document in the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORERUN_TARGET", "FORERUN_CACHE", "FORERUN_DEBUG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call `main` with arguments; `stdin` is text or bytes from a pipe, None a terminal."""

    def call(*args: str, stdin: str | bytes | None = None) -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        stream = io.TextIOWrapper(io.BytesIO(data or b""), encoding="utf-8")
        if data is None:
            stream.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stream)
        status = main(args)
        return Result(status, *capsys.readouterr())

    return call


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> toy.SlowSession:
    """Let `LLM` load the toy model, and return its session."""
    monkeypatch.setattr(forerun.engine.llm, "load_model", None)  # to be put back
    monkeypatch.setattr(forerun.engine.llm, "open_session", None)
    return toy.install()


@pytest.fixture
def start() -> Any:
    """Start `forerun` on the toy as a process; those left over are killed."""
    processes: list[subprocess.Popen[bytes]] = []

    def popen(*args: str, env: dict[str, str] | None = None, **settings: Any) -> subprocess.Popen[bytes]:
        command: Sequence[str] = [sys.executable, "-m", "tests.cli.toy", *args]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **(env or {})}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, **settings)
        processes.append(process)
        return process

    yield popen
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()
