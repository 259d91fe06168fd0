"""Tables are pure functions of the document."""

from forerun.bench.report import (
    Table,
    as_markdown,
    as_text,
    headline,
    markdown_table,
    number,
    percent,
    tables,
    text_table,
    times,
)
from tests.bench.documents import document


def lines(given: dict) -> list[str]:
    """Return the lines of all tables, columns one space apart."""
    return [" ".join(line.split()) for line in as_text(given).splitlines()]


TABLE = Table("Speed", ["", "tokens/s"], [["plain", "9.0"], ["much faster", "123.0"]], ["A remark.", "Another."])


def test_columns_are_as_wide_as_their_widest_entry_words_left_numbers_right() -> None:
    assert text_table(TABLE) == (
        "Speed\n"
        "             tokens/s\n"
        "---------------------\n"
        "plain             9.0\n"
        "much faster     123.0\n"
        "A remark.\n"
        "Another."
    )


def test_a_header_without_words_is_left_out_on_a_terminal() -> None:
    assert text_table(Table("Start", ["", ""], [["a", "1"]])) == "Start\n----\na  1"


def test_markdown_tables_align_numbers_and_keep_bars_inside_cells() -> None:
    rows = "|  | tokens/s |\n| --- | ---: |\n| plain | 9.0 |\n| much faster | 123.0 |"
    assert markdown_table(TABLE) == f"**Speed**\n\n{rows}\n\nA remark.  \nAnother."
    assert "a\\|b" in markdown_table(Table("t", [""], [["a|b"]]))


def test_numbers_that_were_not_measured_are_dashes() -> None:
    assert (number(None), percent(None), times(None)) == ("-", "-", "-")
    assert (number(1.26), number(3.14159, 3), percent(0.085)) == ("1.3", "3.142", "8%")
    assert times(1.5) == "1.50×"
    assert times(1.5, [1.25, 2.0]) == "1.50× (1.25 to 2.00)"


def test_the_headline_says_what_was_run_on_what_and_when() -> None:
    assert headline(document()) == (
        "forerun 0.1.0, toy in bf16 on cpu (Zen, threads 2, backend cpu with avx512), drafter ngram, k 8, "
        "verify block. 3 prompts of mine.txt, up to 32 tokens each, temperature 0.8, top-p 0.95, seed 1, "
        "medians of 3 interleaved repetitions, 2026-01-02."
    )


def test_speed_stands_beside_its_ceiling_and_the_waste_beside_the_acceptance() -> None:
    found = lines(document())
    assert "plain 50.0 - 1.00× 1.00 - - 200" in found
    assert "speculative 100.0 2.00× (1.90 to 2.10) 2.00× 2.50 75% 38% 200" in found
    ceiling = "Ceiling of plain decoding: 100.0 tokens/s: 20.0 GB/s over 200 MB a pass; plain reaches 50% (by sums)."
    assert ceiling in found
    assert "Accepted/reached by position: 80% 50% -" in found
    assert "llama skipped: isn't installed; pip install llama" in found


def test_weights_that_fit_in_the_cache_are_said_to_break_the_ceiling() -> None:
    small = document()
    small["ceiling"]["fits_in_cache"] = True
    assert "the ceiling can be exceeded" in as_text(small)
    assert "the ceiling can be exceeded" not in as_text(document())


def test_each_difference_is_named_with_its_margin_and_verdict() -> None:
    found = lines(document())
    assert "speculative against plain 2 of 3 1 0 0" in found
    assert "b, token 7: speculative has 4, plain 5, margin 0.125 (tied up to 0.5): near-tie" in found


def test_kinds_rounds_curve_batch_and_start_have_a_table_each() -> None:
    found = lines(document())
    assert "speculative, over plain 1.50× -" in found
    assert "with 8 drafts 4 1.00 1.00 1.00 1.00 1.00 1.00 1.00 5%" in found
    assert "t(k)/t(1) 1.00 1.20" in found
    assert "plain 40.0 200.0 5.00×" in found
    assert "resident above imports, MB 300" in found


def test_ours_stands_against_a_peer_width_by_width_and_its_remarks_are_told() -> None:
    given = document()
    given["peers"] = {"llama.cpp": {"contenders": ["llama.cpp plain", "llama.cpp lookup"], "remarks": ["UNFAIR: so"]}}
    rows = {"1": {"ms": 20.0, "over_one_row": 1.0}, "8": {"ms": 60.0, "over_one_row": 3.0}}
    given["curve"]["race"] = {"ours": given["curve"]["rows"], "llama.cpp": rows}
    plain = given["contenders"]["plain"]
    given["contenders"] |= {"llama.cpp plain": plain | {"tokens_per_s": 25.0}, "llama.cpp lookup": plain}
    found = lines(given)
    assert "over the ceiling's 1.00× 1.20×" in found
    assert found[found.index("Against llama.cpp, in the same run") :][3:10] == [
        "a pass over 1, ms 10.00 20.00 0.50×",
        "a pass over 8, ms 12.00 60.00 0.20×",
        "t(8)/t(1) 1.20 3.00",
        "plain against llama.cpp plain, tokens/s 50.0 25.0 2.00×",
        "speculative against llama.cpp plain, tokens/s 100.0 25.0 4.00×",
        "speculative against llama.cpp lookup, tokens/s 100.0 50.0 2.00×",
        "UNFAIR: so",
    ]
    given["curve"] = None
    assert "plain against llama.cpp plain, tokens/s 50.0 25.0 2.00×" in lines(given)


def test_what_was_not_measured_has_no_table() -> None:
    bare = document()
    bare |= {"curve": None, "batch": None, "ceiling": None, "texts": []}
    bare["rounds"] = {"one_row_pass_ms": None, "plain": None}
    del bare["contenders"]["speculative"]
    bare["workload"] |= {"kinds": ["chat"], "temperature": 0, "file": None}
    bare["memory"]["running"] = {"resident": None, "peak": None}
    text = as_text(bare)
    for word in ("A pass over k", "at once", "Ceiling", "Same text", "Time per round", "By kind", "peak memory"):
        assert word not in text
    assert "3 prompts, up to 32 tokens each, greedy" in text


def test_markdown_has_every_table() -> None:
    assert as_markdown(document()).count("\n| --- |") == len(tables(document())) == 7
