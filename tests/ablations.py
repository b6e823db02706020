"""What survives when machinery is taken away: variants x seeds, as a Markdown table and a mermaid chart. Not a test.

    uv run python tests/ablations.py
    uv run python tests/ablations.py --print

Every run is a command line of a script, 16 steps of 16 rollouts (SFT and DPO: the 32 optimizer steps that GRPO's two
inner epochs make, 4 prompts each). So that the task leaves room, one line of `toy_data` is another one in all runs: the
sums of 8 to 20, 169 of them, 80 to train on and 89 held out; and evaluation takes 48 problems at a time, for speed. All
start from one checkpoint, SmolLM2 after 8 SFT steps on these sums, made first. What no flag reaches is a copy of the
script with one line changed, given below. Runs have one thread each, so that their seconds compare. Each finished run
is a line of tests/ablations.jsonl: a study that was stopped goes on where it was, and --print runs nothing. Whoever
changes a variant deletes its lines.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests/ablations.jsonl"
START = ROOT / "out/ablations/sft"
TASK = [
    ("for a in range(10) for b in range(10)", "for a in range(8, 21) for b in range(8, 21)"),
    ("range(0, len(problems), config.batch_size)", "range(0, len(problems), 48)"),
    ("problems[i:i + config.batch_size]", "problems[i:i + 48]"),
]
TEXTBOOK, STRIPPED = "textbook GRPO", "all three gone"
ROLLOUTS = "--steps 16 --batch_size 4 "
NO_KL, ONE_EPOCH, NO_Z = "--beta 0 ", "--inner_epochs 1 ", "--scale_by_std false "
ADVANTAGES = "((rewards - rewards.mean(1, keepdim=True)) / scale).masked_fill(flat, 0)"
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t, 97.5%, for a mean of so many differences
# name: script, flags, seeds, (text, its replacement)...
VARIANTS = {
    TEXTBOOK: ("minimal_grpo", ROLLOUTS, 5),
    "without KL": ("minimal_grpo", ROLLOUTS + NO_KL, 5),
    "without the second inner epoch": ("minimal_grpo", ROLLOUTS + ONE_EPOCH, 5),
    "without the z-score": ("minimal_grpo", ROLLOUTS + NO_Z, 5),
    STRIPPED: ("minimal_grpo", ROLLOUTS + NO_KL + ONE_EPOCH + NO_Z, 5),
    "no baseline": ("minimal_grpo", ROLLOUTS, 3, (ADVANTAGES, "rewards")),
    "groups of 2": ("minimal_grpo", "--steps 16 --batch_size 8 --group_size 2", 3),
    "groups of 8": ("minimal_grpo", "--steps 16 --batch_size 2 --group_size 8", 3),
    "groups of 16": ("minimal_grpo", "--steps 16 --batch_size 1 --group_size 16", 3),
    "PPO": ("minimal_ppo", "--steps 16", 3),
    "DPO": ("minimal_dpo", "--steps 32 --batch_size 4", 3),
    "SFT": ("minimal_sft", "--steps 32 --batch_size 4", 3),
}


def changed(text, changes):
    """The text after its changes (old, new), each in one place; old may be (its beginning, what follows it)."""
    for old, new in changes:
        if isinstance(old, tuple):
            begin = text.index(old[0])
            old = text[begin : text.index(old[1], begin)]
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def run_copy(script, text, flags):
    """Run the text of a script as a command line, with one thread; the finished process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{script}.py"
        path.write_text(text)
        command, one_thread = [sys.executable, path, *map(str, flags)], os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=one_thread)
    if "interrupted: no more training" in done.stdout:  # Ctrl-C ends a script well, but this is no run of a study
        raise KeyboardInterrupt
    return done


def run(script, flags, changes=()):
    """Run a script with the task's lines and `changes`; its output. Raises if it fails."""
    done = run_copy(script, changed((ROOT / f"{script}.py").read_text(), [*TASK, *changes]), flags)
    done.check_returncode()
    return done.stdout


def measure(variant, seed):
    """One run as a dict: rewards of its steps, held-out accuracy after, seconds, peak GB."""
    script, flags, _, *changes = VARIANTS[variant]
    flags = [*flags.split(), "--seed", str(seed)]
    output = run(script, ["--model", START, *flags], changes)
    last = dict(re.findall(r"^(\w+): (\S+)", output.split("\n---\n")[1], re.MULTILINE))
    numbers = {name: float(last[name]) for name in ("accuracy_before", "accuracy_after", "seconds", "peak_gb")}
    rewards = [float(value) for value in re.findall(r"^step .*  reward (\S+)", output, re.MULTILINE)]
    return {"variant": variant, "seed": seed, "flags": " ".join(flags), **numbers, "rewards": rewards}


def finished():
    """The stored runs of VARIANTS as they stand: {(variant, seed): result}."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {(r["variant"], r["seed"]): r for r in map(json.loads, lines) if r["variant"] in VARIANTS}


def study(model, seeds):
    """All runs that are not there yet, seed by seed, so that a stopped study has compared everything at least once."""
    if not START.exists():
        new = START.with_name("new")  # becomes START when it is whole
        run("minimal_sft", ["--model", model, "--steps", 8, "--save", new])
        new.rename(START)
    for seed in seeds:
        for variant, (_, _, count, *_) in VARIANTS.items():
            if seed < count and (variant, seed) not in finished():
                result = measure(variant, seed)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(f"{variant}, seed {seed}: {result['accuracy_after']}, {result['seconds']:.0f} s", flush=True)


def late_reward(result):
    return statistics.mean(result["rewards"][-10:])


def accuracy(result):
    return result["accuracy_after"]


def difference(found, base, value):
    """Mean of the differences to the textbook, seed by seed, and half of its 95% interval (Student's t); or None."""
    pairs = [value(found[seed]) - value(base[seed]) for seed in found if seed in base]
    if len(pairs) < 2:
        return None
    return statistics.mean(pairs), T95[len(pairs)] * statistics.stdev(pairs) / len(pairs) ** 0.5


def verdict(what, gap, half):
    if abs(gap) > half:
        return f"{what} {'higher' if gap > 0 else 'lower'} by {abs(gap):.3f}"
    return f"{what} not distinguished ({half:.3f} would have been)"


def report():
    """The table, a conclusion per row, the chart, as Markdown."""
    results, text = finished(), []
    by_name = {name: {s: results[n, s] for n, s in sorted(results) if n == name} for name in VARIANTS}
    base, conclusions = by_name[TEXTBOOK], []
    text += ["| variant | seeds | held-out accuracy | difference | reward, last 10 | difference | 80% at | s | GB |"]
    text += ["|---|---|---|---|---|---|---|---|---|"]
    for name, found in by_name.items():
        runs = list(found.values())
        if not runs:
            continue
        cells, verdicts = [], []
        for what, value in (("accuracy", accuracy), ("reward", late_reward)):
            if what == "reward" and not runs[0]["rewards"]:
                cells += ["-", "-"]
                continue
            cells.append(f"{statistics.mean(map(value, runs)):.3f}")
            gap = difference(found, base, value) if name != TEXTBOOK else None
            cells.append("{:+.3f} +- {:.3f}".format(*gap) if gap else "-")
            verdicts += [verdict(what, *gap)] if gap else []
        firsts = [next((str(i) for i, x in enumerate(r["rewards"], 1) if x >= 0.8), "never") for r in runs]
        cells.append(", ".join(firsts) if runs[0]["rewards"] else "-")
        cells += [f"{statistics.mean(r['seconds'] for r in runs):.0f}", f"{max(r['peak_gb'] for r in runs):.1f}"]
        text.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
        conclusions += [f"- {name}: {', '.join(verdicts)}."] if verdicts else []
    curves = [by_name[name].values() for name in (TEXTBOOK, STRIPPED) if by_name[name]]
    lines = [[statistics.mean(step) for step in zip(*(r["rewards"] for r in runs))] for runs in curves]
    hours = sum(r["seconds"] for r in results.values()) / 3600
    text += ["", *conclusions, "", f"{len(results)} runs, {hours:.1f} hours.", "", "```mermaid"]
    text += ['%%{init: {"themeVariables": {"xyChart": {"plotColorPalette": "#2a6fdb, #d1495b"}}}}%%', "xychart-beta"]
    text += [f'    title "{TEXTBOOK} (blue), {STRIPPED} (red): reward, mean over the seeds"']
    text += ['    x-axis "step" 1 --> 16', '    y-axis "reward" 0 --> 1']
    text += [f"    line [{', '.join(f'{value:.3f}' for value in line)}]" for line in lines]
    return "\n".join([*text, "```"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ROOT / "out/smollm2", help="what SFT starts from: tests/smollm2.py")
    parser.add_argument("--seeds", type=int, nargs="*", default=range(5), help="a part of the study: these seeds")
    parser.add_argument("--print", action="store_true", help="show the stored results, run nothing")
    args = parser.parse_args()
    if not args.print:
        study(Path(args.model).resolve(), args.seeds)
    print(report())
