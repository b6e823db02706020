"""What happens around the algorithm: wrong flags, folders in the way, crashes, odd models."""

import os
import shutil

import pytest
import test_runs
import torch
from conftest import (
    NAMES,
    RL,
    SCRIPTS,
    flags,
    having,
    make_model,
    make_tokenizer,
    run,
    save,
    steps,
    summary,
)
from safetensors.torch import load_file
from test_runs import LONG, WEIGHT

rewarded, interrupted = test_runs.rewarded, test_runs.interrupted  # fixtures

GROUPS = ["minimal_grpo", *RL[2:]]
BAD = [(name, "group_size", 1) for name in GROUPS] + [("minimal_dpo", "beta", 0.0)]
BAD += [(name, "model", value) for name in NAMES for value in ("nobody/no-such-model", ".")]
BAD += [(name, *case) for name in RL[2:] for case in (("split", "train"), ("data", "nowhere"))]


@pytest.mark.parametrize("name, flag, value", BAD)
def test_wrong_value_ends_in_one_line_before_any_training(
    name, flag, value, tiny, train, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(SCRIPTS[name], "evaluate", lambda *_: pytest.fail("too late"))
    with pytest.raises(SystemExit, match=rf"^error: (--data .*)?--{flag}\b.*$"):
        train(name, tiny, **{flag: value}, save=str(tmp_path / "kept"))
    assert not steps(capsys.readouterr().out) and not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "name, wrong, begins",
    [
        ("minimal_dpo", [], "error: --model Qwen/"),  # no network, an empty cache
        ("gsm8k_grpo", [], "error: --data "),
        ("minimal_sft", ["--model", "TINY", "--save", "."], "error: --save ."),
    ],
    ids=["model", "data", "save"],
)
def test_wrong_value_in_a_process_of_its_own(name, wrong, begins, tiny, tmp_path):
    """In one script each: the entry point is the same text in all."""
    wrong = [str(tiny) if part == "TINY" else part for part in wrong]
    done = run(name, *wrong, folder=tmp_path, check=False, HF_HOME=str(tmp_path / "home"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith(begins) and done.stderr.count("error: ") == 1


@pytest.mark.parametrize("name", NAMES)
def test_programming_error_keeps_its_traceback(name, tiny, train, monkeypatch):
    script, calls, encode_prompts = SCRIPTS[name], [], SCRIPTS[name].encode_prompts

    def fail_once(*args):
        calls.append(1)
        return [][0] if len(calls) == 1 else encode_prompts(*args)

    monkeypatch.setattr(script, "encode_prompts", fail_once)
    with pytest.raises(IndexError):
        train(name, tiny)


@having("load")
def test_cached_model_loads_without_a_network(script, tiny, tmp_path, monkeypatch):
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--somebody--tiny"
    shutil.copytree(tiny, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    model, _ = script.load("somebody/tiny", "cpu")
    assert torch.equal(model.state_dict()[WEIGHT], make_model().state_dict()[WEIGHT])
    with pytest.raises(SystemExit, match="^error: --model somebody/other.* folder.*$"):
        script.load("somebody/other", "cpu")


# ---- --save takes a new folder -------------------------------------------------------------------
@having("make_folder")
def test_save_takes_a_new_folder_and_nothing_else(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a file")
    refused = ["empty", "empty/", "file", "file/m", ".", "..", "/dev/null", "/dev/null/x"]
    for name in [*refused, "x" * 300, str(tmp_path / "empty")]:
        with pytest.raises(SystemExit) as caught:
            script.make_folder(name)
        assert str(caught.value).startswith(f"error: --save {name}: ")
        assert "new folder" in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(os.listdir()) == ["empty", "file"] and not os.listdir("empty")
    made = script.make_folder("new/er/folder")
    assert made.is_dir() and os.path.isdir("new/er/folder")


@having("make_folder")
def test_save_knows_the_home_folder(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    assert script.make_folder("~/x") == tmp_path / "home" / "x"
    assert os.listdir() == ["home"] and (tmp_path / "home" / "x").is_dir()


@pytest.mark.skipif(getattr(os, "geteuid", int)() == 0, reason="root may write anywhere")
@having("make_folder")
def test_save_in_a_read_only_folder(script, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(SystemExit, match="^error: --save .*Permission denied.*$"):
        script.make_folder(str(tmp_path / "locked" / "m"))


@pytest.mark.parametrize("name", NAMES)
def test_save_touches_nothing_in_an_older_folder(name, tiny, train, tmp_path, monkeypatch):
    monkeypatch.setattr(SCRIPTS[name], "evaluate", lambda *_: pytest.fail("too late"))
    (tmp_path / "m" / ".git").mkdir(parents=True)
    held = {"a.safetensors": "weights", "notes.md": "years of work", ".git/HEAD": "ref"}
    for file, text in held.items():
        (tmp_path / "m" / file).write_text(text)
    with pytest.raises(SystemExit, match="^error: --save .*$"):
        train(name, tiny, save=str(tmp_path / "m"))
    assert {file: (tmp_path / "m" / file).read_text() for file in held} == held
    assert sorted(os.listdir(tmp_path / "m")) == [".git", "a.safetensors", "notes.md"]


@pytest.fixture
def break_gradient(monkeypatch):
    """break_gradient(n): the gradient of the n-th call of clip_grad_norm_ is not finite."""

    def of(n):
        calls, clip = [], torch.nn.utils.clip_grad_norm_

        def infinite(parameters, *args, **kwargs):
            parameters = [*parameters]
            calls.append(1)
            if len(calls) == n:
                parameters[0].grad.fill_(torch.inf)
            return clip(parameters, *args, **kwargs)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", infinite)

    return of


@pytest.mark.parametrize("name", NAMES)
def test_gradient_that_is_not_finite_ends_the_training_and_the_weights_are_saved(
    name, tiny, train, tmp_path, rewarded, break_gradient
):
    """In an RL script's second step, in gsm8k_sft_grpo's first after the warm-up."""
    break_gradient(3)
    with pytest.raises(RuntimeError, match="non-finite"):
        train(name, tiny, **LONG[name], save=str(tmp_path / "kept"))
    start, kept = (load_file(f / "model.safetensors") for f in (tiny, tmp_path / "kept"))
    assert all(x.isfinite().all() for x in kept.values())
    assert not torch.equal(kept[WEIGHT], start[WEIGHT])
    SCRIPTS[name].load(str(tmp_path / "kept"), "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_crash_before_the_first_update_leaves_no_folder_and_the_command_works_again(
    name, tiny, train, tmp_path, rewarded, break_gradient, monkeypatch
):
    clip, knobs = torch.nn.utils.clip_grad_norm_, {"save": str(tmp_path / "m")}
    break_gradient(1)
    with pytest.raises(RuntimeError, match="non-finite"):
        train(name, tiny, **knobs)
    assert not (tmp_path / "m").exists()
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    train(name, tiny, **knobs)
    assert (tmp_path / "m" / "model.safetensors").exists()


def test_critic_gradient_that_is_not_finite_ends_the_training(tiny, train, tmp_path, monkeypatch):
    script, token_values = SCRIPTS["minimal_ppo"], SCRIPTS["minimal_ppo"].token_values

    def broken(*args):
        values = token_values(*args)
        values.register_hook(lambda gradient: gradient * torch.inf)
        return values

    monkeypatch.setattr(script, "token_values", broken)
    with pytest.raises(RuntimeError, match="non-finite"):
        train("minimal_ppo", tiny, save=str(tmp_path / "m"))
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("stop", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("name", NAMES[:-1])  # autoresearch evaluates after the training alone
def test_failure_in_the_first_evaluation_leaves_no_folder(
    name, stop, tiny, train, interrupted, tmp_path, monkeypatch
):
    script, calls, evaluate = SCRIPTS[name], [], SCRIPTS[name].evaluate

    def fail_once(*args):
        calls.append(os.listdir(tmp_path))
        if len(calls) == 1:
            raise stop
        return evaluate(*args)

    monkeypatch.setattr(script, "evaluate", fail_once)
    if stop is KeyboardInterrupt:
        out = interrupted(name, tiny, save=str(tmp_path / "m"))
        assert "interrupted" in out and "accuracy_after" in summary(out) and not steps(out)
    else:
        with pytest.raises(MemoryError):
            train(name, tiny, save=str(tmp_path / "m"))
    assert calls[0] == ["m"] and not os.listdir(tmp_path)


@pytest.mark.parametrize("stop", [MemoryError, KeyboardInterrupt])
def test_the_warm_up_is_saved_when_grpo_does_not_take_a_step(
    stop, tiny, train, interrupted, tmp_path, monkeypatch
):
    def fail(*_):
        raise stop

    monkeypatch.setattr(SCRIPTS["gsm8k_sft_grpo"], "group_advantages", fail)
    if stop is KeyboardInterrupt:
        out = interrupted("gsm8k_sft_grpo", tiny, save=str(tmp_path / "m"))
        assert "interrupted" in out and "accuracy_after" in out
    else:
        with pytest.raises(MemoryError):
            train("gsm8k_sft_grpo", tiny, save=str(tmp_path / "m"))
    start, kept = (load_file(f / "model.safetensors") for f in (tiny, tmp_path / "m"))
    assert not torch.equal(kept[WEIGHT], start[WEIGHT])


@pytest.mark.parametrize("name", NAMES)
def test_training_is_saved_before_the_last_evaluation(
    name, tiny, train, tmp_path, rewarded, monkeypatch
):
    script, evaluate = SCRIPTS[name], SCRIPTS[name].evaluate

    def fail_last(*args):
        if (tmp_path / "m" / "model.safetensors").exists():
            raise MemoryError
        return evaluate(*args)

    monkeypatch.setattr(script, "evaluate", fail_last)
    with pytest.raises(MemoryError):
        train(name, tiny, save=str(tmp_path / "m"))
    script.load(str(tmp_path / "m"), "cpu")


# ---- odd models and consoles ---------------------------------------------------------------------
@pytest.mark.parametrize("name", RL)
def test_model_with_more_ids_than_its_tokenizer(name, train, tmp_path):
    """Heads are often padded to a round size: ids 260 to 319 can be sampled and have no text."""
    assert "---" in train(name, save(tmp_path / "m", make_model(vocab=320, spread=0.01)))


@pytest.mark.parametrize("name", RL)
def test_tokenizer_with_bos_and_without_pad(name, train, tmp_path):
    folder = save(tmp_path / "m", tokenizer=make_tokenizer(pad=None, bos="<|end|>"))
    assert "---" in train(name, folder)


def test_console_that_knows_few_characters(tiny, tmp_path):
    """cp1252 has neither the emoji of the question nor the mark of a broken byte sequence."""
    row = '{"question": "Ann \\ud83d\\ude00 has 1 pen. How many?", "answer": "\\u4e00\\n#### 1"}\n'
    (tmp_path / "train.jsonl").write_text(row * 510)
    (tmp_path / "test.jsonl").write_text(row)
    few = flags("gsm8k_sft_grpo", data=tmp_path, steps=1)
    done = run("gsm8k_sft_grpo", "--model", tiny, *few, PYTHONIOENCODING="cp1252")
    assert "\\U0001f600" in done.stdout and "accuracy_after" in summary(done.stdout)
