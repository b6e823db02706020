"""The README keeps its word: commands run, links hit their lines, counts and examples are right."""

import doctest
import re
import shlex
import subprocess
import sys

import pytest
from conftest import NAMES, ROOT, SCRIPTS, SMALL, environment
from test_runs import METRICS
from test_structure import SOURCES, code_lines
from transformers.hf_argparser import HfArgumentParser

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
LINES = [line for kind, block in BLOCKS if not kind for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("uv run ")]
OF_SCRIPTS = [command for command in COMMANDS if re.match(r"uv run \w+\.py", command)]


def parsed(command):
    """(script, Config) of `uv run script.py --flags`."""
    script, *flags = shlex.split(command)[2:]
    module = SCRIPTS[script.removesuffix(".py")]
    return module, module.Config(**vars(HfArgumentParser(module.Config).parse_args(flags)))


@pytest.mark.parametrize("command", OF_SCRIPTS)
def test_commands_of_scripts_run(command, tiny, rows, tmp_path, capsys):
    script, config = parsed(command)
    small = {"model": str(tiny), "device": "cpu", "save": str(tmp_path / "model")}
    small |= SMALL[script.__name__]
    small |= {"minutes": 2e-3} if hasattr(config, "minutes") else {}
    for knob, value in small.items():
        setattr(config, knob, value)
    script.main(config)
    assert "\n---\n" in capsys.readouterr().out


def test_commands_name_what_is_there():
    assert len(OF_SCRIPTS) > 8
    assert {parsed(command)[0].__name__ for command in OF_SCRIPTS} == set(NAMES)
    for file in re.findall(r"[\w/]+\.py\b", "\n".join(COMMANDS)):
        assert (ROOT / file).is_file(), file
    ci = (ROOT / ".ci/run").read_text().splitlines()
    tests = [command for command in COMMANDS if "pytest" in command and "-m slow" not in command]
    assert tests == [line for line in ci if line.startswith("uv run ")]
    diffs = re.findall(r"^diff (\S+) (\S+)$", README, re.MULTILINE)
    assert diffs and all((ROOT / file).is_file() for files in diffs for file in files)


def test_saved_models_have_a_name_of_their_own():
    folders = [parsed(command)[1].save for command in OF_SCRIPTS]
    saved = [folder for folder in folders if folder]
    assert saved and len(saved) == len(set(saved))  # --save takes a new folder


def test_links_lead_to_the_lines_that_they_name():
    links = re.findall(r"\]\((\w+\.py)#L(\d+) \"([^\"]+)\"\)", README)
    assert len(links) > 20 and len(links) == len(re.findall(r"\]\(\w+\.py\b", README))
    for file, line, text in links:
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        found = [i for i, source in enumerate(lines, 1) if text in source]
        assert int(line) in found, (file, line, text, found)


@pytest.mark.parametrize("name", NAMES)
def test_line_counts_are_those_of_the_code(name):
    row = re.search(rf"^\| `{name}\.py` \| .* \| (\d+) \|$", README, re.MULTILINE)
    assert int(row[1]) == len(code_lines(SOURCES[name]))


def test_worked_examples_come_out():
    parser, count = doctest.DocTestParser(), 0
    scope = {}
    for kind, block in BLOCKS:
        if kind == "python" and ">>>" in block:
            runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
            test = parser.get_doctest(block, scope, "README.md", "README.md", 0)
            scope = test.globs
            count += len(test.examples)
            runner.run(test, clear_globs=False)
            assert not runner.failures
    assert count > 15


def test_defaults_are_those_of_the_scripts():
    names = ("minimal_grpo", "gsm8k_grpo", "minimal_ppo", "minimal_dpo", "minimal_sft")
    toy, real, ppo, dpo, sft = (SCRIPTS[name].Config() for name in names)

    def power(value):
        return f"{value:.0e}".replace("e-0", "e-")

    lr = f"{power(sft.lr)} SFT, {power(dpo.lr)} DPO, {power(toy.lr)} GRPO and PPO"
    sizes = f"{toy.batch_size} x {toy.group_size} toy, {real.batch_size} x {real.group_size} GSM8K"
    for knob, default in {
        "`--lr`": f"{lr}, {power(real.lr)} GSM8K",
        "`--batch_size`, `--group_size`": sizes,
        "`--inner_epochs`": f"{toy.inner_epochs}",
        "`--clip`": f"{toy.clip}",
        "`--beta`": f"{toy.beta} GRPO and PPO, {dpo.beta:g} DPO",
        "`--scale_by_std`": f"{toy.scale_by_std}".lower(),
        "`--gamma`, `--lam`": f"{ppo.gamma:g}, {ppo.lam}",
        "`--critic_lr`": power(ppo.critic_lr),
        "`--max_new_tokens`": f"{toy.max_new_tokens} toy, {real.max_new_tokens} GSM8K",
    }.items():
        assert f"| {knob} | {default} |" in README
    assert toy.lr == ppo.lr
    shared = {(c.beta, c.clip, c.inner_epochs) for c in (toy, ppo, real)}
    shared |= {(c.beta, c.clip, c.inner_epochs) for c in [SCRIPTS["gsm8k_sft_grpo"].Config()]}
    assert len(shared) == 1
    assert f"PPO: {ppo.batch_size}, one completion each" in README
    assert {SCRIPTS[name].Config().steps for name in NAMES if "minimal" in name} == {30}
    gsm8k = (
        f"{real.batch_size} problems x {real.group_size} completions of up to "
        f"{real.max_new_tokens} tokens, learning rate {power(real.lr)}, {real.steps} steps"
    )
    assert gsm8k in " ".join(README.split())


def test_requirements_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"Needed are (.*?), or later ones", " ".join(README.split()))[1]
    found = dict(re.findall(r"(\w+) ([\d.]+\d)", needed))
    lowest = dict(re.findall(r"^    \"(\w+)>=([\d.]+)\"", project, re.MULTILINE))
    assert found.pop("Python") == re.search(r"requires-python = \">=([\d.]+)\"", project)[1]
    assert found == {name: lowest[name] for name in ("torch", "transformers", "datasets", "tqdm")}


def test_the_example_of_an_own_task_trains(tiny, train, monkeypatch):
    block, own = next(block for _, block in BLOCKS if block.startswith("# your task")), {}
    exec(block, own)
    for name in ("INSTRUCTION", "toy_data", "reward"):
        monkeypatch.setattr(SCRIPTS["minimal_grpo"], name, own[name])
    output = train("minimal_grpo", tiny, batch_size=2)
    assert own["INSTRUCTION"] in output and "accuracy_after: 0.000 (0/1)" in output
    assert own["reward"](" Paris.", "Paris") == 1 and own["reward"]("Rome", "Paris") == 0


def test_the_trl_script_runs(tiny, tmp_path):
    script = next(block for kind, block in BLOCKS if block.startswith("# trl_grpo.py"))
    for name, value in (
        ('"out/sft"', repr(str(tiny))),
        ('"out/trl"', f"{str(tmp_path)!r}, report_to=[]"),
        ("max_steps=60", "max_steps=2"),
    ):
        assert name in script
        script = script.replace(name, value)
    command = [sys.executable, "-c", script]
    captured = {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, env=environment(), **captured)
    assert done.returncode == 0 and "'reward'" in done.stdout, done.stderr


def test_every_printed_name_is_explained_and_printed():
    start = README.index("## What the numbers on a line mean")
    table = README[start : README.index("\n## ", start + 1)]
    explained = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    printed = {name for metrics in METRICS.values() for name in metrics}
    ends = {"accuracy_before", "accuracy_after", "accuracy_sft", "pair_accuracy", "val_acc"}
    ends |= {"se_val", "truncated_before", "truncated_after", "seconds", "peak_gb"}
    assert explained == printed | ends


def test_every_flag_in_the_text_exists():
    known = {f"--{knob}" for script in SCRIPTS.values() for knob in vars(script.Config())}
    for flag in re.findall(r"(?<![\w-])--[a-z_]+", PROSE):
        assert flag in known | {"--help", "--num_processes"}, flag
