"""Families that we don't run ourselves go through `transformers`: its session conforms, and so does its text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from forerun import LLM, SamplingParams
from forerun.backends.base import Feed, Session
from forerun.backends.open import load_model, open_session
from forerun.backends.transformers import TransformersSession
from forerun.errors import ModelError, OptionError, UnsupportedModelError
from forerun.models.load import load_foreign
from tests.backends.session_suite import SessionSuite, as_numpy
from tests.families import NUM_TOKENS, VOCAB_SIZE, save_hf, save_tokenizer

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "gpt2": transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=3, n_head=4, n_positions=96),
    "gpt_neox": transformers.GPTNeoXConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=96,
    ),
    "opt": transformers.OPTConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, ffn_dim=96,
        max_position_embeddings=96, word_embed_proj_dim=64,
    ),
    "falcon": transformers.FalconConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, alibi=False,
        max_position_embeddings=96,
    ),
    "falcon with alibi": transformers.FalconConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, alibi=True,
        new_decoder_architecture=False, multi_query=True, max_position_embeddings=96,
    ),
    "bloom": transformers.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=3, n_head=4),
    "mamba": transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
        config.initializer_range = 0.3  # large enough that each part of a net moves the logits
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name)
    save_hf("llama", folder / "llama", max_position_embeddings=96)
    return folder


class ForeignSuite(SessionSuite):
    name = "gpt2"
    tolerance = 5e-4
    can_branch = True

    @pytest.fixture(params=DEVICES)
    def session(self, request: pytest.FixtureRequest, models: Path) -> Session:
        session = TransformersSession(load_foreign(str(models / self.name)), dtype="fp32", device=request.param)
        assert session.can_branch == self.can_branch
        assert session.vocab_size == NUM_TOKENS
        return session

    def test_a_subset_of_all_layers_is_the_model(self, session: Session) -> None:
        with pytest.raises(OptionError, match="layers"):
            session.subset(range(session.num_layers))


class TestGPT2(ForeignSuite):
    pass


class TestGPTNeoX(ForeignSuite):
    name = "gpt_neox"


class TestOPT(ForeignSuite):
    name = "opt"


class TestFalcon(ForeignSuite):
    name = "falcon"


class TestFalconWithAlibi(ForeignSuite):
    name = "falcon with alibi"
    can_branch = False


class TestOneOfOurs(ForeignSuite):
    name = "llama"


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("mamba", "bloom")])
def test_rows_are_those_of_the_library(models: Path, name: str) -> None:
    session = TransformersSession(load_foreign(str(models / name)), dtype="fp32", device="cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32).eval()
    texts = [list(range(3, 20)), [7, 8, 9], [5] * 30]
    seqs = [session.open() for _ in texts]
    session.extend([Feed(seq, text[:2]) for seq, text in zip(seqs, texts, strict=True)])
    scores = session.extend([Feed(seq, text[2:], 1) for seq, text in zip(seqs, texts, strict=True)], taps=[1])
    with torch.inference_mode():
        whole = [model(torch.tensor([text]), output_hidden_states=True) for text in texts]
    expected = np.stack([one.logits[0, -1, :NUM_TOKENS].numpy() for one in whole])
    np.testing.assert_allclose(as_numpy(scores.logits), expected, atol=5e-4)
    hidden = np.concatenate([one.hidden_states[2][0, 2:].numpy() for one in whole])
    np.testing.assert_allclose(as_numpy(scores.taps[1]), hidden, atol=5e-4)


def test_a_model_without_keys_and_values_is_refused(models: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="Mamba"):
        TransformersSession(load_foreign(str(models / "mamba")), dtype="fp32", device="cpu")


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt", "falcon", "falcon with alibi"])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "recycle", "lm"])
def test_the_text_is_that_of_plain_decoding(models: Path, name: str, drafter: str) -> None:
    prompts = [[5, 6, 7, 5, 6, 7, 5], list(range(20, 31)), [9] * 20]
    drafter = f"lm:{models / 'gpt2'}" if drafter == "lm" else drafter
    settings: dict[str, Any] = {"dtype": "fp32", "device": "cpu"}
    with LLM(str(models / name), drafter="none", **settings) as plain:
        assert plain.config.backend == "transformers"
        expected = [out.token_ids for out in plain.generate(prompts, PARAMS)]
        coupled = [out.token_ids for out in plain.generate(prompts, COUPLED)]
    with LLM(str(models / name), drafter=drafter, k=4, **settings) as llm:
        outputs = llm.generate(prompts, PARAMS)
        assert [out.token_ids for out in outputs] == expected
        assert sum(out.speculation.proposed for out in outputs) > 0
        assert [out.token_ids for out in llm.generate(prompts, COUPLED)] == coupled


PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, repetition_penalty=1.1)
COUPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=4, verify="coupled")


def test_a_known_family_goes_there_only_if_asked(models: Path) -> None:
    settings: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "threads": 2}
    for backend, kind in (("auto", "torch"), ("transformers", "transformers")):
        checkpoint = load_model(str(models / "llama"), backend=backend)
        assert getattr(open_session(checkpoint, backend=backend, **settings), "backend", None) == kind


def test_what_it_can_not_do_is_said(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match="gpt2 is unknown"):
        LLM(str(models / "gpt2"), backend="cpu")
    with pytest.raises(OptionError, match="dtype is 'q4'"):
        LLM(str(models / "gpt2"), dtype="q4")
    with pytest.raises(OptionError, match="layers"):
        LLM(str(models / "gpt2"), drafter="layerskip:1", dtype="fp32", device="cpu")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match="GGUF"):
        load_model(str(tmp_path / "x.gguf"), backend="transformers")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(str(tmp_path), backend="transformers")
    import forerun.backends.open as module

    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "transformers" else object())
    with pytest.raises(UnsupportedModelError, match=r"pip install 'forerun\[torch\]'"):
        LLM(str(models / "gpt2"))
