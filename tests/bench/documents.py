"""A document of a run, as small as can be, for the tests of tables."""

from typing import Any


def document() -> dict[str, Any]:
    counts = {
        "proposed": 40,
        "tokens_per_round": 2.5,
        "acceptance_rate": 0.75,
        "accepted_over_proposed": 0.375,
        "acceptance_by_position": [0.8, 0.5, 0.0],
        "reached_by_position": [10, 8, 0],
    }
    parts = ("draft", "draft_model", "target", "sampling", "rest", "wall", "overhead")
    split = {**{f"{part}_ms": 1.0 for part in parts}, "rounds": 4, "overhead_over_one_row_pass": 0.05}
    kinds = {"chat": {"tokens_per_s": 1.0, "speedup": 1.5}, "code": {"tokens_per_s": None, "speedup": None}}
    plain = {
        "baseline": None, "tokens_per_s": 50.0, "speedup": None, "speedup_range": None, "over_plain": 1.0,
        "prefill_s": 0.2, "kinds": kinds,
        "speculation": {"proposed": 0, "tokens_per_round": 1.0, "acceptance_rate": 0.0, "accepted_over_proposed": 0.0},
    }  # fmt: skip
    speculative = {
        "baseline": "plain", "tokens_per_s": 100.0, "speedup": 2.0, "speedup_range": [1.9, 2.1], "over_plain": 2.0,
        "prefill_s": 0.2, "kinds": kinds, "speculation": counts,
    }  # fmt: skip
    difference = {
        "prompt_id": "b", "position": 7, "tokens": [4, 5], "margin": 0.125, "tolerance": 0.5, "verdict": "near-tie",
    }  # fmt: skip
    return {
        "forerun": "0.1.0",
        "date": "2026-01-02T03:04:05+00:00",
        "hardware": {"cpu": "Zen", "gpu": None},
        "config": {
            "target": "toy", "dtype": "bf16", "device": "cpu", "threads": 2, "drafter": "ngram", "k": 8,
            "verify": "block", "backend": "cpu",
        },
        "instruction_set": "avx512",
        "workload": {
            "file": "mine.txt", "prompts": 3, "kinds": ["chat", "code"], "max_tokens": 32, "temperature": 0.8,
            "top_p": 0.95, "seed": 1, "repeats": 3,
        },
        "start": {"imported_s": 1.0, "load_s": 2.0, "first_prefill_s": 0.1, "to_first_token_s": 3.5},
        "memory": {
            "after_imports": {"resident": 100_000_000},
            "running": {"resident": 400_000_000, "peak": 500_000_000},
            "weights": 200_000_000,
        },
        "contenders": {"plain": plain, "speculative": speculative},
        "peers": {},
        "skipped_peers": {"llama": "isn't installed; pip install llama"},
        "texts": [{"text": "speculative", "reference": "plain", "same": 2, "of": 3, "differences": [difference]}],
        "ceiling": {
            "bytes_per_s": 20e9, "bytes_per_pass": 200_000_000, "tokens_per_s": 100.0, "method": "by sums",
            "fits_in_cache": False,
        },
        "curve": {
            "context": 256,
            "rows": {"1": {"ms": 10.0, "over_one_row": 1.0}, "8": {"ms": 12.0, "over_one_row": 1.2}},
            "race": {},
        },
        "rounds": {"one_row_pass_ms": 20.0, "plain": split, "speculative": split, "full": split, "full_k": 8},
        "batch": {"size": 16, "plain": {"one_by_one": 40.0, "tokens_per_s": 200.0, "ratio": 5.0}},
    }  # fmt: skip
