"""Tiny random models, the scripts as modules, a runner for their command lines; no hub needed."""

import atexit
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test waits for the hub
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()  # the rows of tests, deleted at exit

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

ROOT = Path(__file__).resolve().parent.parent
TOY = ["minimal_sft", "minimal_dpo", "minimal_grpo", "minimal_ppo"]
GSM8K = ["gsm8k_grpo", "gsm8k_sft_grpo", "gsm8k_grpo_autoresearch"]
NAMES = TOY + GSM8K
RL = ["minimal_grpo", "minimal_ppo", *GSM8K]
CLIPPED = ["minimal_grpo", "minimal_ppo", "gsm8k_grpo", "gsm8k_sft_grpo"]

# Chat templates: Qwen's; Gemma's, which refuses a system turn; and one that drops it silently.
TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + OPENING
REFUSES = "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
REFUSES += "{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
DROPS = "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}" + TURN
DROPS += "{% endif %}{% endfor %}" + OPENING


def pytest_configure():
    """In tests alone: bench.py imports this file too, and times all threads."""
    torch.set_num_threads(1)  # a tiny model gains nothing from more


def import_script(name):
    """The script as a module, under its own name, without running it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


SCRIPTS = {name: import_script(name) for name in NAMES}


def having(function):
    """Parametrize a test over every script that has the function: each copy is tested."""
    found = [script for script in SCRIPTS.values() if hasattr(script, function)]
    assert found
    return pytest.mark.parametrize("script", found, ids=lambda script: script.__name__)


def make_tokenizer(template=CHATML, pad="<|pad|>", eos="<|im_end|>", bos=None):
    """One token per byte, and the chat marks as special tokens: ids 256 to 259."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>", "<|end|>"])
    special = {"pad_token": pad, "eos_token": eos, "bos_token": bos}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    return fast


def make_model(family="qwen2", eos=257, seed=0, vocab=260, spread=0.3):
    """A random model of two layers, in eval mode; spread scales its weights: 0.3 gives peaks."""
    torch.manual_seed(seed)
    common = {"vocab_size": vocab, "initializer_range": spread, "eos_token_id": eos}
    if family == "qwen2":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 512}
        layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = Qwen2Config(**common, **sizes, **layers, tie_word_embeddings=True)
        return Qwen2ForCausalLM(config).eval()
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "bos_token_id": None}
    dropout = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    return GPT2LMHeadModel(GPT2Config(**common, **sizes, **dropout)).eval()


@pytest.fixture(params=["qwen2", "gpt2"])
def model(request):
    return make_model(request.param)


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def save(folder, model=None, tokenizer=None):
    """Save a checkpoint, by default the tiny Qwen2; returns its folder."""
    (model or make_model()).save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder of a tiny Qwen2 checkpoint with its tokenizer."""
    return save(tmp_path_factory.mktemp("tiny") / "model")


def pad(rows, pad_id=258, side="right"):
    """Lists of ids as tensors: ids and mask, padded on the side."""
    width = max(map(len, rows))
    blanks = [width - len(row) for row in rows]
    if side == "left":
        ids = [[pad_id] * n + row for row, n in zip(rows, blanks)]
        mask = [[0] * n + [1] * len(row) for row, n in zip(rows, blanks)]
    else:
        ids = [row + [pad_id] * n for row, n in zip(rows, blanks)]
        mask = [[1] * len(row) + [0] * n for row, n in zip(rows, blanks)]
    return torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.long)


def prompts_of(rows, pad_id=258):
    """prompt_ids and prompt_mask, padded on the left, from lists of ids."""
    return pad(rows, pad_id, "left")


def word_problem(i):
    """A row in the form of GSM8K: calculator marks, and the gold number behind ####."""
    return {
        "question": f"Ann has {i} pens and buys 2. How many?",
        "answer": f"She has {i}+2=<<{i}+2={i + 2}>>{i + 2} pens.\n#### {i + 2:,}",
    }


def write_rows(folder, train=520, test=7):
    """train.jsonl and test.jsonl in the folder; returns it."""
    folder.mkdir(exist_ok=True)
    for split, count in (("train", train), ("test", test)):
        lines = [json.dumps(word_problem(i)) + "\n" for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


# Settings that make a run on a tiny model short, by script.
SMALL = {name: {"steps": 2, "batch_size": 4} for name in TOY} | {
    name: {"batch_size": 4, "group_size": 2, "max_new_tokens": 12, "eval_size": 5} for name in GSM8K
}
SMALL["gsm8k_grpo"] |= {"steps": 2}
SMALL["gsm8k_sft_grpo"] |= {"steps": 2, "sft_steps": 1}


@pytest.fixture(scope="session", autouse=True)
def rows(tmp_path_factory):
    """Folder of 520 + 7 word problems, and the GSM8K scripts' --data."""
    folder = write_rows(tmp_path_factory.mktemp("rows") / "gsm8k")
    for name in GSM8K:
        SMALL[name]["data"] = str(folder)
    return folder


@pytest.fixture
def updates(monkeypatch):
    """A list that gets the gradient of each update, as one vector, before it is clipped."""
    found, clip = [], torch.nn.utils.clip_grad_norm_

    def keep(parameters, *args, **kwargs):
        parameters = [*parameters]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        found.append(torch.cat([g.flatten() for g in grads]))
        return clip(parameters, *args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
    return found


@pytest.fixture
def train(monkeypatch, capsys):
    """train(name, folder, **knobs): main in this process, its output; autoresearch: 2 steps."""

    def of(name, folder, **knobs):
        script = SCRIPTS[name]
        if name == "gsm8k_grpo_autoresearch" and "minutes" not in knobs:
            # A clock that goes on by a second a look: two looks before step 1, two in a step.
            clock = SimpleNamespace(perf_counter=itertools.count().__next__)
            monkeypatch.setattr(script, "time", clock)
            knobs["minutes"] = 4 / 60
        capsys.readouterr()
        knobs = {"model": str(folder), "device": "cpu"} | SMALL[name] | knobs
        script.main(script.Config(**knobs))
        return capsys.readouterr().out

    return of


@pytest.fixture(scope="session")
def smollm2():
    """Folder of SmolLM2-135M-Instruct, built once."""
    import smollm2

    return smollm2.build()


def environment(**extra):
    """The caller's environment with one thread: a tiny model gains nothing from more."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"} | extra


def run(name, *flags, folder=None, check=True, **extra):
    """Run a script with the flags; with `folder`, a lone copy of it from there. Its process."""
    path = ROOT / f"{name}.py"
    if folder is not None:
        path = shutil.copy(path, folder)
    command = [sys.executable, str(path), "--device", "cpu", *map(str, flags)]
    captured = {"capture_output": True, "text": True, "encoding": "utf-8"}
    done = subprocess.run(command, cwd=folder, env=environment(**extra), **captured)
    assert not check or done.returncode == 0, done.stderr
    return done


def flags(name, **knobs):
    """The small settings of a script as flags of its command line."""
    return [
        part for key, value in (SMALL[name] | knobs).items() for part in (f"--{key}", str(value))
    ]


def summary(output):
    """The `key: value` lines after the last `---`."""
    return dict(line.split(": ", 1) for line in output.rpartition("---\n")[2].strip().splitlines())


def steps(output):
    """The step lines without their seconds, the one figure that may differ between equal runs."""
    return [line.rsplit("  ", 1)[0] for line in output.splitlines() if line.startswith("step ")]
