"""The two studies: their arithmetic, their decisions, that they go on where they stopped, and the README's tables."""

import json
from types import SimpleNamespace

import ablations
import autoresearch
import pytest
from conftest import ROOT, SCRIPTS
from transformers.hf_argparser import HfArgumentParser

README = (ROOT / "README.md").read_text()


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty file in the place of the stored results of both studies."""
    for study in (ablations, autoresearch):
        monkeypatch.setattr(study, "RESULTS", tmp_path / study.__name__)
    return tmp_path


def ablation(variant, seed, accuracy, rewards=()):
    numbers = {"accuracy_before": 0.4, "accuracy_after": accuracy, "seconds": 36, "peak_gb": 5}
    return {"variant": variant, "seed": seed, "flags": "", **numbers, "rewards": list(rewards)}


@pytest.mark.parametrize("variant", ablations.VARIANTS)
def test_variants_are_command_lines_of_the_scripts(variant, tmp_path):
    script, flags, seeds, *changes = ablations.VARIANTS[variant]
    config = HfArgumentParser(SCRIPTS[script].Config).parse_args(flags.split())
    inner_epochs, group_size = getattr(config, "inner_epochs", 1), getattr(config, "group_size", 1)
    assert seeds in (3, 5)
    if "grpo" in script or "ppo" in script:
        assert config.steps == 16 and config.batch_size * group_size == 16
    else:  # as many optimizer steps as the textbook's
        assert config.steps == 16 * SCRIPTS["minimal_grpo"].Config().inner_epochs and inner_epochs == 1
    source = (ROOT / f"{script}.py").read_text()
    for old, _ in [*ablations.TASK, *changes]:
        assert source.count(old) == 1


def test_task_is_the_sums_of_8_to_20(tiny):
    changes = [("if __name__ ==", 'print(*toy_data(), sep="\\n")\nif __name__ ==')]
    flags = ["--model", tiny, "--steps", 1, "--max_new_tokens", 1]
    output = ablations.run("minimal_sft", flags, changes).splitlines()
    train, held_out = map(eval, output[:2])
    assert len(train) == 80 and len(held_out) == 89 and not set(train) & set(held_out)
    assert {(f"What is {a} + {b}?", str(a + b)) for a in range(8, 21) for b in range(8, 21)} == set(train + held_out)
    assert "accuracy_after: 0.000 (0/89)" in output


def test_interval_of_paired_differences():
    base = {seed: ablation("", seed, accuracy) for seed, accuracy in enumerate((0.5, 0.6, 0.4, 0.9))}
    found = {seed: ablation("", seed, accuracy) for seed, accuracy in enumerate((0.6, 0.9, 0.6))}
    gap, half = ablations.difference(found, base, ablations.accuracy)
    # Differences 0.1, 0.3, 0.2: mean 0.2, standard deviation 0.1; t with 2 degrees of freedom is 4.303.
    assert gap == pytest.approx(0.2) and half == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert ablations.verdict("accuracy", gap, half) == "accuracy not distinguished (0.248 would have been)"
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
    assert "| textbook GRPO | 2 |" in text and "| 0.600 |" in text and "8, 8" in text  # last ten; first at 80%
    assert text.count("\n- ") == len(ablations.VARIANTS) - 1


def test_stored_study_is_whole_and_the_readme_shows_it():
    stored = [json.loads(line) for line in ablations.RESULTS.read_text().splitlines()]
    assert len(stored) == len(ablations.finished()) == sum(seeds for _, _, seeds, *_ in ablations.VARIANTS.values())
    for row in stored:
        script, flags, seeds, *_ = ablations.VARIANTS[row["variant"]]
        assert row["flags"].split() == [*flags.split(), "--seed", str(row["seed"])] and row["seed"] < seeds
        assert len(row["rewards"]) == (16 if "po" in script and "dpo" not in script else 0)
    assert ablations.report() in README


def test_loop_keeps_what_wins_twice_and_deletions_that_cost_nothing(results, monkeypatch):
    base = autoresearch.changed((ROOT / "gsm8k_grpo_autoresearch.py").read_text(), autoresearch.SCALE)
    grown, shorter = [("import math\n", "import math  #\n")], [("import math\n", "")]
    longer = [("import json\n", "import json  # longer\n")]
    monkeypatch.setattr(
        autoresearch,
        "EXPERIMENTS",
        [("lucky", grown), ("nothing", grown), ("better", longer), ("free", shorter), ("dear", [("import re\n", "")])],
    )
    accuracies = {
        "baseline": [0.40, 0.41, 0.42, 0.38, 0.39],
        "lucky": [0.44, 0.44],
        "nothing": [0.43],
        "better": [0.50, 0.52],
        "free": [0.48, 0.50],
        "dear": [0.45],
    }

    def result(text, seed, description):
        stored = [r for r in autoresearch.rows() if (r["description"], r["seed"]) == (description, str(seed))]
        row = {"commit": autoresearch.name_of(text), "seed": str(seed), "description": description, "val_se": "0.035"}
        row |= {"steps": "12", "train_seconds": "120", "peak_gb": "5", "val_acc": str(accuracies[description][seed])}
        return stored[0] if stored else row

    monkeypatch.setattr(autoresearch, "result", result)
    first, best = autoresearch.loop()
    assert first == base and best == autoresearch.changed(base, longer + shorter)
    verdicts = [(row["description"], row["status"]) for row in autoresearch.rows()[5:]]
    assert verdicts == [
        ("lucky", "candidate"),
        ("lucky", "revert"),  # 0.44 is 0.03 above 0.41
        ("nothing", "revert"),
        ("better", "candidate"),
        ("better", "keep"),
        ("free", "candidate"),
        ("free", "keep"),
        ("dear", "revert"),  # a deletion, 0.05 below the best that was measured before the last deletion
    ]
    before = autoresearch.RESULTS.read_text()
    assert autoresearch.loop() == (first, best) and autoresearch.RESULTS.read_text() == before
    text = autoresearch.report()
    assert "| free | 0.480 | -0.020 | 0.500 | -0.020 | keep |" in text
    assert "5 experiments, 13 runs" in text and "seed 0: 2; with seed 1 again: 1" in text


def test_stored_loop_replays_and_the_readme_shows_it(monkeypatch):
    """Every experiment fits on the best text of its time, and every decision is the stored one."""
    decisions = []

    def log(row, status):
        decisions.append((row["description"], row["seed"], status))
        return float(row["val_acc"])

    def result(text, seed, description):
        compile(text, description, "exec")
        return next(r for r in stored if (r["description"], r["seed"]) == (description, str(seed)))

    stored = autoresearch.rows()
    monkeypatch.setattr(autoresearch, "log", log)
    monkeypatch.setattr(autoresearch, "result", result)
    first, best = autoresearch.loop()
    assert first != best and len(autoresearch.EXPERIMENTS) >= 20
    assert decisions == [(r["description"], r["seed"], r["status"]) for r in stored if r["status"] != "test"]
    assert autoresearch.report() in README


def test_a_crash_is_no_result_and_an_interrupted_run_is_none(results, monkeypatch):
    def run(output, returncode=0):
        done = SimpleNamespace(stdout=output, returncode=returncode)
        monkeypatch.setattr(ablations.subprocess, "run", lambda *_, **__: done)
        return autoresearch.result("text", 0, "an idea")

    summary = "---\nval_acc: 0.500 (100/200)\nval_se: 0.035\nsteps: 9\ntrain_seconds: {}\nseconds: 170\npeak_gb: 4.00\n"
    assert run("\n" + summary.format(125))["val_acc"] == "0.500" and "status" not in run("\n" + summary.format(125))
    for row in (run("\n" + summary.format(200)), run("\n" + summary.format(125), returncode=1), run("", returncode=1)):
        assert (row["val_acc"], row["status"]) == ("0.000", "crash")
    with pytest.raises(KeyboardInterrupt):
        run("interrupted: no more training\n" + summary.format(60))
