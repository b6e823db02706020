"""SFT: the model learns to write the demonstrated answer, token by token.

    loss = mean over completion tokens of  -log p(token | prompt, earlier tokens)

Supervised fine-tuning is the first step of InstructGPT (Ouyang et al. 2022, arXiv:2203.02155). The prompt is read but
not learned: the mask leaves only the answer and its stop token in the loss. minimal_dpo.py adds a second, worse answer
and a frozen reference. Left out: packing several examples into a row, distributed training.

Run: uv run minimal_sft.py
Glossary: B prompts, G completions per prompt (1 here), N = B*G rows, P prompt length, T completion length, V vocabulary
size.
"""

import inspect
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass
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
    seed: int = HfArg(default=0, help="draws batches, never the held-out sums")
    save: str = HfArg(default="", help="folder for the trained model; empty: not saved")
    # update
    steps: int = HfArg(default=30, help="training steps, one batch each")
    batch_size: int = HfArg(default=8, help="prompts per step (B), up to 80")
    lr: float = HfArg(default=1e-5, help="AdamW step size")
    # evaluation
    max_new_tokens: int = HfArg(default=12, help="longest completion in tokens; a bare answer takes about 9")

RANGES = {"steps": (1, 10**9), "batch_size": (1, 80), "max_new_tokens": (1, 10**9)}

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
SYSTEM = "Reply with <answer>sum</answer>."

def toy_data() -> tuple[list, list]:
    """All 100 one-digit sums as (question, answer): 80 to train on, 20 held out, the same ones in every script."""
    sums = [(f"What is {a} + {b}?", str(a + b)) for a in range(10) for b in range(10)]
    random.Random(0).shuffle(sums)
    return sums[:80], sums[80:]

def reward(completion: str, answer: str) -> float:
    """1.0 if the last closed <answer>...</answer> holds the answer, else 0.0. A trained reward model would go here."""
    # The completion alone, never prompt + completion: numbers and tags of a prompt would score.
    found = re.findall(r"<answer>((?:(?!</?answer>).)*)</answer>", completion, re.DOTALL)
    return float(bool(found) and found[-1].strip() == answer != "")

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

def encode_completion(tokenizer, text: str) -> list[int]:
    """Ids of an answer and the EOS that ends it. Encoded alone: joined to the prompt as text, tokens could merge."""
    return [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]

def pad(rows, pad_id, side):
    """Id lists -> ids, mask (rows, longest), long. The mask, 1 on real tokens, alone says what is padding."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row).long() for row in rows], True, pad_id, side)
    return ids, torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)).long() for row in rows], True, 0, side)

def show_row(tokenizer, prompt_ids, prompt_mask, completion_ids, completion_mask):
    """Print the first row token by token, each behind its loss mask, up to the first pad."""
    row = [(0, i) for i in prompt_ids[0, prompt_mask[0] == 1].tolist()]
    row += zip(completion_mask[0].tolist(), completion_ids[0, :completion_mask[0].sum() + 1].tolist())
    print("one row as loss mask and token:", *(f"{m} {tokenizer.decode(i)!r}" for m, i in row), sep="  ")

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

# ---- 8. Evaluation ---------------------------------------------------------------------------------------------------
def evaluate(model, tokenizer, problems, config) -> str:
    """Share of problems that the greedy completion solves, and its count, as "0.250 (5/20)". Draws no random number."""
    solved, pad_id = 0, tokenizer.pad_token_id
    for i in tqdm(range(0, len(problems), config.batch_size), desc="evaluate", leave=False):
        questions, answers = zip(*problems[i:i + config.batch_size])
        prompts = [x.to(model.device) for x in pad([encode_prompt(tokenizer, q) for q in questions], pad_id, "left")]
        ids, _ = sample(model, *prompts, 1, config.max_new_tokens, stop_ids(model, tokenizer), pad_id, greedy=True)
        solved += int(sum(map(reward, tokenizer.batch_decode(ids, skip_special_tokens=True), answers)))
    return f"{solved / len(problems):.3f} ({solved}/{len(problems)})"

def peak_gb(device) -> float:
    """Peak memory in 10^9 bytes: torch's count on CUDA, elsewhere the whole process (0 on Windows)."""
    if device.type == "cuda" or sys.platform == "win32":
        return torch.cuda.max_memory_allocated() / 1e9
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9

# ---- 9. Training loop ------------------------------------------------------------------------------------------------
def main(config: Config) -> None:
    check(config)
    started, rng, (train, held_out) = time.perf_counter(), random.Random(config.seed), toy_data()
    policy, tokenizer = load(config.model, config.device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=0.0, fused=True)
    device, pad_id = policy.device, tokenizer.pad_token_id
    print(f"{Path(__file__).name}: {config.model}, {policy.num_parameters():,} parameters, {device}, {policy.dtype}")
    accuracy_before = evaluate(policy, tokenizer, held_out, config)
    try:
        for step in range(1, config.steps + 1):
            step_started = time.perf_counter()
            # 9.1 Batch
            questions, answers = zip(*rng.sample(train, config.batch_size))
            prompts = [x.to(device) for x in pad([encode_prompt(tokenizer, q) for q in questions], pad_id, "left")]
            rows = [encode_completion(tokenizer, f"<answer>{answer}</answer>") for answer in answers]
            ids, mask = (x.to(device) for x in pad(rows, pad_id, "right"))
            if step == 1:
                show_row(tokenizer, *prompts, ids, mask)
            # 9.4 Update
            loss = masked_mean(-token_logprobs(policy, *prompts, ids, mask), mask)
            loss.backward()  # distributed training would average the gradients here
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()  # now: sampling and the next forward pass need the memory
            # 9.5 Print
            print(f"step {step}/{config.steps}  loss {loss:z.4f}  grad_norm {norm:.3f}  "
                  f"{time.perf_counter() - step_started:.1f} s")
    except KeyboardInterrupt:
        print("interrupted: no more training")
    finally:  # after an error too, but what has not trained a step replaces no older model
        if config.save and (optimizer.state or not Path(config.save).exists()):
            save(policy, tokenizer, config.save)
    print(f"---\naccuracy_before: {accuracy_before}\naccuracy_after: {evaluate(policy, tokenizer, held_out, config)}")
    print(f"seconds: {time.perf_counter() - started:.0f}\npeak_gb: {peak_gb(device):.2f}")

if __name__ == "__main__":
    # A character that the console lacks must not end the run; a log file gets each line at once.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    example = f"example: uv run {Path(__file__).name} --model FOLDER --seed 1 --save out/trained"
    try:
        main(Config(**vars(HfArgumentParser(Config, epilog=example).parse_args())))
    except (ValueError, RuntimeError, OSError, KeyboardInterrupt) as error:
        sys.exit(f"error: {' '.join(str(error).split()) or 'interrupted'}")
