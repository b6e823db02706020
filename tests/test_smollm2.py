"""The scripts train a real model, SmolLM2-135M-Instruct: SFT always (2 minutes on two cores), others with `-m slow`."""

import re

import pytest
import torch
from conftest import SCRIPTS, run, summary


def solved(result, key="accuracy_after"):
    """The k of `0.900 (k/20)`."""
    return int(re.search(r"\((\d+)/20\)", result[key])[1])


@pytest.fixture(scope="session")
def sft_checkpoint(smollm2, tmp_path_factory):
    """SmolLM2 after 8 SFT steps: it knows the form of an answer and gets a part of them right."""
    folder = tmp_path_factory.mktemp("sft") / "sft"
    result = summary(run("minimal_sft", "--model", smollm2, "--steps", 8, "--save", folder, OMP_NUM_THREADS="2").stdout)
    assert 1 <= solved(result) <= 14
    return folder


def test_sft_learns_the_sums(smollm2):
    result = summary(run("minimal_sft", "--model", smollm2, OMP_NUM_THREADS="2").stdout)
    assert solved(result, "accuracy_before") == 0 and solved(result) >= 18


def test_sampler_and_scoring_agree_on_the_real_model(smollm2):
    script = SCRIPTS["minimal_grpo"]
    model, tokenizer = script.load(str(smollm2), "cpu")
    questions = ["What is 3 + 8?", "Who are you, and what is the capital of France?"]
    prompts = script.pad([script.encode_prompt(tokenizer, q) for q in questions], tokenizer.pad_token_id, "left")
    torch.manual_seed(0)
    ids, mask = script.sample(model, *prompts, 2, 8, script.stop_ids(model, tokenizer), tokenizer.pad_token_id)
    with torch.no_grad():
        logprobs = script.token_logprobs(model, *prompts, ids, mask)
        for i, row in enumerate(ids):
            prompt, completion = script.encode_prompt(tokenizer, questions[i // 2]), row[mask[i].bool()]
            whole = torch.cat([torch.tensor(prompt), completion])[None]
            plain = model(whole).logits[0].log_softmax(-1)[len(prompt) - 1 : -1].gather(1, completion[:, None])[:, 0]
            assert (logprobs[i, : len(completion)] - plain).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minimal_grpo", "minimal_ppo"])
def test_rl_from_the_sft_checkpoint(name, sft_checkpoint):
    result = summary(run(name, "--model", sft_checkpoint, OMP_NUM_THREADS="2").stdout)
    assert solved(result) >= 14 and solved(result) > solved(result, "accuracy_before")


@pytest.mark.slow
def test_dpo_from_the_sft_checkpoint(sft_checkpoint):
    output = run("minimal_dpo", "--model", sft_checkpoint, OMP_NUM_THREADS="2").stdout
    result = summary(output)
    assert solved(result) >= 12 and solved(result, "pair_accuracy") >= 18
    rejected = [float(value) for value in re.findall(r"  rejected (-[\d.]+)", output)]
    assert rejected[-1] < rejected[0] - 5  # over-optimisation: it falls without a floor
