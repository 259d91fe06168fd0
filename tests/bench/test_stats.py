"""The arithmetic of the bench, by hand-worked examples."""

import pytest

from forerun.bench.stats import (
    Ceiling,
    Cell,
    Round,
    Run,
    condense,
    difference_at,
    first_difference,
    full_rounds,
    order,
    pooled,
    rate,
    ratio,
    schedule,
    speedup_range,
    split_rounds,
    tie_margin,
    tie_tolerance,
    with_logits,
)
from forerun.types import SpeculationStats


def run(num_tokens: int, decode_s: float, *, num_first: int = 1) -> Run:
    return Run(tuple(range(num_tokens)), num_first, 0.5, decode_s)


def test_contenders_go_forward_and_backward_in_turn_over_prompts_and_repetitions() -> None:
    assert order(3, repetition=0, prompt=0) == [0, 1, 2]
    assert order(3, repetition=0, prompt=1) == [2, 1, 0]
    assert order(3, repetition=1, prompt=0) == [2, 1, 0]
    assert list(schedule(2, 2, 0)) == [(0, 0), (0, 1), (1, 1), (1, 0)]
    assert list(schedule(2, 2, 1)) == [(0, 1), (0, 0), (1, 0), (1, 1)]


def test_over_two_repetitions_everybody_goes_first_equally_often() -> None:
    firsts = [next(iter(order(2, repetition=r, prompt=p))) for r in range(2) for p in range(5)]
    assert firsts.count(0) == firsts.count(1)


def test_tokens_that_come_with_the_first_one_are_not_timed() -> None:
    assert run(9, 2.0, num_first=1).num_timed == 8
    assert condense([run(9, 2.0, num_first=5)]) == Cell(4, 2.0)


def test_a_cell_is_the_median_of_its_repetitions_and_one_slow_run_does_not_move_it() -> None:
    assert condense([run(11, 2.0), run(11, 100.0), run(11, 1.0)]) == Cell(10, 2.0)


def test_a_run_that_ended_with_its_first_token_has_no_speed() -> None:
    assert condense([run(1, 0.0)]) == Cell(0, 0.0)
    assert rate([condense([run(1, 0.0)])]) is None
    assert condense([run(1, 0.0), run(5, 1.0)]) == Cell(4, 1.0)


def test_the_rate_is_total_tokens_over_total_time_not_a_mean_of_rates() -> None:
    assert rate([Cell(100, 1.0), Cell(10, 1.0)]) == 55.0
    assert rate([]) is None


def test_a_ratio_of_nothing_is_nothing() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is None
    assert ratio(3.0, None) is None
    assert ratio(3.0, 0.0) is None


def test_the_range_of_a_speedup_is_that_of_single_repetitions() -> None:
    plain = [[run(5, 4.0), run(5, 4.0)], [run(5, 4.0), run(5, 8.0)]]
    fast = [[run(5, 2.0), run(5, 2.0)], [run(5, 2.0), run(5, 1.0)]]
    assert speedup_range(fast, plain) == (2.0, 4.0)
    assert speedup_range([fast[0][:1]], [plain[0][:1]]) is None  # one repetition has no range
    assert speedup_range([[run(1, 0.0)] * 2], [[run(1, 0.0)] * 2]) is None


def test_counts_are_pooled_as_sums() -> None:
    one = SpeculationStats(1, 4, 2, 1, 2, (1, 1), (1, 0))
    two = SpeculationStats(1, 4, 4, 4, 5, (1, 1, 1, 1), (1, 1, 1, 1))
    total = pooled([run(1, 0.0)._replace(speculation=one), run(1, 0.0), run(1, 0.0)._replace(speculation=two)])
    assert total is not None
    assert (total.acceptance_rate, total.tokens_per_round) == (5 / 6, 3.5)
    assert total.acceptance_by_position == (1.0, 0.5, 1.0, 1.0)
    assert pooled([run(1, 0.0)]) is None


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [((1, 2, 3), [1, 2, 3], None), ((1, 2, 3), (1, 5, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (4,), 0), ((), (), None)],
)
def test_texts_differ_from_the_first_token_that_is_not_the_same(a: tuple, b: tuple, position: int | None) -> None:
    assert first_difference(a, b) == position


def test_a_margin_is_how_far_the_worse_token_lies_below_the_best() -> None:
    assert tie_margin([1.0, 4.0, 3.75, 4.0], [1, 3]) == 0.0
    assert tie_margin([1.0, 4.0, 3.75], [1, 2]) == 0.25
    assert tie_margin([1.0, 4.0, 3.75], [0, 2]) == 3.0  # the best one is neither of the two


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bf16", 0.5), ("fp16", 0.0625), ("fp32", 2.0**-10), ("a type of tomorrow", 2.0**-10)]
)
def test_the_tolerance_of_a_tie_is_in_proportion_to_the_largest_logit(dtype: str, tolerance: float) -> None:
    assert tie_tolerance([1.0, 32.0], dtype) == tolerance
    assert tie_tolerance([1.0, -32.0], dtype) == tolerance
    assert tie_tolerance([2.0, 4.0], dtype) == tolerance / 8


def test_only_a_margin_within_the_rounding_of_the_type_is_a_near_tie() -> None:
    difference = difference_at("p", 1, [3, 0], [3, 2])
    assert (difference.tokens, difference.margin, difference.verdict) == ((0, 2), None, "not judged")
    close = with_logits(difference, [31.5, 0.0, 32.0], "bf16")
    assert (close.margin, close.tolerance, close.verdict) == (0.5, 0.5, "near-tie")
    assert with_logits(difference, [31.25, 0.0, 32.0], "bf16").verdict == "real"
    assert with_logits(difference, [31.5, 0.0, 32.0], "fp16").verdict == "real"


def test_a_text_that_ended_before_the_other_is_not_a_tie() -> None:
    difference = difference_at("p", 2, [3, 0], [3, 0, 1])
    assert difference.tokens == (None, 1)
    assert with_logits(difference, [0.0, 1.0], "bf16").verdict == "not judged"


def test_the_ceiling_is_bandwidth_over_bytes_and_says_when_a_cache_breaks_it() -> None:
    assert Ceiling(20e9, 200_000_000, 32 << 20).tokens_per_s == 100.0
    assert not Ceiling(20e9, 200_000_000, 32 << 20).fits_in_cache
    assert Ceiling(20e9, 32 << 20, 32 << 20).fits_in_cache
    assert not Ceiling(20e9, 1, None).fits_in_cache


def test_the_parts_of_a_round_add_up_and_the_models_passes_are_not_overhead() -> None:
    one = Round(num_drafts=5, wall=10.0, draft=3.0, draft_model=2.0, target=5.0, sampling=1.0)
    assert one.rest == 1.0
    assert one.overhead == 3.0  # draft 3 - 2, sampling 1, rest 1


def test_rounds_are_split_by_medians_in_ms_and_overhead_is_shown_against_a_pass_over_one_row() -> None:
    rounds = [Round(2, w, 0.001, 0.0, 0.008, 0.001) for w in (0.011, 0.012, 0.3)]
    split = split_rounds(rounds, 0.008)
    assert split is not None
    assert split["rounds"] == 3
    assert split["wall_ms"] == pytest.approx(12.0)
    assert split["rest_ms"] == pytest.approx(2.0)
    assert split["overhead_over_one_row_pass"] == pytest.approx(0.5)
    assert split_rounds([], 0.008) is None


def test_full_rounds_are_those_with_k_drafts_or_else_with_the_most() -> None:
    rounds = [Round(n, 1.0, 0, 0, 0, 0) for n in (0, 3, 5, 5)]
    assert [r.num_drafts for r in full_rounds(rounds, 5)] == [5, 5]
    assert [r.num_drafts for r in full_rounds(rounds, 8)] == [5, 5]
    assert [r.num_drafts for r in full_rounds(rounds, 4)] == [3]
    assert full_rounds([], 4) == []
