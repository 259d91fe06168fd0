"""The pool of threads under a cpu session: crowded cores, many passes, the end of a session, forked children."""

import gc
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from forerun.backends.base import Feed
from forerun.backends.cpu import CpuSession
from forerun.backends.cpu.native import load_native
from forerun.models.load import load_checkpoint
from tests.backends.session_suite import as_numpy
from tests.families import save_hf

TEXT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]

pytestmark = [
    pytest.mark.skipif(load_native().instruction_sets() == ["numpy"], reason="the numpy twin has no threads"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    save_hf("llama", folder, dtype="bfloat16")
    return folder


def session_of(model: Path, num_threads: int) -> CpuSession:
    return CpuSession(load_checkpoint(str(model)), num_threads=num_threads)


def logits(session: CpuSession, widths: list[int]) -> np.ndarray:
    """Feed TEXT again and again, `widths` tokens at a time; return the logits of every row."""
    seq, found = session.open(), []
    for i, width in enumerate(widths):
        tokens = [TEXT[(i + j) % len(TEXT)] for j in range(width)]
        found.append(as_numpy(session.extend([Feed(seq, tokens, width)]).logits))
    session.release(seq)
    return np.concatenate(found)


def num_threads_running() -> int:
    return len(os.listdir("/proc/self/task"))


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in Linux's /proc")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def test_more_threads_than_cores_and_a_busy_neighbour_change_no_bit(model: Path) -> None:
    widths = [1, 5, 17, 2, 1, 8]
    expected = logits(session_of(model, 1), widths)
    crowded = session_of(model, 3 * (os.cpu_count() or 1) + 1)
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        for _ in range(3):
            assert np.array_equal(logits(crowded, widths), expected)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


@needs_proc
def test_sessions_share_one_team_and_a_thousand_passes_add_no_thread(model: Path) -> None:
    session = session_of(model, 3)
    before = num_threads_running()
    seq = session.open()
    for i in range(1000):
        if session.length(seq) == 100:
            session.keep(seq, 0)
        session.extend([Feed(seq, [TEXT[i % len(TEXT)]], 1)])
    others = [session_of(model, 3), session.subset([0])]
    for other in others:
        other.extend([Feed(other.open(), TEXT[:5], 1)])
    assert num_threads_running() == before
    del session, other, others
    gc.collect()
    assert num_threads_running() == before


def test_two_threads_that_run_models_at_once_take_turns(model: Path) -> None:
    expected = logits(session_of(model, 1), [1, 5, 9, 2])
    sessions = [session_of(model, 3) for _ in range(4)]

    def run(session: CpuSession) -> list[np.ndarray]:
        return [logits(session, [1, 5, 9, 2]) for _ in range(20)]

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(run, sessions):
            assert all(np.array_equal(rows, expected) for rows in found)


@needs_proc
def test_threads_of_a_session_at_rest_sleep(model: Path) -> None:
    session = session_of(model, 3)
    logits(session, [1, 2])
    time.sleep(0.05)  # longer than the pool spins
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    del session


@needs_fork
@pytest.mark.parametrize("asleep", [True, False])
def test_a_forked_child_that_drops_the_session_ends(model: Path, asleep: bool) -> None:
    """The child has none of the pool's threads: to join them, or to lock what they held, would be to wait for ever."""
    holder = [session_of(model, 3)]
    logits(holder[0], [4])
    if asleep:
        time.sleep(0.05)

    def child() -> None:
        holder.clear()
        gc.collect()

    assert ends_well(child)
    assert len(logits(holder[0], [4])) == 4


@needs_fork
def test_a_forked_child_that_uses_the_session_gets_threads_of_its_own(model: Path) -> None:
    session = session_of(model, 3)
    expected = logits(session, [4, 1])

    def child() -> None:
        assert np.array_equal(logits(session, [4, 1]), expected)

    assert ends_well(child)
    assert np.array_equal(logits(session, [4, 1]), expected)


@needs_fork
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_multiprocessing_are_not_held_up_by_a_session(model: Path, method: str) -> None:
    session = session_of(model, 3)
    logits(session, [2])
    with multiprocessing.get_context(method).Pool(2) as workers:
        assert workers.map_async(abs, [-1, 2, -3]).get(timeout=60) == [1, 2, 3]
    assert len(logits(session, [2])) == 2


def ends_well(work: Callable[[], None]) -> bool:
    """Fork a child that does `work`; return whether it ended without an error within some seconds."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False
