"""What survives when GRPO's machinery is taken away: variants x seeds, as a table. Not a test.

    uv run python tests/ablations.py
    uv run python tests/ablations.py --print

Every run is a command line of a script: 16 steps of 16 rollouts, for SFT and DPO the 32 optimizer
steps that GRPO's two inner epochs make, 4 prompts each. One line of `toy_data` is another one in
all runs, so that the task leaves room: the sums of 8 to 20, 169 of them, 80 to train on and 89 held
out. All start from one checkpoint, SmolLM2 after 8 SFT steps on these sums, made first. What no
flag reaches is a copy of the script with one line changed. Runs have one thread each, so that their
seconds compare. A finished run is a line of tests/ablations.jsonl: a study that was stopped goes on
where it was. Whoever changes a variant deletes its lines; whoever runs the study anew deletes the
file, and sets MADE_AT to the commit of the scripts.
"""

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, MADE_AT = ROOT / "tests/ablations.jsonl", "6dd2aef"
START = ROOT / "out/ablations/sft"
TASK = [("for a in range(10) for b in range(10)", "for a in range(8, 21) for b in range(8, 21)")]
TEXTBOOK, STRIPPED = "textbook GRPO", "all three gone"
LR = "--lr 1e-5 "  # as SmolLM2 needs it
ROLLOUTS = LR + "--steps 16 --batch_size 4 "
NO_KL, ONE_EPOCH, NO_Z = "--beta 0 ", "--inner_epochs 1 ", "--scale_by_std false "
ADVANTAGES = "group_advantages(rewards, config.scale_by_std)"
# Student's t, 97.5%, for a mean of so many differences
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
# name: script, flags, seeds, (text, its replacement)...
VARIANTS = {
    TEXTBOOK: ("minimal_grpo", ROLLOUTS, 5),
    "without KL": ("minimal_grpo", ROLLOUTS + NO_KL, 5),
    "without the second inner epoch": ("minimal_grpo", ROLLOUTS + ONE_EPOCH, 5),
    "without the z-score": ("minimal_grpo", ROLLOUTS + NO_Z, 5),
    STRIPPED: ("minimal_grpo", ROLLOUTS + NO_KL + ONE_EPOCH + NO_Z, 5),
    "no baseline": ("minimal_grpo", ROLLOUTS, 3, (ADVANTAGES, "rewards")),
    "groups of 2": ("minimal_grpo", LR + "--steps 16 --batch_size 8 --group_size 2", 3),
    "groups of 8": ("minimal_grpo", LR + "--steps 16 --batch_size 2 --group_size 8", 3),
    "groups of 16": ("minimal_grpo", LR + "--steps 16 --batch_size 1 --group_size 16", 3),
    "PPO": ("minimal_ppo", LR + "--steps 16 --batch_size 16", 3),
    "DPO": ("minimal_dpo", LR + "--steps 32 --batch_size 4", 3),
    "SFT": ("minimal_sft", LR + "--steps 32 --batch_size 4", 3),
}


def changed(text, changes):
    """The text after its changes (old, new), each in one place; old may be (its start, its end):
    all from the first start up to the end that follows, which stays."""
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
        command, one_thread = [sys.executable, path, *map(str, flags)], {"OMP_NUM_THREADS": "1"}
        env = os.environ | one_thread
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
    if "interrupted" in done.stdout.splitlines():  # Ctrl-C ends a script well; this run is none
        raise KeyboardInterrupt
    return done


def run(script, flags, changes=()):
    """Run a script with the task's line and `changes`; its output. Raises if it fails."""
    text = changed((ROOT / f"{script}.py").read_text(), [*TASK, *changes])
    done = run_copy(script, text, flags)
    done.check_returncode()
    return done.stdout


def measure(variant, seed):
    """One run as a dict: rewards of its steps, held-out accuracy before and after, seconds."""
    script, flags, _, *changes = VARIANTS[variant]
    flags = [*flags.split(), "--seed", str(seed)]
    output = run(script, ["--model", START, *flags], changes)
    last = dict(re.findall(r"^(\w+): (\S+)", output.split("\n---\n")[1], re.MULTILINE))
    numbers = {key: float(last[key]) for key in ("accuracy_before", "accuracy_after", "seconds")}
    rewards = [float(x) for x in re.findall(r"^step .*  reward (\S+)", output, re.MULTILINE)]
    run_as = {"variant": variant, "seed": seed, "flags": " ".join(flags)}
    return run_as | numbers | {"rewards": rewards}


def finished():
    """The stored runs of VARIANTS as they stand: {(variant, seed): result}."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    runs = map(json.loads, lines)
    return {(r["variant"], r["seed"]): r for r in runs if r["variant"] in VARIANTS}


def study(model, seeds):
    """All runs that are not there yet, seed by seed: a stopped study has compared everything."""
    if not START.exists():
        new = START.with_name("new")  # becomes START when it is whole
        run("minimal_sft", ["--model", model, *LR.split(), "--steps", 8, "--save", new])
        new.rename(START)
    for seed in seeds:
        for variant, (_, _, count, *_) in VARIANTS.items():
            if seed < count and (variant, seed) not in finished():
                result = measure(variant, seed)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                numbers = f"{result['accuracy_after']}, {result['seconds']:.0f} s"
                print(f"{variant}, seed {seed}: {numbers}", flush=True)


def late_reward(result):
    return statistics.mean(result["rewards"][-10:])


def accuracy(result):
    return result["accuracy_after"]


def difference(found, base, value):
    """Mean of the differences to the textbook, seed by seed, and half of its 95% interval."""
    pairs = [value(found[seed]) - value(base[seed]) for seed in found if seed in base]
    if len(pairs) < 2:
        return None
    half = T95[len(pairs)] * statistics.stdev(pairs) / len(pairs) ** 0.5
    return statistics.mean(pairs), half


def verdict(what, gap, half):
    if abs(gap) > half:
        return f"{what} {'higher' if gap > 0 else 'lower'} by {abs(gap):.3f}"
    return f"{what} not distinguished ({half:.3f} would have been)"


def report():
    """The table and a conclusion per row, as Markdown."""
    results, conclusions = finished(), []
    columns = "variant | seeds | accuracy | difference | reward, last 10 | difference | 80% at | s"
    text = [f"| {columns} |", "|---|---|---|---|---|---|---|---|"]
    base = {seed: run for (name, seed), run in results.items() if name == TEXTBOOK}
    for variant in VARIANTS:
        found = {seed: run for (name, seed), run in sorted(results.items()) if name == variant}
        runs = list(found.values())
        if not runs:
            continue
        cells, verdicts = [], []
        for what, value in (("accuracy", accuracy), ("reward", late_reward)):
            if what == "reward" and not runs[0]["rewards"]:
                cells += ["-", "-"]
                continue
            cells.append(f"{statistics.mean(map(value, runs)):.3f}")
            gap = difference(found, base, value) if variant != TEXTBOOK else None
            cells.append("{:+.3f} +- {:.3f}".format(*gap) if gap else "-")
            verdicts += [verdict(what, *gap)] if gap else []
        rewards = [r["rewards"] for r in runs]
        firsts = [next((str(i) for i, x in enumerate(r, 1) if x >= 0.8), "never") for r in rewards]
        cells.append(", ".join(firsts) if rewards[0] else "-")
        cells.append(f"{statistics.mean(r['seconds'] for r in runs):.0f}")
        text.append(f"| {variant} | {len(runs)} | {' | '.join(cells)} |")
        conclusions += [f"- {variant}: {', '.join(verdicts)}."] if verdicts else []
    hours = sum(r["seconds"] for r in results.values()) / 3600
    return "\n".join([*text, "", *conclusions, "", f"{len(results)} runs, {hours:.1f} hours."])


def code(text):
    """What Python runs of a text: no comments, docstrings or blank lines."""
    tree, documented = ast.parse(text), ast.Module | ast.FunctionDef | ast.ClassDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.dump(tree)


def age(commit, scripts):
    """One line: whether the scripts' code is still that of the commit that made the rows."""
    new = []
    for name in (f"{script}.py" for script in dict.fromkeys(scripts)):
        try:
            git = ["git", "show", f"{commit}:{name}"]
            then = subprocess.check_output(git, cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
        except (OSError, subprocess.CalledProcessError):
            return f"Rows of commit {commit}: git does not know it here, the code may have changed."
        new += [name] if code(then) != code((ROOT / name).read_text()) else []
    changes = f"has changed since then in {', '.join(new)}" if new else "is still the same"
    return f"Rows of commit {commit}: the code of the scripts {changes}."


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    smollm2 = ROOT / "out/smollm2"
    parser.add_argument("--model", default=smollm2, help="what SFT starts from: tests/smollm2.py")
    parser.add_argument("--seeds", type=int, nargs="*", default=range(5), help="only these seeds")
    parser.add_argument("--print", action="store_true", help="show what is stored, run nothing")
    args = parser.parse_args()
    if not args.print:
        study(Path(args.model).resolve(), args.seeds)
    print(report())
    print(age(MADE_AT, (script for script, *_ in VARIANTS.values())))
