"""The scripts as people run them: a process of their own, a tiny model, a few steps, on CPU, without the hub."""

import math
import re
import signal
import subprocess
import sys

import pytest
import torch
from conftest import NAMES, RL, ROOT, SCRIPTS, environment, make_model, make_tokenizer, run, steps, summary
from transformers import AutoModelForCausalLM

FRACTION = re.compile(r"^(\d\.\d{3}) \((\d+)/(\d+)\)$")
SMALL = ["--steps", 2, "--batch_size", 3]
METRICS = {
    "minimal_sft": ["loss", "grad_norm"],
    "minimal_dpo": ["loss", "grad_norm", "chosen", "rejected", "margin", "accuracy"],
    "minimal_grpo": ["loss", "reward", "length", "grad_norm", "kl", "clip"],
    "minimal_ppo": ["loss", "reward", "length", "grad_norm", "kl", "clip", "value", "value_loss"],
}


def metrics(line):
    return {name: float(value) for name, value in re.findall(r"  ([a-z_]+) (-?[\d.]+)", line)}


@pytest.mark.parametrize("name", NAMES)
def test_lone_copy_runs_from_another_folder_and_prints_everything(name, tiny, tmp_path):
    done = run(name, "--model", tiny, *SMALL, "--save", tmp_path / "out" / "trained", folder=tmp_path)
    head, _, rest = done.stdout.partition("one row as loss mask and token:")
    for shown in (f"{name}.py", str(tiny), "cpu", "float32", f"{make_model().num_parameters():,}"):
        assert shown in head
    row = rest.splitlines()[0]
    assert row.index("0 '<|im_start|>'") < row.index("  1 '")
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2"]
    for line in lines:
        assert list(metrics(line)) == METRICS[name] and re.search(r"  \d+\.\d s$", line)
        assert all(math.isfinite(value) for value in metrics(line).values())
    result = summary(done.stdout)
    for key in ("accuracy_before", "accuracy_after") + (("pair_accuracy",) if name == "minimal_dpo" else ()):
        share, count, total = FRACTION.match(result[key]).groups()
        assert int(total) == 20 and float(share) == pytest.approx(int(count) / 20, abs=5e-4)
    assert float(result["seconds"]) >= 0 and float(result["peak_gb"]) > 0.01
    assert "evaluate" in done.stderr  # the bar
    assert "Warning" not in done.stderr
    # What was saved is one whole folder that the script takes as --model.
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["trained"]
    again = run(name, "--model", tmp_path / "out" / "trained", "--steps", 1, "--batch_size", 2)
    assert summary(again.stdout)["accuracy_before"] == result["accuracy_after"]


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_metrics_another_seed_others(name, tiny):
    first, again, other = (run(name, "--model", tiny, *SMALL, "--seed", seed).stdout for seed in (1, 1, 2))
    assert steps(first) == steps(again) != steps(other) and len(steps(first)) == 2


def train(name, tiny, capsys, **knobs):
    """Run main in this process; its metrics, one dict per step."""
    script = SCRIPTS[name]
    script.main(script.Config(**{"model": str(tiny), "device": "cpu", "steps": 2, "batch_size": 4, **knobs}))
    return [metrics(line) for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]


@pytest.fixture
def rewarded(monkeypatch):
    """A reward that a random model earns about half of the time: the length of the text is even."""
    for name in RL:
        monkeypatch.setattr(SCRIPTS[name], "reward", lambda completion, answer: float(len(completion) % 2 == 0))


@pytest.mark.parametrize("name", RL)
def test_ratio_moves_and_clip_fires_in_the_second_epoch_and_never_in_the_only_one(name, tiny, capsys, rewarded):
    two = train(name, tiny, capsys, inner_epochs=2, lr=1e-2)
    assert max(step["clip"] for step in two) > 0
    one = train(name, tiny, capsys, inner_epochs=1, lr=1e-2)
    assert all(step["clip"] == 0 for step in one)


@pytest.mark.parametrize("name", RL)
def test_first_step_has_no_kl_and_later_ones_do(name, tiny, capsys, rewarded):
    kls = [step["kl"] for step in train(name, tiny, capsys, inner_epochs=1, lr=1e-2)]
    assert kls[0] == 0 and kls[1] > 0


@pytest.mark.parametrize("name", RL)
def test_beta_0_loads_no_reference(name, tiny, capsys, rewarded, monkeypatch):
    script, loaded = SCRIPTS[name], []
    load = script.load
    monkeypatch.setattr(script, "load", lambda *args: loaded.append(load(*args)) or loaded[-1])
    assert all(step["kl"] == 0 for step in train(name, tiny, capsys, beta=0.0, lr=1e-2))
    assert len(loaded) == (2 if name == "minimal_ppo" else 1)
    loaded.clear()
    train(name, tiny, capsys, beta=0.1)
    assert len(loaded) == (3 if name == "minimal_ppo" else 2)


@pytest.mark.parametrize("name", ["minimal_dpo", *RL])
def test_reference_shares_nothing_with_the_policy_and_never_moves(name, tiny, capsys, rewarded, monkeypatch):
    script, loaded = SCRIPTS[name], []
    load = script.load
    monkeypatch.setattr(script, "load", lambda *args: loaded.append(load(*args)[0]) or (loaded[-1], make_tokenizer()))
    train(name, tiny, capsys, lr=1e-2, beta=0.1)
    policy, reference = loaded[0], loaded[1]
    start = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).state_dict()
    moved, kept = policy.state_dict(), reference.state_dict()
    assert all(torch.equal(kept[key], start[key]) for key in start)
    assert not torch.equal(moved["model.embed_tokens.weight"], start["model.embed_tokens.weight"])
    storages = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    assert not storages & {p.untyped_storage().data_ptr() for p in reference.parameters()}
    assert not any(p.requires_grad for p in reference.parameters())


def test_ppo_critic_starts_at_0_and_learns(tiny, capsys, rewarded, monkeypatch):
    script, loaded = SCRIPTS["minimal_ppo"], []
    load = script.load
    monkeypatch.setattr(script, "load", lambda *args: loaded.append(load(*args)[0]) or (loaded[-1], make_tokenizer()))
    shown = train("minimal_ppo", tiny, capsys, lr=1e-3, critic_lr=1e-2, inner_epochs=1)
    policy, _, critic = loaded
    assert shown[0]["value"] == 0 and shown[1]["value"] != 0
    start = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    assert critic.get_output_embeddings().weight.any()
    assert policy.get_output_embeddings().weight.shape == start.get_output_embeddings().weight.shape
    body = critic.state_dict()["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(body, start.state_dict()["model.layers.0.mlp.up_proj.weight"])


def test_ppo_returns_stay_fixed_over_the_inner_epochs(tiny, capsys, rewarded, monkeypatch):
    script, calls = SCRIPTS["minimal_ppo"], []
    gae = script.gae
    monkeypatch.setattr(script, "gae", lambda *args: calls.append(1) or gae(*args))
    train("minimal_ppo", tiny, capsys, inner_epochs=3, steps=2)
    assert len(calls) == 2


def test_dpo_starts_at_log_2_with_margin_0(tiny, capsys):
    shown = train("minimal_dpo", tiny, capsys, lr=1e-3)
    assert shown[0]["loss"] == pytest.approx(0.6931, abs=1e-4) and shown[0]["margin"] == 0
    assert shown[1]["loss"] != shown[0]["loss"]


@pytest.mark.parametrize("name", NAMES)
def test_zero_learning_rate_changes_nothing(name, tiny, tmp_path):
    run(name, "--model", tiny, *SMALL, "--lr", 0, "--save", tmp_path / "same")
    before, after = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (tiny, tmp_path / "same"))
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["gpt2"])
def test_base_model_without_template_and_pad_token(name, family, tmp_path):
    make_model(family).save_pretrained(tmp_path / "base")
    make_tokenizer(template=None, pad=None).save_pretrained(tmp_path / "base")
    done = run(name, "--model", tmp_path / "base", "--steps", 1, "--batch_size", 2)
    assert len(steps(done.stdout)) == 1


@pytest.mark.parametrize("name", RL)
def test_run_that_earns_nothing_says_so_and_what_to_do(name, tiny):
    done = run(name, "--model", tiny, "--steps", 3, "--batch_size", 2)
    assert "minimal_sft.py" in done.stdout and "--model" in done.stdout.partition("no reward")[2]


BAD = [
    (["--steps", 0], "--steps"),
    (["--steps", "-1"], "--steps"),
    (["--batch_size", 0], "--batch_size"),
    (["--batch_size", 81], "--batch_size"),
    (["--lr", "nan"], "--lr"),
    (["--max_new_tokens", 0], "--max_new_tokens"),
    (["--device", "abacus"], "--device"),
    (["--device", "cuda"], "--device"),
    (["--model", "nobody/no-such-model"], "--model"),
    (["--model", "."], "--model"),
    (["--save", "/dev/null/model"], "--save"),
    (["--no_such_flag", 1], "--no_such_flag"),
]
BAD_ONLY = {
    "minimal_dpo": [(["--beta", 0], "--beta")],
    "minimal_grpo": [(["--group_size", 1], "--group_size"), (["--inner_epochs", 0], "--inner_epochs"),
                     (["--beta", "-1"], "--beta"), (["--clip", "-1"], "--clip")],
    "minimal_ppo": [(["--inner_epochs", 0], "--inner_epochs"), (["--beta", "-1"], "--beta")],
}  # fmt: skip


# Bad input is refused by the same `check` and `load` everywhere: one script runs the common list, each its own.
@pytest.mark.parametrize(
    "name, flags, named",
    [("minimal_sft", *case) for case in BAD] + [(name, *case) for name, cases in BAD_ONLY.items() for case in cases],
    ids=str,
)
def test_bad_input_is_one_line_that_names_the_flag(name, flags, named, tiny, tmp_path):
    model = [] if "--model" in flags else ["--model", tiny]
    done = run(name, *model, *flags, folder=tmp_path, check=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert named in last and "error" in last
    assert not steps(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_model_that_cannot_be_had_without_a_network_names_the_flag(name, tmp_path):
    done = run(name, check=False, HF_HOME=str(tmp_path))  # the default model, an empty cache
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "--model" in done.stderr.strip().splitlines()[-1] and "local folder" in done.stderr


def test_save_never_replaces_what_is_not_a_model(tiny, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    done = run("minimal_sft", "--model", tiny, *SMALL, "--save", tmp_path / "thesis", check=False)
    assert done.returncode == 1 and "--save" in done.stderr and (tmp_path / "thesis" / "chapter1.tex").exists()


def test_save_over_the_model_that_was_loaded(tiny, tmp_path):
    make_model().save_pretrained(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    run("minimal_sft", "--model", tmp_path / "m", *SMALL, "--save", f"{tmp_path / 'm'}/")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    changed = AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict()
    assert not torch.equal(changed["model.embed_tokens.weight"], make_model().state_dict()["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_stops_training_then_evaluates_and_saves(name, tiny, tmp_path):
    command = [sys.executable, "-u", str(ROOT / f"{name}.py"), "--model", str(tiny), "--steps", "100000", "--device", "cpu",
               "--save", str(tmp_path / "kept")]  # fmt: skip
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "interrupted" in out and FRACTION.match(summary(out)["accuracy_after"])
    assert (tmp_path / "kept" / "config.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_gradient_that_is_not_finite_ends_training_before_the_step_and_keeps_the_weights(name, tiny, tmp_path, monkeypatch):
    script = SCRIPTS[name]
    logprobs, calls = script.token_logprobs, []

    def broken(*args):
        calls.append(1)
        return logprobs(*args) * (float("inf") if len(calls) > 1 else 1)

    monkeypatch.setattr(script, "token_logprobs", broken)
    config = script.Config(model=str(tiny), device="cpu", steps=5, batch_size=2, save=str(tmp_path / "kept"))
    with pytest.raises(RuntimeError):
        script.main(config)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    assert all(p.isfinite().all() for p in saved.parameters())


def test_checkpoint_with_nan_weights_is_one_line(tiny, tmp_path):
    model = make_model()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    for name in NAMES:
        done = run(name, "--model", tmp_path, *SMALL, check=False)
        assert done.returncode == 1 and "not finite" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_each_flag_with_its_default(name):
    done = run(name, "--help")
    for flag, field in SCRIPTS[name].Config.__dataclass_fields__.items():
        assert f"--{flag}" in done.stdout and field.metadata["help"][:20] in " ".join(done.stdout.split())
    assert "(default: 30)" in done.stdout


def test_no_cuda_call_and_no_autocast_on_cpu():
    for name in NAMES:
        source = (ROOT / f"{name}.py").read_text()
        assert "autocast(" not in source and ".cuda(" not in source and "bfloat16" not in source
