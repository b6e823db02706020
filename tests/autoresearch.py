"""The experiment loop of gsm8k_grpo_autoresearch.py on a task for two CPU cores. Not a test.

    uv run python tests/autoresearch.py --end
    uv run python tests/autoresearch.py --print

The protocol in that script's docstring, with sums of two numbers below 30 in the place of GSM8K
(800 rows of the same form, 500 of them to validate; 100 to test), two minutes of training in the
place of twenty, and SCALE's smaller settings. All runs start from SmolLM2 after 16 SFT steps on
these rows, made first. An experiment is a change of the best text so far: EXPERIMENTS lists them in
the order in which they were thought of, later ones in the light of earlier results; each applies
whatever was kept before it. Every run has one thread and becomes a row of tests/autoresearch.tsv;
its `commit` is the hash of the text that ran (git hash-object's). A loop that was stopped goes on
from there. Whoever changes an experiment deletes its rows; whoever runs the loop anew deletes the
file, and sets MADE_AT to the commit of the scripts. Left out of the protocol: judging peak memory,
which the script prints on accelerators alone.
"""

import argparse
import json
import random
import re
import statistics
import sys
from hashlib import sha1
from pathlib import Path

from ablations import ROOT, age, changed, run_copy

SCRIPT, WARM_UP = "gsm8k_grpo_autoresearch", "gsm8k_sft_grpo"
RESULTS, MADE_AT = ROOT / "tests/autoresearch.tsv", "4dd6cad"
DATA, START = ROOT / "out/sums", ROOT / "out/sums_sft"
NUMBERS = ["val_acc", "se_val", "steps", "train_seconds", "peak_gb"]
COLUMNS = ["commit", "seed", *NUMBERS, "status", "description"]
SMALL = "--batch_size 8 --group_size 4 --max_new_tokens 12"
SEEDS = range(5)  # of the noise floor


def knob(name, value):
    """The change of a default in Config, whatever it is."""
    return (f"    {name} = HfArg(default=", ", help="), f"    {name} = HfArg(default={value}"


SCALE = [
    knob("minutes: float", 2.0),
    knob("batch_size: int", 8),
    knob("group_size: int", 4),
    knob("max_new_tokens: int", 12),
    knob("lr: float", 1e-5),
    # the judge: whatever is trained with
    ("config.batch_size * config.group_size // (samples or 1)", "48 // (samples or 1)"),
]

WHILE, LINE = "60 * config.minutes:\n", "            "  # the loop's head, its indentation
LOADED = "policy, tokenizer = load(config.model, config.device)\n"
FROZEN = "    policy.get_input_embeddings().requires_grad_(False)\n"
LOWER_HALF = "    policy.model.layers[:15].requires_grad_(False)\n"
ADAMW, CLIP = "weight_decay=0.0, fused", "policy.parameters(), %s, error_if_nonfinite=True)"
SET_LR = f'{WHILE}{LINE}optimizer.param_groups[0]["lr"] = config.lr * '
LEFT = "(1 - (step_started - training_started) / (60 * config.minutes))\n"
DRAW, ROLLOUT = "batch = rng.sample(train, config.batch_size)\n", f"{LINE}*batch, rewards = "
KEEP_ROWS = (ROLLOUT, f"{LINE}drawn = batch\n{ROLLOUT}")
ADVANTAGES = (f"{LINE}advantages = ", ".view(-1, 1)")
BATCH_MEAN = f"{LINE}advantages = (rewards - rewards.mean())"
Z_SCORE = f"{LINE}advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6))"
UPDATE = (f"{LINE}tokens", f"{LINE}step += 1")
ONE_PASS = """            tokens = batch[-1].sum()
            loss = -(advantages * token_logprobs(policy, *batch) * batch[-1]).sum() / tokens
            loss.backward()
"""
STEP = f"""{LINE}norm = torch.nn.utils.clip_grad_norm_({CLIP % 1.0}
            optimizer.step()
            optimizer.zero_grad()
"""
TWO_EPOCHS = """            tokens = batch[-1].sum()
            for epoch in range(2):
                logprobs = token_logprobs(policy, *batch)
                old = logprobs.detach() if epoch == 0 else old
                ratio = (logprobs - old).exp()
                losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                loss = (losses * batch[-1]).sum() / tokens
                loss.backward()
""" + STEP.replace(LINE, LINE + "    ")
NEAR = """            texts = tokenizer.batch_decode(batch[2], skip_special_tokens=True)
            found = torch.tensor([float(extract_answer(text) or 99) for text in texts])
            gold = torch.tensor([[float(answer)] for _, _, answer in drawn])
            near = (found.view_as(rewards).to(rewards) - gold.to(rewards)).abs() < 2
            credit = torch.maximum(rewards, 0.5 * near)
            advantages = (credit - credit.mean())"""
REPLAY = "batch = mixed + rng.sample(train, config.batch_size - len(mixed))\n"
MIXED = """            mixed = [problem for problem, r in zip(drawn, rewards) if 0 < r.mean() < 1]
            mixed = mixed[: config.batch_size // 2]
"""
GOLD = """            texts = [f"{s}\\n\\\\boxed{{{a}}}{tokenizer.eos_token}" for _, s, a in drawn]
            gold = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right",
                             return_tensors="pt").to(policy.device)
            gold = gold.input_ids, gold.attention_mask
            imitation = (token_logprobs(policy, *batch[:2], *gold) * gold[1]).sum() / gold[1].sum()
            (-imitation).backward()
"""
# (idea, changes), as `changed` takes them
EXPERIMENTS = [
    (
        "all groups in one backward pass",
        [
            (UPDATE, ONE_PASS + STEP),
            (("def micro_batches", "def main"), ""),
            (("    micro_batch: int", "    lr: float"), ""),
        ],
    ),
    ("lr 3e-5", [knob("lr: float", 3e-5)]),
    ("16 prompts x 2", [knob("batch_size: int", 16), knob("group_size: int", 2)]),
    ("4 prompts x 8", [knob("batch_size: int", 4), knob("group_size: int", 8)]),
    ("no baseline", [(ADVANTAGES, f"{LINE}advantages = rewards")]),
    ("lr falls linearly to 0", [(WHILE, SET_LR + LEFT)]),
    ("batch mean as the baseline", [(ADVANTAGES, BATCH_MEAN)]),
    ("z-score of the batch", [(ADVANTAGES, Z_SCORE)]),
    ("AdamW betas 0.9, 0.95", [(ADAMW, f"betas=(0.9, 0.95), {ADAMW}")]),
    ("embeddings frozen", [(LOADED, LOADED + FROZEN)]),
    ("right completions only", [(".view(-1, 1)", ".view(-1, 1).clamp(min=0)")]),
    ("gradients not clipped", [(CLIP % 1.0, CLIP % 1e9)]),
    ("lr 5e-6", [knob("lr: float", 5e-6)]),
    ("lr rises over five steps", [(WHILE, f"{SET_LR}min(1, (step + 1) / 5)\n")]),
    ("16 prompts x 4", [knob("batch_size: int", 16)]),
    ("4 prompts x 4", [knob("batch_size: int", 4)]),
    ("embeddings and lower half frozen", [(LOADED, LOADED + FROZEN + LOWER_HALF)]),
    ("two inner epochs, ratio, clip", [(UPDATE, TWO_EPOCHS)]),
    ("half a point for a sum that is off by 1", [KEEP_ROWS, (ADVANTAGES, NEAR)]),
    (
        "prompts of mixed outcome again in the next step",
        [
            KEEP_ROWS,
            (DRAW, REPLAY),
            ("step, training_started = 0,", "mixed, step, training_started = [], 0,"),
            (f"{LINE}advantages = ", f"{MIXED}{LINE}advantages = "),
        ],
    ),
    ("gold solutions imitated as well", [KEEP_ROWS, (f"{LINE}tokens", f"{GOLD}{LINE}tokens")]),
]


def prepare(model):
    """The rows and the checkpoint that all runs start from, once."""
    if not (DATA / "test.jsonl").exists():
        sums = [(a, b) for a in range(30) for b in range(30)]
        rows = [{"question": f"What is {a} + {b}?", "answer": f"\n#### {a + b}"} for a, b in sums]
        random.Random(0).shuffle(rows)
        DATA.mkdir(parents=True, exist_ok=True)
        for name, part in (("train", rows[:800]), ("test", rows[800:])):
            lines = [json.dumps(row) + "\n" for row in part]
            (DATA / f"{name}.jsonl").write_text("".join(lines))
    if not START.exists():  # one GRPO step with lr 0: SFT alone
        new = START.with_name("sums_new")  # becomes START when it is whole
        flags = f"{SMALL} --eval_size 100 --sft_steps 16 --sft_lr 1e-5 --steps 1 --lr 0 --beta 0"
        flags = ["--model", model, "--data", DATA, "--save", new, *flags.split()]
        run_copy(WARM_UP, (ROOT / f"{WARM_UP}.py").read_text(), flags).check_returncode()
        new.rename(START)


def rows():
    """What is stored, a dict per run."""
    lines = RESULTS.read_text().splitlines()[1:] if RESULTS.exists() else []
    return [dict(zip(COLUMNS, line.split("\t"))) for line in lines]


def name_of(text):
    return sha1(f"blob {len(text.encode())}\0{text}".encode()).hexdigest()[:7]


def result(text, seed, description, *flags):
    """The row of the text with a seed: a stored one, or that of a run, without a status yet."""
    for row in rows():
        if (row["seed"], row["description"]) == (str(seed), description):
            return row
    flags = ["--model", START, "--data", DATA, "--seed", seed, *flags]
    done = run_copy(SCRIPT, text, flags)
    summary = done.stdout.split("\n---\n")[-1]
    summary = summary.replace("test_acc:", "val_acc:").replace("se_test:", "se_val:")
    found = dict(re.findall(r"^(\w+): (\S+)", summary, re.MULTILINE))
    row = {"commit": name_of(text), "seed": str(seed), "description": description}
    row |= {name: found.get(name, "0.000") for name in NUMBERS}
    crashed = done.returncode or float(row["train_seconds"]) > 150  # the last step began by 120
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
    best = baseline = changed((ROOT / f"{SCRIPT}.py").read_text(), SCALE)
    floor = [log(result(best, seed, "baseline"), "baseline") for seed in SEEDS]
    if not all(floor):
        sys.exit("the baseline crashed or solves nothing: there is nothing to improve")
    accuracies, error = floor[:2], float(result(best, 0, "baseline")["se_val"])
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
                accuracies = [float(row["val_acc"]) for row in (first, second)]
                error = float(first["se_val"])
        else:
            log(second, "revert")
    return baseline, best


def report():
    """The stored rows as Markdown, with differences to the best of their time."""
    stored = rows()
    if len(stored) < len(SEEDS):
        return "no results yet"
    floor = [float(row["val_acc"]) for row in stored if row["status"] == "baseline"]
    best, error = floor[:2], float(stored[0]["se_val"])
    text = ["| experiment | seed 0 | to the best | seed 1 | to the best | |"]
    text += ["|---|---|---|---|---|---|"]
    first_looks = confirmed = 0
    experiments = [row for row in stored if row["status"] not in ("baseline", "test")]
    tried = dict.fromkeys(row["description"] for row in experiments)
    for description in tried:
        runs = [row for row in stored if row["description"] == description]
        accuracies = [float(row["val_acc"]) for row in runs]
        gaps = [a - b for a, b in zip(accuracies, best)]
        cells = [cell for a, gap in zip(accuracies, gaps) for cell in (f"{a:.3f}", f"{gap:+.3f}")]
        cells += ["-"] * (4 - len(cells))
        text.append(f"| {description} | {' | '.join(cells)} | {runs[-1]['status']} |")
        if gaps[0] > error:
            first_looks += 1
            if runs[-1]["status"] == "keep":
                confirmed += 1
                best, error = accuracies, float(runs[0]["se_val"])
    spread = f"{statistics.mean(floor):.3f}, standard deviation {statistics.stdev(floor):.3f}"
    hours = sum(float(row["train_seconds"]) for row in stored) / 3600
    seeds = ", ".join(f"{a:.3f}" for a in floor)
    text += ["", f"Baseline, {len(floor)} seeds: {seeds}; mean {spread}."]
    text += [f"{len(tried)} experiments, {len(stored)} runs, {hours:.1f} hours of training."]
    text += [f"Above the best by more than a standard error, seed 0: {first_looks}; "
             f"with seed 1 again: {confirmed}."]
    for kind in ("baseline, test rows", "best, test rows"):
        found = [float(row["val_acc"]) for row in stored if row["description"] == kind]
        if found:
            seeds = ", ".join(f"{a:.3f}" for a in found)
            text += [f"{kind}: {seeds}; mean {statistics.mean(found):.3f}."]
    return "\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    smollm2 = ROOT / "out/smollm2"
    parser.add_argument("--model", default=smollm2, help="what SFT starts from: tests/smollm2.py")
    parser.add_argument("--end", action="store_true", help="then first and best on the test rows")
    parser.add_argument("--print", action="store_true", help="show what is stored, run nothing")
    args = parser.parse_args()
    if not args.print:
        prepare(Path(args.model).resolve())
        first_and_best, test = loop(), ["--split", "test", "--eval_size", "0"]
        for name, text in zip(("baseline", "best"), first_and_best if args.end else ()):
            for seed in SEEDS[:2]:
                log(result(text, seed, f"{name}, test rows", *test), "test")
    print(report())
    print(age(MADE_AT, [SCRIPT, WARM_UP]))


if __name__ == "__main__":
    main()
