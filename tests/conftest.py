"""Tiny random models, the scripts as modules, and a runner for their command lines. Nothing here needs the hub."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a test never waits for the hub

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
TOY = ["minimal_sft", "minimal_dpo", "minimal_grpo", "minimal_ppo"]
GSM8K = ["gsm8k_grpo", "gsm8k_sft_grpo", "gsm8k_grpo_autoresearch"]
NAMES = TOY + GSM8K
RL = ["minimal_grpo", "minimal_ppo", *GSM8K]
CLIPPED = ["minimal_grpo", "minimal_ppo", "gsm8k_grpo", "gsm8k_sft_grpo"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_configure():
    """Of the tests alone: bench.py imports this file too, and times all threads."""
    torch.set_num_threads(1)  # a tiny model gains nothing from more, and threads that wait slow each other down


def import_script(name):
    """The script as a module, under its own name, without running it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


SCRIPTS = {name: import_script(name) for name in NAMES}


def having(function):
    """Parametrize a test over every script that has the function: a case is tested in each copy."""
    found = [script for script in SCRIPTS.values() if hasattr(script, function)]
    assert found
    return pytest.mark.parametrize("script", found, ids=lambda script: script.__name__)


def make_tokenizer(template=CHATML, pad="<|pad|>", eos="<|im_end|>", bos=None):
    """One token per byte, and the chat marks as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>", "<|end|>"])  # 256 to 259
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, bos_token=bos)
    fast.chat_template = template
    return fast


def make_model(family="qwen2", eos=257, seed=0, vocab=260, spread=0.3):
    """A random model with two layers, in eval mode. spread scales its weights: 0.3 gives peaked distributions."""
    torch.manual_seed(seed)
    if family == "qwen2":
        config = Qwen2Config(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=spread,
            tie_word_embeddings=True,
            eos_token_id=eos,
            bos_token_id=None,
            pad_token_id=None,
        )
        return Qwen2ForCausalLM(config).eval()
    config = GPT2Config(
        vocab_size=vocab,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=spread,
        eos_token_id=eos,
        bos_token_id=None,
        resid_pdrop=0.5,
        embd_pdrop=0.5,
        attn_pdrop=0.5,
    )
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(params=["qwen2", "gpt2"])
def model(request):
    return make_model(request.param)


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder of a tiny Qwen2 checkpoint with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


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
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(word_problem(i)) + "\n" for i in range(count)))
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
        found.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]))
        return clip(parameters, *args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
    return found


@pytest.fixture(scope="session")
def smollm2():
    """Folder of SmolLM2-135M-Instruct, built once."""
    import smollm2

    return smollm2.build()


def environment(**extra):
    """The caller's environment without the hub, and with one thread: a tiny model gains nothing from more."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"} | extra


def run(name, *flags, folder=None, check=True, **extra):
    """Run a script with the flags; with `folder`, a lone copy of it from there. The finished process."""
    path = ROOT / f"{name}.py"
    if folder is not None:
        path = shutil.copy(path, folder)
    command = [sys.executable, str(path), "--device", "cpu", *map(str, flags)]
    done = subprocess.run(
        command, cwd=folder, env=environment(**extra), capture_output=True, text=True, encoding="utf-8"
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def flags(name, **knobs):
    """The small settings of a script as flags of its command line."""
    return [part for key, value in (SMALL[name] | knobs).items() for part in (f"--{key}", str(value))]


def summary(output):
    """The `key: value` lines after the last `---`."""
    return dict(line.split(": ", 1) for line in output.rpartition("---\n")[2].strip().splitlines())


def steps(output):
    """The step lines without their seconds, the one figure that may differ between equal runs."""
    return [line.rsplit("  ", 1)[0] for line in output.splitlines() if line.startswith("step ")]
