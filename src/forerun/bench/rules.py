"""`forerun bench --rules`: what the rules of verification are worth, on the same prompts, seeds and draft model.

Tokens a round don't depend on the machine: nothing is timed here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from forerun.bench.report import Table, number, percent
from forerun.bench.run import Bench, Options, Progress, Quiet, loading, select
from forerun.bench.workload import load_workload
from forerun.drafters.build import DRAFTERS, drafter_kind
from forerun.drafters.lm import LMDrafter
from forerun.drafters.shapes import best_shape
from forerun.engine.llm import LLM
from forerun.types import SpeculationStats, Verify

TEMPERATURE = 0.8
_CHAIN = 5
_TREE = 8
_CHANCES = ((0.6, 0.2, 0.1),) * 4  # of which the tree is the best one
_MODEL = "layerskip:6"  # where the options name no draft model


class _Variant(NamedTuple):
    label: str
    verify: Verify
    num_drafts: int
    is_tree: bool = False
    draws: bool = True


_VARIANTS = (
    _Variant("chain, token verification", "token", _CHAIN),
    _Variant("chain, block verification", "block", _CHAIN),
    _Variant("tree, likeliest tokens, target match", "token", _TREE, is_tree=True, draws=False),
    _Variant("tree, drawn without replacement, RRSw", "token", _TREE, is_tree=True),
    _Variant("tree, drawn without replacement, traversal", "block", _TREE, is_tree=True),
)


def run_rules(options: Options, progress: Progress | None = None) -> dict[str, Any]:
    """Count tokens a round by each rule, at temperature 0.8 unless the options have another one above 0."""
    progress = progress or Quiet()
    prompts = select(load_workload(options.prompts), options.kinds, options.limit)
    options = replace(options, temperature=options.temperature or TEMPERATURE)
    kind, _argument = (
        drafter_kind(options.config.drafter) if options.config.drafter != "auto" else (DRAFTERS["none"], "")
    )
    name = options.config.drafter if kind.is_model else _MODEL
    found = []
    with LLM(replace(options.config, drafter=name, k=_CHAIN), progress=loading(progress)) as llm:
        bench = Bench(options, prompts, llm, progress)
        (drafter,) = llm.drafters
        assert isinstance(drafter, LMDrafter)
        for variant in _VARIANTS:
            if variant.is_tree and not llm.session.can_branch:
                continue
            progress.stage(variant.label)
            drafter.shape = _shape if variant.is_tree else None
            drafter.draws = variant.draws
            stats = SpeculationStats()
            for ids, params in zip(bench.ids, bench.params, strict=True):
                own = replace(params, verify=variant.verify, k=variant.num_drafts)
                stats += llm.generate(list(ids), own).speculation
            found.append({"rule": variant.label, "drafts": variant.num_drafts, **stats.as_dict()})
        heading = bench.heading()
    progress.done()
    heading["workload"] |= {"repeats": 1}
    return {**heading, "rules": found}


def _shape(count: int) -> Sequence[int]:
    return best_shape(_CHANCES, count).parents


def rules_tables(document: Mapping[str, Any]) -> list[Table]:
    rows: list[list[str]] = []
    first: dict[str, float] = {}
    for own in document["rules"]:
        base = first.setdefault(own["rule"].split(",")[0], own["tokens_per_round"])
        rows.append(
            [
                own["rule"],
                str(own["drafts"]),
                number(own["tokens_per_round"], 3),
                f"{100 * (own['tokens_per_round'] / base - 1):+.1f}%",
                percent(own["acceptance_rate"]),
            ]
        )
    title = "Tokens a round by the rule of verification, same seeds"
    return [Table(title, ["", "drafts", "tokens/round", "over the first of its kind", "accepted/reached"], rows)]
