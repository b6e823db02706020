"""REINFORCE on GSM8K: what is left when GRPO's machinery is deleted, and how to go on from there.

    loss = mean over tokens of  -A * log p(token | prompt, earlier tokens)
    A = r - mean(r) over the G rewards r of a prompt

Williams 1992, with a baseline. Gone from gsm8k_grpo.py: the reference and its KL, the inner epochs
with their ratio and clip, the division by std. Training ends after --minutes, so that every idea
pays for the time it takes.

Run: uv run gsm8k_grpo_autoresearch.py
B prompts, G completions per prompt, N = B*G rows, P, T prompt and completion length, V vocabulary

PROTOCOL for an agent that improves this file by experiments, alone, as in karpathy/autoresearch.

The goal is the highest val_acc after 20 minutes of training on a machine that does nothing else.
RUN is `uv run gsm8k_grpo_autoresearch.py` with the --model, --data and --device you were given.
Edit this file alone; a new setting becomes a default in Config.
Frozen: data, split and --eval_size; prompts, `extract_answer`, `reward`, `evaluate` and all that it
calls, in float32, with batch_size, group_size and max_new_tokens as they are now (to train with
others, give it dataclasses.replace(config, ...)); --minutes; the starting model; the packages; the
lines after `---`. Only training rows are trained on, and only val_acc decides: no validation
problem, no test row, no other data, no file of an earlier run.
Free: the rest. Loss, baseline, sampling in training, batch and group size, optimizer, schedule,
precision, speed.

Setup, once: a clean checkout on a new branch. results.tsv has the tab-separated columns commit,
seed, val_acc, se_val, steps, train_seconds, peak_gb, status, description; neither it nor run.log is
committed. RUN with --seed 0 and 1, unchanged, status `baseline`: this is the first BEST. No reward
at all, or hours per run: stop and say so. LIMIT is the longer run's seconds plus 600.

Over and over:
1. One idea, one change. Commit it, with the idea as the message.
2. timeout LIMIT RUN --seed 0 > run.log 2>&1
3. grep -E "^(val_acc|se_val|steps|train_seconds|peak_gb):" run.log. An exit status other than 0, no
   val_acc, or train_seconds above 1260 is a crash. A slip may be mended and run again, twice.
4. Append the row, whatever comes next.
5. Compare with BEST's val_acc of the same seed; a difference counts only beyond se_val.
   Above: `candidate`; it may be luck: RUN --seed 1; above again: `keep`, else `revert`.
   Not seen: if the file became shorter or plainer, RUN --seed 1; not below: `keep`. Else `revert`.
   Below, in either run: `revert`, or `crash`.
   keep: this commit is BEST; a deletion leaves BEST's numbers, or small losses would add up.
   revert: git reset --hard to BEST. Memory may grow by half for a gain, not for nothing.
Do not ask, do not stop: out of ideas, combine near misses, try the opposite, delete something.
When a person ends it: RUN --split test --eval_size 0, both seeds, on the first commit and on BEST.
"""

import math
import random
import re
import time
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import torch
from datasets import load_dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.hf_argparser import HfArg, HfArgumentParser


# ---- 1. The algorithm ----------------------------------------------------------------------------
def group_advantages(rewards, scale_by_std=True):
    """(B, G) -> (B, G): (r - mean) / (std + 1e-4), section 4.1.2, or r - mean; 0 if all equal."""
    scale = rewards.std(1, correction=0, keepdim=True) + 1e-4 if scale_by_std else 1
    return (rewards - rewards.mean(1, keepdim=True)) / scale


# ---- 2. The task ---------------------------------------------------------------------------------
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


def gsm8k(config):
    """(question, gold solution, gold number) to train on, to evaluate; val: 500 training rows."""
    try:
        files = {split: f"{config.data}/{split}.jsonl" for split in ("train", "test")}
        ds = load_dataset(*("json", None, None, files) if config.data else ("openai/gsm8k", "main"))
        train, test = ([(row["question"], *re.sub("<<.*?>>", "", row["answer"]).split("\n#### "))
                        for row in ds[split]] for split in files)
        problems = {"val": train[-500:], "test": test}[config.split]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"error: --data {config.data} or --split: {error}")
    return train[:-500], problems[: config.eval_size or None]


def extract_answer(text):
    r"""The number in the last closed \boxed{...}, without commas; None unless it holds just one.
    Units are allowed, m^2 too, but 12 is not the value of \frac12, 12^2 or x/12."""
    box = (re.findall(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}", text) or [""])[-1]
    box = re.sub(r"(?<=\d)(,|\{,\})(?=\d{3}(?!\d))", "", box.replace("\u2212", "-"))
    box = re.sub(r"(?<=[a-zA-Z}])\^\{?[23]\}?", "", box)
    numbers = re.findall(r"(?:(?<!\w)-[^\w.-]*)?(?:\d+(?:\.\d+)?|(?<!\w)\.\d+)", box)
    if len(numbers) != 1 or re.search(r"\\[cdt]?frac|\\sqrt|[/^]\s*\{?\d", box):
        return None
    return re.sub(r"[^\d.-]", "", numbers[0])


def reward(completion, answer):
    """1.0 if the number in the box is the gold one, as decimals. A reward model would go here."""
    return float(Decimal(extract_answer(completion) or "nan") == Decimal(answer.replace(",", "")))


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


def rollout(model, tokenizer, problems, num_samples, config, greedy=False):
    """A batch and its rewards (B, num_samples), which see no prompt. vLLM would go here."""
    questions, *_, answers = zip(*problems)
    prompts = encode_prompts(tokenizer, questions, model.device)
    limits = config.max_new_tokens, stop_ids(model, tokenizer), tokenizer.pad_token_id
    ids, mask = sample(model, *prompts, num_samples, *limits, greedy)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = [reward(text, answers[i // num_samples]) for i, text in enumerate(texts)]
    return *prompts, ids, mask, torch.tensor(rewards, device=model.device).view(-1, num_samples)


# ---- 4. Evaluation -------------------------------------------------------------------------------
def pass_at_k(n, c, k):
    """Chance that one of k samples is right if c of n are: 1 - C(n-c, k) / C(n, k), unbiased."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def evaluate(model, tokenizer, problems, config, when):
    """Greedy accuracy, standard error, Wilson's 95% interval, share truncated, length, pass@k."""
    totals, counts, n, samples = 0, [], len(problems), config.eval_samples
    stops = stop_ids(model, tokenizer)
    size = max(1, config.batch_size * config.group_size // (samples or 1))
    # The random state stays as it was: training does not depend on what is evaluated.
    with torch.random.fork_rng():
        for i in tqdm(range(0, n, size), leave=False):
            part = problems[i : i + size]
            *_, ids, mask, rewards = rollout(model, tokenizer, part, 1, config, True)
            totals += torch.stack([rewards.sum(), torch.isin(ids, stops).any(1).sum(), mask.sum()])
            if samples:
                counts += rollout(model, tokenizer, part, samples, config)[-1].sum(1).tolist()
    solved, stopped, tokens = totals.tolist()
    p, half = solved / n, 1.96 * (solved * (1 - solved / n) + 0.96) ** 0.5
    low, high = ((solved + 1.92 + x) / (n + 3.84) for x in (-half, half))
    out = [f"accuracy_{when}: {p:.3f} ({solved:.0f}/{n})", f"length_{when}: {tokens / n:.1f}",
           f"se_{when}: {(p * (1 - p) / n) ** 0.5:.3f}", f"truncated_{when}: {1 - stopped / n:.3f}",
           f"interval_{when}: {low:z.3f} to {high:.3f}"]
    for k in range(1, samples + 1):
        out += [f"pass@{k}_{when}: {sum(pass_at_k(samples, int(c), k) for c in counts) / n:.3f}"]
    print(*out, sep="  ", flush=True)
    return out


# ---- 5. Training ---------------------------------------------------------------------------------
@dataclass
class Config:
    model: str = HfArg(default="Qwen/Qwen2.5-0.5B-Instruct", help="hub name or path")
    device: str = HfArg(default="", help="cuda, mps or cpu")
    seed: int = HfArg(default=0, help="random seed")
    save: str = HfArg(default="", help="new folder")
    data: str = HfArg(default="", help="folder of train.jsonl, test.jsonl")
    split: str = HfArg(default="val", help="val or test")
    eval_size: int = HfArg(default=200, help="0: all")
    eval_samples: int = HfArg(default=0, help="for pass@k")
    minutes: float = HfArg(default=20.0, help="of training, evaluation and loading not counted")
    batch_size: int = HfArg(default=16, help="prompts per step (B)")
    group_size: int = HfArg(default=8, help="completions per prompt (G)")
    max_new_tokens: int = HfArg(default=512, help="longest completion")
    micro_batch: int = HfArg(default=0, help="rows per pass; 0: a group")
    lr: float = HfArg(default=2e-6, help="step size")


def make_folder(name):
    """--save's folder, made before the training so that a bad name cannot waste it."""
    try:
        Path(name).expanduser().mkdir(parents=True)
    except OSError as error:
        raise SystemExit(f"error: --save {name}: {error.strerror}; name a new folder")
    return Path(name).expanduser()


def micro_batches(prompt_ids, prompt_mask, ids, mask, size):
    """Row numbers and tensors of parts: `size` rows of a group (0: all), cut to their length."""
    G = len(ids) // len(prompt_ids)
    for b, real in enumerate(prompt_mask.bool()):
        prompt = prompt_ids[b : b + 1, real], prompt_mask[b : b + 1, real]
        for rows in torch.arange(b * G, (b + 1) * G, device=ids.device).split(size or G):
            longest = int(mask[rows].sum(1).max())
            yield rows, (*prompt, ids[rows, :longest], mask[rows, :longest])


def main(config):
    if config.group_size < 2:
        raise SystemExit("error: --group_size: at least 2")
    started, rng = time.perf_counter(), random.Random(config.seed)
    train, problems = gsm8k(config)
    policy, tokenizer = load(config.model, config.device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=0.0, fused=True)
    step, training_started = 0, time.perf_counter()
    folder = make_folder(config.save) if config.save else None
    try:
        torch.manual_seed(config.seed)
        while (step_started := time.perf_counter()) - training_started < 60 * config.minutes:
            # The batch: B problems. The rollout: G completions of each. The reward of each.
            batch = rng.sample(train, config.batch_size)
            *batch, rewards = rollout(policy, tokenizer, batch, config.group_size, config)
            # The advantages, r - mean, the same for all tokens of a completion.
            advantages = group_advantages(rewards, scale_by_std=False).view(-1, 1)
            # The update, part by part; a group of equal rewards has no gradient.
            tokens, loss = batch[-1].sum(), torch.zeros((), device=policy.device)
            for i, part in micro_batches(*batch, config.micro_batch):
                if advantages[i].any():
                    # Divided by the tokens of the whole batch, the parts add up to its mean.
                    losses = -advantages[i] * token_logprobs(policy, *part) * part[-1] / tokens
                    losses.sum().backward()
                    loss += losses.sum().detach()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step}  loss {loss:z.4f}  reward {rewards.mean():.3f}  "
                  f"length {tokens / rewards.numel():.1f}  grad_norm {norm:.3f}  "
                  f"{time.perf_counter() - step_started:.1f} s", flush=True)
            if step % 5 == 1:
                prompt, text = (tokenizer.decode(x[0, m[0] > 0]) for x, m in (batch[:2], batch[2:]))
                print(f"  loss mask 0 {prompt!a}\n  loss mask 1 {text!a} reward {rewards[0, 0]:g}")
                if not rewards.any():
                    print("  no reward: try gsm8k_sft_grpo.py, or a larger --model")
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        if folder and step:
            policy.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        elif folder:
            folder.rmdir()
    acc, *others = evaluate(policy, tokenizer, problems, config, config.split)
    print("---", acc.replace(f"accuracy_{config.split}", f"{config.split}_acc"), *others, sep="\n")
    print(f"steps: {step}", f"train_seconds: {step_started - training_started:.0f}", sep="\n")
    print(f"seconds: {time.perf_counter() - started:.0f}")
    if policy.device.type != "cpu":
        print(f"peak_gb: {torch.accelerator.max_memory_allocated(policy.device) / 1e9:.2f}")


if __name__ == "__main__":
    main(Config(**vars(HfArgumentParser(Config).parse_args())))
