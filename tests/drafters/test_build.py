"""From names to drafters, and what models of the target's own making draft for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import LLM, SamplingParams
from forerun.backends.base import Feed, Scores, Session
from forerun.backends.cpu import CpuSession
from forerun.drafters.base import Drafter
from forerun.drafters.build import AUTO, drafter_kind, drafter_names, names_in
from forerun.drafters.layerskip import best_layers, kept_layers
from forerun.drafters.lm import LMDrafter
from forerun.drafters.mix import MixDrafter
from forerun.errors import OptionError
from forerun.models.load import load_checkpoint
from tests.families import NUM_TOKENS, save_hf

PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=3, verify="coupled"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_hf("llama", folder, dtype="bfloat16", num_hidden_layers=5)
    return folder


def test_the_plus_of_a_list_is_one_that_a_kind_follows() -> None:
    assert names_in("lm:a+b+ngram") == ["lm:a+b", "ngram"]
    assert names_in("lm:a+lm:b.gguf+ngram") == ["lm:a", "lm:b.gguf", "ngram"]
    assert names_in("lm:a+ngrams") == ["lm:a+ngrams"]
    assert names_in("ngram+cascade:lm:a+ngram") == ["ngram", "cascade:lm:a+ngram"]


def test_a_controller_gets_the_parts_of_a_mix() -> None:
    assert drafter_names("auto", is_controlled=True) == AUTO
    assert drafter_names("auto", is_controlled=False) == AUTO[:1]
    assert drafter_names("mix:ngram+lm:a", is_controlled=True) == ["ngram", "lm:a"]
    assert drafter_names("mix:ngram+lm:a", is_controlled=False) == ("mix:ngram+lm:a",)
    assert drafter_names("cascade:lm:a+ngram", is_controlled=True) == ("cascade:lm:a+ngram",)


@pytest.mark.parametrize(
    "name",
    [
        "", "lm", "lm:", "ngram:3", "mix", "mix:ngram", "mix:ngram+none", "mix:ngram+mix:ngram+ngram", "mix:lm+ngram",
        "cascade:ngram+lm:a", "cascade:lm:a", "cascade:lm:a+none", "cascade:lm:a+ngram+ngram",
    ],
)  # fmt: skip
def test_names_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match="drafter is"):
        drafter_kind(name)


@pytest.mark.parametrize("name", ["layerskip:0", "layerskip:4", "layerskip:x", "layerskip:-1", "quant:q8", "quant:q4"])
def test_what_a_model_can_not_give_is_refused(name: str, model: Path) -> None:
    dtype = "q4" if name == "quant:q4" else "q8"
    with pytest.raises(OptionError, match=r"layerskip|quant"):
        LLM(str(model), drafter=name, dtype=dtype, backend="cpu")


def drafters_of(drafter: Drafter) -> list[str]:
    inner = getattr(drafter, "inner", None)
    parts = drafter.drafters if isinstance(drafter, MixDrafter) else [inner] if inner else []
    return [drafter.name, *(name for part in parts for name in drafters_of(part))]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("layerskip:2", ["layerskip"]),
        ("layerskip:auto", ["layerskip"]),
        ("quant:q4", ["quant"]),
        ("cascade:lm:MODEL+ngram", ["lm", "ngram"]),
        ("cascade:quant:q4+layerskip:2+ngram", ["quant", "layerskip", "ngram"]),
        ("mix:ngram+layerskip:1", ["mix", "ngram", "layerskip"]),
        ("mix:ngram+cascade:lm:MODEL+ngram", None),
    ],
)
def test_the_text_is_the_targets_whoever_drafts(backend: str, name: str, made: list[str] | None, model: Path) -> None:
    name = name.replace("MODEL", str(model))
    if backend == "torch" and "quant" in name:
        pytest.skip("the torch backend has no q4")
    dtype = "bf16" if backend == "cpu" else "fp32"
    settings = {"backend": backend, "dtype": dtype, "device": "cpu"}
    prompts = [[5, 6, 7, 5, 6, 7, 5], list(range(20, 31))]
    with LLM(str(model), drafter="none", **settings) as plain:
        expected = [[plain.generate(prompt, params).token_ids for prompt in prompts] for params in PARAMS]
    with LLM(str(model), drafter=name, k=4, **settings) as llm:
        if made is not None:
            assert drafters_of(llm.drafters[0]) == made
        outputs = [llm.generate(prompts, params) for params in PARAMS]
        assert [[out.token_ids for out in both] for both in outputs] == expected
        assert sum(out.speculation.proposed for both in outputs for out in both) > 0
    with LLM(str(model), drafter=name, k="auto", **settings) as llm:
        assert [[out.token_ids for out in llm.generate(prompts, params)] for params in PARAMS] == expected


@pytest.mark.parametrize("dtype", ["bf16", "q4", "fp32"])
def test_trees_leave_the_text_alone_on_real_models(dtype: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = "torch" if dtype == "fp32" else "cpu"
    settings = {"backend": backend, "dtype": dtype, "device": "cpu"}
    prompts = [[5, 6, 7, 5, 6, 7, 5], list(range(20, 31)), [9] * 70]
    params = [*PARAMS, SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, repetition_penalty=1.3, stop=("zz",))]
    with LLM(str(model), drafter="none", **settings) as plain:
        expected = [[plain.generate(prompt, own).token_ids for prompt in prompts] for own in params]
    with LLM(str(model), drafter="layerskip:1", k=8, **settings) as llm:
        (drafter,) = llm.drafters
        assert isinstance(drafter, LMDrafter)
        drafter.shape = lambda count: [-1, -1, 0, 0, 1, *range(3, count)][:count]
        trees: list[int] = []
        honest = type(llm.session).extend

        def extend(session: Session, feeds: Sequence[Feed], **rest: Any) -> Scores:
            trees.extend(len(feed.tokens) for feed in feeds if feed.parents is not None and session is llm.session)
            return honest(session, feeds, **rest)  # type: ignore[arg-type]

        monkeypatch.setattr(type(llm.session), "extend", extend)
        outputs = [llm.generate(prompts, own) for own in params]
        assert [[out.token_ids for out in three] for three in outputs] == expected
        assert max(trees) == 9
        assert sum(out.speculation.accepted for three in outputs for out in three) > 20
        sampled = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=1)
        assert all(out.speculation.accepted for out in llm.generate(prompts, sampled))


def test_layers_go_evenly_and_the_outer_ones_stay() -> None:
    assert kept_layers(6, 4) == [0, 5]
    assert kept_layers(8, 2) == [0, 1, 3, 4, 6, 7]
    for num_layers in (3, 5, 30):
        for skipped in range(1, num_layers - 1):
            kept = kept_layers(num_layers, skipped)
            assert len(kept) == num_layers - skipped
            assert kept[0] == 0
            assert kept[-1] == num_layers - 1


def test_the_layer_that_does_nothing_is_the_first_to_go(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    save_hf("llama", tmp_path, num_hidden_layers=5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        for idle in (2, 3):
            loaded.model.layers[idle].self_attn.o_proj.weight.zero_()
            loaded.model.layers[idle].mlp.down_proj.weight.zero_()
    loaded.save_pretrained(tmp_path)
    session = CpuSession(load_checkpoint(str(tmp_path)), dtype="bf16")
    tokens = np.random.default_rng(0).integers(0, NUM_TOKENS, 40).tolist()
    kept = best_layers(session, tokens, lambda part: float(part.num_layers))
    assert not {2, 3} & set(kept)
    rows = [s.extend([Feed(s.open(), tokens, 1)]).logits for s in (session, session.subset([0, 1, 4]))]
    assert np.array_equal(rows[0], rows[1])
    assert isinstance(LMDrafter(session.subset(kept), vocab_size=session.vocab_size), LMDrafter)
