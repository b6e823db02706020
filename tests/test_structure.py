"""What makes seven copies readable as one: same order, same text, same size. The scripts are parsed, not run."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib

import pytest
from conftest import GSM8K, NAMES, ROOT, TOY

SECTIONS = [
    "Config",
    "Data and reward",
    "Model",
    "Tokens and masks",
    "Sampling",
    "Log-probabilities",
    "Loss",
    "Evaluation",
    "Training loop",
]
# Definitions that may differ between scripts, and why.
EXCEPTIONS = {
    "Config": "each script has its own knobs",
    "main": "the training loop is the lesson",
    "reward": "a sum in tags, or a boxed number: one text for the toy scripts, one for GSM8K",
    "evaluate": "all held-out sums, or error bars, length and pass@k: one text for the toy scripts, one for GSM8K",
}
SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in NAMES}


def definitions(source):
    """Name -> text of each top-level function and class, decorators and comments included."""
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def code_lines(source):
    """Numbers of the lines that hold code: no blanks, comments or docstrings."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        ):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def test_shared_functions_are_the_same_text_in_every_script():
    copies = {}
    for name, source in SOURCES.items():
        for function, text in definitions(source).items():
            copies.setdefault(function, {})[name] = text
    for function, texts in copies.items():
        if function in ("Config", "main"):
            continue
        families = (TOY, GSM8K) if function in EXCEPTIONS else (NAMES,)
        for family in families:
            assert len({texts[name] for name in family if name in texts}) <= 1, f"{function} differs in {family}"
    assert {"sample", "token_logprobs", "load", "save", "pad", "evaluate"} <= {
        f for f, t in copies.items() if len(t) == len(NAMES)
    }


def test_gsm8k_scripts_share_one_table_of_differences():
    tables = [re.search(r"nanochat's chat_rl.*?\n\nLeft out", SOURCES[n], re.S)[0] for n in (GSM8K[0], GSM8K[2])]
    assert tables[0] == tables[1]
    for flag in ("--beta 0", "--inner_epochs 1", "--scale_by_std false"):
        assert flag in tables[0]


@pytest.mark.parametrize("name", NAMES)
def test_sections_come_in_order_with_their_numbers(name):
    banners = re.findall(r"^# ---- (\d)\. (.*?) -+$", SOURCES[name], re.M)
    assert banners == [(str(i), title) for i, title in enumerate(SECTIONS, 1)]
    assert ast.get_docstring(ast.parse(SOURCES[name])).count("Glossary: B prompts, G completions per prompt") == 1
    assert f"uv run {name}.py" in ast.get_docstring(ast.parse(SOURCES[name]))


def test_entry_point_is_the_same_text_in_every_script():
    assert len({source[source.index("if __name__ ==") :] for source in SOURCES.values()}) == 1


def test_functions_stand_in_the_same_order_everywhere():
    for one in NAMES:
        order = list(definitions(SOURCES[one]))
        for name in NAMES:
            shared = [f for f in definitions(SOURCES[name]) if f in order]
            assert shared == [f for f in order if f in shared], (one, name)


@pytest.mark.parametrize("name", NAMES)
def test_imports_are_the_runtime_packages_and_no_other_script(name):
    allowed = {"torch", "transformers", "datasets", "tqdm"} | set(sys.stdlib_module_names)
    for node in ast.walk(ast.parse(SOURCES[name])):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert {module.split(".")[0] for module in modules} <= allowed


@pytest.mark.parametrize("name", NAMES)
def test_import_does_no_work(name):
    for node in ast.parse(SOURCES[name]).body:
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) == "__name__ == '__main__'"
        else:
            assert isinstance(
                node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.Expr)
            ), node
            assert not isinstance(node, ast.Expr) or isinstance(node.value, ast.Constant)


def depth(node):
    """Deepest nesting of blocks in a function; elif counts as nested, as it is in the syntax tree."""
    block = isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try))
    return block + max((depth(child) for child in ast.iter_child_nodes(node)), default=0)


@pytest.mark.parametrize("name", NAMES)
def test_functions_are_short_and_flat(name):
    for node in ast.parse(SOURCES[name]).body:
        if isinstance(node, ast.FunctionDef):
            limit = 60 if node.name == "main" else 40
            assert node.end_lineno - node.lineno + 1 <= limit, node.name
            assert depth(node) <= 4, node.name
            assert node.name == "main" or ast.get_docstring(node), f"{node.name} has no docstring"


# Lines of code, and lines in all. A toy script should have 180 and 280, one on GSM8K 220 and 350 without its protocol;
# these may only go down.
SIZES = {
    "minimal_sft": (198, 292),
    "minimal_dpo": (216, 318),
    "minimal_grpo": (229, 336),
    "minimal_ppo": (249, 355),
    "gsm8k_grpo": (313, 454),
    "gsm8k_sft_grpo": (338, 477),
    "gsm8k_grpo_autoresearch": (300, 433),
}


@pytest.mark.parametrize("name", NAMES)
def test_size(name):
    source, (code, lines) = SOURCES[name], SIZES[name]
    protocol = source[source.find("\nPROTOCOL") : source.index('\n"""\n')] if "\nPROTOCOL" in source else ""
    assert len(code_lines(source)) <= code and len(source.splitlines()) - protocol.count("\n") <= lines
    assert max(map(len, source.splitlines())) <= 120


def test_ruff_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_runtime_packages_are_the_four():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.match(r"[a-z]+", d)[0] for d in project["dependencies"]} == {"torch", "transformers", "datasets", "tqdm"}


def test_top_level_holds_nothing_else():
    allowed = {*(f"{name}.py" for name in NAMES), "pyproject.toml", "uv.lock", "README.md", "LICENSE", "tests", "out"}
    found = {p.name for p in ROOT.iterdir() if not p.name.startswith((".", "__pycache__")) and p.suffix != ".egg-info"}
    assert found <= allowed, found - allowed
