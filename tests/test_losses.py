"""Losses, advantages and returns against numbers worked out by hand."""

import math
import random

import pytest
import torch
from conftest import having, make_model, pad, prompts_of
from torch import tensor

close = torch.testing.assert_close


@having("masked_mean")
def test_masked_mean_ignores_padding(script):
    x = torch.zeros(2, 4)
    x[0, :2] = 0.4  # a KL of 0.4 on 2 of 8 slots
    mask = tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    close(script.masked_mean(x, mask), tensor(0.4))
    wide = torch.cat([x, torch.full((2, 10), 99.0)], 1), torch.nn.functional.pad(mask, (0, 10))
    close(script.masked_mean(*wide), tensor(0.4))


@having("group_advantages")
def test_group_advantages(script):
    flat = script.group_advantages(tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert flat.tolist() == [[0, 0], [0, 0]]
    # std 0.5: 0.5 / 0.5001 = 0.9998
    mixed = script.group_advantages(tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]]))
    close(mixed, tensor([[0.9998, -0.9998], [-0.9998, 0.9998], [0.9998, -0.9998]]))
    # mean 0.25, population std sqrt(0.25 * 0.75) = 0.4330127: 0.75 / 0.4331127 = 1.731651
    rewards = tensor([[1.0, 0, 0, 0]])
    close(script.group_advantages(rewards), tensor([[1.731651] + [-0.577217] * 3]))
    plain = script.group_advantages(rewards, scale_by_std=False)
    close(plain, tensor([[0.75, -0.25, -0.25, -0.25]]))


@having("clipped_surrogate")
def test_clipped_surrogate(script):
    ratio = tensor([[1.0, 1.5, 0.5], [1.0, 1.5, 0.5]])
    advantages = tensor([[1.0], [-1.0]])
    loss, clipped = script.clipped_surrogate(ratio.log(), torch.zeros(2, 3), advantages, 0.2)
    # A gain is capped at 1.2, a loss counts in full: min(1.5, 1.2) and min(-0.5, -0.8).
    close(loss, tensor([[-1.0, -1.2, -0.5], [1.0, 1.5, 0.8]]))
    assert clipped.tolist() == [[0, 1, 0], [0, 0, 1]] and clipped.dtype == torch.float32


@having("clipped_surrogate")
def test_advantages_may_differ_by_token(script):
    advantages = tensor([[1.0, 0.0, -2.0]])
    loss, _ = script.clipped_surrogate(torch.zeros(1, 3), torch.zeros(1, 3), advantages, 0.2)
    assert loss.tolist() == [[-1.0, 0.0, 2.0]]


@having("clipped_surrogate")
def test_no_gradient_where_the_clip_fires(script):
    logprobs = tensor([[1.5, 1.1, 0.5]]).log().requires_grad_()
    loss, _ = script.clipped_surrogate(logprobs, torch.zeros(1, 3), tensor([[1.0]]), 0.2)
    loss.sum().backward()
    close(logprobs.grad, tensor([[0.0, -1.1, -0.5]]))


@having("clipped_surrogate")
def test_loss_is_the_mean_over_tokens_not_over_completions(script):
    mask = (torch.arange(30) < tensor([[10], [30]])).long()
    zeros = torch.zeros(2, 30)
    loss, _ = script.clipped_surrogate(zeros, zeros, tensor([[1.0], [-1.0]]), 0.2)
    # (30 - 10) / 40; by completion it would be 0, by a constant 30 0.333
    close((loss * mask).sum() / mask.sum(), tensor(0.5))
    if hasattr(script, "masked_mean"):
        close(script.masked_mean(loss, mask), tensor(0.5))


@having("clipped_surrogate")
def test_loss_prints_0_while_its_gradient_is_not(script):
    model, ids = make_model(), tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    logprobs = script.token_logprobs(model, *prompts_of([[5, 6, 7]]), ids, torch.ones_like(ids))
    advantages = tensor([[3.0], [-1.0], [-1.0], [-1.0]]) / 3**0.5  # of rewards 1 0 0 0
    losses, clipped = script.clipped_surrogate(logprobs, logprobs.detach(), advantages, 0.2)
    losses.mean().backward()
    assert f"{losses.mean():z.4f}" == "0.0000" and not clipped.any()
    assert max(p.grad.norm() for p in model.parameters()) > 0.1


@having("kl_to_reference")
def test_kl_estimate(script):
    kl = script.kl_to_reference(torch.zeros(3), tensor([-1.0, 0.0, 1.0]))
    close(kl, tensor([0.36788, 0.0, 0.71828]), atol=1e-5, rtol=0)
    near = script.kl_to_reference(torch.zeros(1000), torch.linspace(-1e-4, 1e-4, 1000))
    assert (near >= 0).all() and near.max() == pytest.approx(5e-9, rel=1e-3)
    far = script.kl_to_reference(torch.zeros(3), tensor([30.0, 1e4, -30.0]))
    close(far, tensor([math.expm1(20) - 20] * 2 + [29.0]))  # bounded above and not below


@having("kl_to_reference")
def test_two_references_give_two_gradients(script):
    gradients = []
    for ref in (-1.0, -2.0):
        logprob = tensor([-1.5]).requires_grad_()
        script.kl_to_reference(logprob, tensor([ref])).sum().backward()
        gradients.append(logprob.grad.item())
    # The derivative by p of exp(ref - p) - 1 - (ref - p) is 1 - exp(ref - p).
    assert gradients == pytest.approx([1 - math.exp(0.5), 1 - math.exp(-0.5)])


@having("gae")
def test_gae_by_hand(script):
    mask, values = tensor([[1, 1, 1, 0, 0]]), torch.full((1, 5), 0.5, requires_grad=True)
    advantages, returns = script.gae(tensor([1.0]), values, mask, 1.0, 0.95)
    close(advantages, tensor([[0.45125, 0.475, 0.5, 0.0, 0.0]]))
    close(returns, tensor([[0.95125, 0.975, 1.0, 0.0, 0.0]]))
    assert not advantages.requires_grad and not returns.requires_grad


@having("gae")
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 1.0), (0.9, 0.0), (0.9, 0.5)])
def test_gae_against_its_definition(script, gamma, lam):
    generator = torch.Generator().manual_seed(0)
    values, rewards = (torch.randn(*shape, generator=generator) for shape in ((3, 6), (3,)))
    lengths = [6, 1, 3]
    mask = (torch.arange(6) < tensor(lengths)[:, None]).long()
    advantages, returns = script.gae(rewards, values, mask, gamma, lam)
    for i, n in enumerate(lengths):
        v, paid = [*values[i, :n].tolist(), 0.0], [0.0] * (n - 1) + [rewards[i].item()]
        errors = [paid[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        expected = [
            sum((gamma * lam) ** k * error for k, error in enumerate(errors[t:])) for t in range(n)
        ]
        assert advantages[i].tolist() == pytest.approx(expected + [0] * (6 - n), abs=1e-6)
        expected = [a + b for a, b in zip(expected, v)]
        assert returns[i].tolist() == pytest.approx(expected + [0] * (6 - n), abs=1e-6)


@having("token_values")
def test_value_is_read_before_its_token_and_padding_does_not_change_it(script, model):
    model.set_output_embeddings(torch.nn.Linear(32, 1, bias=False))
    ids, mask = pad([[1, 2, 3], [4, 5]])
    values = script.token_values(model, *prompts_of([[5, 6, 7], [8]]), ids, mask)
    with torch.no_grad():
        first = model(tensor([[5, 6, 7, 1, 2, 3]])).logits[0, 2:5, 0]
        second = model(tensor([[8, 4, 5]])).logits[0, 0:2, 0]
    close(values[0], first, rtol=1e-4, atol=1e-4)
    close(values[1, :2], second, rtol=1e-4, atol=1e-4)


@having("dpo_loss")
def test_dpo_loss(script):
    start = tensor([-3.0, -4.0])
    loss, margin = script.dpo_loss(start, start - 1, start, start - 1, 0.1)
    close(loss, tensor(0.693147))
    assert margin.tolist() == [0, 0]
    # margin (-2 - -3) - (-6 - -4) = 3; loss log(1 + exp(-0.1 * 3)) = 0.554355
    sums = (tensor([x]) for x in (-2.0, -6.0, -3.0, -4.0))
    loss, margin = script.dpo_loss(*sums, 0.1)
    close(loss, tensor(0.554355))
    assert margin.tolist() == [3.0]  # without beta


@having("pair_logps")
def test_pair_has_the_same_sums_alone_in_a_batch_and_by_hand(script, model, tokenizer):
    problems = [("What is 3 + 8?", "11"), ("What is 1 + 1?", "2"), ("Q", "4")]
    prompt_ids, prompt_mask, ids, mask = script.encode_pairs(
        tokenizer, problems, random.Random(0), "cpu"
    )
    together = script.pair_logps(model, prompt_ids, prompt_mask, ids, mask)
    assert together.shape == (2, 3)  # chosen, rejected
    rows = [row[real.bool()].tolist() for row, real in zip(ids, mask)]
    for i in range(3):
        prompt = prompt_ids[i][prompt_mask[i].bool()].tolist()
        pair = rows[2 * i : 2 * i + 2]
        alone = script.pair_logps(model, *prompts_of([prompt]), *pad(pair))
        close(alone[:, 0], together[:, i], rtol=1e-4, atol=1e-3)
        for j, row in enumerate(pair):
            logits = model(tensor([prompt + row])).logits[0, len(prompt) - 1 : -1]
            total = logits.log_softmax(-1).gather(1, tensor(row)[:, None]).sum()
            close(total, together[j, i], rtol=1e-4, atol=1e-3)


@having("clipped_surrogate")
def test_every_row_truncated_still_gives_a_finite_loss_and_gradient(script, model):
    prompts = prompts_of([[5, 6, 7], [8]])
    never = torch.tensor([], dtype=torch.long)
    ids, mask = script.sample(model, *prompts, 2, 5, never, 0)
    assert mask.all() and ids.shape == (4, 5)
    logprobs = script.token_logprobs(model, *prompts, ids, mask)
    loss = script.clipped_surrogate(logprobs, logprobs.detach(), torch.ones(4, 1), 0.2)[0].mean()
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


@having("masked_mean")
def test_raising_the_stop_tokens_logit_changes_the_loss(script):
    model, prompts = make_model(), prompts_of([[5, 6]])
    ids, mask = tensor([[65, 66, 257, 258, 258]]), tensor([[1, 1, 1, 0, 0]])

    def loss(position=None, token=None):
        """With the logit of the token raised where the position's token is predicted."""

        def raise_logit(module, args, out):
            if position and out.shape[1] == 5:  # the pass over the completion
                out[:, position - 1, token] += 1
            return out

        handle = model.get_output_embeddings().register_forward_hook(raise_logit)
        with torch.no_grad():
            logprobs = script.token_logprobs(model, *prompts, ids, mask)
        handle.remove()
        return script.masked_mean(-logprobs, mask).item()

    assert loss(2, 257) < loss() - 1e-3  # the stop token is trained
    assert loss(3, 258) == loss()  # the padding after it is not
