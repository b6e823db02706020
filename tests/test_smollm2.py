"""The scripts train a real model, SmolLM2-135M-Instruct: SFT always, the others with `-m slow`."""

import re

import pytest
import torch
from conftest import SCRIPTS, run, summary


def train(name, model, *flags):
    """The whole output of a run with SmolLM2's learning rate, and its summary."""
    flags = ["--model", model, "--lr", 1e-5, *flags]
    output = run(name, *flags, OMP_NUM_THREADS="2").stdout
    return output, summary(output)


def solved(result, key="accuracy_after"):
    """The k of `0.900 (k/20)`."""
    return int(re.search(r"\((\d+)/20\)", result[key])[1])


@pytest.fixture(scope="session")
def sft_checkpoint(smollm2, tmp_path_factory):
    """SmolLM2 after 8 SFT steps: it knows the form of an answer and gets a part of them right."""
    folder = tmp_path_factory.mktemp("sft") / "sft"
    _, result = train("minimal_sft", smollm2, "--steps", 8, "--save", folder)
    assert 1 <= solved(result) <= 14
    return folder


def test_sft_learns_the_sums(smollm2):
    _, result = train("minimal_sft", smollm2)
    assert solved(result, "accuracy_before") == 0 and solved(result) >= 18


def test_sampler_and_scoring_agree_on_the_real_model(smollm2):
    """With each other, and with each row alone in one plain pass."""
    script = SCRIPTS["minimal_grpo"]
    model, tokenizer = script.load(str(smollm2), "cpu")
    questions = ["What is 3 + 8?", "Who are you, and what is the capital of France?"]
    prompts = script.encode_prompts(tokenizer, questions, "cpu")
    limits = 8, script.stop_ids(model, tokenizer), tokenizer.pad_token_id
    torch.manual_seed(0)
    ids, mask = script.sample(model, *prompts, 2, *limits)
    with torch.no_grad():
        logprobs = script.token_logprobs(model, *prompts, ids, mask)
        for i, row in enumerate(ids):
            prompt = prompts[0][i // 2][prompts[1][i // 2].bool()]
            completion = row[mask[i].bool()]
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            plain = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
            assert (logprobs[i, : len(completion)] - plain).abs().max() < 1e-4
    # The greedy sampler takes the most probable token of the same distribution.
    ids, mask = script.sample(model, *prompts, 1, *limits, greedy=True)
    for prompt, real, row, own in zip(*prompts, ids, mask.bool()):
        whole = torch.cat([prompt[real.bool()], row[own]])[None]
        best = model(whole).logits[0].argmax(-1)[int(real.sum()) - 1 : -1]
        assert torch.equal(best, row[own])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minimal_grpo", "minimal_ppo"])
def test_rl_from_the_sft_checkpoint(name, sft_checkpoint):
    _, result = train(name, sft_checkpoint)
    assert solved(result) >= 14 and solved(result) > solved(result, "accuracy_before")


@pytest.mark.slow
def test_dpo_from_the_sft_checkpoint(sft_checkpoint):
    output, result = train("minimal_dpo", sft_checkpoint)
    assert solved(result) >= 12 and solved(result, "pair_accuracy") >= 18
    rejected = [float(value) for value in re.findall(r"  rejected (-[\d.]+)", output)]
    assert rejected[-1] < rejected[0] - 5  # over-optimisation: it falls without a floor
