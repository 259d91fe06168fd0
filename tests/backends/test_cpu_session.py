"""The cpu backend is a Session to the bit, and computes what its numpy twin and the torch backend compute."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.backends.base import Feed, Session
from forerun.backends.cpu import CpuSession, reference
from forerun.backends.cpu import session as session_module
from forerun.backends.cpu.native import load_native
from forerun.backends.torch import TorchSession
from forerun.errors import OptionError
from forerun.models.load import load_checkpoint
from tests.backends.session_suite import SessionSuite, as_numpy
from tests.families import FAMILIES, NUM_TOKENS, save_hf, write_gguf

INSTRUCTION_SETS = load_native().instruction_sets()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of every family, weights in bf16, and GGUF files of one of them."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        model = save_hf(family, folder / family, dtype="bfloat16")
        if family in ("llama", "gemma3"):
            for quant in ("Q8_0", "Q4_0", "Q4_1"):
                write_gguf(family, model, folder / f"{family}-{quant}.gguf", quant=quant)
    save_hf("llama", folder / "llama with one key head", dtype="bfloat16", num_key_value_heads=1)
    return folder


def session_of(folder: Path, name: str, **settings: Any) -> CpuSession:
    return CpuSession(load_checkpoint(str(folder / name)), **settings)


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, NUM_TOKENS, length).tolist()  # type: ignore[no-any-return]


def rows(session: Session, text: list[int], widths: list[int]) -> np.ndarray:
    """Return the logits of every row of `text`, fed `widths` tokens at a time."""
    seq, at, found = session.open(), 0, []
    for width in widths:
        found.append(as_numpy(session.extend([Feed(seq, text[at : at + width], width)]).logits))
        at += width
    assert at == len(text)
    session.release(seq)
    return np.concatenate(found)


class CpuSuite(SessionSuite):
    name, dtype = "llama", "auto"

    @pytest.fixture
    def session(self, folder: Path) -> Session:
        return session_of(folder, self.name, dtype=self.dtype, num_threads=2)


class TestCpuLlamaBf16(CpuSuite):
    pass


class TestCpuPortable(CpuSuite):
    name, dtype = "gemma3", "q8"

    @pytest.fixture(params=INSTRUCTION_SETS[1:])
    def session(self, folder: Path, request: pytest.FixtureRequest) -> Session:
        return session_of(folder, self.name, dtype=self.dtype, num_threads=1, instruction_set=request.param)


class TestCpuGemma2Q8(CpuSuite):
    name, dtype = "gemma2", "q8"


class TestCpuQwen3Q4(CpuSuite):
    name, dtype = "qwen3", "q4"


class TestCpuGguf(CpuSuite):
    name = "llama-Q4_0.gguf"


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_weights_give_the_logits_of_the_torch_backend(family: str, folder: Path) -> None:
    text = tokens(0, 41)
    expected = rows(TorchSession(load_checkpoint(str(folder / family)), dtype="fp32", device="cpu"), text, [41])
    got = rows(session_of(folder, family), text, [5, 1, 35])
    assert np.abs(got - expected).mean() < 2e-3 * np.abs(expected).mean()  # keys and values are fp16 here
    np.testing.assert_allclose(got, expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("dtype", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_compute_what_the_numpy_twin_computes(
    family: str, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tokens(1, 23)
    kernels = session_of(folder, family, dtype=dtype)
    got = rows(kernels, text, [7, 1, 15])
    twin = type("Twin", (), {name: getattr(reference, name) for name in ("pack", "Model", "instruction_sets")})
    twin.quantise = staticmethod(load_native().quantise)  # type: ignore[attr-defined]  # the very same blocks
    twin.pack = staticmethod(reference.pack)  # type: ignore[attr-defined]
    twin.instruction_sets = staticmethod(reference.instruction_sets)  # type: ignore[attr-defined]
    twin.PAGE = reference.PAGE  # type: ignore[attr-defined]
    monkeypatch.setattr(session_module, "load_native", lambda: twin)
    expected = rows(session_of(folder, family, dtype=dtype), text, [23])
    off = np.abs(got - expected)
    if dtype == "bf16":
        np.testing.assert_allclose(got, expected, atol=2e-2, rtol=0)
    else:  # a last bit may round an activation to its neighbour, 1/127 away, and what comes after it follows
        assert np.median(off) < 3e-2 * np.abs(expected).mean()
    assert off.mean() < 6e-2 * np.abs(expected).mean()


@pytest.mark.parametrize("name", ["llama-Q8_0.gguf", "llama-Q4_0.gguf", "llama-Q4_1.gguf", "gemma3-Q8_0.gguf"])
def test_gguf_blocks_give_nearly_the_logits_of_their_dequantised_weights(name: str, folder: Path) -> None:
    text = tokens(2, 30)
    expected = rows(TorchSession(load_checkpoint(str(folder / name)), dtype="fp32", device="cpu"), text, [30])
    got = rows(session_of(folder, name), text, [30])
    assert np.abs(got - expected).mean() < 0.05 * np.abs(expected).mean()  # int8 activations


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(("name", "dtype"), [("llama", "bf16"), ("gemma2", "q8"), ("gemma3", "q4"), ("phi3", "q8")])
def test_a_row_has_the_same_bits_at_any_width_with_any_threads_and_instructions(
    name: str, dtype: str, instruction_set: str, folder: Path
) -> None:
    text = tokens(3, 131)
    expected = rows(session_of(folder, name, dtype=dtype, num_threads=1), text, [1] * 131)
    for threads in (1, 2):
        session = session_of(folder, name, dtype=dtype, num_threads=threads, instruction_set=instruction_set)
        for widths in ([131], [2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 39], [64, 1, 64, 2], [1, 63, 33, 34]):
            assert np.array_equal(rows(session, text, widths), expected)


@pytest.mark.parametrize("length", [1, 126, 127, 128, 129, 255, 257, 600])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_segments_of_positions_change_no_bit(name: str, length: int, folder: Path) -> None:
    text = tokens(5, length + 40)
    alone = session_of(folder, name, num_threads=1)
    alone.max_len = 1000  # longer than these models were made for
    expected = rows(alone, text, [1] * len(text))[length:]
    parents = [-1, *range(39)]
    wide = [-1, -1, 0, *range(2, 39)]  # a row beside the chain: all after it lie a slot further on
    for threads in (1, 2):
        session = session_of(folder, name, num_threads=threads)
        session.max_len = 1000
        for width in (1, 16, 17, 40):
            seq = session.open()
            session.extend([Feed(seq, text[:length])])
            pieces = [text[at : min(at + width, length + 40)] for at in range(length, length + 40, width)]
            got = [as_numpy(session.extend([Feed(seq, piece, len(piece))]).logits) for piece in pieces]
            assert np.array_equal(np.concatenate(got), expected)
        for tree, fed in ((parents, text[length:]), (wide, [text[length], 7, *text[length + 1 :]][:40])):
            seq = session.open()
            session.extend([Feed(seq, text[:length])])
            got_tree = as_numpy(session.extend([Feed(seq, fed, 40, tree)]).logits)
            along = got_tree if tree is parents else np.delete(got_tree, 1, axis=0)
            assert np.array_equal(along, expected[: len(along)])


@pytest.mark.parametrize("length", [112, 117, 125, 126, 127, 128, 245, 255, 383])
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama with one key head"])
def test_a_small_tree_over_the_edge_of_a_segment_changes_no_bit(name: str, length: int, folder: Path) -> None:
    """Threads share out the segments of a few rows; keys of the tree that count in one may lie in the one before."""
    text = tokens(6, length + 14)
    alone = session_of(folder, name, num_threads=1)
    alone.max_len = 1000
    expected = rows(alone, text, [1] * len(text))[length:]
    fed = [text[length], 7, 9, *text[length + 1 :]][:16]
    parents = [-1, -1, 1, 0, *range(3, 15)]
    for threads in (1, 2):
        session = session_of(folder, name, num_threads=threads)
        session.max_len = 1000
        seq = session.open()
        session.extend([Feed(seq, text[:length])])
        for _ in range(20):  # any thread may come to any segment first
            got = as_numpy(session.extend([Feed(seq, fed, 16, parents)]).logits)
            session.keep(seq, length)
            assert np.array_equal(np.delete(got, [1, 2], axis=0), expected)


def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(folder: Path) -> None:
    session = session_of(folder, "gemma2", dtype="q8", num_threads=2)
    texts = [tokens(seed, 70) for seed in range(5)]
    expected = [rows(session, text, [70]) for text in texts]
    seqs = [session.open() for _ in texts]
    at = [0] * 5
    generator = np.random.default_rng(0)
    while min(at) < 70:
        feeds, parts = [], []
        for i in generator.permutation(5)[: generator.integers(1, 6)]:
            width = min(int(generator.integers(1, 12)), 70 - at[i])
            if width:
                feeds.append(Feed(seqs[i], texts[i][at[i] : at[i] + width], width))
                parts.append(expected[i][at[i] : at[i] + width])
                at[i] += width
        if feeds:
            assert np.array_equal(as_numpy(session.extend(feeds).logits), np.concatenate(parts))


def test_an_instruction_set_that_is_not_here_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="portable"):
        session_of(folder, "llama", instruction_set="sse9")
    monkeypatch.setenv("FORERUN_ISA", "portable")
    assert session_of(folder, "llama").instruction_set == "portable"


def test_a_dtype_that_this_backend_has_not_is_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match="q4"):
        session_of(folder, "llama", dtype="fp16")


def test_this_path_needs_neither_torch_nor_transformers(folder: Path) -> None:
    code = f"""
import sys
from forerun import LLM, SamplingParams
llm = LLM({str(folder / "llama-Q8_0.gguf")!r}, drafter="ngram")
llm.generate([1, 2, 3], SamplingParams(max_tokens=5))
assert not {{"torch", "transformers"}} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
