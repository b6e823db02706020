"""The scripts as people run them: a process of their own, a tiny model, a few steps, on CPU, without the hub."""

import itertools
import math
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import (
    CLIPPED,
    GSM8K,
    NAMES,
    RL,
    ROOT,
    SCRIPTS,
    SMALL,
    TOY,
    environment,
    flags,
    make_model,
    make_tokenizer,
    run,
    steps,
    summary,
)
from transformers import AutoModelForCausalLM

FRACTION = re.compile(r"^(\d\.\d{3}) \((\d+)/(\d+)\)$")
GRPO = ["loss", "reward", "flat", "length", "grad_norm", "kl", "clip"]
METRICS = {  # of a run's last step
    "minimal_sft": ["loss", "grad_norm"],
    "minimal_dpo": ["loss", "grad_norm", "chosen", "rejected", "margin", "accuracy"],
    "minimal_grpo": ["loss", "reward", "length", "grad_norm", "kl", "clip"],
    "minimal_ppo": ["loss", "reward", "length", "grad_norm", "kl", "clip", "value", "value_loss"],
    "gsm8k_grpo": GRPO,
    "gsm8k_sft_grpo": GRPO,
    "gsm8k_grpo_autoresearch": GRPO[:5],
}
STEPS = {name: ["step 1/2", "step 2/2"] for name in NAMES}
STEPS["gsm8k_sft_grpo"] = ["step 1/1", "step 1/2", "step 2/2"]
BEFORE = dict.fromkeys(NAMES, "accuracy_before") | {"gsm8k_grpo_autoresearch": None}
AFTER = dict.fromkeys(NAMES, "accuracy_after") | {"gsm8k_grpo_autoresearch": "val_acc"}


def metrics(line):
    return {name: float(value) for name, value in re.findall(r"  ([a-z_]+) (-?[\d.]+)", line)}


@pytest.mark.parametrize("name", NAMES)
def test_lone_copy_runs_from_another_folder_and_prints_everything(name, tiny, tmp_path, capsys):
    budget = {"minutes": 1e-3} if name == "gsm8k_grpo_autoresearch" else {}
    save = tmp_path / "out" / "trained"
    done = run(name, "--model", tiny, *flags(name, batch_size=3, **budget), "--save", save, folder=tmp_path)
    head, _, rest = done.stdout.partition("one row as loss mask and token:")
    for shown in (f"{name}.py", str(tiny), "cpu", "float32", f"{make_model().num_parameters():,}"):
        assert shown in head
    row = rest.splitlines()[0]
    assert row.index("0 '<|im_start|>'") < row.index("  1 '") and "0 '<|pad|>'  0 '<|im_start|>'" not in row
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines][:1] == ["step 1"] if budget else STEPS[name]
    assert list(metrics(lines[-1])) == METRICS[name]
    for line in lines:
        assert re.search(r"  \d+\.\d s$", line) and all(math.isfinite(value) for value in metrics(line).values())
    result, total = summary(done.stdout), 5 if name in GSM8K else 20
    counts = [key for key in result if "accuracy" in key or key == "val_acc"]
    assert counts == {
        "minimal_dpo": ["accuracy_before", "accuracy_after", "pair_accuracy"],
        "gsm8k_sft_grpo": ["accuracy_before", "accuracy_sft", "accuracy_after"],
        "gsm8k_grpo_autoresearch": ["val_acc"],
    }.get(name, ["accuracy_before", "accuracy_after"])
    for key in counts:
        share, count, of = FRACTION.match(result[key]).groups()
        assert int(of) == total and float(share) == pytest.approx(int(count) / total, abs=5e-4)
    assert float(result["seconds"]) >= 0 and float(result["peak_gb"]) > 0.01
    assert "evaluate" in done.stderr  # the bar
    assert "Warning" not in done.stderr
    # What was saved is one whole folder that the script takes as --model.
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["trained"]
    again = train(name, tmp_path / "out" / "trained", capsys, batch_size=3)
    assert BEFORE[name] is None or summary(again)[BEFORE[name]] == result[AFTER[name]]


TWO_STEPS = SimpleNamespace(count=lambda start: iter((start, start + 1)))


def train(name, folder, capsys, itertools=TWO_STEPS, **knobs):
    """Run main in this process on the model in the folder, autoresearch for 2 steps; its whole output."""
    script = SCRIPTS[name]
    config = script.Config(**{"model": str(folder), "device": "cpu", **SMALL[name], **knobs})
    with mock.patch.object(script, "itertools", itertools, create=True):
        script.main(config)
    return capsys.readouterr().out


def trained(name, *args, **knobs):
    """Run main in this process; its metrics, one dict per step, without those of an SFT warm-up."""
    shown = [metrics(line) for line in train(name, *args, **knobs).splitlines() if line.startswith("step ")]
    return [step for step in shown if "reward" in step or name not in RL]


@pytest.fixture
def rewarded(monkeypatch):
    """A reward that a random model earns about half of the time: the length of the text is even."""
    for name in RL:
        monkeypatch.setattr(SCRIPTS[name], "reward", lambda completion, answer: float(len(completion) % 2 == 0))


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_metrics_another_seed_others(name, tiny, capsys, rewarded):
    first, again, other = (steps(train(name, tiny, capsys, seed=seed, lr=1e-3)) for seed in (1, 1, 2))
    assert first == again != other and len(first) == len(STEPS[name])


@pytest.mark.parametrize("name", RL)
def test_reward_sees_completions_and_nothing_of_the_prompt(name, tiny, capsys, monkeypatch):
    script, seen, texts, sample = SCRIPTS[name], [], [], SCRIPTS[name].sample
    tokenizer = make_tokenizer()

    def keep(*args, **kwargs):
        ids, mask = sample(*args, **kwargs)
        texts.extend(tokenizer.decode(row[real.bool()], skip_special_tokens=True) for row, real in zip(ids, mask))
        return ids, mask

    monkeypatch.setattr(script, "sample", keep)
    monkeypatch.setattr(script, "reward", lambda completion, answer: seen.append(completion) or 0.0)
    train(name, tiny, capsys)
    assert seen == texts and len(seen) > 8


@pytest.mark.parametrize("name", RL)
def test_evaluation_leaves_the_random_state_as_it_found_it(name, tiny, capsys, rewarded, monkeypatch):
    plain = trained(name, tiny, capsys, lr=1e-3)
    monkeypatch.setattr(SCRIPTS[name], "evaluate", lambda *args: {"accuracy": "-"} if name in GSM8K else "-")
    assert trained(name, tiny, capsys, lr=1e-3) == plain


@pytest.mark.parametrize("name", CLIPPED)
def test_ratio_moves_and_clip_fires_in_the_second_epoch_and_never_in_the_only_one(name, tiny, capsys, rewarded):
    two = trained(name, tiny, capsys, inner_epochs=2, lr=1e-2)
    assert max(step["clip"] for step in two) > 0
    one = trained(name, tiny, capsys, inner_epochs=1, lr=1e-2)
    assert all(step["clip"] == 0 for step in one)


@pytest.mark.parametrize("name", CLIPPED)
def test_first_step_has_no_kl_and_later_ones_do(name, tiny, capsys, rewarded):
    kls = [step["kl"] for step in trained(name, tiny, capsys, inner_epochs=1, lr=1e-2)]
    assert kls[0] == 0 and kls[1] > 0


@pytest.mark.parametrize("name", ["minimal_grpo", "minimal_ppo", "gsm8k_grpo"])
def test_beta_0_loads_no_reference(name, tiny, capsys, rewarded, monkeypatch):
    script, loaded = SCRIPTS[name], []
    load = script.load
    monkeypatch.setattr(script, "load", lambda *args: loaded.append(load(*args)) or loaded[-1])
    assert all(step["kl"] == 0 for step in trained(name, tiny, capsys, beta=0.0, lr=1e-2))
    assert len(loaded) == (2 if name == "minimal_ppo" else 1)
    loaded.clear()
    train(name, tiny, capsys, beta=0.1)
    assert len(loaded) == (3 if name == "minimal_ppo" else 2)


@pytest.mark.parametrize("name", ["minimal_dpo", "minimal_grpo", "minimal_ppo", "gsm8k_grpo"])
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
    shown = trained("minimal_ppo", tiny, capsys, lr=1e-3, critic_lr=1e-2, inner_epochs=1)
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
    shown = trained("minimal_dpo", tiny, capsys, lr=1e-3)
    assert shown[0]["loss"] == pytest.approx(0.6931, abs=1e-4) and shown[0]["margin"] == 0
    assert shown[1]["loss"] != shown[0]["loss"]


@pytest.mark.parametrize("name", NAMES)
def test_zero_learning_rate_changes_nothing(name, tiny, tmp_path, capsys, rewarded):
    sft = {"sft_lr": 0.0} if name == "gsm8k_sft_grpo" else {}
    train(name, tiny, capsys, lr=0.0, **sft, save=str(tmp_path / "same"))
    before, after = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (tiny, tmp_path / "same"))
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", NAMES)
def test_gpt2_base_model_without_template_and_pad_token(name, tmp_path, capsys):
    make_model("gpt2").save_pretrained(tmp_path / "base")
    make_tokenizer(template=None, pad=None).save_pretrained(tmp_path / "base")
    assert len(trained(name, tmp_path / "base", capsys)) == 2


@pytest.mark.parametrize("name", RL)
def test_run_that_earns_nothing_says_so_and_what_to_do(name, tiny, capsys):
    output = train(name, tiny, capsys)
    assert "sft" in output.partition("no reward")[2] and "--model" in output.partition("no reward")[2]


@pytest.mark.parametrize("name", RL)
def test_run_that_earns_something_says_nothing(name, tiny, capsys, rewarded):
    assert "no reward" not in train(name, tiny, capsys)


@pytest.mark.parametrize("name", TOY)
def test_first_gradient_is_that_of_the_plain_formula(name, tiny, capsys, rewarded, updates, monkeypatch):
    """Each row alone and whole through the model, without cache or padding, and the loss of the docstring by hand."""
    script, batches, logprobs = SCRIPTS[name], [], SCRIPTS[name].token_logprobs
    monkeypatch.setattr(script, "token_logprobs", lambda *args: batches.append(args[1:]) or logprobs(*args))
    monkeypatch.setattr(script, "stop_ids", lambda *args: list(range(0, 256, 4)))  # completions of different lengths
    train(name, tiny, capsys, steps=1, batch_size=8, **({"beta": 0.7} if name == "minimal_dpo" else {}))
    prompt_ids, prompt_mask, ids, mask = batches[0]
    model, tokenizer = script.load(str(tiny), "cpu")
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards, G = [float(len(text) % 2 == 0) for text in texts], len(ids) // len(prompt_ids)
    for i, (row, real) in enumerate(zip(ids, mask.bool())):
        prompt, completion = prompt_ids[i // G][prompt_mask[i // G].bool()], row[real]
        n, tokens = len(completion), mask.sum()
        if name == "minimal_sft":
            weights = torch.ones(n) / tokens
        elif name == "minimal_dpo":  # -log sigmoid(0.7 * margin) at margin 0: slope -0.7 / 2, mean over the pairs
            weights = torch.full((n,), 0.35 if i % 2 == 0 else -0.35) / len(prompt_ids)
        elif name == "minimal_grpo":
            group = torch.tensor(rewards[i // G * G : (i // G + 1) * G])
            weights = (rewards[i] - group.mean()) / (group.std(correction=0) + 1e-6) / tokens * torch.ones(n)
        else:  # the critic starts at 0: the advantage of a token is the reward, discounted by lambda from the end
            weights = rewards[i] * script.Config().lam ** torch.arange(n - 1, -1, -1) / tokens
        logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        (-weights * logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]).sum().backward()
    plain = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert ((updates[0] - plain).norm() / plain.norm()).item() < 1e-4 and mask.sum(1).unique().numel() > 1


NAN = float("nan")
BAD = [
    ("batch_size", 0),
    ("batch_size", 81),  # more than there are, in either task
    ("lr", NAN),
    ("lr", -1.0),
    ("max_new_tokens", 0),
    ("device", "abacus"),
    ("device", "cuda:99"),
    ("model", "nobody/no-such-model"),
    ("model", "."),
    ("save", "/dev/null/model"),
    ("save", "/dev/null"),
]
GRPO_BAD = [("group_size", 1), ("inner_epochs", 0), ("beta", -1.0), ("clip", -1.0), ("steps", 0)]
GSM8K_BAD = [("split", "train"), ("data", "nowhere"), ("eval_size", -1), ("eval_samples", -1), ("micro_batch", -1)]
BAD_ONLY = {
    "minimal_sft": [("steps", 0), ("steps", -1)],
    "minimal_dpo": [("steps", 0), ("beta", 0.0)],
    "minimal_grpo": GRPO_BAD,
    "minimal_ppo": [("steps", 0), ("inner_epochs", 0), ("beta", -1.0), ("critic_lr", NAN)],
    "gsm8k_grpo": GRPO_BAD + GSM8K_BAD,
    "gsm8k_sft_grpo": GRPO_BAD + GSM8K_BAD + [("sft_steps", 0), ("sft_lr", NAN)],
    "gsm8k_grpo_autoresearch": GSM8K_BAD + [("group_size", 1), ("minutes", -1.0), ("minutes", NAN)],
}


@pytest.mark.parametrize("name, flag, value", [(n, *case) for n in NAMES for case in BAD + BAD_ONLY[n]])
def test_bad_input_is_refused_by_the_name_of_its_flag_before_any_training(name, flag, value, tiny, capsys):
    with pytest.raises(ValueError, match=f"--{flag} "):
        train(name, tiny, capsys, **{flag: value})
    assert not steps(capsys.readouterr().out)


@pytest.mark.parametrize(
    "name, flags, named",
    [
        ("minimal_ppo", ["--no_such_flag", 1], "--no_such_flag"),
        ("minimal_dpo", [], "local folder"),  # the default model, no network, an empty cache
        ("minimal_grpo", ["--save", "/dev/null/model"], "--save"),
        ("gsm8k_grpo", [], "--data"),  # the default data, likewise
    ],
    ids=str,
)
def test_bad_input_ends_in_one_line_and_a_status(name, flags, named, tmp_path):
    """The entry point, whose text is the same in every script; which inputs are bad is tested above."""
    done = run(name, *flags, folder=tmp_path, check=False, HF_HOME=str(tmp_path))
    assert done.returncode != 0 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert named in last and "error: " in last


def test_save_never_replaces_what_is_not_a_model(tiny, tmp_path, capsys):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with pytest.raises(ValueError, match="--save"):
        train("minimal_sft", tiny, capsys, save=str(tmp_path / "thesis"))
    assert (tmp_path / "thesis" / "chapter1.tex").exists()


def test_save_into_an_empty_folder_and_over_the_model_that_was_loaded(tmp_path, capsys):
    (tmp_path / "m").mkdir()
    make_model().save_pretrained(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    train("minimal_sft", tmp_path / "m", capsys, save=f"{tmp_path / 'm'}/")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    changed = AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict()
    assert not torch.equal(changed["model.embed_tokens.weight"], make_model().state_dict()["model.embed_tokens.weight"])


@pytest.fixture
def sigint():
    """The usual answer to Ctrl-C, which jobs in a shell's background do without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_stops_training_then_evaluates_and_saves(name, tiny, tmp_path, capsys, monkeypatch, rewarded, sigint):
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def press_ctrl_c(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:  # step 3 of 6, or before
            signal.raise_signal(signal.SIGINT)
        return clip(*args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", press_ctrl_c)
    endless = {"minutes": 1e6} if name == "gsm8k_grpo_autoresearch" else {"steps": 100_000}
    out = train(name, tiny, capsys, **endless, save=str(tmp_path / "kept"), itertools=itertools)
    assert "interrupted" in out and FRACTION.match(summary(out)[AFTER[name]]) and 1 <= len(steps(out)) <= 6
    assert (tmp_path / "kept" / "config.json").exists()


def test_ctrl_c_in_the_warm_up_ends_training_as_well(tiny, capsys, monkeypatch, sigint):
    monkeypatch.setattr(SCRIPTS["gsm8k_sft_grpo"], "masked_mean", lambda *_: signal.raise_signal(signal.SIGINT))
    out = train("gsm8k_sft_grpo", tiny, capsys)
    assert "interrupted" in out and not steps(out)
    assert [key for key in summary(out) if "accuracy" in key] == ["accuracy_before", "accuracy_after"]


def test_ctrl_c_from_outside(tiny, tmp_path):
    command = [sys.executable, str(ROOT / "minimal_grpo.py"), "--model", str(tiny), "--device", "cpu"]
    command += ["--steps", "100000", "--save", str(tmp_path / "kept")]
    process = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "interrupted" in out and "accuracy_after" in summary(out) and (tmp_path / "kept" / "config.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_gradient_that_is_not_finite_ends_training_before_the_step_and_keeps_the_weights(
    name, tiny, tmp_path, monkeypatch, capsys, rewarded
):
    script = SCRIPTS[name]
    logprobs, calls = script.token_logprobs, []

    def broken(*args):
        calls.append(1)
        return logprobs(*args) * (float("inf") if len(calls) > 1 else 1)

    monkeypatch.setattr(script, "token_logprobs", broken)
    with pytest.raises(RuntimeError):
        train(name, tiny, capsys, save=str(tmp_path / "kept"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    assert all(p.isfinite().all() for p in saved.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_with_nan_weights_is_refused(name, tmp_path, capsys):
    model = make_model()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    model.save_pretrained(tmp_path / "nan")
    make_tokenizer().save_pretrained(tmp_path / "nan")
    with pytest.raises(RuntimeError, match="--model"):
        train(name, tmp_path / "nan", capsys)


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_each_flag_with_its_text_and_default(name):
    script = SCRIPTS[name]
    text = " ".join(script.HfArgumentParser(script.Config).format_help().split())
    for flag, field in script.Config.__dataclass_fields__.items():
        assert f"--{flag}" in text and " ".join(field.metadata["help"].split()) in text
        assert field.default == "" or f"(default: {field.default})" in text


def test_no_cuda_call_and_no_autocast_on_cpu():
    for name in NAMES:
        source = (ROOT / f"{name}.py").read_text()
        assert "autocast(" not in source and ".cuda(" not in source and "bfloat16" not in source
