"""The losses against code that is not ours: transformers' own loss, TRL's trainers, torchrl's GAE.

All on the same token ids, values and gradients both. Run with -s to see the differences.
"""

import copy

import pytest
import torch
from conftest import SCRIPTS, having, make_model, make_tokenizer, pad, prompts_of

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def batch(completions_per_prompt=4):
    """Two prompts and their completions of different lengths, the last one truncated."""
    generator = torch.Generator().manual_seed(0)

    def draw(lengths):
        return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]

    lengths = [5, 1, 8, 3, 2, 7, 6, 8][: 2 * completions_per_prompt]
    return [*prompts_of(draw([9, 4])), *pad(draw(lengths))]


def perturbed(model, seed):
    """A copy whose weights are moved a little: another policy, or a reference."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p += 0.02 * torch.randn_like(p)
    return other


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_equal(label, ours, theirs):
    """The difference of two tensors is small against the second, which is not 0."""
    difference = ((ours - theirs).norm() / theirs.norm()).item()
    print(f"{label}: {difference:.1e}")
    assert difference < 1e-5 and theirs.norm() > 1e-3


def trl_grpo(folder, model, tensors, advantages, old=None, ref=None, **settings):
    """Value and gradient of TRL's GRPO loss; its generation and rewards are never used."""
    model = copy.deepcopy(model)
    model.save_pretrained(folder / "start")
    model.config._name_or_path = str(folder / "start")  # a reference of its own comes from here
    rows = len(tensors[2]) // len(tensors[0])
    config = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        num_generations=len(tensors[2]),  # advantages are given: any number will do
        per_device_train_batch_size=len(tensors[2]),
        loss_type="bnpo",  # the mean over the tokens of the batch
        temperature=1.0,
        gradient_checkpointing=False,
        **settings,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "Q"}] * 8),
        processing_class=make_tokenizer(),
    )
    prompt_ids, prompt_mask, ids, mask = tensors
    inputs = {
        "prompt_ids": prompt_ids.repeat_interleave(rows, 0),
        "prompt_mask": prompt_mask.repeat_interleave(rows, 0),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
    }
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, {k: v for k, v in inputs.items() if v is not None})
    loss.backward()
    return loss.detach(), gradient(trainer.model)


@having("clipped_surrogate")
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("per_token", [False, True], ids=["per_row", "per_token"])
def test_clip_and_kl_estimate_are_trls(script, beta, per_token, tmp_path):
    """With old log-probabilities of another policy; advantages by token are PPO's."""
    old_model = make_model(spread=0.1)
    model, reference = perturbed(old_model, 1), perturbed(old_model, 2)
    tensors = batch()
    ids, mask = tensors[2:]
    torch.manual_seed(3)
    advantages = torch.randn(ids.shape if per_token else (len(ids), 1))
    with torch.no_grad():
        old, ref = (script.token_logprobs(m, *tensors) for m in (old_model, reference))
    logprobs = script.token_logprobs(model, *tensors)
    losses, clipped = script.clipped_surrogate(logprobs, old, advantages, 0.2)
    losses = losses + beta * (logprobs - old).exp() * script.kl_to_reference(logprobs, ref)
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    assert 0.05 < (clipped * mask).sum() / mask.sum() < 0.95  # the clip fires, and not everywhere
    theirs, their_gradient = trl_grpo(
        tmp_path,
        model,
        tensors,
        advantages if per_token else advantages[:, 0],
        old,
        ref,
        beta=beta,
        epsilon=0.2,
    )
    assert_equal(f"{script.__name__} beta {beta} value", loss.detach(), theirs)
    assert_equal(f"{script.__name__} beta {beta} gradient", gradient(model), their_gradient)


@pytest.fixture
def loop(monkeypatch, train, tiny):
    """The first step of a run: batch and advantages, and each update's weights and gradient."""

    def of(name, **knobs):
        script, seen, clip = SCRIPTS[name], {"updates": []}, torch.nn.utils.clip_grad_norm_
        sample, source = script.sample, "gae" if name == "minimal_ppo" else "group_advantages"
        advantages = getattr(script, source)

        def keep_batch(model, prompt_ids, prompt_mask, *args, **kwargs):
            out = sample(model, prompt_ids, prompt_mask, *args, **kwargs)
            if not (kwargs.get("greedy") or len(args) > 4 and args[4]):  # not an evaluation
                seen["batch"] = [prompt_ids, prompt_mask, *out]
            return out

        def keep_advantages(*args):
            seen["advantages"] = advantages(*args)
            return seen["advantages"]

        def keep_update(parameters, *args, **kwargs):
            parameters = [*parameters]
            grads = torch.cat([p.grad.flatten() for p in parameters])
            seen["updates"].append(([p.detach().clone() for p in parameters], grads))
            return clip(parameters, *args, **kwargs)

        monkeypatch.setattr(script, "sample", keep_batch)
        monkeypatch.setattr(script, source, keep_advantages)
        monkeypatch.setattr(script, "reward", lambda text, _: float(sum(text.encode()) % 2))
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep_update)
        train(name, tiny, steps=1, inner_epochs=2, **knobs)
        return seen

    return of


@pytest.mark.parametrize("name", ["minimal_grpo", "minimal_ppo", "gsm8k_grpo", "gsm8k_sft_grpo"])
def test_gradients_of_the_training_loop_are_trls(name, loop, tiny, tmp_path):
    """Of both inner epochs of a run, whatever it caches, cuts to length or splits."""
    sizes = {
        "minimal_grpo": {"batch_size": 2, "group_size": 4},
        "minimal_ppo": {"batch_size": 8},
        "gsm8k_grpo": {"batch_size": 2, "group_size": 4, "micro_batch": 3},
        "gsm8k_sft_grpo": {"batch_size": 2, "group_size": 4, "micro_batch": 3, "sft_steps": 0},
    }
    seen = loop(name, lr=1e-3, beta=0.5, clip=0.1, max_new_tokens=6, **sizes[name])
    tensors, script = seen["batch"], SCRIPTS[name]
    if name == "minimal_ppo":  # gae returns two; the critic's updates stand between the policy's
        advantages, updates = seen["advantages"][0], seen["updates"][::2]
    else:
        advantages, updates = seen["advantages"].flatten(), seen["updates"]
    start = script.load(str(tiny), "cpu")[0]
    with torch.no_grad():
        old = script.token_logprobs(start, *tensors)
    assert len(updates) == 2 and (updates[0][0][0] != updates[1][0][0]).any()
    for epoch, (weights, ours) in enumerate(updates):
        model = copy.deepcopy(start)
        with torch.no_grad():
            for p, value in zip(model.parameters(), weights):
                p.copy_(value)
        _, theirs = trl_grpo(
            tmp_path,
            model,
            tensors,
            advantages,
            old,
            old,
            beta=0.5,
            epsilon=0.1,
        )
        assert_equal(f"{name} epoch {epoch}", ours, theirs)


def test_reinforce_gradient_is_grpo_with_beta_0_and_one_iteration(tmp_path):
    """The value differs: -A log p is not -A ratio. The gradient is the same at ratio 1."""
    script, model = SCRIPTS["gsm8k_grpo_autoresearch"], make_model(spread=0.1)
    tensors, rewards = batch(), torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0]])
    advantages = script.group_advantages(rewards, scale_by_std=False).view(-1, 1)
    for rows, part in script.micro_batches(*tensors, 3):
        losses = -advantages[rows] * script.token_logprobs(model, *part) * part[-1]
        (losses / tensors[3].sum()).sum().backward()
    _, theirs = trl_grpo(tmp_path, model, tensors, advantages.flatten(), beta=0.0, num_iterations=1)
    assert_equal("autoresearch", gradient(model), theirs)


def test_dpo_loss(tmp_path):
    script = SCRIPTS["minimal_dpo"]
    reference = make_model(spread=0.1)
    model, tensors = perturbed(reference, 1), batch(completions_per_prompt=2)
    with torch.no_grad():
        ref = script.pair_logps(reference, *tensors)
    loss, margin = script.dpo_loss(*script.pair_logps(model, *tensors), *ref, 0.3)
    loss.backward()
    assert margin.abs().min() > 0.01
    config = trl.DPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        beta=0.3,
        loss_type="sigmoid",
        gradient_checkpointing=False,
    )
    pairs = [{"prompt": "Q", "chosen": "a", "rejected": "b"}] * 2
    trainer = trl.DPOTrainer(
        model=copy.deepcopy(model),
        ref_model=reference,
        args=config,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=make_tokenizer(),
    )
    chosen_first = [0, 2, 1, 3]
    prompts = [x.repeat_interleave(2, 0)[chosen_first] for x in tensors[:2]]
    ids, mask = (x[chosen_first] for x in tensors[2:])
    inputs = {
        "input_ids": torch.cat([prompts[0], ids], 1),
        "attention_mask": torch.cat([prompts[1], mask], 1),
        "completion_mask": torch.cat([torch.zeros_like(prompts[1]), mask], 1),
    }
    theirs = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    theirs.backward()
    assert_equal("minimal_dpo value", loss.detach(), theirs.detach())
    assert_equal("minimal_dpo gradient", gradient(model), gradient(trainer.model))


@pytest.mark.parametrize("name", ["minimal_sft", "gsm8k_sft_grpo"])
def test_gradient_of_an_sft_step_is_that_of_transformers_own_loss(
    name, train, tiny, updates, monkeypatch
):
    """model(labels=...) on whole rows, padded on the right, -100 on prompt and padding."""
    script, fed, tokenizer = SCRIPTS[name], [], make_tokenizer()
    prompts, completions = script.encode_prompts, script.encode_completions
    monkeypatch.setattr(script, "encode_prompts", lambda *a: fed.append(a[1]) or prompts(*a))
    monkeypatch.setattr(
        script, "encode_completions", lambda *a: fed.append(a[1]) or completions(*a)
    )
    monkeypatch.setattr(script, "evaluate", lambda *args: "")
    train(name, tiny, **({"steps": 1} if name == "minimal_sft" else {"steps": 0, "sft_steps": 1}))
    assert len(fed) == 2
    rows, labels = [], []
    for question, text in zip(*fed):
        ids, _ = prompts(tokenizer, [question], "cpu")
        prompt, completion = ids[0].tolist(), [*tokenizer(text).input_ids, 257]
        rows.append(prompt + completion)
        labels.append([-100] * len(prompt) + completion)
    model = script.load(str(tiny), "cpu")[0]
    ids, mask = pad(rows)
    model(ids, attention_mask=mask, labels=pad(labels, -100)[0]).loss.backward()
    assert_equal(name, updates[0], gradient(model))


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
        theirs, targets = functional.generalized_advantage_estimate(
            gamma, lam, value, following, paid, done, done
        )
        torch.testing.assert_close(advantages[i, :n], theirs[:, 0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(returns[i, :n], targets[:, 0], rtol=1e-5, atol=1e-6)
        assert not advantages[i, n:].any() and not returns[i, n:].any()
