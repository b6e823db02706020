"""Gradients against finite differences and full enumeration, samples against probabilities."""

import itertools
import math

import pytest
import torch
from conftest import SCRIPTS, having, make_model, pad, prompts_of

close = torch.testing.assert_close
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@having("clipped_surrogate")
@pytest.mark.parametrize("columns", [1, 4])
def test_clipped_surrogate_gradient(script, columns):
    logprobs, old = draw(3, 4).requires_grad_(), draw(3, 4, seed=1)
    fixed = old, draw(3, columns, seed=2), 0.2
    assert script.clipped_surrogate(logprobs, *fixed)[1].any()
    assert torch.autograd.gradcheck(lambda x: script.clipped_surrogate(x, *fixed)[0], logprobs)


@having("kl_to_reference")
def test_kl_gradient(script):
    x, ref = draw(3, 4).requires_grad_(), draw(3, 4, seed=1)
    assert torch.autograd.gradcheck(lambda x: script.kl_to_reference(x, ref), x)


@having("masked_mean")
def test_masked_mean_gradient(script):
    x = draw(3, 4).requires_grad_()
    script.masked_mean(x, MASK).backward()
    close(x.grad, MASK / 9.0, check_dtype=False)


@having("dpo_loss")
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_dpo_gradient(script, beta):
    pair = draw(5).requires_grad_(), draw(5, seed=1).requires_grad_()
    ref = draw(5, seed=2), draw(5, seed=3)
    assert torch.autograd.gradcheck(lambda c, r: script.dpo_loss(c, r, *ref, beta)[0], pair)


@having("token_logprobs")
def test_gradient_through_the_model_is_its_slope(script, model):
    """Along the gradient the slope is the gradient's norm, by the central difference; float64."""
    prompts, completions = prompts_of([[5, 6, 7], [8]]), pad([[1, 2, 3], [4], [5, 6], [7, 8, 9]])
    weights, model = draw(4, 3, seed=1) * completions[1], model.double()

    def loss():
        return (script.token_logprobs(model, *prompts, *completions) * weights).sum()

    loss().backward()
    gradient = [p.grad.clone() for p in model.parameters()]
    norm, values = sum((g**2).sum() for g in gradient).sqrt(), []
    for step in (1e-3, -2e-3):
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradient):
                p += step * g / norm
            values.append(loss().item())
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(norm.item(), rel=2e-3)


# A bandit that can be enumerated: two tokens, completions of length 2, a reward for each of four.
COMPLETIONS = torch.tensor([*itertools.product((0, 1), repeat=2)])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0])


def bandit(script):
    """Token log-probabilities (4, 2) of all completions, their probabilities, a function for
    gradients, and the gradient of the expected reward."""
    model = make_model(vocab=2, spread=0.5, seed=3, eos=1)
    mask = torch.ones_like(COMPLETIONS)
    logprobs = script.token_logprobs(model, *prompts_of([[1, 0, 1]]), COMPLETIONS, mask)
    parameters = [*model.parameters()]

    def slope(value):
        grads = torch.autograd.grad(value, parameters, retain_graph=True)
        return torch.cat([g.flatten() for g in grads])

    p = logprobs.sum(1).exp()
    assert p.sum().item() == pytest.approx(1) and p.min() > 0.02
    return logprobs, p, slope, slope((p * REWARDS).sum())


def policy_losses(script, logprobs, advantages):
    """The script's loss per token on the first inner epoch: the ratio is 1."""
    if hasattr(script, "clipped_surrogate"):
        return script.clipped_surrogate(logprobs, logprobs.detach(), advantages, 0.2)[0]
    return -advantages * logprobs


@pytest.mark.parametrize("name", ["gsm8k_grpo_autoresearch", "gsm8k_grpo"])
@pytest.mark.parametrize("G", [2, 3])
def test_mean_of_the_gradient_over_all_groups_is_the_policy_gradient(name, G):
    """Of r - mean, over all 4^G groups by their probability. A completion is part of its own
    baseline, which costs the factor (G - 1) / G; the token mean costs 1 / T."""
    script = SCRIPTS[name]
    logprobs, p, slope, exact = bandit(script)
    expected = 0.0
    for group in map(list, itertools.product(range(4), repeat=G)):
        advantages = script.group_advantages(REWARDS[group][None], scale_by_std=False).view(-1, 1)
        losses = policy_losses(script, logprobs[group], advantages)
        expected = expected + p[group].prod().detach() * losses.mean()
    ours = -slope(expected) * 2 * G / (G - 1)
    close(ours, exact, rtol=1e-3, atol=1e-4 * exact.norm().item())
    assert exact.norm() > 0.01


@having("group_advantages")
def test_a_large_group_follows_the_policy_gradient_up_to_the_standard_deviation(script):
    logprobs, p, slope, exact = bandit(script)
    rows = torch.arange(4).repeat_interleave((p.detach() * 20_000).round().long())
    advantages = script.group_advantages(REWARDS[rows][None]).view(-1, 1)
    ours = -slope(policy_losses(script, logprobs[rows], advantages).mean()) * 2
    q = (p * REWARDS).sum().item()
    close(ours * math.sqrt(q * (1 - q)), exact, rtol=0, atol=2e-3 * exact.norm().item())


@having("gae")
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_ends_of_gae_are_monte_carlo_and_one_step(script, gamma):
    values, rewards = draw(2, 5).float(), torch.tensor([1.0, -2.0])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    monte_carlo, returns = script.gae(rewards, values, mask, gamma, 1.0)
    one_step, _ = script.gae(rewards, values, mask, gamma, 0.0)
    for i, n in enumerate((5, 2)):
        for t in range(n):
            paid = rewards[i] * gamma ** (n - 1 - t)
            close(monte_carlo[i, t], paid - values[i, t])
            close(returns[i, t], paid)
            following = gamma * values[i, t + 1] if t + 1 < n else rewards[i]
            close(one_step[i, t], following - values[i, t])


@having("sample")
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_samples_have_the_frequencies_that_token_logprobs_states(script, family):
    """Pearson's chi-squared, for two prompts of different lengths in a batch; token 3 stops."""
    model = make_model(family, vocab=4, spread=0.2, seed=1, eos=3)
    prompts, draws = prompts_of([[1, 2, 0, 2, 1], [2]], 0), 4000
    torch.manual_seed(0)
    ids, mask = script.sample(model, *prompts, draws, 3, torch.tensor([3]), 0)
    every = [list(c) for n in (1, 2, 3) for c in itertools.product(range(4), repeat=n)]
    every = [c for c in every if 3 not in c[:-1] and (c[-1] == 3 or len(c) == 3)]
    with torch.no_grad():
        rows = pad(every * 2, 0)
        sums = (script.token_logprobs(model, *prompts, *rows) * rows[1]).sum(1)
    p = sums.exp().view(2, -1)
    close(p.sum(1), torch.ones(2), rtol=0, atol=1e-5)
    seen = [row[real.bool()].tolist() for row, real in zip(ids, mask)]
    for b in range(2):
        drawn = seen[b * draws : (b + 1) * draws]
        counts = torch.tensor([float(drawn.count(c)) for c in every])
        assert counts.sum() == draws
        expected = p[b] * draws
        common = expected >= 5  # the test's usual condition; the rare ones count as one cell
        counts = torch.cat([counts[common], counts[~common].sum()[None]])
        expected = torch.cat([expected[common], expected[~common].sum().clamp(min=1e-3)[None]])
        statistic = ((counts - expected) ** 2 / expected).sum()
        degrees = torch.tensor((len(counts) - 1) / 2)
        assert torch.special.gammaincc(degrees, statistic / 2) > 1e-3 and len(counts) > 10
