"""The losses against implementations that we did not write: TRL's trainers and torchrl's GAE, on the same token ids.

Advantages are fed in: TRL divides by the sample standard deviation plus 1e-4, the scripts by the population one plus
1e-6, a factor of sqrt(G / (G - 1)). Run with -s to see the differences.
"""

import copy

import pytest
import torch
from conftest import SCRIPTS, having, make_model, make_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def batch(script, completions_per_prompt=4, seed=0):
    """Two left-padded prompts and their right-padded completions of different lengths, the last one cut off."""
    generator = torch.Generator().manual_seed(seed)

    def draw(lengths):
        return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]

    prompts = script.pad(draw([9, 4]), 258, "left")
    completions = script.pad(draw([5, 1, 8, 3, 2, 7, 6, 8][: 2 * completions_per_prompt]), 258, "right")
    return [*prompts, *completions]


def perturbed(model, seed, scale=0.02):
    """A copy whose weights are moved a little: another policy, or a reference."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p += scale * torch.randn_like(p)
    return other


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_equal(label, ours, theirs, our_gradient, their_gradient):
    value = abs(ours.item() - theirs.item()) / abs(theirs.item())
    slope = ((our_gradient - their_gradient).norm() / their_gradient.norm()).item()
    print(f"{label}: value {value:.1e}, gradient {slope:.1e}")
    assert value < 1e-5 and slope < 1e-5 and their_gradient.norm() > 1e-3


def grpo_trainer(folder, model, **settings):
    """TRL's trainer around the model, on CPU, for its loss alone; generation and rewards are never used."""
    config = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        num_generations=4,
        per_device_train_batch_size=8,
        loss_type="bnpo",  # the mean over the tokens of the batch
        use_bias_correction_kl=False,  # the penalty as the GRPO paper has it; TRL multiplies it by the ratio otherwise
        temperature=1.0,
        gradient_checkpointing=False,
        **settings,
    )
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "Q"}] * 8),
        processing_class=make_tokenizer(),
    )


def trl_grpo(folder, model, tensors, advantages, old_logprobs=None, ref_logprobs=None, **settings):
    """Value and gradient of TRL's GRPO loss."""
    model = copy.deepcopy(model)
    model.save_pretrained(folder / "start")
    # With beta > 0 the trainer loads a reference of its own from here.
    model.config._name_or_path = str(folder / "start")
    trainer = grpo_trainer(folder, model, **settings)
    prompt_ids, prompt_mask, ids, mask = tensors
    rows = len(ids) // len(prompt_ids)
    inputs = {
        "prompt_ids": prompt_ids.repeat_interleave(rows, 0),
        "prompt_mask": prompt_mask.repeat_interleave(rows, 0),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }
    if old_logprobs is not None:
        inputs["old_per_token_logps"] = old_logprobs
    if ref_logprobs is not None:
        inputs["ref_per_token_logps"] = ref_logprobs
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss, gradient(trainer.model)


@having("clipped_surrogate")
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("per_token", [False, True], ids=["per_row", "per_token"])
def test_grpo_loss_in_the_second_inner_epoch(script, beta, per_token, tmp_path):
    """Clip, KL and token mean, with old log-probabilities of another policy; per-token advantages are PPO's."""
    old_model = make_model(spread=0.1)
    model, reference = perturbed(old_model, 1), perturbed(old_model, 2)
    tensors = batch(script)
    ids, mask = tensors[2:]
    torch.manual_seed(3)
    advantages = torch.randn(ids.shape if per_token else (len(ids), 1))
    with torch.no_grad():
        old, ref = (script.token_logprobs(m, *tensors) for m in (old_model, reference))
    logprobs = script.token_logprobs(model, *tensors)
    surrogate, clipped = script.clipped_surrogate(logprobs, old, advantages, 0.2)
    loss = script.masked_mean(surrogate + beta * script.kl_to_reference(logprobs, ref), mask)
    loss.backward()
    share = script.masked_mean(clipped, mask)
    assert 0.05 < share < 0.95  # the clip fires, and not everywhere
    theirs, their_gradient = trl_grpo(
        tmp_path, model, tensors, advantages if per_token else advantages[:, 0], old, ref, beta=beta, epsilon=0.2
    )
    assert_equal(f"{script.__name__} beta {beta} {per_token}", loss, theirs, gradient(model), their_gradient)


def test_autoresearch_gradient_is_grpo_with_beta_0_and_one_iteration(tmp_path):
    """The value differs: -A log p is not -A ratio. The gradient is the same where the ratio is 1."""
    script, model = SCRIPTS["gsm8k_grpo_autoresearch"], make_model(spread=0.1)
    tensors = batch(script)
    advantages = script.group_advantages(torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0]]), scale_by_std=False)
    total = tensors[3].sum()
    for part, part_advantages in script.micro_batches(*tensors, advantages, 3, True):
        logprobs = script.token_logprobs(model, *part)
        loss = script.masked_mean(-part_advantages * logprobs, part[-1]) * part[-1].sum() / total
        loss.backward()
    _, theirs = trl_grpo(tmp_path, model, tensors, advantages.flatten(), beta=0.0, num_iterations=1)
    difference = ((gradient(model) - theirs).norm() / theirs.norm()).item()
    print(f"autoresearch: gradient {difference:.1e}")
    assert difference < 1e-5


def test_dpo_loss(tmp_path):
    script = SCRIPTS["minimal_dpo"]
    reference = make_model(spread=0.1)
    model = perturbed(reference, 1)
    tensors = batch(script, completions_per_prompt=2)
    with torch.no_grad():
        ref = script.pair_logprobs(reference, *tensors).T
    loss, margin = script.dpo_loss(*script.pair_logprobs(model, *tensors).T, *ref, 0.3)
    loss.backward()
    assert margin.abs().min() > 0.01
    theirs_model = copy.deepcopy(model)
    config = trl.DPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        beta=0.3,
        loss_type="sigmoid",
        gradient_checkpointing=False,
    )
    trainer = trl.DPOTrainer(
        model=theirs_model,
        ref_model=reference,
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "Q", "chosen": "a", "rejected": "b"}] * 2),
        processing_class=make_tokenizer(),
    )
    prompt_ids, prompt_mask, ids, mask = tensors
    chosen_first = [0, 2, 1, 3]
    prompts = [x.repeat_interleave(2, 0)[chosen_first] for x in (prompt_ids, prompt_mask)]
    inputs = {
        "input_ids": torch.cat([prompts[0], ids[chosen_first]], 1),
        "attention_mask": torch.cat([prompts[1], mask[chosen_first]], 1),
        "completion_mask": torch.cat([torch.zeros_like(prompts[1]), mask[chosen_first]], 1),
    }
    theirs = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    theirs.backward()
    assert_equal("minimal_dpo", loss, theirs, gradient(model), gradient(trainer.model))


@having("gae")
@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_gae_against_torchrl(script, gamma, lam):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    torch.manual_seed(0)
    lengths = torch.tensor([6, 1, 3, 5])
    values, rewards = torch.randn(4, 6), torch.randn(4)
    mask = (torch.arange(6) < lengths[:, None]).long()
    advantages, returns = script.gae(rewards, values, mask, gamma, lam)
    for i, n in enumerate(lengths.tolist()):
        paid, done = torch.zeros(n, 1), torch.zeros(n, 1, dtype=torch.bool)
        paid[-1], done[-1] = rewards[i], True
        value = values[i, :n, None]
        following = torch.cat([value[1:], torch.full((1, 1), 99.0)])  # unused: the row ends there
        theirs, targets = functional.generalized_advantage_estimate(gamma, lam, value, following, paid, done, done)
        torch.testing.assert_close(advantages[i, :n], theirs[:, 0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(returns[i, :n], targets[:, 0], rtol=1e-5, atol=1e-6)
        assert not advantages[i, n:].any() and not returns[i, n:].any()
