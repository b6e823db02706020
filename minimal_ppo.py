"""PPO: the model samples answers, and a critic's prediction of the reward judges each token.

    loss = mean over tokens of [-min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A) + beta * KL]
    ratio = p(token) / p_old(token),  A = sum over k >= 0 of (gamma * lam)^k * error_(t+k)
    error_t = r_t + gamma * V_(t+1) - V_t,  the critic's loss = (V - (A + V_old))^2 / 2
    KL = ratio * (exp(d) - 1 - d),  d = log p_ref(token) - log p(token)

Schulman et al. 2017 (arXiv:1707.06347), eq. 7; A is GAE, arXiv:1506.02438, eq. 16. To
minimal_grpo.py it adds the critic, a transformer of its own, in the place of the group's mean: one
completion per prompt is enough.

Run: uv run minimal_ppo.py
B prompts, G completions per prompt (1 here), N = B*G rows, P, T prompt and completion length,
V vocabulary size
"""

import copy
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.hf_argparser import HfArg, HfArgumentParser


# ---- 1. The algorithm ----------------------------------------------------------------------------
def clipped_surrogate(logprobs, old_logprobs, advantages, clip):
    """Per-token loss (N, T), eq. 7 of the PPO paper negated, and 1.0 where the clip binds."""
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    return -torch.minimum(unclipped, clipped), (clipped < unclipped).float()


def kl_to_reference(logprobs, ref_logprobs):
    """Per-token KL estimate (N, T), GRPO's eq. 4. The gradient of -d alone has no p_ref in it."""
    d = (ref_logprobs - logprobs).clamp(max=20)  # keeps exp finite
    return torch.expm1(d) - d


@torch.no_grad()
def gae(rewards, values, mask, gamma, lam):
    """Rewards (N,) of the last tokens, values (N, T) -> advantages, eq. 16, and returns (N, T)."""
    last = mask.cumsum(1) == mask.sum(1, keepdim=True)  # the last token, and the padding after it
    paid = rewards[:, None] * last * mask
    values, advantages = values * mask, torch.zeros_like(values)
    advantage = next_value = torch.zeros_like(rewards)  # after the end
    for t in reversed(range(values.shape[1])):
        error = paid[:, t] + gamma * next_value - values[:, t]
        advantage = (error + gamma * lam * advantage) * mask[:, t]
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages, advantages + values


def masked_mean(x, mask):
    """Mean of x over the tokens with mask 1."""
    return (x * mask).sum() / mask.sum()


# ---- 2. The task ---------------------------------------------------------------------------------
INSTRUCTION = "Answer inside <answer></answer> tags."


def toy_data():
    """All one-digit sums as (question, answer): 80 to train on, 20 held out, always the same."""
    sums = [(f"What is {a} + {b}?", str(a + b)) for a in range(10) for b in range(10)]
    random.Random(0).shuffle(sums)
    return sums[:80], sums[80:]


def reward(completion, answer):
    """1.0 if the last closed <answer>...</answer> holds `answer`. A reward model would go here."""
    found = re.findall(r"(?s)<answer>((?:(?!<answer>).)*?)</answer>", completion)
    return float(bool(found) and found[-1].strip() == answer != "")


# ---- 3. The model --------------------------------------------------------------------------------
def load(name, device):
    """The model, in float32 (bf16 weights would round small updates away), and its tokenizer."""
    device = torch.device(device or torch.accelerator.current_accelerator(True) or "cpu")
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")  # TF32
    # On MPS, sdpa has returned NaN for rows of padding (pytorch issue 167515).
    options = {"attn_implementation": "eager"} if device.type == "mps" else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: --model {name}, hub name or folder: {str(error).splitlines()[0]}")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    plain = "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template = tokenizer.chat_template or plain
    print(Path(__file__).name, name, f"{model.num_parameters():,} parameters", device, model.dtype)
    return model.to(device), tokenizer


def stop_ids(model, tokenizer):
    """All ids that end a completion: generation_config's (an int, a list or None) and the EOS."""
    ids = model.generation_config.eos_token_id
    ids = {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}
    return torch.tensor(sorted(ids), dtype=torch.long, device=model.device)


def make_critic(policy):
    """A transformer whose head is one value, 0 at first. A reward model would be a better start."""
    critic = copy.deepcopy(policy)
    head = torch.nn.Linear(policy.get_output_embeddings().in_features, 1, False, policy.device)
    torch.nn.init.zeros_(head.weight)
    critic.set_output_embeddings(head)
    return critic


def encode_prompts(tokenizer, questions, device):
    """prompt_ids, prompt_mask (B, P), padded on the left: chats up to the completion."""
    encoded = tokenizer.apply_chat_template(
        [[{"role": "user", "content": f"{INSTRUCTION}\n{q}"}] for q in questions],
        add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt",
        tokenizer_kwargs={"padding_side": "left"}).to(device)
    return encoded.input_ids, encoded.attention_mask


def forward(model, ids, mask, cache, keep=0):
    """Logits of ids (N, L), or the last `keep`; mask (N, cached + L); positions skip padding."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=positions, cache=cache,
                 logits_to_keep=keep).logits


def prefill(model, prompt_ids, prompt_mask, num_samples):
    """Read each prompt once: cache (gradients pass), mask (N, P), next token's logits (N, 1, V)."""
    cache = DynamicCache()
    logits = forward(model, prompt_ids, prompt_mask, cache, keep=1)
    assert cache.get_seq_length() > 0, "needs transformers 5.24"
    cache.batch_repeat_interleave(num_samples)
    return cache, *(x.repeat_interleave(num_samples, 0) for x in (prompt_mask, logits))


@torch.no_grad()
def sample(model, prompt_ids, prompt_mask, num_samples, max_new_tokens, stops, pad_id,
           greedy=False):
    """ids, mask (N, T) with the stop token, drawn from softmax(logits), as the loss assumes."""
    cache, seen, logits = prefill(model, prompt_ids, prompt_mask, num_samples)
    ids, running = seen[:, :0], torch.ones_like(seen[:, :1])
    while True:
        # MPS has drawn ids of probability 0 (pytorch issue 192577): the CPU draws for it.
        probs = logits[:, -1].softmax(-1).to("cpu" if logits.is_mps else logits.device)
        token = probs.argmax(-1, keepdim=True) if greedy else torch.multinomial(probs, 1)
        ids = torch.cat([ids, token.to(ids.device).where(running == 1, pad_id)], 1)
        seen = torch.cat([seen, running], 1)
        running = running * ~torch.isin(ids[:, -1:], stops)
        if ids.shape[1] == max_new_tokens or not running.any():
            return ids, seen[:, prompt_ids.shape[1] :]
        logits = forward(model, ids[:, -1:], seen, cache)


def token_logprobs(model, prompt_ids, prompt_mask, ids, mask):
    """Log-probability (N, T) of each completion token, from the logits one token earlier."""
    cache, seen, first = prefill(model, prompt_ids, prompt_mask, len(ids) // len(prompt_ids))
    rest = forward(model, ids, torch.cat([seen, mask], 1), cache)
    logits = torch.cat([first, rest[:, :-1]], 1)  # (N, T, V)
    return logits.log_softmax(-1).gather(-1, ids[:, :, None])[:, :, 0]


def token_values(critic, prompt_ids, prompt_mask, ids, mask):
    """The critic's value (N, T) of all that stands before each completion token."""
    cache, seen, first = prefill(critic, prompt_ids, prompt_mask, len(ids) // len(prompt_ids))
    rest = forward(critic, ids, torch.cat([seen, mask], 1), cache)
    return torch.cat([first, rest[:, :-1]], 1)[:, :, 0]


# ---- 4. Evaluation -------------------------------------------------------------------------------
def evaluate(model, tokenizer, problems, config):
    """Share of the problems that greedy decoding solves, and the count: "0.250 (5/20)"."""
    questions, answers = zip(*problems)
    prompts = encode_prompts(tokenizer, questions, model.device)
    limits = config.max_new_tokens, stop_ids(model, tokenizer), tokenizer.pad_token_id
    ids, _ = sample(model, *prompts, 1, *limits, greedy=True)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    solved = int(sum(map(reward, texts, answers)))
    return f"{solved / len(problems):.3f} ({solved}/{len(problems)})"


# ---- 5. Training ---------------------------------------------------------------------------------
@dataclass
class Config:
    model: str = HfArg(default="Qwen/Qwen2.5-0.5B-Instruct", help="hub name or path")
    device: str = HfArg(default="", help="cuda, mps or cpu")
    seed: int = HfArg(default=0, help="random seed")
    save: str = HfArg(default="", help="new folder to save in")
    steps: int = HfArg(default=30, help="rollouts")
    batch_size: int = HfArg(default=16, help="prompts per step (B), up to 80")
    max_new_tokens: int = HfArg(default=12, help="longest completion")
    inner_epochs: int = HfArg(default=2, help="updates per rollout")
    lr: float = HfArg(default=1e-7, help="AdamW step size")
    critic_lr: float = HfArg(default=1e-5, help="AdamW step size of the critic")
    clip: float = HfArg(default=0.2, help="bounds of the ratio")
    beta: float = HfArg(default=0.04, help="KL weight")
    gamma: float = HfArg(default=1.0, help="discount per token")
    lam: float = HfArg(default=0.95, help="GAE: 1 trusts the reward, 0 the critic")


def make_folder(name):
    """--save's folder, made before the training so that a bad name cannot waste it."""
    try:
        Path(name).expanduser().mkdir(parents=True)
    except OSError as error:
        raise SystemExit(f"error: --save {name}: {error.strerror}; name a new folder")
    return Path(name).expanduser()


def main(config):
    started, rng, results = time.perf_counter(), random.Random(config.seed), []
    train, held_out = toy_data()
    policy, tokenizer = load(config.model, config.device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    critic = make_critic(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=0.0, fused=True)
    optimizer.add_param_group({"params": critic.parameters(), "lr": config.critic_lr})
    limits = config.max_new_tokens, stop_ids(policy, tokenizer), tokenizer.pad_token_id
    folder = make_folder(config.save) if config.save else None
    try:
        results += [f"accuracy_before: {evaluate(policy, tokenizer, held_out, config)}"]
        torch.manual_seed(config.seed)
        for step in range(1, config.steps + 1):
            step_started = time.perf_counter()
            # The batch: B questions.
            questions, answers = zip(*rng.sample(train, config.batch_size))
            prompts = encode_prompts(tokenizer, questions, policy.device)
            # The rollout: a completion of each. vLLM would go here.
            ids, mask = sample(policy, *prompts, 1, *limits)
            # The rewards, of completions alone. InstructGPT subtracts the KL here, we in the loss.
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            rewards = torch.tensor([*map(reward, texts, answers)], device=policy.device)
            # The update. Distributed training would average the gradients after backward().
            ref_logprobs = token_logprobs(reference, *prompts, ids, mask)
            for epoch in range(config.inner_epochs):
                logprobs = token_logprobs(policy, *prompts, ids, mask)
                values = token_values(critic, *prompts, ids, mask)
                if epoch == 0:  # weights unchanged: ratio 1; whitening would follow
                    old_logprobs = logprobs.detach()
                    advantages, returns = gae(rewards, values, mask, config.gamma, config.lam)
                losses, clipped = clipped_surrogate(logprobs, old_logprobs, advantages, config.clip)
                kl = (logprobs - old_logprobs).exp() * kl_to_reference(logprobs, ref_logprobs)
                loss = masked_mean(losses + config.beta * kl, mask)
                value_loss = masked_mean((values - returns) ** 2, mask) / 2
                (loss + value_loss).backward()
                norm, _ = (torch.nn.utils.clip_grad_norm_(
                    model.parameters(), 1.0, error_if_nonfinite=True) for model in (policy, critic))
                optimizer.step()
                optimizer.zero_grad()
            # The log. All but reward and length are of the last inner epoch.
            print(f"step {step}/{config.steps}  loss {loss:z.4f}  reward {rewards.mean():.3f}  "
                  f"length {mask.sum() / len(mask):.1f}  grad_norm {norm:.3f}  kl "
                  f"{masked_mean(kl, mask):.4f}  clip {masked_mean(clipped, mask):.3f}  value_loss "
                  f"{value_loss:.4f}  {time.perf_counter() - step_started:.1f} s", flush=True)
            if step % 5 == 1:
                prompt, text = (tokenizer.decode(x[0, m[0] > 0]) for x, m in (prompts, (ids, mask)))
                print(f"  loss mask 0 {prompt!a}\n  loss mask 1 {text!a} reward {rewards[0]:g}")
                if not rewards.any():
                    print("  no reward: minimal_sft.py --steps 8 --save X, then this --model X")
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        if folder and optimizer.state:
            policy.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        elif folder:
            folder.rmdir()  # no step: the name is free again
    results += [f"accuracy_after: {evaluate(policy, tokenizer, held_out, config)}"]
    print("---", *results, f"seconds: {time.perf_counter() - started:.0f}", sep="\n")
    if policy.device.type != "cpu":
        print(f"peak_gb: {torch.accelerator.max_memory_allocated(policy.device) / 1e9:.2f}")


if __name__ == "__main__":
    main(Config(**vars(HfArgumentParser(Config).parse_args())))
