"""The C++ kernels on their own: under sanitizers, on another processor, and what their object files let out.

Build folders under build/ are kept, so only what has changed is compiled again.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # cmake may be in the venv
CROSS = "aarch64-linux-gnu-g++"

pytestmark = pytest.mark.slow


def tool(*names: str) -> str:
    """Return the path of the first of these programs that is here; skip the test if none is."""
    for name in names:
        path = shutil.which(name, path=PATH)
        if path is not None:
            return path
    pytest.skip(f"{' or '.join(names)} isn't installed")


def build(folder: str, *options: str, cross: bool = False) -> Path:
    """Compile the kernels and their test program into build/`folder`."""
    cmake = tool("cmake")
    tool(*([CROSS] if cross else [os.environ.get("CXX") or "c++", "g++", "clang++"]))
    target = ROOT / "build" / folder
    where = ["-S", str(ROOT), "-B", str(target), "-DFORERUN_MODULE=OFF", "-DFORERUN_KERNEL_TEST=ON"]
    run(cmake, *where, *options)
    run(cmake, "--build", str(target))
    return target


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_kernels_run_clean_under_address_and_undefined_behaviour_sanitizers() -> None:
    options = ["-DFORERUN_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=-O1"]
    folder = build("sanitize", *options)
    assert "0 failed" in run(str(folder / "kernel_test"), "quick")


def test_neon_has_the_bits_of_the_portable_kernels_under_an_emulator() -> None:
    emulator = tool("qemu-aarch64", "qemu-aarch64-static")
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS}"]
    folder = build("aarch64", *system, "-DCMAKE_EXE_LINKER_FLAGS=-static", cross=True)
    program = str(folder / "kernel_test")
    report = run(emulator, "-cpu", "max", program, "quick")
    assert "on neon equals portable" in report
    assert "0 failed" in report
    without_dot_product = run(emulator, "-cpu", "cortex-a53", program, "sets")
    assert without_dot_product.split() == ["portable"]


def test_the_source_of_an_instruction_set_lets_out_its_table_and_nothing_else() -> None:
    """An inline function of the library that is emitted there may be the copy that the linker keeps, and another
    machine would meet an illegal instruction in it.
    """
    nm = tool("nm")
    folder = build("lint", "-DCMAKE_BUILD_TYPE=Debug", "-DFORERUN_WERROR=ON")  # unoptimised: nothing is inlined away
    objects = sorted(folder.glob("CMakeFiles/forerun_native.dir/**/simd_*.o"))
    assert objects
    for path in objects:
        defined = run(nm, "-C", "--defined-only", "--extern-only", str(path)).splitlines()
        names = [line.split(maxsplit=2)[2] for line in defined]
        table = path.name.split(".")[0].replace("simd", "kernels")
        assert names == [f"forerun::{table}()"], path.name
