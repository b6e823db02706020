"""REINFORCE on GSM8K: what is left of gsm8k_grpo.py when its machinery is deleted, and a protocol to go on from there.

    loss = mean over completion tokens of  -A * log p(token | prompt, earlier tokens)
    advantage A = r - mean(r) over the G rewards r of one prompt

Williams 1992 (REINFORCE, with a baseline) on the problems of Cobbe et al. 2021 (arXiv:2110.14168). No reference, KL,
ratio, clipped ratio, z-score or temperature schedule. Training ends after --minutes of wall-clock time, so that every
idea pays for what it costs.

nanochat's chat_rl.py departs from GRPO as published in four points. Three flags take gsm8k_grpo.py there as well, and
gsm8k_grpo_autoresearch.py is what is then left (the two compute the same gradient, says a test):

    point            GRPO as published                nanochat          gsm8k_grpo.py          ..._autoresearch.py
    reference        KL to a frozen first model       none              --beta 0               none
    ratio and clip   several updates per rollout      none: on policy   --inner_epochs 1       none
    mean             per completion, then over them   tokens of a pass  tokens of the batch    tokens of the batch
    advantage        (r - mean) / std                 r - mean          --scale_by_std false   r - mean

Left out, each named where it would go: a trained reward model, vLLM rollouts, distributed training.

Run: uv run gsm8k_grpo_autoresearch.py
Glossary: B prompts, G completions per prompt, N = B*G rows, P prompt length, T completion length, V vocabulary size;
rollout: a batch of sampled completions.

PROTOCOL for an agent that improves this file by experiments, alone and overnight, as in karpathy/autoresearch.

The goal is the highest val_acc after 20 minutes of training, on one machine that does nothing else. RUN stands for `uv
run gsm8k_grpo_autoresearch.py` with the --model, --data and --device that a person gave you, and --seed. New settings
become defaults in Config. The repository's tests compare the copies of functions: do not run them here.

Frozen, because a number that is measured differently cannot be compared:
 - the data: `gsm8k`, its split, the first 200 validation problems (--split val, --eval_size 200). The training rows,
   with their gold solutions, are all there is to learn from: no other dataset, model or file, and nothing of an earlier
   run. Validation problems are neither trained on nor chosen by; the test split is not looked at;
 - the judge: SYSTEM, `encode_prompt`, `extract_answer`, `reward`, `pass_at_k`, `evaluate` and all that it calls, once,
   at the end, in float32, with the config's batch_size, group_size and max_new_tokens as they are now. An experiment
   that changes one of these for training gives `evaluate` a dataclasses.replace(config, ...) with the old values, and a
   new way to sample is a new function beside `sample`;
 - the budget: --minutes 20. Whatever computes, but for loading and that last evaluation, is inside it;
 - the starting --model, the installed packages, the summary behind `---`.
Free: all else between the training rows and optimizer.step(). Loss, advantages, baseline, how training samples, which
problems and how many, group size, batch size, learning rate and its schedule, optimizer, precision, faster code.

Setup, once:
 1. Start from a clean checkout, on a new branch autoresearch/DATE. Read this file whole.
 2. Create results.tsv, tab-separated, with the header
    commit  seed  val_acc  val_se  steps  train_seconds  peak_gb  status  description
    It and run.log are never committed: add both to the file that `git rev-parse --git-path info/exclude` prints.
 3. RUN with --seed 0 and with --seed 1, unchanged; log both as `baseline`. This is the first BEST: its commit, its two
    val_acc, its val_se (of seed 0). How far the two seeds lie apart is a first look at the noise. If a run earns no
    reward at all or takes hours, there is nothing to improve: stop and say so. LIMIT is the longer run's `seconds` plus
    600.

One experiment, over and over:
 1. Choose one idea. One change per experiment, or its result cannot be told from that of the other change.
 2. Edit this file alone. Commit, with the idea as the message.
 3. timeout LIMIT RUN --seed 0 > run.log 2>&1, in the background if your shell does not wait that long.
 4. grep -E "^(val_acc|val_se|steps|train_seconds|seconds|peak_gb):" run.log. It crashed if the exit status is not 0, if
    val_acc is missing, or if train_seconds is above 1260. A slip (a typo, a forgotten import) may be mended, with git
    commit --amend, and run again, twice at most: tail run.log, and for the traceback call main(Config(...)) from
    Python. Otherwise log val_acc 0.000 and `crash`, revert, go on.
 5. Append a row to results.tsv: short hash, seed, the numbers as printed, status, and the idea in a few words. Rejected
    ideas get their row too: it is all that is left of them.
 6. Decide by the difference to BEST's val_acc of the same seed. It counts only beyond val_se (3.4 points for 200
    problems at 35%): up to one in three ideas without any effect gets there by luck, so a winner is run again with
    --seed 1.
    - above by more than val_se: status `candidate`. RUN --seed 1. Above BEST's by more than val_se again:
      `keep`, else `revert`.
    - within val_se: nothing was seen, and simplicity decides. If the file became shorter or plainer, RUN --seed 1;
      within val_se or above again: `keep`. If it grew: `revert`. So a deletion that costs nothing is a success.
    - below by more than val_se, in either run: `revert`.
    keep: this commit and its numbers are the new BEST, except that a kept deletion leaves BEST's two val_acc as they
    are, or many small losses would add up. revert: git reset --hard to BEST's commit.
Peak memory may grow by half for a gain, not without one. Nobody answers questions at night: do not ask, go on until
stopped. Out of ideas, read results.tsv for near misses, combine two of them, try the opposite, delete something.

Once, when a person ends the loop: RUN --split test --eval_size 0 with both seeds, on the first commit and on BEST, and
grep test_acc. They are reported whatever they are, and nothing is chosen by them.
"""

import inspect
import itertools
import json
import math
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.hf_argparser import HfArg, HfArgumentParser


# ---- 1. Config -------------------------------------------------------------------------------------------------------
@dataclass
class Config:
    model: str = HfArg(default="Qwen/Qwen2.5-0.5B-Instruct", help="name on the hub, or a local folder")
    device: str = HfArg(default="auto", help="cuda, mps or cpu; auto: the accelerator if there is one")
    seed: int = HfArg(default=0, help="draws batches and completions, never the evaluated problems")
    save: str = HfArg(default="", help="folder for the trained model; empty: not saved")
    # data and evaluation
    data: str = HfArg(default="", help="folder with train.jsonl and test.jsonl; empty: openai/gsm8k from the hub")
    split: str = HfArg(default="val", help="what to evaluate: val (500 training rows set apart) or test (at the end)")
    eval_size: int = HfArg(default=200, help="problems evaluated, 0 for all; 200 give +-6.6 points at 35 percent")
    eval_samples: int = HfArg(default=0, help="samples per problem for pass@1 to pass@n; 0: greedy only")
    # rollout
    minutes: float = HfArg(default=20.0, help="wall-clock budget of training; loading and evaluation do not count")
    batch_size: int = HfArg(default=16, help="prompts per step (B)")
    group_size: int = HfArg(default=8, help="completions per prompt (G), at least 2: one alone equals its mean")
    max_new_tokens: int = HfArg(default=512, help="longest completion in tokens; 256 would cut Qwen's answers off")
    # update
    micro_batch: int = HfArg(default=0, help="rows of a group per pass, to save memory; 0: the whole group")
    lr: float = HfArg(default=2e-6, help="AdamW step size")

RANGES = {"batch_size": (1, 10**9), "group_size": (2, 10**9), "max_new_tokens": (1, 10**9)}

def check(config: Config) -> None:
    """Raises ValueError, before any work, that names a flag out of range or a --save that cannot be written."""
    for flag, value in vars(config).items():
        low, high = RANGES.get(flag, (0, 10**9))
        if isinstance(value, (int, float)) and not low <= value <= high:  # nan fails too
            raise ValueError(f"--{flag} {value}: must be from {low} to {high}")
    try:
        folder = Path(config.save).resolve()
        if config.save and folder.exists() and any(folder.iterdir()) and not any(folder.glob("*.safetensors")):
            raise OSError("there already, and no model folder")
        if config.save:  # save will write into it
            Path(f"{folder}.partial").mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"--save {config.save}: {error}") from error

# ---- 2. Data and reward ----------------------------------------------------------------------------------------------
SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."  # as Qwen2.5 was trained

def gsm8k(config) -> tuple[list, list]:
    """(question, gold solution, gold number) of the problems to train on, and of those to evaluate (--split).

    The last 500 training rows are the val split. Raises ValueError that names the flag and the malformed row.
    """
    if config.split not in ("val", "test"):
        raise ValueError(f"--split {config.split}: must be val or test")
    rows = {"train": [], "test": []}
    for split, parsed in rows.items():
        try:
            if config.data:
                source = (Path(config.data) / f"{split}.jsonl").read_bytes().splitlines()
            else:
                from datasets import load_dataset  # here: it takes seconds, and --data does without
                source = load_dataset("openai/gsm8k", "main", split=split)
            for row in source:
                row = json.loads(row) if config.data else row
                solution, answer = re.sub("<<[^<>]*>>", "", row["answer"]).split("####")  # <<...>>: calculator marks
                if (number := extract_answer(rf"\boxed{{{answer}}}")) is None:
                    raise ValueError("no number behind ####")
                parsed.append((row["question"].strip(), rf"{solution}\boxed{{{number}}}", number))
        except Exception as error:  # hub, files, JSON, columns: each raises a kind of its own
            place = f"{config.data}, {split}.jsonl line {len(parsed) + 1}" if config.data else "FOLDER works offline"
            raise ValueError(f"--data {place}: {error!r}") from error
    train, problems = rows["train"][:-500], rows["test"] if config.split == "test" else rows["train"][-500:]
    if len(train) < config.batch_size or not rows["test"]:
        raise ValueError(f"--data {config.data}: {len(rows['train'])} training rows, 500 of them to validate, are too "
                         f"few for --batch_size {config.batch_size}; or there is no test row")
    return train, problems[:config.eval_size or None]

def extract_answer(text: str) -> str | None:
    r"""The number in the last closed \boxed{...}, without commas; None unless that holds exactly one number."""
    opened, box = [], slice(0)  # where the open braces of boxes begin (None: of others); an empty text so far
    for mark in re.finditer(r"\\boxed\s*\{|[{}]", text):
        if mark[0] != "}":
            opened.append(None if mark[0] == "{" else mark.end())
        elif opened and (start := opened.pop()) is not None:
            box = slice(start, mark.start())
    inside = re.sub("[\u2010-\u2015\u2212\uff0d]", "-", text[box])  # dashes and the minus sign
    inside = re.sub(r"(?<=\d)(?:\{,\}|\\[,;:! ]|[,~])+(?=\d{3}(?!\d))", "", inside)  # thousands separators, LaTeX's too
    inside = re.sub(r"(?<=[a-zA-Z}])\^\{?[23]\}?", "", inside)  # square and cubic units
    if re.search(r"\\(?:[cdt]?frac|sqrt|pi|pm|over)|[!√π±¼-¾⅐-⅞]|[/^][\s{]*\d", inside):
        return None  # 12 is not the value of \frac12, \sqrt{12} or 12!
    found = re.findall(r"(?:(?<!\w)-(?:\\[a-z]+|[^\w.-])*)?(?:\d+(?:\.\d+)?|\.\d+)", inside, re.ASCII)
    return re.sub(r"[^\d.-]", "", found[0]) if len(found) == 1 else None

def reward(completion: str, answer: str) -> float:
    """1.0 if the completion's boxed number is the gold one, as exact decimals. A trained reward model would go here."""
    # The completion alone, never prompt + completion: numbers and boxes of a prompt would score.
    found, gold = extract_answer(completion), extract_answer(rf"\boxed{{{answer}}}")
    return float(None not in (found, gold) and Decimal(found) == Decimal(gold))

# ---- 3. Model --------------------------------------------------------------------------------------------------------
def load(name, device):
    """Model (float32, eval mode) and tokenizer. Raises ValueError if one of them cannot be had."""
    try:
        device = (torch.accelerator.current_accelerator(True) or "cpu") if device == "auto" else device
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        # sdpa on MPS has returned NaN for rows that are all padding (pytorch issue 167515).
        attention = "eager" if torch.device(device).type == "mps" else "sdpa"
        # bf16 would round an update of 5e-6 to a weight of 0.02 away: ten SFT steps of that size left a 135M model's
        # loss at 2.0, against 0.4 in float32. Without dtype, a bf16 checkpoint stays bf16.
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation=attention)
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # CUDA's products alone, 8 times finer than bf16's
        # Fails here, not in training, if template, pad token or vocabulary do not fit.
        model.get_input_embeddings()(torch.tensor([*encode_prompt(tokenizer, "?"), tokenizer.pad_token_id]))
        return model.to(device).eval(), tokenizer
    except Exception as error:  # hub, files, JSON, safetensors, device: each raises a kind of its own
        raise ValueError(f"--model {name} (hub name or local folder), --device {device}: {error}") from error

def save(model, tokenizer, folder):
    """Write FOLDER.partial, then let it take FOLDER's place: an older FOLDER goes only when the new one is whole."""
    try:
        folder = Path(folder).resolve()
        partial = Path(f"{folder}.partial")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except Exception as error:  # a full disk is no OSError in safetensors
        raise OSError(f"--save {folder}: {error}") from error

# ---- 4. Tokens and masks ---------------------------------------------------------------------------------------------
def stop_ids(model, tokenizer) -> list[int]:
    """Every id that ends a completion: generation_config's (an int, a list or None) and the tokenizer's EOS."""
    ids = model.generation_config.eos_token_id
    ids = [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]
    return [i for i in dict.fromkeys(ids) if i is not None]

def encode_prompt(tokenizer, question: str) -> list[int]:
    """Ids of system line, question and the assistant's header; plain text where there is no chat template."""
    if tokenizer.chat_template is None:
        return tokenizer(f"{SYSTEM}\n{question}\n").input_ids
    # Some templates print today's date. The macro hides their function for it: the same ids on every day.
    template = "{% macro strftime_now(format) %}1 January 2025{% endmacro %}" + tokenizer.get_chat_template()
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, chat_template=template, add_generation_prompt=True, return_dict=False)

def pad(rows, pad_id, side):
    """Id lists -> ids, mask (rows, longest), long. The mask, 1 on real tokens, alone says what is padding."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row).long() for row in rows], True, pad_id, side)
    return ids, torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)).long() for row in rows], True, 0, side)

def show_row(tokenizer, prompt_ids, prompt_mask, completion_ids, completion_mask):
    """Print the first row token by token, each behind its loss mask, up to the first pad."""
    row = [(0, i) for i in prompt_ids[0, prompt_mask[0] == 1].tolist()]
    row += zip(completion_mask[0].tolist(), completion_ids[0, :completion_mask[0].sum() + 1].tolist())
    print("one row as loss mask and token:", *(f"{m} {tokenizer.decode(i)!r}" for m, i in row), sep="  ")

def micro_batches(prompt_ids, prompt_mask, completion_ids, completion_mask, advantages, rows, skip_flat):
    """Parts of `rows` completions of one prompt (0: its whole group), sorted by length so that each pads little.

    advantages (B, G). A list of ((prompt_ids (1, P), prompt_mask, completion_ids (n, T), completion_mask), advantages
    (n, 1)). With skip_flat, groups without advantage are left out.
    """
    parts, G = [], advantages.shape[1]
    for b in range(len(prompt_ids)):
        real = prompt_mask[b].bool()
        by_length = b * G + completion_mask[b * G:(b + 1) * G].sum(1).argsort()
        for part in by_length.split(rows or G) if advantages[b].any() or not skip_flat else ():
            batch = (prompt_ids[b:b + 1, real], prompt_mask[b:b + 1, real], completion_ids[part], completion_mask[part])
            parts.append((batch, advantages.view(-1, 1)[part]))
    return parts

def similar_lengths(mask):
    """Row numbers of mask (N, T) in parts, from long rows to short ones, with little padding each.

    A part ends before its padding passes both 64 slots and an eighth of its tokens; what pads 128 or less is one part.
    """
    # In one rectangle of 32 toy rollouts of up to 24 tokens, 54% was padding, in these parts 17%; the update took two
    # thirds of the time. A pass more costs a CPU about as much as 100 slots: shorter rollouts are not split.
    lengths = mask.sum(1)
    rows = lengths.argsort(descending=True)
    while len(rows):
        padding = (lengths[rows[0]] - lengths[rows]).cumsum(0)
        fits = (padding <= (lengths[rows].cumsum(0) / 8).clamp(min=64)) | (padding[-1] <= 128)
        yield rows[fits]
        rows = rows[~fits]

# ---- 5. Sampling -----------------------------------------------------------------------------------------------------
def forward(model, ids, mask, cache, keep=0):
    """Logits of the last `keep` ids (0: all). mask (rows, seen + L) covers the cached tokens, then ids (rows, L)."""
    if model.training:  # dropout would change the probabilities, and gradient checkpointing drops the cache
        logits = forward(model.eval(), ids, mask, cache, keep)
        model.train()
        return logits
    # Positions count real tokens. Without them and the mask, 12 pads moved a log-probability by 0.5 nats on average.
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
    # transformers renamed past_key_values to cache, and ignores the name that it does not know.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=keep, **{name: cache}).logits

@torch.no_grad()
def sample(model, prompt_ids, prompt_mask, num_samples, max_new_tokens, stop_ids, pad_id, greedy=False):
    """completion_ids, completion_mask (N, T) drawn from softmax(logits), the distribution that is trained: no top-k.

    greedy: the likeliest token, not a draw. T is the longest row, at most max_new_tokens. Raises RuntimeError if the
    logits are not finite.
    """
    cache, stops, finite = DynamicCache(), torch.tensor(stop_ids, device=prompt_ids.device), True
    logits = forward(model, prompt_ids, prompt_mask, cache, keep=1).repeat_interleave(num_samples, 0)  # (N, 1, V)
    cache.batch_repeat_interleave(num_samples)  # each prompt is read once, for all its completions
    ids = prompt_ids.new_full((len(logits), max_new_tokens), pad_id)
    written = torch.zeros_like(ids)  # becomes the completions' mask
    rows = torch.arange(len(ids), device=ids.device)  # those in the batch still, (n,)
    done = torch.zeros_like(rows, dtype=torch.bool)
    for t in range(max_new_tokens):
        seen = torch.cat([prompt_mask[rows // num_samples], written[rows, :t]], 1)
        logits = forward(model, ids[rows, t - 1, None], seen, cache) if t else logits
        finite = logits.amax(-1).isfinite().all() & finite
        probs = torch.softmax(logits[:, -1].float().nan_to_num(), -1)  # (n, V); a NaN in multinomial would abort CUDA
        # For one draw a CPU makes V random numbers per row, a sixth of the loop's time; for two it makes two, and finds
        # them in the running sum of probs: float64, or rounding would distort the tail. On MPS, multinomial has
        # returned ids of probability 0: the CPU draws for it.
        weights, draws = (probs, 1) if greedy or ids.is_cuda else (probs.cpu().double(), 2)
        draw = probs.argmax(-1) if greedy else torch.multinomial(weights, draws, replacement=True)[:, 0]
        ids[rows, t], written[rows, t] = torch.where(done, pad_id, draw.to(ids.device)), (~done).long()
        done = done | torch.isin(ids[rows, t], stops)  # the stop token itself belongs to its row
        # Reading a flag makes the host wait for an accelerator: there every 16 tokens. Empty columns are cut off below.
        if ids.is_cpu or t % 16 == 0:
            if done.all() or not finite:
                break
            if done.sum() >= 8:  # finished rows leave the batch, not one by one: the cache is copied for it
                cache.batch_select_indices(~done)
                rows, done = rows[~done], done[~done]
    if not finite:
        raise RuntimeError("the logits are not finite: broken weights in --model, or --lr too high")
    return ids[:, written.any(0)], written[:, written.any(0)]  # (N, T)

def rollout(model, tokenizer, problems, num_samples, config, greedy=False):
    """num_samples completions for each of B problems: prompts (ids, mask), ids, mask (N, T), texts, rewards (B, G)."""
    questions, _, answers = zip(*problems)
    pad_id = tokenizer.pad_token_id
    prompts = [x.to(model.device) for x in pad([encode_prompt(tokenizer, q) for q in questions], pad_id, "left")]
    # vLLM would go here, faster, if it can be made to give the same probabilities.
    stops = stop_ids(model, tokenizer)
    ids, mask = sample(model, *prompts, num_samples, config.max_new_tokens, stops, pad_id, greedy)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = torch.tensor([reward(text, answers[i // num_samples]) for i, text in enumerate(texts)])
    return prompts, ids, mask, texts, rewards.view(-1, num_samples).to(model.device)

# ---- 6. Log-probabilities --------------------------------------------------------------------------------------------
def completion_logits(model, prompt_ids, prompt_mask, completion_ids, completion_mask):
    """The logits that predict each completion token, part by part: rows and columns (indices), logits (n, t, V)."""
    prompts, G = DynamicCache(), len(completion_ids) // len(prompt_ids)
    first = forward(model, prompt_ids, prompt_mask, prompts, keep=1)  # (B, 1, V), of the completions' first tokens
    yield slice(None), slice(0, 1), first.repeat_interleave(G, 0)
    # Tried and left out: computing logits again in the backward pass (saves 1.2 of 6.8 GB, costs 6% of the time, has to
    # reach into the model); all rows end to end in one (no padding, but attention grows with the square of all tokens).
    for rows in similar_lengths(completion_mask):
        length = int(completion_mask[rows[0]].sum()) - 1  # of the longest; the last token predicts nothing
        if length > 0:
            cache = DynamicCache(prompts)  # a copy that gradients flow through
            cache.batch_select_indices(rows // G)
            mask = torch.cat([prompt_mask[rows // G], completion_mask[rows, :length]], 1)
            yield rows, slice(1, length + 1), forward(model, completion_ids[rows, :length], mask, cache)

def token_logprobs(model, prompt_ids, prompt_mask, completion_ids, completion_mask):
    """log p(token | all before it), (N, T), float32; only those of the mask count."""
    logprobs = torch.zeros(completion_ids.shape, device=completion_ids.device)
    for rows, t, logits in completion_logits(model, prompt_ids, prompt_mask, completion_ids, completion_mask):
        ids = completion_ids[rows, t, None]  # (n, t, 1)
        logprobs[rows, t] = logits.float().log_softmax(-1).gather(-1, ids)[:, :, 0]
    return logprobs

# ---- 7. Loss ---------------------------------------------------------------------------------------------------------
def masked_mean(x, mask):
    """Mean of x over the slots with mask 1; 0 if there are none."""
    return (x * mask).sum() / mask.sum().clamp(min=1)

def group_advantages(rewards, scale_by_std=True):
    """(B, G) -> (B, G): (r - mean) / std, section 4.1.2 of the GRPO paper (the 1e-6 is ours), or r - mean."""
    scale = rewards.std(1, correction=0, keepdim=True) + 1e-6 if scale_by_std else 1
    # A flat group teaches nothing, to the last bit: the mean of equal floats can differ from them by rounding.
    flat = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return ((rewards - rewards.mean(1, keepdim=True)) / scale).masked_fill(flat, 0)

# ---- 8. Evaluation ---------------------------------------------------------------------------------------------------
def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from n samples of which c are.

    1 - C(n-c, k) / C(n, k), Chen et al. 2021 (arXiv:2107.03374), eq. 1. Raises ValueError unless 1 <= k <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} needs at least {k} samples, at least 1, and from 0 to n right ones: n={n}, c={c}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)

def evaluate(model, tokenizer, problems, config) -> dict[str, str]:
    """Greedy accuracy with its standard error and 95% interval, share cut off by the length limit, mean length, pass@k.

    The training loop's rollout with a counter in the place of the gradient. Leaves the random state as it found it.
    """
    solved, cut_off, tokens, counts, n = 0, 0, 0, [], config.eval_samples
    stops = torch.tensor(stop_ids(model, tokenizer), device=model.device)
    chunk = max(1, config.batch_size * config.group_size // max(1, n))  # problems: about the rows of a training step
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(cuda), tqdm(total=len(problems), desc="evaluate", leave=False) as bar:
        torch.manual_seed(0)  # pass@k of two models by the same draws
        for i in range(0, len(problems), chunk):
            part = problems[i:i + chunk]
            _, ids, mask, _, rewards = rollout(model, tokenizer, part, 1, config, greedy=True)
            solved, tokens = solved + int(rewards.sum()), tokens + int(mask.sum())
            cut_off += len(part) - int((torch.isin(ids, stops) & mask.bool()).any(1).sum())
            counts += rollout(model, tokenizer, part, n, config)[-1].sum(1).int().tolist() if n else []
            bar.update(len(part))
            bar.set_postfix(accuracy=f"{solved / (i + len(part)):.3f}")
    total, p = len(problems), solved / len(problems)
    # Wilson's score interval (1927), z = 1.96: near 0, where a small model starts, p +- 1.96 se would be too narrow.
    center, half = (solved + 1.9208) / (total + 3.8416), 1.96 * (solved * (1 - p) + 0.9604) ** 0.5 / (total + 3.8416)
    result = {"accuracy": f"{p:.3f} ({solved}/{total})", "se": f"{(p * (1 - p) / total) ** 0.5:.3f}",
              "interval": f"{center - half:z.3f} to {center + half:.3f}",
              "cut_off": f"{cut_off / total:.3f}", "length": f"{tokens / total:.1f}"}
    result |= {f"pass@{k}": f"{sum(pass_at_k(n, c, k) for c in counts) / total:.3f}" for k in range(1, n + 1)}
    print("evaluation", *(f"{key} {value}" for key, value in result.items()), sep="  ")
    return result

def peak_gb(device) -> float:
    """Peak memory in 10^9 bytes: torch's count on CUDA, elsewhere the whole process (0 on Windows)."""
    if device.type == "cuda" or sys.platform == "win32":
        return torch.cuda.max_memory_allocated() / 1e9
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9

# ---- 9. Training loop ------------------------------------------------------------------------------------------------
def main(config: Config) -> None:
    check(config)
    started, rng, (train, problems) = time.perf_counter(), random.Random(config.seed), gsm8k(config)
    policy, tokenizer = load(config.model, config.device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=0.0, fused=True)
    print(f"{Path(__file__).name}: {config.model}, {policy.num_parameters():,} parameters, {policy.device}, "
          f"{policy.dtype}, {len(train)} problems to train on, {len(problems)} of {config.split} to evaluate")
    torch.manual_seed(config.seed)
    steps, training_started = 0, time.perf_counter()
    try:
        for step in tqdm(itertools.count(1), desc="train", leave=False):
            step_started = time.perf_counter()
            if step_started - training_started >= 60 * config.minutes:
                break  # a step that has begun is finished: the budget is exceeded by a part of a step
            # 9.1 Batch, 9.2 Rollout, 9.3 Reward
            batch = rng.sample(train, config.batch_size)
            prompts, ids, mask, texts, rewards = rollout(policy, tokenizer, batch, config.group_size, config)
            if step == 1:
                show_row(tokenizer, *prompts, ids, mask)
            advantages = group_advantages(rewards, scale_by_std=False)  # (B, G): r - mean
            # 9.4 Update. A group of equal rewards has no gradient and costs no pass. All flat: AdamW does nothing.
            loss = torch.zeros((), device=policy.device)
            for part, part_advantages in micro_batches(*prompts, ids, mask, advantages, config.micro_batch, True):
                logprobs = token_logprobs(policy, *part)
                # Its share of all tokens, those of skipped groups too: the parts add up to the batch's token mean.
                part_mask, share = part[-1], part[-1].sum() / mask.sum()
                part_loss = share * masked_mean(-part_advantages * logprobs, part_mask)
                part_loss.backward()  # adds to the gradient; distributed training would average it afterwards
                loss += part_loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()  # now: sampling and the next forward pass need the memory
            steps = step  # finished ones
            # 9.5 Print
            flat = (advantages == 0).all(1).float().mean()
            tqdm.write(f"step {step}  loss {loss:z.4f}  reward {rewards.mean():.3f}  flat {flat:.3f}  "
                       f"length {mask.sum() / len(mask):.1f}  grad_norm {norm:.3f}  "
                       f"{time.perf_counter() - step_started:.1f} s")
            if step % 5 == 0:
                tqdm.write(f"  {texts[0]!r} reward {rewards[0, 0]:.0f}")
            if not rewards.any():
                tqdm.write("  no reward in this step. If it stays so: gsm8k_sft_grpo.py, or a larger --model")
    except KeyboardInterrupt:
        print("interrupted: no more training")
    finally:  # after an error too, but what has not trained a step replaces no older model
        train_seconds = time.perf_counter() - training_started
        if config.save and (optimizer.state or not Path(config.save).exists()):
            save(policy, tokenizer, config.save)
    result = evaluate(policy, tokenizer, problems, config)
    print(f"---\n{config.split}_acc: {result.pop('accuracy')}")
    print(*(f"{config.split}_{key}: {value}" for key, value in result.items()), sep="\n")
    print(f"steps: {steps}\ntrain_seconds: {train_seconds:.0f}")
    print(f"seconds: {time.perf_counter() - started:.0f}\npeak_gb: {peak_gb(policy.device):.2f}")

if __name__ == "__main__":
    # A character that the console lacks must not end the run; a log file gets each line at once.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    example = f"example: uv run {Path(__file__).name} --model FOLDER --seed 1 --save out/trained"
    try:
        main(Config(**vars(HfArgumentParser(Config, epilog=example).parse_args())))
    except (ValueError, RuntimeError, OSError, KeyboardInterrupt) as error:
        sys.exit(f"error: {' '.join(str(error).split()) or 'interrupted'}")
