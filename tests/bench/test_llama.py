"""llama.cpp as a peer: the loop by a double of its functions, and the real one where it is installed."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.bench import llama
from forerun.bench.llama import INSTALL, LlamaCpp, build_remark, model_file
from forerun.bench.measure import pass_times
from forerun.bench.peer import PeerMissingError, PeerSetup
from forerun.types import SamplingParams
from tests.bench.fake_llama_cpp import SYSTEM_INFO, TABLE, FakeLlama, FakeLookup

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def setup(**settings: Any) -> PeerSetup:
    fields = {"source_kind": "gguf", "path": Path("m.gguf"), "fingerprint": "f", "tokenizer": None} | settings
    fields["tokenizer"] = SimpleNamespace(eos_ids=fields.pop("eos_ids", (0,)))
    return PeerSetup(SimpleNamespace(**fields), "q4", "cpu", 2, num_positions=700)  # type: ignore[arg-type]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    module = FakeLlama()
    lookup = SimpleNamespace(LlamaPromptLookupDecoding=FakeLookup)
    monkeypatch.setattr(llama, "find_spec", lambda _name: True)
    monkeypatch.setattr(llama, "import_module", lambda name: {"llama_cpp": module}.get(name, lookup))
    monkeypatch.setattr(llama.machine, "cpu_flags", lambda: {"avx2", "avx512f"})
    return module


def greedy(num_tokens: int) -> tuple[int, ...]:
    tokens = [PROMPT[-1]]
    for _ in range(num_tokens):
        tokens.append(int(TABLE[tokens[-1]].argmax()))
    return tuple(tokens[1:])


def test_plain_and_lookup_write_the_greedy_text_and_only_lookup_checks_drafts(fake: FakeLlama) -> None:
    plain, lookup = LlamaCpp(setup()).contenders
    params = SamplingParams(max_tokens=23)
    run = plain.run(PROMPT, params)
    assert run.token_ids == greedy(23)
    assert fake.widths == [(8, 1)] + [(1, 1)] * 22
    assert (run.num_first, run.num_timed) == (1, 22)
    fake.widths.clear()
    assert lookup.run(PROMPT, params).token_ids == greedy(23)
    assert len(fake.widths) < 20  # some drafts held, and each pass had logits for all of them
    assert {wide - wanted for wide, wanted in fake.widths[1:]} == {0}
    assert (plain.baseline, lookup.baseline) == (None, "llama.cpp plain")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_text_is_longer_than_asked_for(fake: FakeLlama, max_tokens: int) -> None:
    for contender in LlamaCpp(setup()).contenders:
        assert contender.run(PROMPT, SamplingParams(max_tokens=max_tokens)).token_ids == greedy(max_tokens)


def test_a_text_ends_with_our_end_token_drafted_or_not(fake: FakeLlama) -> None:
    end = greedy(23)[4]
    length = greedy(23).index(end) + 1
    for contender in LlamaCpp(setup(eos_ids=(end,))).contenders:
        assert contender.run(PROMPT, SamplingParams(max_tokens=23)).token_ids == greedy(length)


def test_sampling_is_their_own_by_our_law_and_is_freed(fake: FakeLlama) -> None:
    plain, lookup = LlamaCpp(setup()).contenders
    params = SamplingParams(max_tokens=23, temperature=1.5, top_p=0.9, seed=4)
    text = plain.run(PROMPT, params).token_ids
    assert lookup.run(PROMPT, params).token_ids == text != greedy(23)
    assert [part[0] for part in fake.chains[0]] == ["temp", "top_p", "dist"]
    assert fake.chains[0][0][1:] + fake.chains[0][1][1:] == (1.5, 0.9, 1)
    assert fake.num_freed == 2


def test_it_runs_the_very_file_with_the_same_threads_and_room_for_the_text(fake: FakeLlama) -> None:
    peer = LlamaCpp(setup())
    assert fake.path == b"m.gguf"
    assert (fake.limits.n_threads, fake.limits.n_threads_batch, fake.limits.n_ctx) == (2, 2, 768)
    assert [contender.has_our_weights for contender in peer.contenders] == [True, True]
    assert peer.remarks[0] == "llama-cpp-python 9.9 on m.gguf"
    assert peer.remarks[1].startswith("llama.cpp was built natively (")


def test_another_file_is_raced_but_its_texts_are_not_compared(fake: FakeLlama) -> None:
    peer = LlamaCpp(setup(source_kind="safetensors")._replace(argument="other.gguf"))
    assert fake.path == b"other.gguf"
    assert [contender.name for contender in peer.contenders] == [
        "llama.cpp:other.gguf plain", "llama.cpp:other.gguf prompt lookup",
    ]  # fmt: skip
    assert not any(contender.has_our_weights for contender in peer.contenders)
    assert peer.remarks[0].endswith("other weights than ours")


def test_long_prompts_come_in_several_batches(fake: FakeLlama) -> None:
    prompt = PROMPT * 80
    (plain, _lookup) = LlamaCpp(setup()).contenders
    assert plain.run(prompt, SamplingParams(max_tokens=3)).token_ids == greedy(3)
    assert fake.widths[:2] == [(512, 0), (128, 1)]


def test_the_curve_wants_all_logits_and_leaves_no_row_behind(fake: FakeLlama) -> None:
    passes = LlamaCpp(setup()).passes
    assert passes is not None
    (times,) = pass_times([passes], PROMPT, rows=(1, 4), repeats=2)
    assert list(times) == [1, 4]
    assert fake.widths == [(8, 1), (4, 4), (1, 1), (1, 1), (4, 4), (4, 4), (1, 1)]
    assert fake._tokens == []


def test_a_text_that_does_not_fit_is_an_error_with_its_place(fake: FakeLlama) -> None:
    (plain, _lookup) = LlamaCpp(setup()).contenders
    with pytest.raises(RuntimeError, match="llama_decode failed with 1 at position 512"):
        plain.run(PROMPT * 97, SamplingParams(max_tokens=2))


def test_what_cannot_run_steps_aside_and_says_why(fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerMissingError, match="the target is no GGUF file"):
        LlamaCpp(setup(source_kind="safetensors"))
    with pytest.raises(PeerMissingError, match="forerun runs on cuda"):
        LlamaCpp(setup()._replace(device="cuda"))
    with pytest.raises(PeerMissingError, match=r"can't load broken\.gguf"):
        LlamaCpp(setup(path=Path("broken.gguf")))
    monkeypatch.setattr(llama, "find_spec", lambda _name: None)
    with pytest.raises(PeerMissingError, match=f"isn't installed; {INSTALL}"):
        LlamaCpp(setup())


def test_a_build_that_leaves_instructions_unused_is_called_unfair() -> None:
    assert "natively" in build_remark(SYSTEM_INFO.decode(), {"avx2", "fma", "avx512f", "avx512_vnni", "sse"})
    old = build_remark("AVX = 1 | AVX2 = 1 | AVX512 = 0 | FMA = 1 |", {"avx2", "fma", "avx512f", "avx512_vnni"})
    assert old.startswith("UNFAIR: llama.cpp was built without AVX512, AVX512_VNNI,")


def test_a_file_in_other_blocks_is_made_once_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def write(_checkpoint: Any, path: Path, kind: str) -> None:
        made.append(kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    monkeypatch.setattr(llama, "write_gguf_like", write)
    wanted = setup()._replace(argument="Q4_0", cache_dir=tmp_path)
    assert model_file(wanted) == model_file(wanted) == tmp_path / "bench" / "m.f.Q4_0.gguf"
    assert made == ["Q4_0"]

    def fail(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(llama, "write_gguf_like", fail)
    with pytest.raises(PeerMissingError, match="No space left on device"):
        model_file(wanted._replace(argument="Q8_0"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python isn't installed")
def test_the_real_one_has_the_logits_of_our_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from forerun.models.load import load_checkpoint
    from tests.families import tiny_model, write_gguf

    model = tiny_model("llama")
    write_gguf("llama", model, tmp_path / "m.gguf")
    checkpoint = load_checkpoint(str(tmp_path / "m.gguf"), cache_dir=tmp_path)
    peer = LlamaCpp(PeerSetup(checkpoint, "fp32", "cpu", 1, num_positions=256))
    plain, lookup = peer.contenders
    params = SamplingParams(max_tokens=12)
    text = plain.run(PROMPT, params).token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *text]])).logits[0, len(PROMPT) - 1 : -1]
    best = logits.max(-1).values - logits[range(len(text)), list(text)]
    assert float(best.max()) < 1e-2  # the likeliest, up to rounding
    assert np.mean(np.array(lookup.run(PROMPT, params).token_ids[:4]) == np.array(text[:4])) == 1.0
    hot = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=3)
    assert plain.run(PROMPT, hot).token_ids == plain.run(PROMPT, hot).token_ids
    assert peer.passes is not None
    assert set(pass_times([peer.passes], PROMPT, rows=(1, 4), repeats=1)[0]) == {1, 4}
