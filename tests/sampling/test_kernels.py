"""The compiled twins of laws, masses and draws: equal to the array reference, and the same bits on every processor."""

import numpy as np
import pytest

from forerun.sampling import arrays, kernels, verify
from forerun.sampling import laws as laws_module
from forerun.sampling.streams import Stream
from forerun.types import SamplingParams

pytestmark = pytest.mark.skipif(not kernels.usable(), reason="forerun was installed without its C++ kernels")

SIZES = [1, 2, 15, 16, 17, 255, 256, 257, 5000, 49152]
SETS = kernels._native.instruction_sets() if kernels.usable() else []
TINY = 1e-37  # e^-87, below which the compiled exponential is 0
LAST_U = 1 - 2**-53  # the largest uniform


def normal(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.normal(scale=3, size=size)


def forbidden(generator: np.random.Generator, size: int) -> np.ndarray:
    x = generator.normal(scale=3, size=size)
    x[generator.random(size) < 0.7] = -np.inf
    x[generator.integers(size)] = 1.0
    return x


def flat(generator: np.random.Generator, size: int) -> np.ndarray:
    return np.full(size, -2.5)


def nearly_flat(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.normal(scale=1e-3, size=size)


def one_hot(generator: np.random.Generator, size: int) -> np.ndarray:
    x = np.full(size, -np.inf)
    x[size // 2] = 5.0
    return x


def peaked(generator: np.random.Generator, size: int) -> np.ndarray:
    x = generator.normal(size=size)
    x[size // 3] = 200.0
    return x


def tied(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.integers(-4, 5, size).astype(float)


KINDS = [normal, forbidden, flat, nearly_flat, one_hot, peaked, tied]
SETTINGS = [
    SamplingParams(temperature=temperature, **rest)
    for temperature in (0.1, 0.7, 1.0, 3.0)
    for rest in (
        {}, {"top_p": 1e-9}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.999999}, {"min_p": 0.05}, {"min_p": 1.0},
        {"top_k": 1}, {"top_k": 5}, {"top_k": 5, "top_p": 0.5}, {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
    )
]  # fmt: skip


def rows_of(size: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.stack([kind(generator, size) for kind in KINDS]).astype(np.float32)


def with_vocabulary(size: int) -> list[SamplingParams]:
    return [*SETTINGS, *(SamplingParams(temperature=1.0, top_k=k, top_p=0.9) for k in (size, 2 * size))]


@pytest.mark.parametrize("size", SIZES)
def test_laws_of_the_compiled_twin_equal_the_reference(size: int) -> None:
    x_RV = rows_of(size)
    highest_R = x_RV.max(axis=-1)
    for params in with_vocabulary(size)[:: 1 if size < 10_000 else 3]:
        rows = [params] * len(x_RV)
        got = kernels.laws(x_RV, highest_R, rows)
        expected = laws_module._sampled(x_RV, highest_R, rows)
        assert got.dtype == expected.dtype == np.float32
        for kind, g, e in zip(KINDS, got, expected, strict=True):
            where = f"{kind.__name__}, {params}"
            np.testing.assert_allclose(g.sum(dtype=np.float64), 1.0, rtol=1e-6, err_msg=where)
            assert g.argmax() == e.argmax(), where
            assert np.array_equal(g > TINY, e > TINY), where
            np.testing.assert_allclose(g, e, rtol=1e-6, atol=TINY, err_msg=where)


@pytest.mark.parametrize("size", SIZES)
def test_surplus_of_the_compiled_twin_equals_the_reference(size: int) -> None:
    generator = np.random.default_rng(1)
    p_BLV = generator.dirichlet(np.full(size, 0.3), size=(2, 3)).astype(np.float32)
    q_BLV = generator.dirichlet(np.full(size, 0.3), size=(2, 3)).astype(np.float32)
    q_BLV[0, 1], q_BLV[1, 2] = 0.0, p_BLV[1, 2]
    scale_BL = np.asarray([[1.0, 0.4, 0.0], [0.999, 1e-20, 1.0]])
    got, expected = kernels.surplus(p_BLV, q_BLV, scale_BL), verify.surplus(p_BLV, q_BLV, scale_BL)
    assert got.dtype == expected.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-300)
    assert got[1, 2] == 0.0


def masses(size: int) -> np.ndarray:
    """Laws that aren't normalised: gaps, a single token at either end, denormals, sums far from 1."""
    generator = np.random.default_rng(2)
    rows = [generator.random(size), generator.random(size) * 1e30, generator.random(size) * 1e-30]
    gaps = generator.random(size) * (generator.random(size) < 0.05)
    gaps[generator.integers(size)] = 0.1
    denormal = np.where(generator.random(size) < 0.5, 1e-45, 0.0)
    denormal[size // 2] = 3e-45
    first, last = np.zeros(size), np.zeros(size)
    first[0], last[-1] = 1.0, 1e-40
    falling = 2.0 ** -np.minimum(np.arange(size), 140.0)
    return np.stack([*rows, gaps, denormal, first, last, falling, falling[::-1]]).astype(np.float32)


UNIFORMS = [0.0, 2**-53, 1e-3, 0.25, 0.5, 0.75, 1 - 1e-9, LAST_U]


def by_definition(law: np.ndarray, u: float) -> tuple[int, int]:
    """Return the first and the last token that a draw may give: the running sum passes u, up to rounding."""
    cdf = np.cumsum(law, dtype=np.longdouble)
    slack = cdf[-1] * np.longdouble(1e-13)
    has_mass = np.flatnonzero(law > 0)
    low, high = (int(np.searchsorted(cdf, u * cdf[-1] + shift, side="right")) for shift in (-slack, slack))
    return max(low, int(has_mass[0])), min(high, int(has_mass[-1]))


@pytest.mark.parametrize("size", SIZES)
def test_draws_of_the_compiled_twin_equal_the_reference(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    law_BV = masses(size)
    uniforms = [*UNIFORMS, *np.random.default_rng(3).random(20)]
    for u in uniforms:
        u_B = np.full(len(law_BV), u)
        got = kernels.draw(law_BV, u_B)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_native", None)
            expected = verify.draw(law_BV, u_B)
        assert got.dtype == expected.dtype == np.int64
        for law, *drawn in zip(law_BV, got.tolist(), expected.tolist(), strict=True):
            low, high = by_definition(law, u)
            for token in drawn:
                assert law[token] > 0, (u, drawn)
                assert low <= token <= high, (u, drawn, low, high)


@pytest.mark.parametrize("size", SIZES)
def test_choices_are_draws_from_the_laws(size: int) -> None:
    x_RV = rows_of(size, seed=5)
    highest_R = x_RV.max(axis=-1)
    for params in with_vocabulary(size)[:: 1 if size < 10_000 else 5]:
        rows = [params] * len(x_RV)
        law_RV = kernels.laws(x_RV, highest_R, rows)
        for u in UNIFORMS:
            tokens_R, masses_R = kernels.choose(x_RV, highest_R, rows, [u] * len(x_RV))
            for law, token, mass in zip(law_RV, tokens_R.tolist(), masses_R, strict=True):
                low, high = by_definition(law, u)
                assert law[token] > 0
                # the sum of rounded quotients is a little off, and so may be the place of a uniform
                assert low == high == token or abs(float(law[: token + 1].sum(dtype=np.float64)) - u) < 1e-6 + mass
                assert mass == law[token]


def test_choices_of_greedy_rows_are_the_first_of_the_largest() -> None:
    x_RV = rows_of(257)
    greedy = SamplingParams()
    tokens_R, masses_R = kernels.choose(x_RV, x_RV.max(axis=-1), [greedy, SETTINGS[0]] * 3 + [greedy], [0.3] * 7)
    assert tokens_R[::2].tolist() == x_RV.argmax(axis=-1)[::2].tolist()
    assert masses_R[::2].tolist() == [1.0] * 4


@pytest.mark.parametrize("size", SIZES)
def test_races_of_the_compiled_twin_equal_the_reference(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    law_RV = np.concatenate([kernels.laws(x := rows_of(size), x.max(axis=-1), [SETTINGS[11]] * 7), masses(size)])
    for seed in range(3 if size > 1000 else 30):
        draws = [(Stream(seed, row), 100 * seed + row) for row in range(len(law_RV))]
        got = verify.race(law_RV, draws)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_native", None)
            expected = verify.race(law_RV, draws)
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_top_ids_of_the_compiled_twin_equal_the_reference(size: int) -> None:
    x_RV = rows_of(size)
    for k in {1, min(3, size), min(8, size), min(64, size)}:
        got = arrays.top_ids(x_RV, k)
        assert got.shape == (len(x_RV), k)
        assert got.tolist() == np.argsort(-x_RV, axis=-1, kind="stable")[:, :k].tolist()


@pytest.mark.parametrize("threads", [2, 3])
def test_rows_spread_over_threads_have_the_same_bits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x_RV = rows_of(5000)
    highest_R, rows = x_RV.max(axis=-1), [SETTINGS[i * 5] for i in range(7)]

    def everything() -> list[np.ndarray]:
        law_RV = kernels.laws(x_RV, highest_R, rows)
        draws = [(Stream(1), place) for place in range(7)]
        return [
            law_RV, *kernels.choose(x_RV, highest_R, rows, [0.1 * i for i in range(7)]), verify.race(law_RV, draws),
            kernels.draw(law_RV, np.linspace(0, 0.9, 7)), arrays.top_ids(x_RV, 5),
            kernels.surplus(law_RV[None, :3], law_RV[None, 3:6], np.ones((1, 3))),
        ]  # fmt: skip

    alone = everything()
    monkeypatch.setattr(kernels, "num_threads", threads)
    assert all(np.array_equal(a, b) for a, b in zip(alone, everything(), strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_every_instruction_set_gives_the_same_bits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x_RV, law_BV = rows_of(size, seed=4), masses(size)
    highest_R = x_RV.max(axis=-1)
    settings = with_vocabulary(size)[:: 1 if size < 10_000 else 7]
    scales = np.asarray([[0.3, 1.0, 0.7]])
    found = []
    for name in SETS:
        monkeypatch.setattr(kernels, "_SET", name)
        laws = [kernels.laws(x_RV, highest_R, [params] * len(x_RV)) for params in settings]
        draws = [kernels.draw(law_BV, np.full(len(law_BV), u)) for u in UNIFORMS]
        found.append([*laws, *draws, kernels.surplus(laws[0][None, :3], laws[0][None, 3:6], scales)])
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_rows_have_settings_of_their_own_and_need_not_be_contiguous() -> None:
    x_RV = rows_of(257)
    rows = [SETTINGS[i * 5] for i in range(len(x_RV))]
    together = kernels.laws(x_RV, x_RV.max(axis=-1), rows)
    wide = np.repeat(x_RV, 2, axis=1)[:, ::2]
    assert np.array_equal(kernels.laws(wide, wide.max(axis=-1), rows), together)
    for i, params in enumerate(rows):
        alone = kernels.laws(x_RV[i : i + 1], x_RV[i : i + 1].max(axis=-1), [params])
        assert np.array_equal(alone[0], together[i])
    assert np.array_equal(
        kernels.draw(together[:, ::2], np.full(7, 0.4)), kernels.draw(together[:, ::2].copy(), np.full(7, 0.4))
    )
