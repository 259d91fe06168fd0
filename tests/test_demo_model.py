"""The demo model as a whole: its greedy text is that of `transformers` on the same file, whatever drafts it."""

from collections.abc import Iterator

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.bench.peers import hf_model
from forerun.bench.workload import load_workload

NUM_TOKENS = 48


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2-135m", drafter="ngram", dtype="fp32", backend="torch", device="cpu") as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_text_in_fp32_is_that_of_transformers_on_the_same_file(llm: LLM, penalty: float) -> None:
    model = hf_model(llm.checkpoint, "fp32").eval()
    for prompt in load_workload():
        ids = list(llm.encode(prompt.prompt))
        with torch.inference_mode():
            written = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                repetition_penalty=penalty,
                eos_token_id=list(llm.tokenizer.eos_ids),
                pad_token_id=0,
            )[0, len(ids) :].tolist()
        params = SamplingParams(max_tokens=NUM_TOKENS, repetition_penalty=penalty)
        assert list(llm.generate(ids, params).token_ids) == written, prompt.id


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "auto"), ("cpu", "q8"), ("torch", "bf16"), ("torch", "fp32")])
def test_greedy_text_is_the_same_with_and_without_speculation(backend: str, dtype: str) -> None:
    with LLM("smollm2-135m", drafter="ngram", dtype=dtype, backend=backend, device="cpu") as llm:
        prompts = [prompt.prompt for prompt in load_workload()]
        plain = [llm.generate(prompt, SamplingParams(max_tokens=NUM_TOKENS, k=0)) for prompt in prompts]
        drafted = llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, k=8))  # all in one batch
        assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]


def test_the_same_text_comes_from_a_coupled_seed_with_any_drafter_alone_and_in_a_batch() -> None:
    texts = set()
    for drafter in ("none", "ngram"):
        with LLM("smollm2-135m", drafter=drafter, verify="coupled", device="cpu") as llm:
            params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=3)
            texts.add(llm.generate("Tell me about rivers.", params).token_ids)
            texts.add(llm.generate(["Hi!", "Tell me about rivers.", "What is 7 times 8?"], params)[1].token_ids)
    assert len(texts) == 1
