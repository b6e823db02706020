"""The README keeps its word: commands run, links lead where they say, counts, defaults and examples are right."""

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

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if not kind for line in block.splitlines() if line.startswith("uv run ")]
OF_SCRIPTS = [command for command in COMMANDS if re.match(r"uv run \w+\.py", command)]


def parsed(command):
    """(script, Config) of `uv run script.py --flags`."""
    script, *flags = shlex.split(command)[2:]
    module = SCRIPTS[script.removesuffix(".py")]
    return module, module.Config(**vars(HfArgumentParser(module.Config).parse_args(flags)))


@pytest.mark.parametrize("command", OF_SCRIPTS)
def test_commands_of_scripts_run(command, tiny, rows, tmp_path, capsys):
    script, config = parsed(command)
    small = SMALL[script.__name__] | {"model": str(tiny), "device": "cpu", "save": str(tmp_path / "model")}
    small |= {"minutes": 1e-3} if hasattr(config, "minutes") else {}
    for knob, value in small.items():
        setattr(config, knob, value)
    script.main(config)
    assert "\n---\n" in capsys.readouterr().out


def test_commands_name_what_is_there():
    assert len(OF_SCRIPTS) > 8 and {parsed(command)[0].__name__ for command in OF_SCRIPTS} == set(NAMES)
    for file in re.findall(r"[\w/]+\.py\b", "\n".join(COMMANDS)):
        assert (ROOT / file).is_file(), file
    ci = (ROOT / ".ci/run").read_text().splitlines()
    for command in (line for line in COMMANDS if "pytest" in line and "-m slow" not in line):
        assert command in ci
    for files in re.findall(r"^diff (\S+) (\S+)$", README, re.MULTILINE):
        assert all((ROOT / file).is_file() for file in files)


def test_links_lead_to_the_lines_that_they_name():
    links = re.findall(r"\]\((\w+\.py)#L(\d+) \"([^\"]+)\"\)", README)
    assert len(links) > 20 and len(links) == len(re.findall(r"\]\(\w+\.py#", README))
    for file, line, text in links:
        assert text in (ROOT / file).read_text().splitlines()[int(line) - 1], (file, line, text)


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
    names = ("minimal_grpo", "gsm8k_grpo", "minimal_ppo", "minimal_dpo")
    toy, real, ppo, dpo = (SCRIPTS[name].Config() for name in names)
    for knob, default in {
        "`--lr`": f"{toy.lr:.0e} toy, {real.lr:.0e} GSM8K".replace("e-0", "e-"),
        "`--batch_size`, `--group_size`": f"{toy.batch_size} x {toy.group_size} toy, "
        f"{real.batch_size} x {real.group_size} GSM8K",
        "`--inner_epochs`": f"{toy.inner_epochs}",
        "`--clip`": f"{toy.clip}",
        "`--beta`": f"{toy.beta} GRPO and PPO, {dpo.beta:g} DPO",
        "`--scale_by_std`": f"{toy.scale_by_std}".lower(),
        "`--gamma`, `--lam`": f"{ppo.gamma:g}, {ppo.lam}",
        "`--critic_lr`": f"{ppo.critic_lr:.0e}".replace("e-0", "e-"),
        "`--max_new_tokens`": f"{toy.max_new_tokens} toy, {real.max_new_tokens} GSM8K",
    }.items():
        assert f"| {knob} | {default} |" in README
    for config in (ppo, real, SCRIPTS["gsm8k_sft_grpo"].Config()):
        assert (config.beta, config.clip, config.inner_epochs) == (toy.beta, toy.clip, toy.inner_epochs)


def test_the_trl_script_runs(tiny, tmp_path):
    script = next(block for kind, block in BLOCKS if block.startswith("# trl_grpo.py"))
    for name, value in (
        ('"out/sft"', repr(str(tiny))),
        ('"out/trl"', f"{str(tmp_path)!r}, report_to=[]"),
        ("max_steps=60", "max_steps=2"),
    ):
        assert name in script
        script = script.replace(name, value)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "'reward'" in done.stdout, done.stderr


def test_every_printed_metric_is_explained():
    table = README[README.index("## What the numbers on a line mean") :]
    names = {name for metrics in METRICS.values() for name in metrics}
    for name in names | {"accuracy_before", "accuracy_after", "pair_accuracy", "peak_gb"}:
        assert re.search(rf"^\|[^|]*`{name}`[^|]*\| \w", table, re.MULTILINE), name


def test_every_flag_in_the_text_exists():
    known = {f"--{knob}" for script in SCRIPTS.values() for knob in vars(script.Config())} | {"--help"}
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    for flag in re.findall(r"(?<![\w-])--[a-z_]+", prose):
        assert flag in known | {"--num_processes", "--memory"}, flag
