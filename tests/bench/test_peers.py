"""Peers run our very weights: the `transformers` model built from a checkpoint has the logits of the original."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from forerun.bench import peers
from forerun.bench.peer import PeerMissingError, PeerSetup
from forerun.bench.peers import check_peer, hf_model, hf_settings, open_peer
from forerun.errors import OptionError
from forerun.models.config import DecoderConfig, Layer, Rope
from forerun.models.load import load_checkpoint
from forerun.types import SamplingParams

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.families import FAMILIES, save_hf, tiny_model, write_gguf  # noqa: E402  # needs torch

PROMPT = [5, 17, 101, 17, 5, 17, 101, 64, 3, 5, 17]
SETTINGS = SamplingParams(max_tokens=23)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_a_gguf_file_become_the_original_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    write_gguf(family, model, tmp_path / "m.gguf")
    rebuilt = hf_model(load_checkpoint(str(tmp_path / "m.gguf"), cache_dir=tmp_path), "fp32").eval()
    ids = torch.tensor([PROMPT * 3])  # longer than the sliding windows
    with torch.inference_mode():
        torch.testing.assert_close(rebuilt(ids).logits, model(ids).logits, atol=2e-4, rtol=1e-4)


def test_a_hugging_face_folder_is_loaded_as_it_is_but_without_its_own_sampling_defaults(tmp_path: Path) -> None:
    model = save_hf("qwen3", tmp_path)
    rebuilt = hf_model(load_checkpoint(str(tmp_path)), "fp32").eval()
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        torch.testing.assert_close(rebuilt(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert rebuilt.generation_config.eos_token_id is None


def test_plain_and_lookup_write_the_same_and_are_timed_from_their_first_token(tmp_path: Path) -> None:
    save_hf("llama", tmp_path)
    peer = open_peer("transformers", PeerSetup(load_checkpoint(str(tmp_path)), "fp32", "cpu", 1))
    plain, lookup = (contender.run(PROMPT, SETTINGS) for contender in peer.contenders)
    assert plain.token_ids == lookup.token_ids
    assert plain.num_first == 1
    assert len(plain.token_ids) == 23 or plain.token_ids[-1] in (0, 2)
    assert 1 <= lookup.num_first <= 11
    for run in (plain, lookup):
        assert run.prefill_s > 0
        assert (run.decode_s > 0) == (run.num_timed > 0)
    assert [contender.baseline for contender in peer.contenders] == [None, "transformers plain"]


def test_what_the_library_has_no_kind_for_runs_in_bf16_and_is_told(tmp_path: Path) -> None:
    write_gguf("llama", tiny_model("llama"), tmp_path / "m.gguf")
    for path, same in ((tmp_path / "m.gguf", True), (save_folder(tmp_path / "hf"), False)):
        peer = open_peer("transformers", PeerSetup(load_checkpoint(str(path), cache_dir=tmp_path), "q4", "cpu", 1))
        assert peer.remarks == ["transformers has no q4: it runs the weights in bf16"]
        assert peer.contenders[0].model.dtype == torch.bfloat16  # type: ignore[attr-defined]
        assert {contender.has_our_weights for contender in peer.contenders} == {same}


def save_folder(folder: Path) -> Path:
    folder.mkdir()
    save_hf("llama", folder)
    return folder


def test_sampling_settings_reach_the_peer_and_the_seed_holds(tmp_path: Path) -> None:
    save_hf("llama", tmp_path)
    plain = open_peer("transformers", PeerSetup(load_checkpoint(str(tmp_path)), "fp32", "cpu", 1)).contenders[0]
    hot = SamplingParams(max_tokens=12, temperature=1.5, seed=4)
    assert plain.run(PROMPT, hot).token_ids == plain.run(PROMPT, hot).token_ids
    assert plain.run(PROMPT, hot).token_ids != plain.run(PROMPT, SETTINGS).token_ids[:12]
    cut = SamplingParams(max_tokens=12, temperature=1.5, top_p=1e-6, seed=4)  # only the likeliest token is left
    assert plain.run(PROMPT, cut).token_ids == plain.run(PROMPT, SETTINGS).token_ids[:12]


def test_a_peer_that_is_not_installed_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    with pytest.raises(PeerMissingError, match=r"pip install 'forerun\[torch\]'"):
        open_peer("transformers", PeerSetup(None, "fp32", "cpu", 1))  # type: ignore[arg-type]


def test_an_unknown_peer_is_refused_by_name() -> None:
    check_peer("transformers")
    check_peer("llama.cpp:Q4_0")
    with pytest.raises(OptionError, match="peer is 'transformers:Q4_0'"):
        check_peer("transformers:Q4_0")
    with pytest.raises(OptionError, match="peer is 'vlm'; expected one of transformers"):
        check_peer("vlm")


def test_a_rotary_scaling_that_cannot_be_said_back_makes_the_peer_step_aside() -> None:
    config = DecoderConfig("llama", 8, 8, 8, 2, 2, 4, 64, 1e-5, (Layer(),), (Rope(kind="dynamic"),), 0.5)
    with pytest.raises(PeerMissingError, match="dynamic rotary scaling"):
        hf_settings(config, [])


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (Rope(kind="linear", factor=2.0), {"rope_type": "linear", "factor": 2.0}),
        (Rope(kind="factors", factors=(1.0, 2.0)), {"rope_type": "default"}),
        (Rope(rotary_dim=2), {"rope_type": "default", "partial_rotary_factor": 0.5}),
        (Rope(kind="yarn", factor=4.0, original_max_len=16, attention_factor=1.5),
         {"rope_type": "yarn", "attention_factor": 1.5, "original_max_position_embeddings": 16}),
    ],
)  # fmt: skip
def test_rotary_scalings_are_said_in_the_words_of_the_library(rope: Rope, said: dict) -> None:
    config = DecoderConfig("llama", 8, 8, 8, 2, 2, 4, 64, 1e-5, (Layer(),), (rope,), 0.5)
    assert said.items() <= hf_settings(config, [])[1]["rope_parameters"].items()
