"""GSM8K: the number in the box, the rows, the evaluation, the update in parts, and the identity with REINFORCE."""

import json
import math
import random
import re
import time

import pytest
import torch
from conftest import GSM8K, SCRIPTS, SMALL, having, make_model, make_tokenizer, word_problem, write_rows
from test_runs import train, trained

scripts = having("extract_answer")


@scripts
@pytest.mark.parametrize(
    "gold, completion, expected",
    [
        # thousands
        ("8000", r"\boxed{8,000}", 1),
        ("1234", r"\boxed{1,234.00}", 1),
        ("9500", r"\boxed{$9{,}500}", 1),
        ("9500", r"\boxed{\$9\,500}", 1),
        ("9500", r"\boxed{\text{\$9,\!500}}", 1),
        ("1,234,567", r"\boxed{1234567}", 1),
        ("12000", r"\boxed{12{,}\!000}", 1),
        ("12000", r"\boxed{12\ 000}", 1),
        ("12000", r"\boxed{12~000}", 1),
        ("12000", r"\boxed{12 000}", 0),
        ("12", r"\boxed{1,2}", 0),
        ("12", r"\boxed{1$2}", 0),
        ("12345", r"\boxed{1,2345}", 0),
        # decimals, units, words
        ("29", r"\boxed{$29.00}", 1),
        ("29", r"\boxed{29.}", 1),
        ("29", r"\boxed{29 dollars}", 1),
        ("29", r"\boxed{29\text{ dollars}}", 1),
        ("29", r"\boxed{x = 29}", 1),
        ("29", r"\boxed{29\%}", 1),
        ("29", r"\boxed {29}", 1),
        ("29", r"\boxed{29\text{ m}^2}", 1),
        ("29", r"\boxed{29 ft^{3}}", 1),
        ("29", r"\boxed{29 km/h}", 1),
        ("29", r"\boxed{2.9}", 0),
        ("29", r"\boxed{290}", 0),
        ("29", r"\boxed{-29}", 0),
        ("0.5", r"\boxed{.50}", 1),
        ("12", r"\boxed{12.0}", 1),
        ("12.0", r"\boxed{12}", 1),
        # signs
        ("3", r"\boxed{-3}", 0),
        ("-3", r"\boxed{-3}", 1),
        ("-3", "\\boxed{\u22123}", 1),
        ("-3", r"\boxed{-\$3}", 1),
        ("-3", r"\boxed{x=-3}", 1),
        ("3", r"\boxed{step-3}", 1),
        ("-3", r"\boxed{-\,3}", 1),
        ("3", r"\boxed{-\ 3}", 0),
        ("3", r"\boxed{-{3}}", 0),
        ("3", r"\boxed{-(3)}", 0),
        ("3", r"\boxed{-\text{3}}", 0),
        ("3", "\\boxed{-\u20ac3}", 0),
        ("3", "\\boxed{\u20133}", 0),
        # not one number
        ("12", "", 0),
        ("12", "12", 0),
        ("12", r"\boxed{}", 0),
        ("12", r"\boxed{1}", 0),
        ("12", r"\boxed{112}", 0),
        ("12", r"\boxed{1 2 3 12}", 0),
        ("12", r"\boxed{10-12}", 0),
        ("12", r"\boxed{\frac12}", 0),
        ("12", r"\boxed{\dfrac{12}{1}}", 0),
        ("12", r"\boxed{\sqrt{12}}", 0),
        ("12", r"\boxed{12\pi}", 0),
        ("12", r"\boxed{\pm 12}", 0),
        ("12", r"\boxed{12!}", 0),
        ("12", r"\boxed{x/12}", 0),
        ("12", r"\boxed{x^{12}}", 0),
        ("12", "\\boxed{12\u00bd}", 0),
        ("12", "\\boxed{\u221a12}", 0),
        # which box
        ("12", r"\boxed{12", 0),
        ("12", r"\boxed{12} and \boxed{13", 1),
        ("12", r"\boxed{12} and \boxed{13}", 0),
        ("12", r"\boxed{13} and \boxed{12}", 1),
        ("12", r"{ \boxed{\boxed{12}}", 1),
        ("12", r"boxed{12}", 0),
        # exact, whatever the length
        ("1" * 1000, rf"\boxed{{{'1' * 1000}}}", 1),
        ("1" * 1000, rf"\boxed{{{'1' * 999}2}}", 0),
        ("0.1", r"\boxed{0.1000000000000000055511151231257827}", 0),  # the float that is printed as 0.1
    ],
)
def test_reward_reads_the_number_in_the_last_closed_box(script, gold, completion, expected):
    score = script.reward(completion, gold)
    assert score == expected and isinstance(score, float)


@scripts
def test_extracted_answer_is_the_plain_number(script):
    assert script.extract_answer(r"so \boxed{$-8{,}000.50$ a year}") == "-8000.50"
    assert script.extract_answer("8000") is None and script.extract_answer(r"\boxed{\text{none}}") is None


@scripts
@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 15_000,
        r"\boxed{" * 12_000 + "}" * 12_000,
        r"\boxed{" + "1" * 100_000 + "}",
        r"\boxed{" + "1,111" * 20_000 + "}",
        r"\boxed{" + "- " * 50_000 + "}",
        "\\boxed" + " " * 100_000,
        "{" * 100_000,
        r"\boxed{-" + r"\text{" * 15_000,
        r"\boxed{" + "/ " * 50_000 + "}",
        r"\boxed{" + "1" + "," * 100_000 + "}",
    ],
    ids=["unclosed", "nested", "digits", "commas", "signs", "spaces", "braces", "macros", "slashes", "separators"],
)
def test_100_kb_take_no_time(script, text):
    seconds = []
    for _ in range(3):  # the fastest counts: other processes may be at work
        started = time.perf_counter()
        assert script.reward(text, "12") == 0
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.1


@scripts
def test_only_the_completion_is_rewarded(script, tiny, monkeypatch):
    model, tokenizer = make_model(), make_tokenizer()
    texts = []
    monkeypatch.setattr(script, "reward", lambda completion, answer: texts.append(completion) or 0.0)
    config = script.Config(max_new_tokens=3)
    script.rollout(model, tokenizer, [(r"Say \boxed{42}. He buys 8", "", "42")], 2, config)
    assert len(texts) == 2 and not any("42" in text or "8" in text for text in texts)


@scripts
def test_rows_lose_their_calculator_marks_and_end_in_the_box(script, rows):
    train_rows, problems = script.gsm8k(script.Config(data=str(rows), eval_size=0))
    assert train_rows[3] == ("Ann has 3 pens and buys 2. How many?", "She has 3+2=5 pens.\n\\boxed{5}", "5")
    assert all(script.reward(solution, answer) == 1 for _, solution, answer in train_rows + problems)
    assert (len(train_rows), len(problems)) == (20, 500) and not {*train_rows} & {*problems}


@scripts
def test_val_is_the_last_500_training_rows_and_test_the_test_file(script, rows):
    train_rows, val = script.gsm8k(script.Config(data=str(rows), eval_size=3))
    assert [answer for *_, answer in val] == ["22", "23", "24"]  # rows 20, 21, 22 of 520
    _, test = script.gsm8k(script.Config(data=str(rows), split="test", eval_size=1000))
    assert [answer for *_, answer in test] == [str(i + 2) for i in range(7)]


@scripts
def test_hub_rows_are_read_the_same_way(script, monkeypatch):
    import datasets

    def load_dataset(name, configuration, split):
        assert (name, configuration) == ("openai/gsm8k", "main")
        return datasets.Dataset.from_list([word_problem(i) for i in range(520 if split == "train" else 7)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train_rows, _ = script.gsm8k(script.Config())
    assert len(train_rows) == 20 and train_rows[0][1:] == ("She has 0+2=2 pens.\n\\boxed{2}", "2")


@scripts
@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "7",
        "",
        '{"question": "Q"}',
        '{"question": 1, "answer": "#### 1"}',
        '{"question": "Q", "answer": "1"}',
        '{"question": "Q", "answer": "#### "}',
        '{"question": "Q", "answer": "#### one"}',
        '{"question": "Q", "answer": "#### 1 or 2"}',
        '{"question": "Q", "answer": "#### 1 #### 2"}',
        b"\xff\xfe",
    ],
    ids=repr,
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_malformed_row_is_named_by_file_and_line(script, tmp_path, split, line):
    path = write_rows(tmp_path / "rows") / f"{split}.jsonl"
    lines = path.read_bytes().splitlines()
    lines[4] = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=rf"--data .*rows, {split}\.jsonl line 5: "):
        script.gsm8k(script.Config(data=str(tmp_path / "rows")))


@scripts
def test_gold_number_is_stored_plain_and_marks_cost_no_time(script, tmp_path):
    path = write_rows(tmp_path / "rows") / "train.jsonl"
    row = {"question": "Q", "answer": "<" * 100_000 + "<<1+1=2>>$1,002.\n#### $1,002"}
    path.write_text("\n".join([json.dumps(row), *path.read_text().splitlines()[1:]]))
    started = time.perf_counter()
    train_rows, _ = script.gsm8k(script.Config(data=str(tmp_path / "rows")))
    assert time.perf_counter() - started < 5
    assert train_rows[0] == ("Q", "<" * 100_000 + "$1,002.\n\\boxed{1002}", "1002")


@scripts
def test_too_few_rows_are_refused(script, tmp_path):
    one = write_rows(tmp_path / "one", train=501)
    train_rows, _ = script.gsm8k(script.Config(data=str(one), batch_size=1))
    assert len(train_rows) == 1
    for train_count, test_count, batch_size in ((500, 7, 1), (501, 7, 2), (520, 0, 1), (0, 7, 1)):
        folder = write_rows(tmp_path / "few", train_count, test_count)
        with pytest.raises(ValueError, match="--data"):
            script.gsm8k(script.Config(data=str(folder), batch_size=batch_size))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="--data"):
        script.gsm8k(script.Config(data=str(tmp_path / "empty")))


@scripts
def test_pass_at_k(script):
    assert script.pass_at_k(8, 2, 4) == pytest.approx(0.785714, abs=1e-6)  # 1 - C(6,4)/C(8,4) = 1 - 15/70
    assert script.pass_at_k(8, 0, 8) == 0 and script.pass_at_k(8, 1, 8) == 1 and script.pass_at_k(5, 2, 1) == 0.4
    draws = [any(x < 2 for x in random.Random(i).sample(range(8), 3)) for i in range(4000)]
    assert script.pass_at_k(8, 2, 3) == pytest.approx(sum(draws) / 4000, abs=0.03)
    for n, c, k in ((4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)):
        with pytest.raises(ValueError):
            script.pass_at_k(n, c, k)


@scripts
@pytest.mark.parametrize("count, batch_size", [(1, 4), (7, 2), (8, 2), (7, 100)])
@pytest.mark.parametrize("samples", [0, 3])
def test_evaluation_counts_each_problem_once(script, monkeypatch, count, batch_size, samples, capsys):
    model, tokenizer = make_model(), make_tokenizer()
    problems = [(f"Question {i * 7919}?", "", str(i)) for i in range(count)]
    scored = []
    monkeypatch.setattr(script, "reward", lambda c, a: scored.append(a) or float(int(a) % 3 == 0))
    config = script.Config(batch_size=batch_size, group_size=2, max_new_tokens=6, eval_samples=samples)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    result = script.evaluate(model, tokenizer, problems, config)
    assert torch.equal(torch.get_rng_state(), before)  # as it was found
    assert sorted(scored) == sorted([a for *_, a in problems] * (1 + samples))
    k, p = (count + 2) // 3, (count + 2) // 3 / count
    assert result["accuracy"] == f"{p:.3f} ({k}/{count})" and result["se"] == f"{math.sqrt(p * (1 - p) / count):.3f}"
    # Wilson's bounds are the solutions q of |p - q| = 1.96 sqrt(q (1 - q) / n).
    for q in map(float, result["interval"].split(" to ")):
        assert abs(p - q) == pytest.approx(1.96 * math.sqrt(max(q * (1 - q), 0) / count), abs=2e-3)
    for i in range(1, samples + 1):
        assert result[f"pass@{i}"] == f"{p:.3f}"  # every sample of a problem scores, or none
    assert f"pass@{samples + 1}" not in result
    # Length and cut-off by one problem at a time.
    stops, lengths, cut = script.stop_ids(model, tokenizer), [], 0
    for problem in problems:
        _, ids, mask, *_ = script.rollout(model, tokenizer, [problem], 1, config, greedy=True)
        lengths.append(int(mask.sum()))
        cut += ids[0, -1].item() not in stops
    assert result["length"] == f"{sum(lengths) / count:.1f}" and result["cut_off"] == f"{cut / count:.3f}"


@scripts
def test_cut_off_is_the_share_without_a_stop_token(script, monkeypatch):
    completions = torch.tensor([[1, 257, 257], [1, 2, 3], [1, 2, 257], [257, 257, 257]])  # pad is the stop token here
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 0]])
    monkeypatch.setattr(script, "sample", lambda *args: (completions, mask))
    problems = [("Q", "", "1")] * 4
    result = script.evaluate(make_model(), make_tokenizer(), problems, script.Config(max_new_tokens=3))
    assert result["cut_off"] == "0.250" and result["length"] == "2.2"


@scripts
def test_interval_at_70_of_200_and_at_0(script, monkeypatch):
    monkeypatch.setattr(script, "reward", lambda completion, answer: float(int(answer) < 70))
    problems, config = [("Q", "", str(i)) for i in range(200)], script.Config(max_new_tokens=1)
    result = script.evaluate(make_model(), make_tokenizer(), problems, config)
    assert result["accuracy"] == "0.350 (70/200)" and result["se"] == "0.034"
    low, high = map(float, result["interval"].split(" to "))
    assert (low, high) == pytest.approx((0.287, 0.418), abs=0.001)  # 35% +- 6.6 points
    monkeypatch.setattr(script, "reward", lambda completion, answer: 0.0)
    assert script.evaluate(make_model(), make_tokenizer(), problems, config)["interval"] == "0.000 to 0.019"


@scripts
def test_parts_cover_each_row_once_and_are_sorted(script):
    rows = [[5, 6, 7], [8]]
    prompt_ids, prompt_mask = script.pad(rows, 0, "left")
    lengths = [4, 1, 3, 2, 2, 4, 1, 1]
    ids, mask = script.pad([[10 + i] * n for i, n in enumerate(lengths)], 0, "right")
    advantages = torch.arange(8.0).view(2, 4)
    parts = script.micro_batches(prompt_ids, prompt_mask, ids, mask, advantages, 3, skip_flat=False)
    assert [len(part[2]) for part, _ in parts] == [3, 1, 3, 1]
    seen = []
    for (part_prompt, part_prompt_mask, part_ids, part_mask), part_advantages in parts:
        real = part_mask.sum(1)
        assert real.tolist() == sorted(real.tolist())
        assert part_advantages.shape == (len(part_ids), 1)
        for row, n, advantage in zip(part_ids, real, part_advantages[:, 0]):
            i = int(row[0]) - 10
            assert n == lengths[i] and advantage == i and part_prompt[0].tolist() == rows[i // 4]
            seen.append(i)
        assert part_prompt_mask.all()
    assert sorted(seen) == list(range(8))
    advantages[0] = 0
    assert len(script.micro_batches(prompt_ids, prompt_mask, ids, mask, advantages, 0, skip_flat=True)) == 1
    assert len(script.micro_batches(prompt_ids, prompt_mask, ids, mask, advantages, 0, skip_flat=False)) == 2


@pytest.fixture
def gradients(updates, monkeypatch):
    """A run's gradients, stacked; rewards by a checksum of the text, so that some groups are flat."""
    for name in GSM8K:
        monkeypatch.setattr(
            SCRIPTS[name], "reward", lambda completion, answer: float(sum(completion.encode()) % 3 == 0)
        )

    def of(name, folder, capsys, **knobs):
        updates.clear()
        shown = trained(name, folder, capsys, batch_size=12, **knobs)
        assert 0 < shown[0]["flat"] < 1 and shown[0]["reward"] > 0
        return torch.stack(updates)

    return of


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", GSM8K)
def test_gradient_does_not_depend_on_micro_batch(name, tiny, capsys, gradients):
    whole, *others = (gradients(name, tiny, capsys, group_size=4, micro_batch=m) for m in (0, 1, 3))
    assert len(whole) == {"gsm8k_grpo": 4, "gsm8k_sft_grpo": 5, "gsm8k_grpo_autoresearch": 2}[name]
    for other in others:
        assert all(difference(a, b) < 1e-5 for a, b in zip(other, whole))


def test_three_flags_turn_textbook_grpo_into_reinforce(tiny, capsys, gradients, monkeypatch):
    flags = {"beta": 0.0, "inner_epochs": 1, "scale_by_std": False, "group_size": 3, "lr": 1e-3}
    grpo = gradients("gsm8k_grpo", tiny, capsys, **flags)
    reinforce = gradients("gsm8k_grpo_autoresearch", tiny, capsys, group_size=3, lr=1e-3)
    assert len(grpo) == len(reinforce) == 2 and all(difference(a, b) < 1e-5 for a, b in zip(grpo, reinforce))
    for name in ("gsm8k_grpo", "gsm8k_grpo_autoresearch"):  # the same with no flat group skipped
        micro_batches = SCRIPTS[name].micro_batches
        monkeypatch.setattr(
            SCRIPTS[name], "micro_batches", lambda *args, skip_flat=None, m=micro_batches: m(*args[:6], skip_flat=False)
        )
    assert all(difference(a, b) < 1e-5 for a, b in zip(gradients("gsm8k_grpo", tiny, capsys, **flags), grpo))
    again = gradients("gsm8k_grpo_autoresearch", tiny, capsys, group_size=3, lr=1e-3)
    assert all(difference(a, b) < 1e-5 for a, b in zip(again, grpo))
    for flag, value in (("beta", 0.5), ("inner_epochs", 2), ("scale_by_std", True)):  # each flag is needed
        other = gradients("gsm8k_grpo", tiny, capsys, **(flags | {flag: value}))
        assert len(other) != 2 or max(difference(a, b) for a, b in zip(other, grpo)) > 1e-2


def test_gradient_is_that_of_the_plain_formula(tiny, capsys, gradients, monkeypatch):
    """REINFORCE by hand: each row alone and whole through the model, no cache, no padding, no parts."""
    script, taken = SCRIPTS["gsm8k_grpo_autoresearch"], []
    rollout = script.rollout
    monkeypatch.setattr(script, "rollout", lambda *args, **kw: taken.append(rollout(*args, **kw)) or taken[-1])
    ours = gradients("gsm8k_grpo_autoresearch", tiny, capsys, group_size=3)[0]
    (prompt_ids, prompt_mask), ids, mask, _, rewards = taken[0]
    model = script.load(str(tiny), "cpu")[0]
    for i, (row, real) in enumerate(zip(ids, mask.bool())):
        b = i // 3
        prompt, completion = prompt_ids[b][prompt_mask[b].bool()], row[real]
        logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, completion[:, None])
        advantage = rewards[b, i % 3] - rewards[b].mean()
        (-(advantage * logprobs).sum() / mask.sum()).backward()
    assert difference(ours, torch.cat([p.grad.flatten() for p in model.parameters()])) < 1e-4


@pytest.mark.parametrize("name", ["gsm8k_grpo", "gsm8k_grpo_autoresearch"])
def test_flat_groups_cost_no_pass_without_a_kl_penalty(name, tiny, capsys, monkeypatch):
    script, calls = SCRIPTS[name], []
    logprobs = script.token_logprobs
    monkeypatch.setattr(script, "token_logprobs", lambda *args: calls.append(1) or logprobs(*args))
    monkeypatch.setattr(script, "reward", lambda completion, answer: 0.0)
    shown = trained(name, tiny, capsys, **({"beta": 0.0} if name == "gsm8k_grpo" else {}))
    assert not calls and all(step["flat"] == 1 and step["grad_norm"] == 0 for step in shown)
    if name == "gsm8k_grpo":  # with the penalty they do: 2 steps of 4 groups, the reference once, the policy twice
        trained(name, tiny, capsys, beta=0.1)
        assert len(calls) == 2 * 4 * 3


@pytest.mark.parametrize("name", GSM8K)
def test_eval_flags_do_not_change_the_training(name, tiny, capsys, gradients):
    plain = trained(name, tiny, capsys)
    assert trained(name, tiny, capsys, eval_size=9) == trained(name, tiny, capsys, eval_samples=3) == plain


def test_warm_up_trains_the_gold_solution_and_its_stop_token(tiny, capsys):
    out = train("gsm8k_sft_grpo", tiny, capsys)
    row = next(line for line in out.splitlines() if line.startswith("one row"))
    learned = "".join(re.findall(r"  1 '(.*?)'(?=  |$)", row))
    assert re.search(r"pens\.\\n\\\\boxed\{\d+\}<\|im_end\|>$", learned), learned
    assert "1 '<|im_start|>'" not in row


def test_grpo_starts_from_the_warmed_up_model_with_a_fresh_optimizer(tiny, capsys, monkeypatch):
    script, copies, optimizers = SCRIPTS["gsm8k_sft_grpo"], [], []
    deepcopy, adamw = script.copy.deepcopy, torch.optim.AdamW
    monkeypatch.setattr(
        script, "copy", type("copy", (), {"deepcopy": lambda m: copies.append(deepcopy(m)) or copies[-1]})
    )
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **kw: optimizers.append(adamw(*a, **kw)) or optimizers[-1])
    train("gsm8k_sft_grpo", tiny, capsys, sft_steps=3, sft_lr=1e-2, steps=1)
    start, reference = script.load(str(tiny), "cpu")[0], copies[0]
    assert not torch.equal(start.model.embed_tokens.weight, reference.model.embed_tokens.weight)
    assert not any(p.requires_grad for p in reference.parameters())
    assert len(optimizers) == 2 and optimizers[1].param_groups[0]["lr"] == script.Config().lr
    train("gsm8k_sft_grpo", tiny, capsys, beta=0.0)
    assert len(copies) == 1  # no penalty, no reference


def test_after_the_warm_up_it_is_plain_grpo(tiny, capsys, gradients, monkeypatch):
    monkeypatch.setattr(SCRIPTS["gsm8k_sft_grpo"], "warm_up", lambda *args: None)
    sft = trained("gsm8k_sft_grpo", tiny, capsys)
    assert sft == trained("gsm8k_grpo", tiny, capsys)


@pytest.mark.parametrize("split", ["val", "test"])
def test_autoresearch_stops_by_the_clock_and_names_the_split(split, tiny, capsys):
    import itertools

    knobs = {"minutes": 0.02, "split": split, "eval_samples": 2, "itertools": itertools}
    out = train("gsm8k_grpo_autoresearch", tiny, capsys, **knobs)
    result = dict(line.split(": ") for line in out.split("---\n")[1].splitlines())
    keys = [f"{split}_{key}" for key in ("acc", "se", "interval", "cut_off", "length", "pass@1", "pass@2")]
    assert [*result] == [*keys, "steps", "train_seconds", "seconds", "peak_gb"]
    shown = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(shown) == int(result["steps"]) >= 2 and float(result["train_seconds"]) in (1, 2)
    out = train("gsm8k_grpo_autoresearch", tiny, capsys, minutes=0.0, itertools=itertools)
    assert "\nsteps: 0\n" in out and "step 1" not in out  # the untrained model's accuracy


def test_rows_in_the_tests_have_the_form_of_the_dataset():
    assert json.loads(json.dumps(word_problem(1)))["answer"] == "She has 1+2=<<1+2=3>>3 pens.\n#### 3"
    assert all("data" in SMALL[name] for name in GSM8K)
