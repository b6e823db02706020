"""Seven files that read as one: the same text, order and sizes. The scripts are parsed, not run."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib

import pytest
from conftest import GSM8K, NAMES, ROOT, TOY

SECTIONS = ["The algorithm", "The task", "The model", "Evaluation", "Training"]
PACKAGES = {"torch", "transformers", "datasets", "tqdm"}
SIZES = {  # most lines of code, most lines in all
    "minimal_sft": (140, 210),
    "minimal_dpo": (155, 230),
    "minimal_grpo": (170, 250),
    "minimal_ppo": (195, 285),
    "gsm8k_grpo": (220, 315),
    "gsm8k_sft_grpo": (245, 345),
    "gsm8k_grpo_autoresearch": (200, 290),
}
SOURCES = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in NAMES}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}


def definitions(name):
    """Name -> text of each top-level function, class and constant, decorators and comments too."""
    lines, found = SOURCES[name].splitlines(), {}
    for node in TREES[name].body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign)):
            key = node.targets[0].id if isinstance(node, ast.Assign) else node.name
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            found[key] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def functions(name):
    """Name -> syntax tree of each function."""
    return {n.name: n for n in ast.walk(TREES[name]) if isinstance(n, ast.FunctionDef)}


def code_lines(source):
    """The lines that hold code, without indentation: no blanks, comments or docstrings."""
    lines, skipped = source.splitlines(), set()
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
        if documented and ast.get_docstring(node) is not None:
            skipped.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            skipped.add(token.start[0])
    return [x.strip() for i, x in enumerate(lines, 1) if x.strip() and i not in skipped]


def docstring(name):
    """The lines of a script's docstring without the protocol, and those of the protocol."""
    text, mark, protocol = ast.get_docstring(TREES[name]).partition("\nPROTOCOL")
    return text.splitlines(), (mark + protocol).splitlines()[1:]


def depth(node):
    """Deepest nesting of blocks; an elif counts as nested, as it does in the syntax tree."""
    block = isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try))
    return block + max(map(depth, ast.iter_child_nodes(node)), default=0)


def test_shared_functions_are_the_same_text_in_every_script():
    texts = {name: definitions(name) for name in NAMES}
    own = {"main", "Config"}
    names = {key for text in texts.values() for key in text}
    of_the_task = {"reward", "evaluate", *filter(str.isupper, names)}
    for key in names - own:
        for family in (TOY, GSM8K) if key in of_the_task else (NAMES,):
            copies = {texts[name][key] for name in family if key in texts[name]}
            assert len(copies) <= 1, f"{key} differs in {family}"
    everywhere = set.intersection(*map(set, texts.values()))
    assert {"load", "encode_prompts", "prefill", "sample", "token_logprobs"} <= everywhere


def test_functions_stand_in_the_same_order_everywhere():
    for one in NAMES:
        order = list(definitions(one))
        for name in NAMES:
            shared = [key for key in definitions(name) if key in order]
            assert shared == [key for key in order if key in shared], (one, name)


def test_entry_point_is_the_same_text_in_every_script():
    assert len({source[source.index("\nif __name__ ==") :] for source in SOURCES.values()}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_function_is_used(name):
    used = {node.id for node in ast.walk(TREES[name]) if isinstance(node, ast.Name)}
    assert set(functions(name)) <= used


@pytest.mark.parametrize("name", NAMES)
def test_five_numbered_sections_in_order(name):
    banners = re.findall(r"^# ---- (\d)\. (.*?) -+$", SOURCES[name], re.M)
    assert banners == [(str(i), title) for i, title in enumerate(SECTIONS, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_docstring_is_short_and_has_the_run_line_and_the_letters(name):
    lines, protocol = docstring(name)
    assert len(lines) <= 18 and len(protocol) <= 45
    assert bool(protocol) == (name == "gsm8k_grpo_autoresearch")
    assert f"Run: uv run {name}.py" in lines
    assert any(line.startswith("B prompts, G completions per prompt") for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_size(name):
    source, code, (most_code, most_lines) = SOURCES[name], code_lines(SOURCES[name]), SIZES[name]
    assert len(code) <= most_code
    assert len(source.splitlines()) - len(docstring(name)[1]) <= most_lines
    assert max(map(len, source.splitlines())) <= 100
    assert sum(map(len, code)) / len(code) <= 52  # lines are not packed


@pytest.mark.parametrize("name", NAMES)
def test_functions_are_short_flat_and_documented(name):
    for key, node in functions(name).items():
        is_main = key == "main"
        assert node.end_lineno - node.lineno + 1 <= (62 if is_main else 30), key
        assert depth(node) <= (4 if is_main else 3), key
        assert is_main or len(ast.get_docstring(node).splitlines()) <= 2, key


def test_grpo_is_seen_at_a_glance():
    found = functions("minimal_grpo")
    for key in ("group_advantages", "clipped_surrogate", "kl_to_reference"):
        assert found[key].end_lineno <= 60
    loops = [node for node in ast.walk(found["main"]) if isinstance(node, ast.For)]
    loop = next(node for node in loops if node.target.id == "step")
    assert loop.end_lineno - loop.lineno + 1 <= 45


@pytest.mark.parametrize("name", NAMES)
def test_imports_are_the_runtime_packages_and_no_other_script(name):
    for node in ast.walk(TREES[name]):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert {m.split(".")[0] for m in modules} <= PACKAGES | set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", NAMES)
def test_import_does_no_work(name):
    head, *body, entry = TREES[name].body
    assert isinstance(head, ast.Expr) and ast.unparse(entry.test) == "__name__ == '__main__'"
    for node in body:
        kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        assert isinstance(node, kinds) or constant, ast.unparse(node)


@pytest.mark.parametrize("name", NAMES)
def test_every_device_and_float32(name):
    for word in ("autocast", ".cuda(", "torch.cuda", "bfloat16", "float16"):
        assert word not in SOURCES[name]


def test_ruff_finds_nothing():
    command = [sys.executable, "-m", "ruff", "check", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_runtime_packages_are_the_four():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]} == PACKAGES


def test_top_level_holds_nothing_else():
    allowed = {*(f"{name}.py" for name in NAMES), "tests", "out"}
    allowed |= {"pyproject.toml", "uv.lock", "README.md", "LICENSE"}
    found = {path.name for path in ROOT.iterdir() if path.suffix != ".egg-info"}
    assert {key for key in found if not key.startswith((".", "__pycache__"))} <= allowed
