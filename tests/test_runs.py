"""Runs of a few steps on a tiny model: what is printed, what is trained, how a run ends."""

import logging
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    CLIPPED,
    GSM8K,
    NAMES,
    RL,
    ROOT,
    SCRIPTS,
    environment,
    flags,
    having,
    make_model,
    make_tokenizer,
    save,
    steps,
    summary,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
)
from transformers.hf_argparser import HfArgumentParser

FRACTION = re.compile(r"^(\d\.\d{3}) \((\d+)/(\d+)\)$")
GRPO = ["loss", "reward", "length", "grad_norm", "kl", "clip"]
METRICS = {  # of a run's last step
    "minimal_sft": ["loss", "grad_norm"],
    "minimal_dpo": ["loss", "grad_norm", "chosen", "rejected", "margin"],
    "minimal_grpo": GRPO,
    "minimal_ppo": [*GRPO, "value_loss"],
    "gsm8k_grpo": GRPO,
    "gsm8k_sft_grpo": GRPO,
    "gsm8k_grpo_autoresearch": GRPO[:4],
}
STEPS = dict.fromkeys(NAMES, ["step 1/2", "step 2/2"])
STEPS["gsm8k_sft_grpo"] = ["step 1/1", "step 1/2", "step 2/2"]
STEPS["gsm8k_grpo_autoresearch"] = ["step 1", "step 2"]
COUNTS = dict.fromkeys(NAMES, ["accuracy_before", "accuracy_after"])
COUNTS["minimal_dpo"] = ["accuracy_before", "accuracy_after", "pair_accuracy"]
COUNTS["gsm8k_sft_grpo"] = ["accuracy_before", "accuracy_sft", "accuracy_after"]
COUNTS["gsm8k_grpo_autoresearch"] = ["val_acc"]
WEIGHT = "model.layers.0.mlp.up_proj.weight"
LONG = {name: {"steps": 30} for name in NAMES}  # until something ends it
LONG["gsm8k_grpo_autoresearch"] = {"minutes": 1.0}


def metrics(line):
    """Name -> value of a step line."""
    return {key: float(value) for key, value in re.findall(r"  ([a-z_]+) (\S+)", line)}


def trained(output):
    """The metrics of each step, without those of an SFT warm-up."""
    shown = [metrics(line) for line in steps(output)]
    return [step for step in shown if step.keys() == shown[-1].keys()]


@pytest.fixture
def rewarded(monkeypatch):
    """A reward that a random model earns about half of the time: the text's length is even."""
    for name in RL:
        monkeypatch.setattr(SCRIPTS[name], "reward", lambda text, _: float(len(text) % 2 == 0))


@pytest.fixture
def unevaluated(monkeypatch):
    """Evaluations cost nothing and draw nothing."""
    for name in NAMES:
        stub = ["accuracy: -"] if name in GSM8K else "-"
        monkeypatch.setattr(SCRIPTS[name], "evaluate", lambda *_, stub=stub: stub)


@pytest.mark.parametrize("name", NAMES)
def test_lone_copy_runs_from_another_folder_and_prints_everything(
    name, tiny, train, tmp_path, monkeypatch, capsys, recwarn
):
    """The entry point with flags, but in this process: imports take far longer than the run."""
    budget = {"minutes": 2e-3} if name == "gsm8k_grpo_autoresearch" else {}
    script = shutil.copy(ROOT / f"{name}.py", tmp_path)
    command = [script, "--model", str(tiny), "--device", "cpu", "--save", "out/trained"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command + flags(name, batch_size=3, **budget))
    runpy.run_path(script, run_name="__main__")
    out = capsys.readouterr().out
    parameters = f"{make_model().num_parameters():,} parameters"
    for shown in (f"{name}.py", str(tiny), parameters, "cpu", "float32"):
        assert shown in out.partition("step 1")[0]
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    begins = [line.split("  ")[0] for line in lines]
    assert begins[:1] == ["step 1"] if budget else begins == STEPS[name]
    assert list(metrics(lines[-1])) == METRICS[name]
    for line in lines:
        assert re.search(r"  \d+\.\d s$", line) and all(map(math.isfinite, metrics(line).values()))
    rows = re.findall(r"^  loss mask ([01]) (['\"].*['\"])(.*)$", out, re.M)
    assert rows and [mask for mask, *_ in rows] == ["0", "1"] * (len(rows) // 2)
    assert "<|im_start|>" in rows[0][1] and "<|pad|>" not in rows[0][1]
    assert bool(re.fullmatch(r" reward [01]", rows[1][2])) == (name in RL)
    result, total = summary(out), 5 if name in GSM8K else 20
    found = [key for key in result if FRACTION.match(result[key])]
    assert found == COUNTS[name]
    for key in found:
        share, count, of = FRACTION.match(result[key]).groups()
        assert int(of) == total and float(share) == pytest.approx(int(count) / total, abs=5e-4)
    assert int(result["seconds"]) >= 0 and "peak_gb" not in result
    assert not [str(warning.message) for warning in recwarn]
    if not budget:  # autoresearch takes no step without a reward, and saves nothing
        # What was saved is what --model takes: evaluated before training, it solves as many.
        assert os.listdir("out") == ["trained"]
        again = summary(train(name, "out/trained", batch_size=3))
        assert again["accuracy_before"] == result["accuracy_after"]


@pytest.mark.parametrize("name", NAMES)
def test_help_has_a_text_and_the_default_of_each_flag(name):
    parser = HfArgumentParser(SCRIPTS[name].Config)
    text = " ".join(parser.format_help().split())
    for key, default in vars(SCRIPTS[name].Config()).items():
        action = next(action for action in parser._actions if action.dest == key)
        assert len(action.help) > 3 and " ".join(action.help.split()).split(";")[0] in text
        assert re.search(rf"--{key} .*?\(default: {re.escape(str(default))}\)", text), key


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_metrics_another_seed_others(name, tiny, train, rewarded):
    first, again, other = (steps(train(name, tiny, seed=seed, lr=1e-3)) for seed in (1, 1, 2))
    assert first == again != other
    assert [line.split("  ")[0] for line in first] == STEPS[name]


@pytest.mark.parametrize("name", RL)
def test_evaluation_does_not_change_the_training_draws(name, tiny, train, rewarded, monkeypatch):
    plain = steps(train(name, tiny, lr=1e-3))
    if name in GSM8K:
        assert steps(train(name, tiny, lr=1e-3, eval_size=2, eval_samples=3)) == plain
    stub = ["accuracy: -"] if name in GSM8K else "-"
    monkeypatch.setattr(SCRIPTS[name], "evaluate", lambda *_: torch.rand(99) is None or stub)
    assert steps(train(name, tiny, lr=1e-3)) == plain


@pytest.mark.parametrize("name", RL)
def test_reward_sees_completions_and_nothing_of_the_prompt(name, tiny, train, monkeypatch):
    script, seen, texts, sample = SCRIPTS[name], [], [], SCRIPTS[name].sample
    tokenizer = make_tokenizer()

    def keep(*args, **kwargs):
        ids, mask = sample(*args, **kwargs)
        rows = [row[real.bool()] for row, real in zip(ids, mask)]
        texts.extend(tokenizer.decode(row, skip_special_tokens=True) for row in rows)
        return ids, mask

    monkeypatch.setattr(script, "sample", keep)
    monkeypatch.setattr(script, "reward", lambda text, answer: seen.append(text) or 0.0)
    train(name, tiny)
    assert seen == texts and len(seen) > 8


@pytest.mark.parametrize("name", CLIPPED)
def test_ratio_moves_in_the_second_inner_epoch_alone(name, tiny, train, rewarded, unevaluated):
    assert trained(train(name, tiny, inner_epochs=2, lr=1e-2))[0]["clip"] > 0
    assert all(step["clip"] == 0 for step in trained(train(name, tiny, inner_epochs=1, lr=1e-2)))


@pytest.mark.parametrize("name", CLIPPED)
def test_first_step_has_no_kl_and_later_ones_do(name, tiny, train, rewarded, unevaluated):
    """In gsm8k_sft_grpo, too: its reference is the model after the warm-up."""
    sft = {"sft_lr": 1e-2} if name == "gsm8k_sft_grpo" else {}
    first, second = trained(train(name, tiny, inner_epochs=1, lr=1e-2, **sft))
    assert first["kl"] == 0 < second["kl"]


@pytest.mark.parametrize("name", ["minimal_dpo", *CLIPPED])
def test_reference_shares_nothing_with_the_policy_and_never_moves(
    name, tiny, train, rewarded, unevaluated, monkeypatch
):
    script, calls, logprobs = SCRIPTS[name], {True: [], False: []}, SCRIPTS[name].token_logprobs

    def keep(model, *batch):
        weights = {key: x.clone() for key, x in model.state_dict().items()}
        calls[any(p.requires_grad for p in model.parameters())].append((model, weights))
        return logprobs(model, *batch)

    monkeypatch.setattr(script, "token_logprobs", keep)
    train(name, tiny, lr=1e-2)
    (policy, start), *_, (_, moved) = calls[True]
    (reference, first), *_, (_, last) = calls[False]
    assert not torch.equal(moved[WEIGHT], start[WEIGHT])
    assert all(torch.equal(last[key], first[key]) for key in first)
    if name != "gsm8k_sft_grpo":
        assert all(torch.equal(first[key], start[key]) for key in first)
    storages = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    assert not storages & {p.untyped_storage().data_ptr() for p in reference.parameters()}


def test_ppo_critic_starts_at_0_and_learns(tiny, train, rewarded, monkeypatch):
    script, calls, values = SCRIPTS["minimal_ppo"], [], SCRIPTS["minimal_ppo"].token_values

    def keep(critic, *batch):
        calls.append((critic, values(critic, *batch)))
        return calls[-1][1]

    monkeypatch.setattr(script, "token_values", keep)
    train("minimal_ppo", tiny, lr=1e-3, critic_lr=1e-2, inner_epochs=1)
    (critic, first), (_, second) = calls
    assert not first.any() and second.abs().max() > 1e-3
    moved, start = critic.state_dict(), make_model().state_dict()
    assert not torch.equal(moved[WEIGHT], start[WEIGHT])


def test_ppo_returns_stay_fixed_over_the_inner_epochs(tiny, train, rewarded, monkeypatch):
    script, calls, gae = SCRIPTS["minimal_ppo"], [], SCRIPTS["minimal_ppo"].gae
    monkeypatch.setattr(script, "gae", lambda *args: calls.append(1) or gae(*args))
    train("minimal_ppo", tiny, inner_epochs=3)
    assert len(calls) == 2


def test_dpo_starts_at_log_2_with_margin_0(tiny, train):
    first, second = trained(train("minimal_dpo", tiny, lr=1e-3))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4) and first["margin"] == 0
    assert second["loss"] != first["loss"]


def test_checkpoint_without_the_tensors_of_a_layer(tiny, train, tmp_path, monkeypatch, caplog):
    """They are drawn at random, with a warning: the reference must get the same ones."""
    folder = save(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    whole = {key: x for key, x in weights.items() if "layers.1." not in key}
    assert len(whole) < len(weights)
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert trained(train("minimal_dpo", folder))[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert "layers" in caplog.text and "MISSING" in caplog.text
    for name in CLIPPED[:3]:
        assert trained(train(name, folder, inner_epochs=1))[0]["kl"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_zero_learning_rate_changes_nothing(name, tiny, train, tmp_path, rewarded, unevaluated):
    sft = {"sft_lr": 0.0} if name == "gsm8k_sft_grpo" else {}
    train(name, tiny, lr=0.0, **sft, save=str(tmp_path / "same"))
    before, after = (load_file(f / "model.safetensors") for f in (tiny, tmp_path / "same"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_sft_and_grpo_have_an_optimizer_each(tiny, train, rewarded, monkeypatch):
    made, adamw = [], torch.optim.AdamW

    def make(*args, **kwargs):
        made.append(adamw(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch.optim, "AdamW", make)
    train("gsm8k_sft_grpo", tiny, sft_steps=3, sft_lr=1e-3, lr=1e-4, inner_epochs=2)
    found = [(x.param_groups[0]["lr"], *{int(s["step"]) for s in x.state.values()}) for x in made]
    assert found == [(1e-3, 3), (1e-4, 4)]


@pytest.mark.parametrize("name", NAMES)
def test_first_gradient_is_that_of_the_plain_formula(
    name, tiny, train, rewarded, unevaluated, updates, monkeypatch
):
    """Each row alone and whole through the model, without cache or padding, its loss by hand."""
    script, batches = SCRIPTS[name], []
    calls = script.sample, script.token_logprobs

    def sample(model, *args):
        ids, mask = calls[0](model, *args)
        batches.append((*args[:2], ids, mask))
        return ids, mask

    def token_logprobs(model, *batch):
        batches.append(batch)
        return calls[1](model, *batch)

    monkeypatch.setattr(script, "sample", sample)
    monkeypatch.setattr(script, "token_logprobs", token_logprobs)
    stops = torch.arange(0, 256, 4)  # completions of different lengths
    monkeypatch.setattr(script, "stop_ids", lambda *_: stops)
    knobs = {"sft_steps": 0} if name == "gsm8k_sft_grpo" else {}
    knobs |= {"beta": 0.7} if name == "minimal_dpo" else {}
    train(name, tiny, batch_size=8, **knobs)
    prompt_ids, prompt_mask, ids, mask = batches[0]
    model, tokenizer = script.load(str(tiny), "cpu")
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    G, tokens = len(ids) // len(prompt_ids), mask.sum()
    rewards = torch.tensor([float(len(text) % 2 == 0) for text in texts])
    groups = rewards.view(-1, G)
    centred = (groups - groups.mean(1, keepdim=True)).flatten()
    for i, (row, real) in enumerate(zip(ids, mask.bool())):
        prompt, completion = prompt_ids[i // G][prompt_mask[i // G].bool()], row[real]
        weights = torch.ones(len(completion)) / tokens
        if name == "minimal_dpo":  # -log sigmoid(0.7 * margin) at 0 has the slope -0.35
            weights = weights * tokens * (0.35 if i % 2 == 0 else -0.35) / len(prompt_ids)
        elif name == "minimal_ppo":  # the critic says 0: the reward, discounted from the end
            weights = weights * rewards[i] * 0.95 ** torch.arange(len(completion)).flip(0)
        elif name == "gsm8k_grpo_autoresearch":
            weights = weights * centred[i]
        elif name in CLIPPED:
            weights = weights * centred[i] / (groups[i // G].std(correction=0) + 1e-4)
        logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
        (-weights * logprobs).sum().backward()
    plain = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (updates[0] - plain).norm() / plain.norm() < 1e-4
    assert mask.sum(1).unique().numel() > 1 and plain.norm() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_gpt2_base_model_without_template_and_pad_token(name, train, tmp_path):
    folder = save(tmp_path / "base", make_model("gpt2"), make_tokenizer(template=None, pad=None))
    assert len(trained(train(name, folder))) == 2


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_models_with_attention_of_their_own(family, train, tmp_path, rewarded):
    """Soft-capped scores and sliding windows in one, attention sinks in the other."""
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"sliding_window": 16, "eos_token_id": 257, "pad_token_id": 258}
    if family == "gemma2":
        model = Gemma2ForCausalLM(Gemma2Config(**sizes))
    else:
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
        model = GptOssForCausalLM(GptOssConfig(**sizes, **experts))
    folder = save(tmp_path / "m", model)
    assert trained(train("minimal_grpo", folder, inner_epochs=1))[0]["kl"] == 0


@having("load")
def test_attention_is_left_to_transformers_and_tf32_is_cudas(script, tiny, monkeypatch):
    asked, precision = [], []

    def keep(name, **options):
        asked.append(options)
        raise OSError("enough")

    stub = SimpleNamespace(from_pretrained=keep)
    monkeypatch.setattr(script, "AutoModelForCausalLM", stub)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision.append)
    for device in ("cpu", "cuda", "mps"):
        with pytest.raises(SystemExit):
            script.load(str(tiny), device)
    assert [options.get("attn_implementation") for options in asked] == [None, None, "eager"]
    assert precision == ["highest", "high", "highest"]


@having("load")
def test_bf16_checkpoint_becomes_float32(script, tmp_path, capsys):
    folder = save(tmp_path / "m", make_model().to(torch.bfloat16))
    model, _ = script.load(str(folder), "cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training
    assert "cpu torch.float32" in capsys.readouterr().out


@pytest.mark.parametrize("name", RL)
def test_run_that_earns_nothing_says_what_to_do(name, tiny, train, rewarded, monkeypatch):
    assert "no reward" not in train(name, tiny)
    monkeypatch.setattr(SCRIPTS[name], "reward", lambda *_: 0.0)
    advice = train(name, tiny).partition("no reward")[2]
    assert "sft" in advice


@pytest.fixture
def sigint():
    """The usual answer to Ctrl-C, which jobs in a shell's background do without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupted(train):
    """train, where a Ctrl-C that comes out of main fails the test instead of ending all tests."""

    def of(*args, **knobs):
        try:
            return train(*args, **knobs)
        except KeyboardInterrupt:
            pytest.fail("Ctrl-C came out of main")

    return of


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_stops_training_then_saves_and_evaluates(
    name, tiny, interrupted, tmp_path, rewarded, updates, monkeypatch, sigint
):
    clip = torch.nn.utils.clip_grad_norm_

    def press(*args, **kwargs):
        if len(updates) == 5:  # in step 3 of a few or before
            signal.raise_signal(signal.SIGINT)
        return clip(*args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", press)
    out = interrupted(name, tiny, **LONG[name], save=str(tmp_path / "kept"))
    result, last = summary(out), COUNTS[name][0].replace("before", "after")
    assert "interrupted" in out and 1 <= len(steps(out)) <= 5 and FRACTION.match(result[last])
    start, kept = (load_file(f / "model.safetensors") for f in (tiny, tmp_path / "kept"))
    assert not torch.equal(kept[WEIGHT], start[WEIGHT])


def test_ctrl_c_in_the_warm_up_ends_the_training_as_well(
    tiny, interrupted, tmp_path, updates, monkeypatch, sigint
):
    """The first step of the warm-up is kept."""
    clip = torch.nn.utils.clip_grad_norm_

    def press(*args, **kwargs):
        if len(updates) == 1:
            signal.raise_signal(signal.SIGINT)
        return clip(*args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", press)
    out = interrupted("gsm8k_sft_grpo", tiny, sft_steps=9, save=str(tmp_path / "kept"))
    assert "interrupted" in out and len(steps(out)) == 1
    found = [key for key in summary(out) if "accuracy" in key]
    assert found == ["accuracy_before", "accuracy_after"]
    start, kept = (load_file(f / "model.safetensors") for f in (tiny, tmp_path / "kept"))
    assert not torch.equal(kept[WEIGHT], start[WEIGHT])


def test_ctrl_c_from_outside(tiny, tmp_path):
    script = shutil.copy(ROOT / "minimal_grpo.py", tmp_path)
    command = [sys.executable, script, "--model", str(tiny), "--device", "cpu"]
    command += ["--steps", "100000", "--save", "kept"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), **pipes,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "interrupted" in out and "accuracy_after" in summary(out)
    AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
