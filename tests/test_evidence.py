"""The two studies: their arithmetic, their decisions, and that every run of theirs would run."""

from types import ModuleType, SimpleNamespace

import ablations
import autoresearch
import pytest
from conftest import ROOT, SCRIPTS
from transformers.hf_argparser import HfArgumentParser

BASELINE = autoresearch.changed(
    (ROOT / f"{autoresearch.SCRIPT}.py").read_text(), autoresearch.SCALE
)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty file in the place of the stored results of both studies."""
    for study in (ablations, autoresearch):
        monkeypatch.setattr(study, "RESULTS", tmp_path / study.__name__)


def module(name, text):
    """The text of a script as a module."""
    script = ModuleType(name)
    script.__file__ = f"{name}.py"
    exec(compile(text, script.__file__, "exec"), script.__dict__)
    return script


def ablation(variant, seed, accuracy, rewards=()):
    numbers = {"accuracy_before": 0.4, "accuracy_after": accuracy, "seconds": 36}
    return {"variant": variant, "seed": seed, "flags": "", **numbers, "rewards": list(rewards)}


@pytest.mark.parametrize("variant", ablations.VARIANTS)
def test_variants_are_command_lines_of_the_scripts(variant):
    script, flags, seeds, *changes = ablations.VARIANTS[variant]
    config = HfArgumentParser(SCRIPTS[script].Config).parse_args(flags.split())
    assert seeds in (3, 5) and config.lr == 1e-5
    if "grpo" in script or "ppo" in script:
        assert config.steps == 16 and config.batch_size * getattr(config, "group_size", 1) == 16
    else:  # as many optimizer steps as the textbook's
        assert config.steps == 16 * SCRIPTS["minimal_grpo"].Config().inner_epochs
    ablations.changed((ROOT / f"{script}.py").read_text(), [*ablations.TASK, *changes])


def test_a_run_is_measured(tiny, monkeypatch):
    monkeypatch.setattr(ablations, "START", tiny)
    script, _, seeds, *changes = ablations.VARIANTS["no baseline"]
    flags = "--device cpu --steps 2 --batch_size 2 --group_size 2 --max_new_tokens 2"
    monkeypatch.setitem(ablations.VARIANTS, "no baseline", (script, flags, seeds, *changes))
    row = ablations.measure("no baseline", 3)
    assert row.pop("seconds") >= 0
    assert row == {
        "variant": "no baseline",
        "seed": 3,
        "flags": f"{flags} --seed 3",
        "accuracy_before": 0,
        "accuracy_after": 0,
        "rewards": [0, 0],
    }


@pytest.mark.parametrize("script", sorted({script for script, *_ in ablations.VARIANTS.values()}))
def test_task_is_the_sums_of_8_to_20(script):
    text = ablations.changed((ROOT / f"{script}.py").read_text(), ablations.TASK)
    train, held_out = module(script, text).toy_data()
    assert len(train) == 80 and len(held_out) == 89 and not set(train) & set(held_out)
    sums = {(f"What is {a} + {b}?", str(a + b)) for a in range(8, 21) for b in range(8, 21)}
    assert sums == set(train + held_out)


def test_interval_of_paired_differences():
    base = {seed: ablation("", seed, x) for seed, x in enumerate((0.5, 0.6, 0.4, 0.9))}
    found = {seed: ablation("", seed, x) for seed, x in enumerate((0.6, 0.9, 0.6))}
    gap, half = ablations.difference(found, base, ablations.accuracy)
    # Differences 0.1, 0.3, 0.2: mean 0.2, deviation 0.1; t with 2 degrees of freedom is 4.303.
    assert gap == pytest.approx(0.2) and half == pytest.approx(4.303 * 0.1 / 3**0.5)
    verdict = ablations.verdict("accuracy", gap, half)
    assert verdict == "accuracy not distinguished (0.248 would have been)"
    assert ablations.verdict("reward", -0.3, 0.2) == "reward lower by 0.300"


def test_a_stopped_study_goes_on_where_it_was(results, monkeypatch, tmp_path):
    ran = []

    def measure(variant, seed):
        if len(ran) == 15:
            raise KeyboardInterrupt
        ran.append((variant, seed))
        return ablation(variant, seed, 0.5 + 0.01 * len(ran), [0.1] * 6 + [0.3, 0.9] * 5)

    monkeypatch.setattr(ablations, "START", tmp_path)
    monkeypatch.setattr(ablations, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        ablations.study("model", range(5))
    first, ran[:] = list(ran), []
    ablations.study("model", range(2))
    assert len(ran) == 9 and not set(first) & set(ran)
    assert first[:12] == [(variant, 0) for variant in ablations.VARIANTS]
    text = ablations.report()
    # Accuracies 0.51 and 0.63; the last ten rewards; 80% first reached in step 8, by both.
    assert "| textbook GRPO | 2 | 0.570 | - | 0.600 | - | 8, 8 | 36 |" in text
    assert text.count("\n- ") == len(ablations.VARIANTS) - 1


def test_rows_say_whether_the_code_is_still_theirs(monkeypatch):
    names = ["minimal_sft", "minimal_dpo"]
    assert "code may have changed" in ablations.age("no-such-commit", names)
    stored = {f"{name}.py": (ROOT / f"{name}.py").read_text() for name in names}

    def show(command, **_):
        commit, name = command[-1].split(":")
        assert command[:2] == ["git", "show"] and commit == "abc"
        return stored[name]

    monkeypatch.setattr(ablations.subprocess, "check_output", show)
    stored["minimal_sft.py"] = stored["minimal_sft.py"].replace('"""SFT', '"""Another') + "\n# x\n"
    text = "Rows of commit abc: the code of the scripts"
    assert ablations.age("abc", names) == f"{text} is still the same."
    stored["minimal_dpo.py"] = stored["minimal_dpo.py"].replace("steps", "rounds")
    assert ablations.age("abc", names) == f"{text} has changed since then in minimal_dpo.py."


@pytest.mark.parametrize("study", [ablations, autoresearch])
def test_stored_rows_are_of_runs_that_the_study_has(study):
    if study is ablations:
        stored = ablations.RESULTS.read_text().splitlines()
        assert len(stored) == len(ablations.finished()) > 0
        assert all(seed < ablations.VARIANTS[name][2] for name, seed in ablations.finished())
    else:
        found = {row["description"] for row in autoresearch.rows()}
        ideas = {"baseline", *(name for name, _ in autoresearch.EXPERIMENTS)}
        assert ideas <= found <= ideas | {"baseline, test rows", "best, test rows"}


def train_text(text, train, folder, monkeypatch):
    """Train with the text of the script in this process, every other completion right; output."""
    script, calls = module(autoresearch.SCRIPT, text), []
    script.reward = lambda *_: calls.append(0) or float(len(calls) % 2)
    monkeypatch.setitem(SCRIPTS, autoresearch.SCRIPT, script)
    return train(autoresearch.SCRIPT, folder)


@pytest.mark.parametrize("idea", dict(autoresearch.EXPERIMENTS))
def test_every_experiment_changes_the_baseline_and_runs(idea, train, tiny, monkeypatch):
    text = autoresearch.changed(BASELINE, dict(autoresearch.EXPERIMENTS)[idea])
    output = train_text(text, train, tiny, monkeypatch)
    assert text != BASELINE and "step 2  loss" in output and "val_acc: 0.600 (3/5)" in output


def test_experiments_apply_whatever_was_kept(train, tiny, monkeypatch):
    text = BASELINE
    for _, changes in autoresearch.EXPERIMENTS:
        text = autoresearch.changed(text, changes)
    assert "step 2  loss" in train_text(text, train, tiny, monkeypatch)


def test_loop_keeps_what_wins_twice_and_deletions_that_cost_nothing(results, monkeypatch):
    grown, shorter = [("import math\n", "import math  #\n")], [("import math\n", "")]
    longer, dear = [("import time\n", "import time  # longer\n")], [("import re\n", "")]
    experiments = {
        "lucky": grown,
        "nothing": grown,
        "better": longer,
        "free": shorter,
        "dear": dear,
    }
    monkeypatch.setattr(autoresearch, "EXPERIMENTS", list(experiments.items()))
    accuracies = {
        "baseline": [0.40, 0.41, 0.42, 0.38, 0.39],
        "lucky": [0.44, 0.44],
        "nothing": [0.43],
        "better": [0.50, 0.52],
        "free": [0.48, 0.50],
        "dear": [0.45],
    }

    def result(text, seed, description):
        for row in autoresearch.rows():
            if (row["description"], row["seed"]) == (description, str(seed)):
                return row
        row = dict.fromkeys(autoresearch.NUMBERS, "12") | {"se_val": "0.035"}
        row |= {"commit": autoresearch.name_of(text), "val_acc": str(accuracies[description][seed])}
        return row | {"seed": str(seed), "description": description}

    monkeypatch.setattr(autoresearch, "result", result)
    first, best = autoresearch.loop()
    assert first == BASELINE and best == autoresearch.changed(BASELINE, longer + shorter)
    verdicts = [(row["description"], row["status"]) for row in autoresearch.rows()[5:]]
    assert verdicts == [
        ("lucky", "candidate"),
        ("lucky", "revert"),  # 0.44 is 0.03 above 0.41
        ("nothing", "revert"),
        ("better", "candidate"),
        ("better", "keep"),
        ("free", "candidate"),
        ("free", "keep"),
        ("dear", "revert"),  # a deletion, 0.05 below the best before the last deletion
    ]
    before = autoresearch.RESULTS.read_text()
    assert autoresearch.loop() == (first, best) and autoresearch.RESULTS.read_text() == before
    text = autoresearch.report()
    assert "| free | 0.480 | -0.020 | 0.500 | -0.020 | keep |" in text
    assert "5 experiments, 13 runs" in text and "seed 0: 2; with seed 1 again: 1" in text


def test_a_run_of_the_loop_becomes_a_row(results, tiny, rows, monkeypatch):
    monkeypatch.setattr(autoresearch, "START", tiny)
    monkeypatch.setattr(autoresearch, "DATA", rows)
    flags = ["--device", "cpu", "--minutes", 1e-3, "--eval_size", 3, "--split", "test"]
    row = autoresearch.result(BASELINE, 1, "an idea", *flags)
    assert float(row.pop("train_seconds")) < 60 and int(row.pop("steps")) > 0
    assert row == {
        "commit": autoresearch.name_of(BASELINE),
        "seed": "1",
        "description": "an idea",
        "val_acc": "0.000",
        "se_val": "0.000",
        "peak_gb": "0.000",
    }
    autoresearch.log(row | {"steps": "1", "train_seconds": "1"}, "candidate")
    assert autoresearch.rows()[0]["status"] == "candidate"


def test_a_crash_is_no_result_and_an_interrupted_run_is_none(results, monkeypatch):
    def run(output, returncode=0):
        done = SimpleNamespace(stdout=output, returncode=returncode)
        monkeypatch.setattr(ablations.subprocess, "run", lambda *_, **__: done)
        return autoresearch.result("text", 0, "an idea")

    summary = "---\nval_acc: 0.500 (100/200)\nse_val: 0.035\nsteps: 9\ntrain_seconds: {}\n"
    good, late = "\n" + summary.format(125), "\n" + summary.format(200)
    assert run(good)["val_acc"] == "0.500" and "status" not in run(good)
    for row in (run(late), run(good, returncode=1), run("", returncode=1)):
        assert (row["val_acc"], row["status"]) == ("0.000", "crash")
    with pytest.raises(KeyboardInterrupt):
        run("interrupted\n" + summary.format(60))
