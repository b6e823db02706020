"""Losses, advantages and returns against numbers worked out by hand."""

import math

import pytest
import torch
from conftest import having, make_model
from torch import tensor

close = torch.testing.assert_close


@having("masked_mean")
def test_masked_mean_ignores_padding_and_empty_masks(script):
    x = torch.zeros(2, 4)
    x[0, :2] = 0.4
    mask = tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    close(script.masked_mean(x, mask), tensor(0.4))
    wide = torch.cat([x, torch.full((2, 10), 99.0)], 1), torch.cat([mask, torch.zeros(2, 10)], 1)
    close(script.masked_mean(*wide), tensor(0.4))
    assert script.masked_mean(x, torch.zeros(2, 4)) == 0.0
    assert script.masked_mean(tensor([[3.0, 9.0]]), tensor([[1, 0]])) == 3.0


@having("group_advantages")
def test_group_advantages(script):
    assert script.group_advantages(tensor([[1.0, 1.0], [0.0, 0.0]])).tolist() == [[0, 0], [0, 0]]
    close(
        script.group_advantages(tensor([[1.0, 0.0], [0.0, 1.0]])), tensor([[1.0, -1.0], [-1.0, 1.0]]), rtol=0, atol=1e-5
    )
    three = script.group_advantages(tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 4.0]]))  # more groups than completions
    close(three, tensor([[1.0, -1.0], [0.0, 0.0], [-1.0, 1.0]]), rtol=0, atol=1e-5)
    # mean 0.25, population standard deviation sqrt(0.25 * 0.75) = 0.4330: 0.75 / 0.4330 = sqrt(3)
    close(script.group_advantages(tensor([[1.0, 0, 0, 0]])), tensor([[3**0.5] + [-(3**-0.5)] * 3]), rtol=0, atol=1e-5)
    close(script.group_advantages(tensor([[1.0, 0, 0, 0]]), scale_by_std=False), tensor([[0.75, -0.25, -0.25, -0.25]]))
    # The 1e-6 keeps tiny differences tiny: 5e-7 / (5e-7 + 1e-6) = 1 / 3.
    close(script.group_advantages(tensor([[1e-6, 0.0]])), tensor([[1 / 3, -1 / 3]]), rtol=1e-4, atol=0)
    for scale_by_std in (True, False):  # 0.1 is no binary fraction: the mean of equal rewards differs from them
        assert not script.group_advantages(torch.full((1, 7), 0.1), scale_by_std).any()


@having("clipped_surrogate")
def test_clipped_surrogate(script):
    ratio = tensor([[1.0, 1.5, 0.5], [1.0, 1.5, 0.5]])
    advantages = tensor([[1.0], [-1.0]])
    loss, clipped = script.clipped_surrogate(ratio.log(), torch.zeros(2, 3), advantages, 0.2)
    # A gain is capped at 1.2 times the advantage, a loss is counted in full: min(1.5, 1.2) and min(-0.5, -0.8).
    close(loss, tensor([[-1.0, -1.2, -0.5], [1.0, 1.5, 0.8]]))
    assert clipped.tolist() == [[0, 1, 0], [0, 0, 1]] and clipped.dtype == torch.float32


@having("clipped_surrogate")
def test_per_token_advantages_broadcast(script):
    advantages = tensor([[1.0, 0.0, -2.0]])
    loss, _ = script.clipped_surrogate(torch.zeros(1, 3), torch.zeros(1, 3), advantages, 0.2)
    assert loss.tolist() == [[-1.0, 0.0, 2.0]]


@having("clipped_surrogate")
def test_no_gradient_where_the_clip_fires(script):
    logprobs = tensor([[1.5, 1.1, 0.5]]).log().requires_grad_()
    loss, clipped = script.clipped_surrogate(logprobs, torch.zeros(1, 3), tensor([[1.0]]), 0.2)
    loss.sum().backward()
    close(logprobs.grad, tensor([[0.0, -1.1, -0.5]]))
    assert clipped.tolist() == [[1, 0, 0]]


@having("clipped_surrogate")
def test_loss_is_the_mean_over_tokens_not_over_completions(script):
    mask = (torch.arange(30) < tensor([[10], [30]])).long()
    loss, _ = script.clipped_surrogate(torch.zeros(2, 30), torch.zeros(2, 30), tensor([[1.0], [-1.0]]), 0.2)
    close(
        script.masked_mean(loss, mask), tensor(0.5)
    )  # (30 - 10) / 40; per completion it would be 0, by 30 slots 0.333


@having("clipped_surrogate")
def test_loss_prints_0_while_its_gradient_is_not(script):
    model = make_model()
    prompt_ids, prompt_mask = script.pad([[5, 6, 7]], 0, "left")
    ids = tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    logprobs = script.token_logprobs(model, prompt_ids, prompt_mask, ids, torch.ones_like(ids))
    advantages = tensor([[3.0], [-1.0], [-1.0], [-1.0]]) / 3**0.5  # of rewards 1 0 0 0
    surrogate, _ = script.clipped_surrogate(logprobs, logprobs.detach(), advantages, 0.2)
    loss = script.masked_mean(surrogate, torch.ones_like(ids))
    loss.backward()
    assert f"{loss:z.4f}" == "0.0000"
    assert max(p.grad.norm() for p in model.parameters()) > 0.1


@having("kl_to_reference")
def test_kl_estimate(script):
    policy = torch.zeros(1, 3)
    close(
        script.kl_to_reference(policy, tensor([[-1.0, 0.0, 1.0]])), tensor([[0.36788, 0.0, 0.71828]]), atol=1e-5, rtol=0
    )
    tiny = script.kl_to_reference(torch.zeros(1000), torch.linspace(-1e-4, 1e-4, 1000))
    assert (tiny >= 0).all() and tiny.max() == pytest.approx(5e-9, rel=1e-3)
    assert script.kl_to_reference(tensor([0.0, 0.0]), tensor([-1e4, 1e4])).isfinite().all()
    close(script.kl_to_reference(tensor([0.0]), tensor([30.0])), tensor([math.expm1(20) - 20]))  # bounded above
    close(script.kl_to_reference(tensor([0.0]), tensor([-30.0])), tensor([29.0]))  # and not below


@having("kl_to_reference")
def test_two_references_give_two_gradients(script):
    gradients = []
    for ref in (-1.0, -2.0):
        logprob = tensor([-1.5]).requires_grad_()
        script.kl_to_reference(logprob, tensor([ref])).sum().backward()
        gradients.append(logprob.grad.item())
    # d/dp (exp(ref - p) - 1 - (ref - p)) = 1 - exp(ref - p)
    assert gradients == pytest.approx([1 - math.exp(0.5), 1 - math.exp(-0.5)])


@having("gae")
def test_gae_by_hand(script):
    mask = tensor([[1, 1, 1, 0, 0]])
    values = torch.full((1, 5), 0.5)
    advantages, returns = script.gae(tensor([1.0]), values, mask, 1.0, 0.95)
    close(advantages, tensor([[0.45125, 0.475, 0.5, 0.0, 0.0]]))
    close(returns, tensor([[0.95125, 0.975, 1.0, 0.0, 0.0]]))


@having("gae")
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 1.0), (0.9, 0.0), (0.9, 0.5)])
def test_gae_against_its_definition(script, gamma, lam):
    generator = torch.Generator().manual_seed(0)
    values, rewards = torch.randn(4, 6, generator=generator), torch.randn(4, generator=generator)
    lengths = [6, 1, 3, 0]
    mask = (torch.arange(6) < tensor(lengths)[:, None]).long()
    advantages, returns = script.gae(rewards, values, mask, gamma, lam)
    for i, length in enumerate(lengths):
        v = [*values[i, :length].tolist(), 0.0]
        errors = [(rewards[i].item() if t == length - 1 else 0) + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(6):
            expected = sum((gamma * lam) ** k * error for k, error in enumerate(errors[t:])) if t < length else 0
            assert advantages[i, t].item() == pytest.approx(expected, abs=1e-6)
            assert returns[i, t].item() == pytest.approx(expected + v[t] if t < length else 0, abs=1e-6)


@having("gae")
def test_returns_carry_no_gradient(script):
    values = torch.full((1, 3), 0.5, requires_grad=True)
    advantages, returns = script.gae(tensor([1.0]), values, torch.ones(1, 3), 1.0, 0.95)
    assert not advantages.requires_grad and not returns.requires_grad


@having("token_values")
def test_value_is_read_before_its_token_and_padding_does_not_change_it(script, model):
    model.set_output_embeddings(torch.nn.Linear(32, 1, bias=False))
    prompt_ids, prompt_mask = script.pad([[5, 6, 7], [8]], 0, "left")
    ids = tensor([[1, 2, 3], [4, 5, 0]])
    mask = tensor([[1, 1, 1], [1, 1, 0]])
    values = script.token_values(model, prompt_ids, prompt_mask, ids, mask)
    with torch.no_grad():
        close(values[0], model(tensor([[5, 6, 7, 1, 2, 3]])).logits[0, 2:5, 0], rtol=1e-4, atol=1e-4)
        close(values[1, :2], model(tensor([[8, 4, 5]])).logits[0, 0:2, 0], rtol=1e-4, atol=1e-4)


@having("dpo_loss")
def test_dpo_loss(script):
    start = tensor([-3.0, -4.0])
    loss, margin = script.dpo_loss(start, start - 1, start, start - 1, 0.1)
    close(loss, tensor(0.693147))
    assert margin.tolist() == [0, 0]
    # margin (-2 - -3) - (-6 - -4) = 3; loss log(1 + exp(-0.1 * 3)) = 0.554355
    loss, margin = script.dpo_loss(tensor([-2.0]), tensor([-6.0]), tensor([-3.0]), tensor([-4.0]), 0.1)
    close(loss, tensor(0.554355))
    assert margin.tolist() == [3.0]


@having("pair_logprobs")
def test_pair_has_the_same_logprobs_alone_and_in_a_batch(script, model, tokenizer):
    import random

    problems = [("What is 3 + 8?", "11"), ("What is 1 + 1?", "2"), ("Q", "4")]
    batch = script.encode_pairs(tokenizer, problems, random.Random(0), "cpu")
    together = script.pair_logprobs(model, *batch)
    for i in range(3):
        rows = [row[mask.bool()].tolist() for row, mask in zip(*batch[2:])][2 * i : 2 * i + 2]
        prompt = [batch[0][i][batch[1][i].bool()].tolist()]
        alone = script.pair_logprobs(model, *script.pad(prompt, 0, "left"), *script.pad(rows, 0, "right"))
        close(alone[0], together[i], rtol=1e-4, atol=1e-3)


@having("clipped_surrogate")
def test_every_row_truncated_still_gives_a_finite_loss_and_gradient(script, model):
    prompt_ids, prompt_mask = script.pad([[5, 6, 7], [8]], 0, "left")
    ids, mask = script.sample(model, prompt_ids, prompt_mask, 2, 5, [], 0)
    assert mask.all() and ids.shape == (4, 5)
    logprobs = script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask)
    surrogate, _ = script.clipped_surrogate(logprobs, logprobs.detach(), torch.ones(4, 1), 0.2)
    loss = script.masked_mean(surrogate, mask)
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


@having("masked_mean")
def test_raising_the_stop_tokens_logit_changes_the_loss(script):
    model = make_model()
    prompt_ids, prompt_mask = script.pad([[5, 6]], 0, "left")
    ids, mask = tensor([[65, 66, 257, 258, 258]]), tensor([[1, 1, 1, 0, 0]])

    def loss(position, token):
        def raise_logit(module, args, out):
            # two passes: the prompt's predicts slot 0, the completion's the others, if any; there is none for padding
            column = position - 1
            if out.shape[1] == 2 and column < 2:
                out = out.clone()
                out[:, column, token] += 1
            return out

        handle = model.get_output_embeddings().register_forward_hook(raise_logit)
        value = script.masked_mean(-script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask), mask).item()
        handle.remove()
        return value

    plain = script.masked_mean(-script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask), mask).item()
    assert loss(2, 257) < plain - 1e-3  # the stop token is trained
    assert loss(3, 258) == plain  # the padding after it is not
