"""The experiment loop of gsm8k_grpo_autoresearch.py for real, on a task that two CPU cores can measure. Not a test.

    uv run python tests/autoresearch.py --end
    uv run python tests/autoresearch.py --print

The protocol in that script's docstring, with sums of two numbers below 30 in the place of GSM8K (800 rows of the same
form, 500 of them to validate; 100 to test), two minutes of training in the place of twenty, and SCALE's smaller
settings. All runs start from SmolLM2 after 16 SFT steps on these rows, made first. An experiment is a change of the
best text so far: EXPERIMENTS lists them in the order in which they were thought of, later ones in the light of earlier
results. Every run has one thread and becomes a row of tests/autoresearch.tsv; its `commit` is the hash of the text that
ran (git hash-object's), made from the script as of commit 4dd6cad. A loop that was stopped goes on from there, and
--print runs nothing. Whoever changes an experiment deletes its rows. Left out of the protocol: judging peak memory.
"""

import argparse
import json
import random
import re
import statistics
import sys
from hashlib import sha1
from pathlib import Path

from ablations import ROOT, changed, run_copy

RESULTS = ROOT / "tests/autoresearch.tsv"
DATA, START = ROOT / "out/sums", ROOT / "out/sums_sft"
COLUMNS = ["commit", "seed", "val_acc", "val_se", "steps", "train_seconds", "peak_gb", "status", "description"]
SMALL = "--batch_size 8 --group_size 4 --max_new_tokens 12"
SCALE = [
    ("minutes: float = HfArg(default=20.0", "minutes: float = HfArg(default=2.0"),
    ("batch_size: int = HfArg(default=16", "batch_size: int = HfArg(default=8"),
    ("group_size: int = HfArg(default=8", "group_size: int = HfArg(default=4"),
    ("max_new_tokens: int = HfArg(default=512", "max_new_tokens: int = HfArg(default=12"),
    ("lr: float = HfArg(default=2e-6", "lr: float = HfArg(default=1e-5"),
    ("config.batch_size * config.group_size // max(1, n)", "48 // max(1, n)"),  # the judge: whatever is trained with
]
SEEDS = range(5)  # of the noise floor

LR, BATCH, GROUP = (
    f"{knob}: {kind} = HfArg(default=%s,"
    for knob, kind in (("lr", "float"), ("batch_size", "int"), ("group_size", "int"))
)
BACKWARD = ("            loss = torch.zeros((), device=policy.device)\n", "            norm = ")
ONE_PASS = """            logprobs = token_logprobs(policy, *prompts, ids, mask)
            loss = masked_mean(-advantages.view(-1, 1) * logprobs, mask)
            loss.backward()
"""
GRADIENT = "            loss.backward()\n"
ADVANTAGES = "advantages = group_advantages(rewards, scale_by_std=False)"
BATCH_MEAN = "advantages = rewards - rewards.mean()"
ADAMW, STEP = "weight_decay=0.0, fused", "            optimizer.step()\n"
LOADED = "policy, tokenizer = load(config.model, config.device)\n"
FROZEN = "    policy.get_input_embeddings().requires_grad_(False)\n"
LOWER_HALF = "    policy.model.layers[:15].requires_grad_(False)\n"
UPDATE = ("            logprobs = token_logprobs(", "            steps = step")
GROUP_LR = 'optimizer.param_groups[0]["lr"]'
LEFT = "1 - (step_started - training_started) / (60 * config.minutes)"
TWO_EPOCHS = """            for epoch in range(2):
                logprobs = token_logprobs(policy, *prompts, ids, mask)
                old = logprobs.detach() if epoch == 0 else old
                ratio, A = (logprobs - old).exp(), advantages.view(-1, 1)
                loss = masked_mean(-torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A), mask)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0, error_if_nonfinite=True)
                optimizer.step()
                optimizer.zero_grad()
"""
NEAR = """near = [abs(float(extract_answer(text) or 99) - float(batch[i // config.group_size][2])) < 2
                    for i, text in enumerate(texts)]
            credit = torch.maximum(rewards, 0.5 * torch.tensor(near).view_as(rewards).to(rewards))
            advantages = credit - credit.mean()"""
DRAW = "batch = rng.sample(train, config.batch_size)\n"
REPLAY = "batch = mixed + rng.sample(train, config.batch_size - len(mixed))\n"
MIXED = "mixed = [problem for problem, r in zip(batch, rewards) if 0 < r.mean() < 1][:config.batch_size // 2]"
GOLD = """            stop = [tokenizer.eos_token_id]
            gold = [tokenizer(s, add_special_tokens=False).input_ids + stop for _, s, _ in batch]
            gold = pad(gold, tokenizer.pad_token_id, "right")
            loss = loss + masked_mean(-token_logprobs(policy, *prompts, *gold), gold[1])
"""
# (idea, changes), as `changed` takes them
EXPERIMENTS = [
    ("all groups in one backward pass", [(BACKWARD, ONE_PASS), (("def micro_batches", "def similar_lengths"), "")]),
    ("lr 3e-5", [(LR % "1e-5", LR % "3e-5")]),
    ("16 prompts x 2", [(BATCH % 8, BATCH % 16), (GROUP % 4, GROUP % 2)]),
    ("4 prompts x 8", [(BATCH % 8, BATCH % 4), (GROUP % 4, GROUP % 8)]),
    ("no baseline", [(ADVANTAGES, "advantages = rewards")]),
    ("lr falls linearly to 0", [(STEP, f"            {GROUP_LR} = config.lr * ({LEFT})\n{STEP}")]),
    ("batch mean as the baseline", [(ADVANTAGES, BATCH_MEAN)]),
    ("z-score of the batch", [(BATCH_MEAN, "advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)")]),
    ("AdamW betas 0.9, 0.95", [(ADAMW, f"betas=(0.9, 0.95), {ADAMW}")]),
    ("embeddings frozen", [(LOADED, LOADED + FROZEN)]),
    ("right completions only", [(BATCH_MEAN, "advantages = (rewards - rewards.mean()).clamp(min=0)")]),
    ("gradients not clipped", [("policy.parameters(), 1.0, error", "policy.parameters(), 1e9, error")]),
    ("lr 5e-6", [(LR % "1e-5", LR % "5e-6")]),
    ("lr rises over five steps", [(STEP, f"            {GROUP_LR} = config.lr * min(1, step / 5)\n{STEP}")]),
    ("16 prompts x 4", [(BATCH % 8, BATCH % 16)]),
    ("4 prompts x 4", [(BATCH % 8, BATCH % 4)]),
    ("embeddings and lower half frozen", [(LOADED, LOADED + FROZEN + LOWER_HALF)]),
    ("two inner epochs, ratio, clip", [(UPDATE, TWO_EPOCHS)]),
    ("half a point for a sum that is off by 1", [(BATCH_MEAN, NEAR)]),
    (
        "prompts of mixed outcome again in the next step",
        [
            (DRAW, REPLAY),
            ("steps, training_started = 0,", "mixed, steps, training_started = [], 0,"),
            (BATCH_MEAN, f"{MIXED}\n            {BATCH_MEAN}"),
        ],
    ),
    ("gold solutions imitated as well", [(GRADIENT, GOLD + GRADIENT)]),
]


def prepare(model):
    """The rows and the checkpoint that all runs start from, once."""
    if not (DATA / "test.jsonl").exists():
        rows = [{"question": f"What is {a} + {b}?", "answer": f"#### {a + b}"} for a in range(30) for b in range(30)]
        random.Random(0).shuffle(rows)
        DATA.mkdir(parents=True, exist_ok=True)
        for name, part in (("train", rows[:800]), ("test", rows[800:])):
            (DATA / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    if not START.exists():  # one GRPO step with lr 0: SFT alone
        new = START.with_name("sums_new")  # becomes START when it is whole
        flags = f"{SMALL} --eval_size 100 --sft_steps 16 --sft_lr 1e-5 --steps 1 --lr 0 --beta 0".split()
        flags = ["--model", model, "--data", DATA, "--save", new, *flags]
        run_copy("gsm8k_sft_grpo", (ROOT / "gsm8k_sft_grpo.py").read_text(), flags).check_returncode()
        new.rename(START)


def rows():
    """What is stored, a dict per run."""
    lines = RESULTS.read_text().splitlines()[1:] if RESULTS.exists() else []
    return [dict(zip(COLUMNS, line.split("\t"))) for line in lines]


def name_of(text):
    return sha1(f"blob {len(text.encode())}\0{text}".encode()).hexdigest()[:7]


def result(text, seed, description, *flags):
    """The row of the text with a seed: a stored one, or that of a run, which has no status yet."""
    for row in rows():
        if (row["seed"], row["description"]) == (str(seed), description):
            return row
    flags = ["--model", START, "--data", DATA, "--seed", seed, *flags]
    done = run_copy("gsm8k_grpo_autoresearch", text, flags)
    summary = done.stdout.split("\n---\n")[-1].replace("test_", "val_")
    row = dict.fromkeys(COLUMNS[2:7], "0.000") | dict(re.findall(r"^(\w+): (\S+)", summary, re.MULTILINE))
    row |= {"commit": name_of(text), "seed": str(seed), "description": description}
    crashed = done.returncode or float(row["train_seconds"]) > 150  # a last step has begun within 120
    return row | ({"status": "crash", "val_acc": "0.000"} if crashed else {})


def log(row, status):
    """Append a run that is not stored yet; its val_acc."""
    row = {"status": status} | row
    if row not in rows():
        if not RESULTS.exists():
            RESULTS.write_text("\t".join(COLUMNS) + "\n")
        line = "\t".join(row[column] for column in COLUMNS)
        with RESULTS.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
    return float(row["val_acc"])


def loop():
    """The protocol, one experiment after the other; the first and the best text."""
    best = baseline = changed((ROOT / "gsm8k_grpo_autoresearch.py").read_text(), SCALE)
    floor = [log(result(best, seed, "baseline"), "baseline") for seed in SEEDS]
    if not all(floor):
        sys.exit("the baseline crashed or solves nothing: there is nothing to improve")
    accuracies, error = floor[:2], float(result(best, 0, "baseline")["val_se"])
    for description, changes in EXPERIMENTS:
        text = changed(best, changes)
        first = result(text, 0, description)
        gap = float(first["val_acc"]) - accuracies[0]
        deletion = abs(gap) <= error and len(text) < len(best)  # shorter, and nothing was seen
        if not deletion and gap <= error:
            log(first, "revert")
            continue
        log(first, "candidate")
        second = result(text, 1, description)
        gap = float(second["val_acc"]) - accuracies[1]
        if gap > error or (deletion and gap >= -error):
            log(second, "keep")
            best = text
            if not deletion:  # after a deletion they stay, or many small losses would add up
                accuracies, error = [float(row["val_acc"]) for row in (first, second)], float(first["val_se"])
        else:
            log(second, "revert")
    return baseline, best


def report():
    """The stored rows as Markdown, with differences to the best of their time."""
    stored = rows()
    if len(stored) < len(SEEDS):
        return "no results yet"
    floor = [float(row["val_acc"]) for row in stored if row["status"] == "baseline"]
    best, error = floor[:2], float(stored[0]["val_se"])
    text = ["| experiment | seed 0 | to the best | seed 1 | to the best | |", "|---|---|---|---|---|---|"]
    first_looks = confirmed = 0
    tried = dict.fromkeys(r["description"] for r in stored if r["status"] in ("candidate", "revert", "crash", "keep"))
    for description in tried:
        runs = [row for row in stored if row["description"] == description]
        accuracies = [float(row["val_acc"]) for row in runs]
        gaps = [a - b for a, b in zip(accuracies, best)]
        cells = [cell for a, gap in zip(accuracies, gaps) for cell in (f"{a:.3f}", f"{gap:+.3f}")]
        text.append(f"| {description} | {' | '.join(cells + ['-'] * (4 - len(cells)))} | {runs[-1]['status']} |")
        if gaps[0] > error:
            first_looks += 1
            if runs[-1]["status"] == "keep":
                confirmed += 1
                best, error = accuracies, float(runs[0]["val_se"])
    spread = f"{statistics.mean(floor):.3f}, standard deviation {statistics.stdev(floor):.3f}"
    hours = sum(float(row["train_seconds"]) for row in stored) / 3600
    text += ["", f"Baseline, {len(floor)} seeds: {', '.join(f'{a:.3f}' for a in floor)}; mean {spread}."]
    text += [f"{len(tried)} experiments, {len(stored)} runs, {hours:.1f} hours of training."]
    text += [f"Above the best by more than a standard error, seed 0: {first_looks}; with seed 1 again: {confirmed}."]
    for kind in ("baseline, test rows", "best, test rows"):
        found = [float(row["val_acc"]) for row in stored if row["description"] == kind]
        text += [f"{kind}: {', '.join(f'{a:.3f}' for a in found)}; mean {statistics.mean(found):.3f}."] if found else []
    return "\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ROOT / "out/smollm2", help="what SFT starts from: tests/smollm2.py")
    parser.add_argument("--end", action="store_true", help="end the loop: the first and the best on the test rows")
    parser.add_argument("--print", action="store_true", help="show the stored results, run nothing")
    args = parser.parse_args()
    if not args.print:
        prepare(Path(args.model).resolve())
        baseline, best = loop()
        if args.end:
            for name, text in (("baseline", baseline), ("best", best)):
                for seed in SEEDS[:2]:
                    log(result(text, seed, f"{name}, test rows", "--split", "test", "--eval_size", "0"), "test")
    print(report())


if __name__ == "__main__":
    main()
