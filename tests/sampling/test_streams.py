"""Keyed uniforms: their values, their law, and that no draw is met twice."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from forerun.sampling.streams import Role, Stream, _mix

NUMPY, TORCH = np.zeros(1, dtype=np.float32), torch.zeros(1)


GOLDEN = [
    [0.16806180823156136, 0.17667246852156093, 0.9977730269896264],
    [0.3055017526642364, 0.3908451977293682, 0.6977986734966489],
    [0.4025880222054098, 0.34982452500177075, 0.49188296466260273],
    [0.4104805709221013, 2.049400038135056, 0.6922540780788843, 0.14198736515402108],
]


def test_values_are_those_of_the_first_release() -> None:
    """A seed keeps its text from version to version: change these numbers only with a note to the users."""
    assert Stream(0).uniforms(0, Role.DRAFT, 3) == GOLDEN[0]
    assert Stream(42, 7).uniforms(123, Role.ACCEPT, 3) == GOLDEN[1]
    assert Stream(-1, 2**40).uniforms(10**6, Role.RESAMPLE, 3) == GOLDEN[2]
    np.testing.assert_allclose(Stream(42).exponentials(5, 4, NUMPY), GOLDEN[3], rtol=1e-15)


def test_the_mixer_is_that_of_splitmix64() -> None:
    """The first outputs of SplitMix64 with state 1234567, as its authors publish them."""
    outputs, state = [], 1234567
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        outputs.append(_mix(state))
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("size", [1, 2, 997, 50_000])
def test_numpy_and_torch_have_the_same_uniforms_behind_their_exponentials(size: int) -> None:
    """The hashes agree to the bit; the two libraries' logarithms differ in the last place, now and then."""
    for position in (0, 1, 5000):
        a, b = Stream(3, 1).exponentials(position, size, NUMPY), Stream(3, 1).exponentials(position, size, TORCH)
        assert a.dtype == np.float64
        assert b.dtype == torch.float64
        assert a.shape == tuple(b.shape) == (size,)
        np.testing.assert_array_max_ulp(a, b.numpy(), maxulp=2)


def test_the_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    """So a drafter whose head is padded differently meets the target's own noise."""
    for like in (NUMPY, TORCH):
        wide = np.asarray(Stream(9).exponentials(4, 1009, like))
        assert np.array_equal(np.asarray(Stream(9).exponentials(4, 500, like)), wide[:500])


def test_uniforms_do_not_depend_on_how_many_are_asked_for() -> None:
    stream = Stream(1, 2)
    for role in Role:
        assert stream.uniforms(3, role, 2) == stream.uniforms(3, role, 9)[:2]
    assert stream.uniforms(3, Role.DRAFT, 0) == []


def test_uniforms_are_uniform() -> None:
    """Kolmogorov-Smirnov along each axis of the key; 6 tests at 1e-7 each, false-alarm rate below 1e-6 in all."""
    rate = 1e-7
    along_index = Stream(1).uniforms(0, Role.ACCEPT, 20_000)
    along_position = [Stream(1).uniforms(position, Role.DRAFT, 1)[0] for position in range(20_000)]
    along_seed = [Stream(seed).uniforms(7, Role.RESAMPLE, 1)[0] for seed in range(20_000)]
    along_request = [Stream(5, request).uniforms(7, Role.DRAFT, 1)[0] for request in range(20_000)]
    for values in (along_index, along_position, along_seed, along_request):
        assert kstest(values, "uniform").pvalue > rate
    assert kstest(Stream(1).exponentials(3, 20_000, NUMPY), "expon").pvalue > rate
    pairs = np.abs(np.asarray(along_position[1:]) - np.asarray(along_position[:-1]))
    assert kstest(1 - (1 - pairs[::2]) ** 2, "uniform").pvalue > rate


def test_no_number_is_met_twice() -> None:
    """Over roles, positions, indices, requests and seeds: 53 bits hold 300 000 keys with a repeat in 2e5 runs."""
    seen = [
        u
        for seed, request in itertools.product((0, 1, 2, 10**12), (0, 1, 2, 3, 99))
        for position in range(300)
        for role in (Role.DRAFT, Role.ACCEPT, Role.RESAMPLE)
        for u in Stream(seed, request).uniforms(position, role, 16)
    ]
    assert len(seen) == len(set(seen)) == 4 * 5 * 300 * 3 * 16


def test_fields_of_the_key_are_not_interchangeable() -> None:
    keys = [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 3, 2), (2, 3, 1), (3, 1, 2)]
    values = {Stream(a, b).uniforms(c, role, 1)[0] for a, b, c in keys for role in Role}
    assert len(values) == len(keys) * len(Role)


def test_uniforms_lie_in_the_half_open_unit_interval_and_exponentials_are_positive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the hash: the smallest and the largest are tried."""
    import forerun.sampling.streams as module

    for bits in (0, 2**64 - 1, 2**63, 2**63 - 1, 2047, 2048):
        monkeypatch.setattr(module, "_mix", lambda x, bits=bits: bits)
        monkeypatch.setattr(
            module, "_mix_array", lambda x, bits=bits: x * 0 + (bits - (1 << 64) if bits >> 63 else bits)
        )
        assert all(0.0 <= u < 1.0 for u in Stream(0).uniforms(0, Role.DRAFT, 2))
        for like in (NUMPY, TORCH):
            noise = np.asarray(Stream(0).exponentials(0, 3, like))
            assert (noise > 0).all()
            assert (noise < 50).all()


def test_negative_and_huge_seeds_are_streams_of_their_own() -> None:
    values = {Stream(seed).uniforms(0, Role.DRAFT, 1)[0] for seed in (-1, 0, 1, 2**63, 2**64 - 2, -(2**63) + 1)}
    assert len(values) == 6
    assert all(math.isfinite(value) for value in values)
