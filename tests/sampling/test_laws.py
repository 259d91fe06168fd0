"""From logits to laws: equal to `transformers` where it has the transform, else to the definition in plain Python."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from forerun.errors import EngineError
from forerun.sampling import laws as laws_module
from forerun.sampling.laws import Row, Sampler, laws, log_softmax
from forerun.types import SamplingParams
from tests.reference import next_law

LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy}
PROMPT, OUTPUT = (5, 3, 3, 11, 0), (7, 3, 7, 20)
END_IDS = (2, 9)

SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "greedy": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=2.5),
    "top-k": SamplingParams(temperature=0.9, top_k=7),
    "top-k of one": SamplingParams(temperature=0.9, top_k=1),
    "top-k past the vocabulary": SamplingParams(temperature=0.9, top_k=10_000),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "small top-p": SamplingParams(temperature=1.3, top_p=0.01),
    "min-p": SamplingParams(temperature=1.0, min_p=0.1),
    "min-p of one": SamplingParams(temperature=1.0, min_p=1.0),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.4),
    "repetition under one": SamplingParams(temperature=1.0, repetition_penalty=0.7),
    "greedy repetition": SamplingParams(repetition_penalty=3.0),
    "bias": SamplingParams(temperature=1.0, logit_bias={1: 4.0, 3: -2.5, 30: -math.inf}),
    "minimum length": SamplingParams(temperature=1.0, min_tokens=6),
    "minimum length reached": SamplingParams(temperature=1.0, min_tokens=4),
    "all": SamplingParams(
        temperature=0.7, top_k=25, top_p=0.9, min_p=0.02, repetition_penalty=1.2, min_tokens=5,
        logit_bias={2: 3.0, 7: 1.5},
    ),
}  # fmt: skip
PATHS = [(), (8,), (8, 3), (20, 20, 20)]


def sampler_of(params: SamplingParams, prompt: Any = PROMPT, output: Any = OUTPUT, end_ids: Any = END_IDS) -> Sampler:
    sampler = Sampler(params, prompt, end_ids, seed=1)
    sampler.advance(output)
    return sampler


def random_logits(rows: int, size: int = 41, seed: int = 0, scale: float = 2.5) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=scale, size=(rows, size)).astype(np.float32)


def by_transformers(logits_V: np.ndarray, params: SamplingParams, text: tuple[int, ...]) -> np.ndarray:
    """The law as `transformers` would make it: its processors, composed in its order."""
    steps = hf.LogitsProcessorList()
    if params.logit_bias:
        steps.append(hf.SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()}))
    if params.repetition_penalty != 1.0:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        steps.append(hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, list(END_IDS)))
    if params.temperature not in (0.0, 1.0):
        steps.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.temperature and params.top_k:
        steps.append(hf.TopKLogitsWarper(params.top_k))
    if params.temperature and params.top_p < 1.0:
        steps.append(hf.TopPLogitsWarper(params.top_p))
    if params.temperature and params.min_p:
        steps.append(hf.MinPLogitsWarper(params.min_p))
    scores = steps(torch.tensor([text]), torch.from_numpy(logits_V.copy())[None])[0]
    if params.temperature == 0.0:
        return np.eye(len(logits_V))[int(scores.argmax())]
    return scores.double().softmax(dim=-1).numpy()


@pytest.mark.parametrize("library", LIBRARIES)
def test_laws_of_mixed_settings_in_one_batch_are_those_of_transformers(library: str) -> None:
    """Several texts with all settings and drafted paths side by side, the rows of each text neighbours."""
    for seed in range(5):
        rows, expected = [], []
        logits = random_logits(len(SETTINGS) * len(PATHS), seed=seed)
        for params in SETTINGS.values():
            sampler = sampler_of(params)
            for path in PATHS:
                expected.append(by_transformers(logits[len(rows)], params, PROMPT + OUTPUT + path))
                rows.append(Row(sampler, path))
        found = np.asarray(laws(LIBRARIES[library](logits), rows))
        assert found.dtype == np.float32
        assert np.array_equal(found > 0, np.asarray(expected) > 0)
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("presence", [0.0, 1.5, -0.7])
@pytest.mark.parametrize("frequency", [0.0, 0.4, -0.3])
def test_presence_and_frequency_count_output_and_path_but_not_the_prompt(
    library: str, presence: float, frequency: float
) -> None:
    params = SamplingParams(
        temperature=0.8, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=1.1
    )
    logits = random_logits(len(PATHS), seed=3)
    found = np.asarray(laws(LIBRARIES[library](logits), [Row(sampler_of(params), path) for path in PATHS]))
    sampler = sampler_of(params)
    together = np.asarray(laws(LIBRARIES[library](logits), [Row(sampler, path) for path in PATHS]))
    expected = [next_law(row, params, PROMPT, OUTPUT + path) for row, path in zip(logits, PATHS, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-9)
    assert np.array_equal(found, together)


def test_a_path_that_is_committed_leaves_the_law_it_had_as_a_draft() -> None:
    """What the drafts see is what the text sees once they stand, after one commit or after one for each token."""
    for params in SETTINGS.values():
        logits, path = random_logits(1, seed=4), (8, 3, 8)
        as_path = laws(logits, [Row(sampler_of(params), path)])
        one_by_one = sampler_of(params)
        for token in path:
            one_by_one.advance([token])
        assert np.array_equal(as_path, laws(logits, [Row(sampler_of(params, output=OUTPUT + path))]))
        assert np.array_equal(as_path, laws(logits, [Row(one_by_one)]))


def test_laws_change_neither_logits_nor_the_state_of_a_sampler() -> None:
    for library in LIBRARIES.values():
        for params in (*SETTINGS.values(), SamplingParams(logits_processors=[_spoils_its_argument])):
            logits = random_logits(len(PATHS), seed=5)
            kept, sampler = logits.copy(), sampler_of(params)
            rows = [Row(sampler, path) for path in PATHS]
            first = np.asarray(laws(library(logits), rows)).copy()
            assert np.array_equal(first, np.asarray(laws(library(logits), rows)))
            assert np.array_equal(logits, kept)


def _spoils_its_argument(tokens: Any, logits: Any) -> Any:
    logits[:] = 0.0
    logits[len(tokens)] = 1.0
    return logits


@pytest.mark.parametrize("library", LIBRARIES)
def test_greedy_is_a_point_mass_with_ties_to_the_lowest_id(library: str) -> None:
    logits = np.zeros((3, 300), dtype=np.float32)
    logits[0, [250, 17, 93]] = 4.0
    logits[1, -1] = 1.0
    rows = [Row(sampler_of(SamplingParams(top_k=2, top_p=0.5, min_p=0.5)))] * 3
    found = np.asarray(laws(LIBRARIES[library](logits), rows))
    assert np.array_equal(found, np.eye(300)[[17, 299, 0]])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("scale", [0.0, 0.01, 0.5, 3.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 1 - 1e-9])
def test_top_p_is_exact_whether_or_not_the_largest_values_hold_its_mass(
    library: str, scale: float, top_p: float
) -> None:
    """Flat laws over 5000 tokens, where the prefixes that are looked at first are too short, beside a sharp row."""
    assert laws_module._TOP_P_PREFIXES == (64, 1024)
    logits = np.round(random_logits(4, size=5000, seed=6, scale=scale), 3)  # rounded: many ties
    logits[3] = random_logits(1, size=5000, scale=20.0)
    for other in (top_p, 0.5):
        params = [SamplingParams(temperature=1.0, top_p=p) for p in (top_p, other, top_p, top_p)]
        rows = [Row(sampler_of(p, (), (), ())) for p in params]
        found = np.asarray(laws(LIBRARIES[library](logits), rows))
        for row, law, p in zip(logits, found, params, strict=True):
            w = np.exp(row - row.max()).astype(np.float64)
            ordered = np.sort(w)[::-1]
            above = np.cumsum(ordered) - ordered
            kept = w >= ordered[above < p.top_p * w.sum()].min()
            assert (law > 0).sum() == pytest.approx(kept.sum(), abs=0 if p.top_p < 1 - 1e-8 else 2)
            np.testing.assert_allclose(law, np.where(kept, w, 0) / w[kept].sum(), rtol=3e-6, atol=1e-10)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_flat_row_makes_no_difference_to_the_top_p_of_a_sharp_one(library: str) -> None:
    """A flat row lets the whole batch look at more than the largest values."""
    make = LIBRARIES[library]
    logits = np.concatenate([random_logits(20, size=5000, seed=14, scale=3.0), random_logits(1, size=5000, scale=0.01)])
    rows = [Row(sampler_of(SamplingParams(temperature=1.0, top_p=0.95), (), (), ()))] * 21
    together = np.asarray(laws(make(logits), rows))
    for i in range(21):
        assert np.array_equal(np.asarray(laws(make(logits[i : i + 1].copy()), rows[:1]))[0], together[i])


@pytest.mark.parametrize("library", LIBRARIES)
def test_ties_with_the_last_token_kept_are_kept(library: str) -> None:
    logits = np.asarray([[0, 3, 1, 1, 1, -2, 3], [0, 3, 1, 1, 1, -2, 3]], dtype=np.float32)
    rows = [
        Row(sampler_of(params, (), (), ()))
        for params in (SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=1.0, top_p=0.85))
    ]
    found = np.asarray(laws(LIBRARIES[library](logits), rows))
    assert (found > 0).tolist() == [[False, True, True, True, True, False, True]] * 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_top_p_stops_where_the_mass_is_met_exactly(library: str) -> None:
    """Masses 1/2, 1/4, 1/8, 1/8: at 0.5 the first alone is kept, at 0.75 two, as in `transformers`."""
    logits = np.log(np.asarray([[0.125, 0.5, 0.25, 0.125]], dtype=np.float32) * 2)
    assert np.array_equal(np.exp(logits), [[0.25, 1.0, 0.5, 0.25]])
    for top_p, kept in ((0.5, [1]), (0.75, [1, 2]), (0.76, [0, 1, 2, 3])):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        found = np.asarray(laws(LIBRARIES[library](logits), [Row(sampler_of(params, (), (), ()))]))[0]
        assert np.nonzero(found)[0].tolist() == kept


def test_numpy_and_torch_give_the_same_laws() -> None:
    for size in (7, 41, 300, 5003):
        rows = [
            Row(sampler_of(params, (1, 2), (3,), (4,)), path) for params in _for_small(size) for path in ((), (1, 6))
        ]
        logits = random_logits(len(rows), size=size, seed=7)
        a, b = laws(logits, rows), laws(torch.from_numpy(logits), rows).numpy()
        assert np.array_equal(a > 0, b > 0)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12)


def _for_small(size: int) -> list[SamplingParams]:
    return [params for params in SETTINGS.values() if all(token < size for token in params.logit_bias)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_row_of_logits_has_the_same_law_to_the_bit_alone_and_in_any_batch(library: str) -> None:
    make = LIBRARIES[library]
    for size in (41, 997, 5003):
        rows = [Row(sampler_of(params), path) for params in SETTINGS.values() for path in PATHS]
        logits = random_logits(len(rows), size=size, seed=8)
        together = np.asarray(laws(make(logits), rows))
        order = np.random.default_rng(9).permutation(len(rows))[:23]
        shuffled = np.asarray(laws(make(logits[order]), [rows[i] for i in order]))
        assert np.array_equal(shuffled, together[order])
        for i, row in enumerate(rows):
            assert np.array_equal(np.asarray(laws(make(logits[i : i + 1].copy()), [row]))[0], together[i])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_left_raises(library: str, temperature: float) -> None:
    make, fine = LIBRARIES[library], random_logits(3, size=5)
    forbidden = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(5), -math.inf))
    open_params = SamplingParams(temperature=temperature)
    with pytest.raises(EngineError, match="every token is forbidden"):
        laws(make(fine), [Row(sampler_of(p, (), (), ())) for p in (open_params, forbidden, open_params)])
    for bad in (np.nan, np.inf):
        spoilt = fine.copy()
        spoilt[1, 2] = bad
        with pytest.raises(EngineError):
            laws(make(spoilt), [Row(sampler_of(open_params, (), (), ()))] * 3)


def test_a_failing_processor_raises_with_its_reason() -> None:
    def fails(tokens: Any, logits: Any) -> Any:
        raise ValueError("no such rule")

    for function, text in ((fails, "no such rule"), (lambda t, x: None, "NoneType"), (lambda t, x: x[:2], "shape")):
        with pytest.raises(EngineError, match=text):
            laws(random_logits(1), [Row(sampler_of(SamplingParams(logits_processors=[function])))])


def test_processors_see_the_text_with_its_path_after_penalties_and_before_temperature() -> None:
    seen = []

    def watches(tokens: Any, logits: Any) -> Any:
        seen.append((tuple(tokens), logits.copy()))
        return logits

    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, min_tokens=9, logits_processors=[watches])
    logits = random_logits(2, seed=10)
    laws(logits, [Row(sampler_of(params), path) for path in ((), (4, 4))])
    assert [tokens for tokens, _ in seen] == [PROMPT + OUTPUT, PROMPT + OUTPUT + (4, 4)]
    expected = logits.copy()
    expected[:, 1] += np.float32(2.0)
    expected[:, list(END_IDS)] = -np.inf
    assert np.array_equal([row for _, row in seen], expected)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-6, 1e6, 1e38, 1e39, 1e300])
def test_extreme_temperatures_give_their_limits_and_never_nan(library: str, temperature: float) -> None:
    logits = np.asarray([[1.0, 3.0, -math.inf, 2.0, 3.0]], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature), (), (), seed=0)
    found = np.asarray(laws(LIBRARIES[library](logits), [Row(sampler)]))[0]
    limit = [0, 0.5, 0, 0, 0.5] if temperature < 1 else [0.25, 0.25, 0, 0.25, 0.25]
    np.testing.assert_allclose(found, limit, atol=1e-5)


def test_half_precision_logits_are_taken_as_they_are() -> None:
    logits = torch.from_numpy(random_logits(4, seed=12)).to(torch.bfloat16)
    rows = [Row(sampler_of(SETTINGS["all"]))] * 4
    assert torch.equal(laws(logits, rows), laws(logits.float(), rows))


@pytest.mark.parametrize("library", LIBRARIES)
def test_log_softmax_is_that_of_the_raw_logits(library: str) -> None:
    logits = random_logits(5, size=997, seed=13, scale=30.0)
    exact = logits.astype(np.float64)
    exact = exact - np.logaddexp.reduce(exact, axis=-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(log_softmax(LIBRARIES[library](logits))), exact, rtol=1e-6, atol=3e-6)


# 16 bits: the kernels compute in float32, which can't tell 1 from 1 - 1e-10 as the definition can
some_penalties = st.just(0.0) | st.floats(-2.0, 2.0, width=16, allow_subnormal=False)
settings_of_all_kinds = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]) | st.floats(0.05, 5.0),
    top_k=st.integers(0, 12),
    top_p=st.just(1.0) | st.floats(0.01, 1.0),
    min_p=st.just(0.0) | st.floats(0.0, 1.0),
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2.0, width=16),
    presence_penalty=some_penalties,
    frequency_penalty=some_penalties,
    min_tokens=st.integers(0, 4),
    logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-5.0, 5.0, width=16, allow_subnormal=False), max_size=3),
)
texts = st.lists(st.integers(0, 9), max_size=5)
some_logits = st.lists(st.floats(-20, 20, width=16), min_size=10, max_size=10)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(settings_of_all_kinds, texts, texts, texts, some_logits)
def test_any_settings_give_a_law_that_is_monotone_in_the_shifted_logits(
    params: SamplingParams, prompt: list[int], output: list[int], path: list[int], logits: list[float]
) -> None:
    """Each law sums to 1, keeps a token of the largest logit, and orders tokens as the constraints leave them."""
    sampler = sampler_of(params, prompt, output, (2,))
    row = np.asarray([logits], dtype=np.float32)
    law = laws(row, [Row(sampler, tuple(path))])[0]
    shifted = row.copy()
    for constraint in sampler.constraints:
        shifted = constraint.shift(shifted, [tuple(path)])
    assert law.sum() == pytest.approx(1.0, abs=1e-6)
    assert (law >= 0).all()
    assert law[shifted[0].argmax()] == law.max() > 0
    order = np.argsort(shifted[0], kind="stable")
    if params.temperature:
        assert (np.diff(law[order]) >= 0).all()
        kept, gone = shifted[0][law > 0], shifted[0][law == 0]
        assert not gone.size or gone.max() < kept.min()
        if params.top_k:
            assert (law > 0).sum() <= (shifted[0] >= np.sort(shifted[0])[-min(params.top_k, 10)]).sum()
    if len(output) + len(path) < params.min_tokens:
        assert law[2] == 0


@settings(max_examples=150, deadline=None, derandomize=True)
@given(settings_of_all_kinds, texts, texts, texts, some_logits)
def test_any_settings_give_the_law_of_the_definition(
    params: SamplingParams, prompt: list[int], output: list[int], path: list[int], logits: list[float]
) -> None:
    sampler = sampler_of(params, prompt, output, (2,))
    law = laws(np.asarray([logits], dtype=np.float32), [Row(sampler, tuple(path))])[0]
    expected = next_law(logits, params, prompt, [*output, *path], (2,))
    far = np.abs(law - expected) > 1e-5
    # a value on the edge of a filter may round to either side: then neighbours of the law without it must agree
    nudged = [
        next_law(logits, _nudged(params, factor), prompt, [*output, *path], (2,)) for factor in (1 - 1e-5, 1 + 1e-5)
    ]
    assert not far.any() or any(np.abs(law - other).max() < 1e-3 for other in nudged)


def _nudged(params: SamplingParams, factor: float) -> SamplingParams:
    return SamplingParams(
        **{**params.__dict__, "top_p": min(1.0, params.top_p * factor), "min_p": min(1.0, params.min_p * factor)}
    )
