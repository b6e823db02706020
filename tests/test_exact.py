"""Gradients against finite differences, policy gradients against a full enumeration, samples against probabilities."""

import itertools
import math

import pytest
import torch
from conftest import SCRIPTS, having, make_model

close = torch.testing.assert_close


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])


@having("clipped_surrogate")
@pytest.mark.parametrize("columns", [1, 4])
def test_clipped_surrogate_gradient(script, columns):
    logprobs, old = draw(3, 4).requires_grad_(), draw(3, 4, seed=1)
    advantages = draw(3, columns, seed=2)
    assert script.clipped_surrogate(logprobs, old, advantages, 0.2)[1].any()
    assert torch.autograd.gradcheck(lambda x: script.clipped_surrogate(x, old, advantages, 0.2)[0], logprobs)


@having("kl_to_reference")
def test_kl_gradient(script):
    ref = draw(3, 4, seed=1)
    assert torch.autograd.gradcheck(lambda x: script.kl_to_reference(x, ref), draw(3, 4).requires_grad_())


@having("masked_mean")
def test_masked_mean_gradient(script):
    assert torch.autograd.gradcheck(lambda x: script.masked_mean(x, MASK), draw(3, 4).requires_grad_())
    x = draw(3, 4).requires_grad_()
    script.masked_mean(x, MASK).backward()
    close(x.grad, MASK / 9.0, check_dtype=False)


@having("dpo_loss")
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_dpo_gradient(script, beta):
    chosen, rejected = draw(5).requires_grad_(), draw(5, seed=1).requires_grad_()
    ref = draw(5, seed=2), draw(5, seed=3)
    assert torch.autograd.gradcheck(lambda c, r: script.dpo_loss(c, r, *ref, beta)[0], (chosen, rejected))


@having("token_logprobs")
def test_loss_gradient_through_the_model_is_its_slope(script, model):
    """Along the gradient the slope is the gradient's norm, by the central difference; weights in float64."""
    prompts = script.pad([[5, 6, 7], [8]], 0, "left")
    completions = script.pad([[1, 2, 3], [4], [5, 6], [7, 8, 9]], 0, "right")
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


# A bandit that can be enumerated: two tokens, completions of length 2, a reward for each of the four.
COMPLETIONS = torch.tensor([*itertools.product((0, 1), repeat=2)])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0])


def bandit(script):
    """Token log-probabilities (4, 2) of all completions, with their graph, and the gradient of expected reward."""
    model = make_model(vocab=2, spread=0.5, seed=3)
    prompt = script.pad([[1, 0, 1]], 0, "left")
    logprobs = script.token_logprobs(model, *prompt, COMPLETIONS, torch.ones_like(COMPLETIONS))
    parameters = [*model.parameters()]

    def slope(value):
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, retain_graph=True)])

    p = logprobs.sum(1).exp()
    assert p.sum().item() == pytest.approx(1) and p.min() > 0.02
    return logprobs, p, slope, slope((p * REWARDS).sum())


@pytest.mark.parametrize("name", ["gsm8k_grpo_autoresearch", "gsm8k_grpo"])
@pytest.mark.parametrize("G", [2, 3])
def test_mean_of_the_gradient_over_all_groups_is_the_policy_gradient(name, G):
    """Of r - mean, over all 4^G groups by their probability. A completion is part of its own baseline, which costs the
    factor (G - 1) / G; the token mean costs 1 / T."""
    script = SCRIPTS[name]
    logprobs, p, slope, exact = bandit(script)
    expected = 0.0
    for group in itertools.product(range(4), repeat=G):
        rows = list(group)
        advantages = script.group_advantages(REWARDS[rows][None], scale_by_std=False).view(-1, 1)
        mask = torch.ones(G, 2)
        if name == "gsm8k_grpo":
            losses, _ = script.clipped_surrogate(logprobs[rows], logprobs[rows].detach(), advantages, 0.2)
        else:
            losses = -advantages * logprobs[rows]
        expected = expected + p[rows].prod().detach() * script.masked_mean(losses, mask)
    ours = slope(expected)
    close(-ours * 2 * G / (G - 1), exact, rtol=1e-3, atol=1e-4 * exact.norm().item())
    assert exact.norm() > 0.01


@having("group_advantages")
def test_large_group_follows_the_policy_gradient_up_to_the_standard_deviation(script):
    logprobs, p, slope, exact = bandit(script)
    counts = (p.detach() * 20_000).round().long()
    rows = torch.arange(4).repeat_interleave(counts)
    advantages = script.group_advantages(REWARDS[rows][None]).view(-1, 1)
    if hasattr(script, "clipped_surrogate"):
        losses, _ = script.clipped_surrogate(logprobs[rows], logprobs[rows].detach(), advantages, 0.2)
    else:
        losses = -advantages * logprobs[rows]
    ours = slope(script.masked_mean(losses, torch.ones(len(rows), 2)))
    q = (p * REWARDS).sum().item()
    close(-ours * 2 * math.sqrt(q * (1 - q)), exact, rtol=0, atol=2e-3 * exact.norm().item())


@having("gae")
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_ends_are_monte_carlo_and_one_step(script, gamma):
    values, rewards = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, -2.0])
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
    """Pearson's chi-squared, for two prompts of different lengths in one batch; token 3 stops."""
    model = make_model(family, vocab=4, spread=0.2, seed=1)
    prompts, draws = script.pad([[1, 2, 0, 2, 1], [2]], 0, "left"), 4000
    torch.manual_seed(0)
    ids, mask = script.sample(model, *prompts, draws, 3, [3], 0)
    every = [c for n in (1, 2, 3) for c in itertools.product(range(4), repeat=n)]
    every = [list(c) for c in every if 3 not in c[:-1] and (c[-1] == 3 or len(c) == 3)]
    with torch.no_grad():
        rows = script.pad(every * 2, 0, "right")
        p = (script.token_logprobs(model, *prompts, *rows) * rows[1]).sum(1).exp().view(2, -1)
    close(p.sum(1), torch.ones(2), rtol=0, atol=1e-5)
    for b in range(2):
        seen = [row[real.bool()].tolist() for row, real in zip(ids, mask)][b * draws : (b + 1) * draws]
        counts = torch.tensor([float(seen.count(c)) for c in every])
        assert counts.sum() == draws
        expected = p[b] * draws
        common = expected >= 5  # the usual condition of the test; the rare ones count as one cell
        counts = torch.cat([counts[common], counts[~common].sum()[None]])
        expected = torch.cat([expected[common], expected[~common].sum().clamp(min=1e-3)[None]])
        statistic = ((counts - expected) ** 2 / expected).sum()
        p_value = torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), statistic / 2)
        assert p_value > 1e-3 and len(counts) > 10
