"""What happens around the algorithm: a killed process, a full disk, odd tokenizers and consoles."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import NAMES, RL, ROOT, SCRIPTS, flags, having, make_model, make_tokenizer, run
from safetensors.torch import load_file
from test_runs import train

KILLED = """
import os, random, signal, sys, threading, time
import tqdm
tqdm.tqdm.set_lock(threading.RLock())  # its own is shared with the children, and one would die with it in hand
sys.path.insert(0, {tests!r})
from conftest import SCRIPTS, make_model, make_tokenizer
import torch
torch.set_num_threads(1)
script, rng, target = SCRIPTS["minimal_sft"], random.Random(0), sys.argv[1]
models = [make_model(seed=seed) for seed in (0, 1)]
for model, value in zip(models, (0.0, 1.0)):
    for p in model.parameters():
        torch.nn.init.constant_(p, value)
tokenizer = make_tokenizer()
script.save(models[0], tokenizer, target)
started = time.perf_counter()
script.save(models[1], tokenizer, target)
whole = time.perf_counter() - started
for trial in range(40):
    pid = os.fork()
    if pid == 0:
        script.save(models[trial % 2], tokenizer, target)
        os._exit(0)
    time.sleep(rng.uniform(0, 1.3 * whole))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = [f for f in (target, target + ".partial") if os.path.isdir(f)]
    ok = False
    for folder in found:
        try:
            model, _ = script.load(folder, "cpu")
        except ValueError:
            continue
        ok |= len({{p.unique().item() for p in model.parameters()}}) == 1
    print("whole" if ok else f"LOST in trial {{trial}}", *sorted(os.path.basename(f) for f in found), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_saving_leaves_one_whole_folder(tmp_path):
    """SIGKILL at 40 random moments of `save`, the same text in every script."""
    code = KILLED.format(tests=str(ROOT / "tests"))
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith(("whole", "LOST"))]
    assert len(lines) == 40 and all(line.startswith("whole") for line in lines), done.stdout + done.stderr
    assert any("partial" in line for line in lines)  # some kills came in the middle


@having("save")
def test_every_step_of_save_may_be_the_last(script, tmp_path, monkeypatch):
    """The three moments between which nothing else happens: before the swap, within it, after it."""

    class Kill(BaseException):
        pass

    def kill(*args, **kwargs):
        raise Kill

    def value(folder):
        return load_file(folder / "model.safetensors")["model.norm.weight"].unique().item()

    old, new, tokenizer, target = make_model(), make_model(), make_tokenizer(), tmp_path / "m"
    torch.nn.init.constant_(old.model.norm.weight, 1.0)
    torch.nn.init.constant_(new.model.norm.weight, 2.0)
    for owner, step, kept in ((tokenizer, "save_pretrained", 1.0), (script.shutil, "rmtree", 1.0)):
        script.save(old, tokenizer, target)
        with monkeypatch.context() as patch, pytest.raises(Kill):
            patch.setattr(owner, step, kill)
            script.save(new, tokenizer, target)
        assert value(target) == kept
    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(script.Path, "rename", kill)
        script.save(new, tokenizer, target)
    assert not target.exists() and value(tmp_path / "m.partial") == 2.0
    script.save(new, tokenizer, target)  # the rest of a killed run is in nobody's way
    assert value(target) == 2.0 and [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("name", ["gsm8k_grpo"])  # `save` is the same text in every script
def test_full_disk_is_one_line_and_leaves_the_older_folder(name, tiny, tmp_path):
    """No file may grow beyond 50 kB: the weights do not fit."""
    pytest.importorskip("resource")
    target = tmp_path / "m"
    make_model().save_pretrained(target)
    before = (target / "model.safetensors").read_bytes()
    limit = "import resource, signal, runpy, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); sys.argv = sys.argv[1:]; "
    limit += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", limit, str(ROOT / f"{name}.py"), "--model", str(tiny), "--device", "cpu"]
    command += [*flags(name, steps=1), "--save", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "--save" in done.stderr.strip().splitlines()[-1]
    assert (target / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the administrator may write anywhere")
@pytest.mark.parametrize("name", NAMES)
def test_read_only_folder_is_refused_before_training(name, tiny, tmp_path, capsys):
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(ValueError, match="--save"):
        train(name, tiny, capsys, save=str(tmp_path / "locked" / "model"))


@pytest.mark.parametrize("name", NAMES)
def test_folder_that_may_not_be_written_is_refused(name, tiny, tmp_path, capsys, monkeypatch):
    def refuse(*args, **kwargs):  # as for a user without rights; the tests may run as the administrator
        raise PermissionError("Permission denied")

    monkeypatch.setattr(SCRIPTS[name].Path, "mkdir", refuse)
    with pytest.raises(ValueError, match="--save .*Permission denied"):
        train(name, tiny, capsys, save=str(tmp_path / "model"))


@having("check")
def test_save_is_refused_where_it_cannot_work(script, tmp_path):
    (tmp_path / "m.partial").write_text("a file")
    (tmp_path / "file").write_text("another")
    for bad in (
        tmp_path / "m",
        tmp_path / "file",
        tmp_path / "file" / "m",
        tmp_path / ("x" * 250),
        "/dev/null",
        "a\0b",
    ):
        with pytest.raises(ValueError, match="--save"):
            script.check(script.Config(save=str(bad)))
    assert (tmp_path / "m.partial").read_text() == "a file"


@having("save")
def test_save_into_the_folder_that_one_is_in_and_through_a_link(script, tmp_path, monkeypatch):
    here, link = tmp_path / "here", tmp_path / "link"
    model, tokenizer = make_model(), make_tokenizer()
    for target in (".", "sub/..", "../link"):
        script.save(make_model(seed=1), tokenizer, here)
        link.symlink_to(here)
        (here / "sub").mkdir()
        monkeypatch.chdir(here)
        script.check(script.Config(save=target))
        script.save(model, tokenizer, target)
        monkeypatch.chdir(tmp_path)
        link.unlink()
        assert [p.name for p in tmp_path.iterdir()] == ["here"]
        saved = load_file(here / "model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(saved, model.model.embed_tokens.weight)


@pytest.mark.parametrize(
    "stop", [torch.OutOfMemoryError("out of memory"), KeyboardInterrupt()], ids=["error", "ctrl-c"]
)
@pytest.mark.parametrize("name", NAMES)
def test_what_has_not_trained_a_step_leaves_an_older_model_alone(name, stop, tiny, tmp_path, capsys, monkeypatch):
    target = tmp_path / "m"
    make_model(seed=1).save_pretrained(target)
    before = (target / "model.safetensors").read_bytes()

    def interrupt(*args, **kwargs):
        raise stop

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", interrupt)
    if isinstance(stop, KeyboardInterrupt):
        assert "interrupted" in train(name, tiny, capsys, save=str(target))
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            train(name, tiny, capsys, save=str(target))
    assert (target / "model.safetensors").read_bytes() == before


@having("load")
def test_cached_model_loads_without_a_network(script, tiny, tmp_path, monkeypatch):
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--somebody--tiny"
    shutil.copytree(tiny, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    model, tokenizer = script.load("somebody/tiny", "cpu")
    assert torch.equal(model.model.embed_tokens.weight, make_model().model.embed_tokens.weight)
    with pytest.raises(ValueError, match="--model somebody/other"):
        script.load("somebody/other", "cpu")


@having("load")
def test_model_and_tokenizer_that_do_not_fit_are_refused_by_load(script, tmp_path):
    refusing = "{{ raise_exception('System role not supported') }}"
    for i, (vocab, tokenizer) in enumerate(
        [(260, make_tokenizer(refusing)), (200, make_tokenizer()), (260, make_tokenizer(pad=None, eos=None))]
    ):
        make_model(vocab=vocab).save_pretrained(tmp_path / str(i))
        tokenizer.save_pretrained(tmp_path / str(i))
        with pytest.raises(ValueError, match="--model"):
            script.load(str(tmp_path / str(i)), "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_model_with_more_ids_than_its_tokenizer(name, tmp_path, capsys):
    """Output layers are often padded to a round size: ids 260 to 319 have no text, and can be sampled."""
    make_model(vocab=320, spread=0.01).save_pretrained(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    assert "---" in train(name, tmp_path / "m", capsys)


@pytest.mark.parametrize("name", RL)
def test_tokenizer_with_bos_and_without_pad(name, tmp_path, capsys):
    make_model().save_pretrained(tmp_path / "m")
    make_tokenizer(pad=None, bos="<|end|>").save_pretrained(tmp_path / "m")
    assert "---" in train(name, tmp_path / "m", capsys)


def test_console_of_windows_and_an_emoji(tiny, tmp_path):
    """cp1252 has neither the emoji of the question nor the replacement character of a broken byte sequence."""
    rows = tmp_path / "rows"
    rows.mkdir()
    row = '{"question": "Ann \\ud83d\\ude00 has 1 pen. How many?", "answer": "\\u4e00\\n#### 1"}\n'
    (rows / "train.jsonl").write_text(row * 510)
    (rows / "test.jsonl").write_text(row)
    few = flags("gsm8k_sft_grpo", data=rows, steps=5, sft_steps=1)
    done = run("gsm8k_sft_grpo", "--model", tiny, *few, PYTHONIOENCODING="cp1252")
    assert "\\U0001f600" in done.stdout or "\\xf0" in done.stdout or "\\ufffd" in done.stdout
