"""Packing keeps GGUF's blocks bit for bit, and what is quantised on load is better than plain rounding."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from forerun.backends.cpu import reference
from forerun.backends.cpu.native import load_native
from forerun.backends.cpu.packing import Kind, choose_kind, pack_matrix, q4_k_to_q4_1
from forerun.models.tensorfile import RawTensor

NATIVES = [load_native(), reference]


def random_rows(num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, num_columns)).astype(np.float32)


def stored(kind: str, values: np.ndarray) -> RawTensor:
    return RawTensor(quantize(values, GGMLQuantizationType[kind]), kind, values.shape)


@pytest.mark.parametrize("native", NATIVES, ids=["compiled", "numpy"])
@pytest.mark.parametrize("shape", [(16, 32), (1, 32), (17, 64), (83, 96), (250, 320)])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_a_file_keep_their_values_to_the_bit(kind: str, shape: tuple[int, int], native: object) -> None:
    tensor = stored(kind, random_rows(*shape))
    rows, columns = np.arange(shape[0]), np.arange(shape[1])
    matrix = pack_matrix(native, tensor, Kind[kind], row_map=rows, column_map=columns)
    assert np.array_equal(matrix.to_float32(), tensor.to_float32())


@pytest.mark.parametrize("kind", list(Kind))
def test_the_compiled_packing_equals_its_numpy_twin(kind: Kind) -> None:
    values = random_rows(53, 64)
    tensor = RawTensor(values, "F32", values.shape)
    rows = np.asarray([5, -1, *range(40), -1, 52])
    if kind is Kind.Q4_0:
        tensor = stored("Q4_0", values)
    a, b = (pack_matrix(_Mixed(native), tensor, kind, row_map=rows, column_map=np.arange(64)) for native in NATIVES)
    assert np.array_equal(a.to_float32(), b.to_float32())
    assert np.array_equal(a.to_float32()[[1, 42]], np.zeros((2, 64)))


class _Mixed:
    """One twin's packing after the compiled quantisation."""

    def __init__(self, native: object) -> None:
        self.pack = native.pack  # type: ignore[attr-defined]
        self.quantise = NATIVES[0].quantise


def test_columns_can_be_spread_over_padding() -> None:
    values = random_rows(20, 24)
    columns = np.full(32, -1)
    columns[:12], columns[16:28] = np.arange(12), np.arange(12, 24)
    tensor = RawTensor(values, "F32", values.shape)
    matrix = pack_matrix(load_native(), tensor, Kind.BF16, row_map=np.arange(20), column_map=columns)
    got = matrix.to_float32()
    np.testing.assert_allclose(got[:, columns >= 0], values, rtol=2**-8)
    assert not got[:, columns < 0].any()


def test_q4_k_becomes_q4_1_with_the_same_quants_and_rounded_scales() -> None:
    generator = np.random.default_rng(1)
    data = generator.integers(0, 256, size=(6, 2 * 144), dtype=np.uint8)
    for start in (0, 144):  # the two scales of a super-block, kept finite
        halves = generator.uniform(0.001, 0.1, size=(6, 2)).astype(np.float16)
        data[:, start : start + 4] = halves.view(np.uint8)
    expected = dequantize(data, GGMLQuantizationType.Q4_K)
    got = dequantize(q4_k_to_q4_1(data), GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(got, expected, atol=float(np.abs(expected).max()) * 2**-10)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0])
def test_the_search_for_a_scale_beats_rounding_to_nearest(kind: Kind) -> None:
    values = random_rows(64, 256, seed=2)
    errors = []
    for native in NATIVES:  # the numpy twin rounds, the compiled one searches
        blocks = np.empty((64, 8 * (34 if kind is Kind.Q8_0 else 20)), dtype=np.uint8)
        native.quantise(int(kind), values, blocks)
        errors.append(np.square(dequantize(blocks, GGMLQuantizationType[kind.name]) - values).mean())
    searched, rounded = errors
    assert searched < (0.95 if kind is Kind.Q4_1 else 1.0) * rounded


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-20, 60000.0])
def test_a_constant_block_keeps_its_value(kind: Kind, value: float) -> None:
    values = np.full((1, 32), value, dtype=np.float32)
    blocks = np.empty((1, 34 if kind is Kind.Q8_0 else 20), dtype=np.uint8)
    load_native().quantise(int(kind), values, blocks)
    np.testing.assert_allclose(dequantize(blocks, GGMLQuantizationType[kind.name]), values, rtol=2e-3, atol=1e-7)


def test_kinds_become_what_the_table_says() -> None:
    assert choose_kind("Q4_1", "auto") is Kind.Q4_1
    assert choose_kind("Q6_K", "auto") is Kind.Q8_0
    assert choose_kind("Q4_K", "auto") is Kind.Q4_1
    assert choose_kind("BF16", "auto") is Kind.BF16
    assert choose_kind("F32", "q8") is Kind.Q8_0
    assert choose_kind("Q8_0", "q4") is Kind.Q4_1
    assert choose_kind("Q4_0", "bf16") is Kind.BF16


def test_the_demo_file_is_packed_without_a_second_rounding() -> None:
    from forerun.models.load import load_checkpoint

    checkpoint = load_checkpoint("smollm2-135m")
    for name in ("layers.0.q", "layers.7.down", "embed"):
        tensor = checkpoint.tensor(name)
        rows, columns = np.arange(tensor.shape[0]), np.arange(tensor.shape[1])
        matrix = pack_matrix(load_native(), tensor, Kind[tensor.kind], row_map=rows, column_map=columns)
        assert np.array_equal(matrix.to_float32(), tensor.to_float32())
