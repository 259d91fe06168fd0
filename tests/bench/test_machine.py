"""What is recorded of the machine."""

import os
from pathlib import Path

import numpy as np
import pytest

from forerun.bench import machine
from tests.bench.doubles import FakeClock


def test_bandwidth_is_the_bytes_of_the_buffer_over_the_fastest_read() -> None:
    clock = FakeClock()
    pauses = iter([0.0, 3.0, 2.0, 4.0])  # by call: start, end, start, end, …

    def ticking() -> float:
        clock.advance(next(pauses))
        return clock()

    found = machine.read_bandwidth(np.zeros((1, 2)), threads=3, num_bytes=1200, repeats=2, clock=ticking)
    assert found.bytes_per_s == 400.0
    assert found.method == "numpy sum of float32 in 3 threads, 0 MB, best of 2"


def test_bandwidth_is_measured_with_torch_where_the_model_runs_on_torch() -> None:
    torch = pytest.importorskip("torch")
    found = machine.read_bandwidth(torch.zeros(1, 2), threads=1, num_bytes=1 << 20, repeats=2)
    assert found.bytes_per_s > 0
    assert found.method == "torch sum of float32 on cpu with 1 threads, 1 MB, best of 2"


def test_the_last_level_cache_is_the_largest_that_the_system_names(tmp_path: Path) -> None:
    for name, size in {"index0": "32K", "index2": "1024K", "index3": "32M", "index4": "junk"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(size + "\n")
    assert machine.last_level_cache_bytes(tmp_path) == 32 << 20
    assert machine.last_level_cache_bytes(tmp_path / "none") is None


def test_hardware_and_versions_are_plain_values() -> None:
    hardware = machine.hardware("cpu")
    assert hardware["cpu"]
    assert hardware["cores"] == os.cpu_count()
    assert hardware["gpu"] is None
    found = machine.versions()
    assert found["python"].startswith("3.")
    assert "numpy" in found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_grows_with_what_is_held_and_the_process_ages() -> None:
    before = machine.memory()["resident"]
    held = np.ones(64 << 20, dtype=np.uint8)
    after = machine.memory()
    assert before is not None
    assert after["resident"] is not None
    assert after["peak"] is not None
    assert after["resident"] - before > held.nbytes // 2
    assert after["peak"] >= after["resident"]
    age = machine.process_age_s()
    assert age is not None
    assert 0 < age < 1e6
