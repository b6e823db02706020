"""GSM8K: the number in the box, the rows, the evaluation, the micro-batches, and REINFORCE."""

import copy
import math
import random
import re
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    GSM8K,
    SCRIPTS,
    having,
    make_model,
    make_tokenizer,
    pad,
    prompts_of,
    steps,
    summary,
    word_problem,
    write_rows,
)

scripts = having("extract_answer")


@scripts
@pytest.mark.parametrize(
    "gold, completion, expected",
    [
        # thousands
        ("8000", r"\boxed{8,000}", 1),
        ("8,000", r"\boxed{8000}", 1),
        ("1234", r"\boxed{1,234.00}", 1),
        ("9500", r"\boxed{$9{,}500}", 1),
        ("1,234,567", r"\boxed{1,234,567}", 1),
        ("12000", r"\boxed{12 000}", 0),
        ("12", r"\boxed{1,2}", 0),
        ("12345", r"\boxed{1,2345}", 0),
        # decimals, signs of money and percent, words, units
        ("29", r"\boxed{$29.00}", 1),
        ("29", r"\boxed{29.}", 1),
        ("29", r"\boxed{29 dollars}", 1),
        ("29", r"\boxed{2.9}", 0),
        ("29", r"\boxed{290}", 0),
        ("29", r"\boxed{-29}", 0),
        ("29", r"\boxed{29\text{ dollars}}", 1),
        ("29", r"\boxed{x = 29}", 1),
        ("29", r"\boxed{29\%}", 1),
        ("29", r"\boxed {29}", 1),
        ("29", r"\boxed{29 m^2}", 1),
        ("29", r"\boxed{29\text{ m}^2}", 1),
        ("29", r"\boxed{29 ft^{3}}", 1),
        ("29", r"\boxed{29 km/h}", 1),
        ("0.5", r"\boxed{.50}", 1),
        ("500", r"\boxed{Rs.500}", 1),
        ("500", r"\boxed{No. 500}", 1),
        ("0.5", r"\boxed{Rs.500}", 0),
        # minus
        ("3", r"\boxed{-3}", 0),
        ("-3", r"\boxed{-3}", 1),
        ("-3", "\\boxed{\u22123}", 1),
        ("-3", r"\boxed{-\$3}", 1),
        ("-3", r"\boxed{x=-3}", 1),
        ("3", r"\boxed{step-3}", 1),
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
        ("12", r"\boxed{x/12}", 0),
        ("12", r"\boxed{x^{12}}", 0),
        ("5", r"\boxed{5^2}", 0),
        ("25", r"\boxed{5^2}", 0),
        # which box
        ("12", r"\boxed{12", 0),
        ("12", r"\boxed{12} and \boxed{13", 1),
        ("12", r"\boxed{12} and \boxed{13}", 0),
        ("12", r"\boxed{13} and \boxed{12}", 1),
        ("12", r"boxed{12}", 0),
        # exact, whatever the length
        ("1" * 1000, rf"\boxed{{{'1' * 1000}}}", 1),
        ("1" * 1000, rf"\boxed{{{'1' * 999}2}}", 0),
        ("0.1", r"\boxed{0.1000000000000000055511151231257827}", 0),  # the float called 0.1
    ],
)
def test_reward_reads_the_number_in_the_last_closed_box(script, gold, completion, expected):
    score = script.reward(completion, gold)
    assert score == expected and isinstance(score, float)


@scripts
def test_extracted_answer_is_the_plain_number(script):
    assert script.extract_answer(r"so \boxed{$-8{,}000.50$ a year}") == "-8000.50"
    assert script.extract_answer("8000") is script.extract_answer(r"\boxed{\text{none}}") is None


@scripts
def test_a_long_completion_costs_no_time(script):
    parts = [r"\boxed{", "{}", "1", "1,111", "- ", "/ ", ",", " ", r"\text{", "}"]
    started = time.process_time()
    for part in parts:
        assert script.reward(r"\boxed{-1" + part * (5000 // len(part)), "12") == 0
    assert time.process_time() - started < 1


@scripts
def test_only_the_completion_is_rewarded(script, monkeypatch):
    texts, prompt = [], r"Say \boxed{42}. He buys 8"
    stop = torch.tensor([[257]]), torch.tensor([[1]])
    monkeypatch.setattr(script, "sample", lambda *args: stop)
    config = script.Config(max_new_tokens=3)
    for gold in ("8", "42"):
        batch = script.rollout(make_model(), make_tokenizer(), [(prompt, "", gold)], 1, config)
        assert batch[-1].tolist() == [[0.0]]
    monkeypatch.setattr(script, "reward", lambda completion, answer: texts.append(completion) or 0)
    script.rollout(make_model(), make_tokenizer(), [(prompt, "", "42")], 1, config)
    assert texts == [""]


@scripts
def test_rollout_pairs_each_completion_with_its_own_answer(script, monkeypatch):
    ids, mask = pad([[49, 257], [50, 257], [51, 257], [52, 257]])
    monkeypatch.setattr(script, "sample", lambda *args: (ids, mask))
    monkeypatch.setattr(script, "reward", lambda completion, answer: float(completion == answer))
    tokenizer, config = make_tokenizer(), script.Config()
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    problems = [("A", "", texts[1]), ("B", "", texts[2])]
    *_, rewards = script.rollout(make_model(), tokenizer, problems, 2, config)
    assert rewards.tolist() == [[0, 1], [1, 0]]


@scripts
def test_rows_lose_their_calculator_marks_and_val_is_the_last_500_for_training(script, rows):
    train_rows, val = script.gsm8k(script.Config(data=str(rows), eval_size=0))
    assert train_rows[3] == ("Ann has 3 pens and buys 2. How many?", "She has 3+2=5 pens.", "5")
    assert (len(train_rows), len(val)) == (20, 500) and not {*train_rows} & {*val}
    assert [answer for *_, answer in train_rows + val] == [f"{i + 2:,}" for i in range(520)]
    assert script.gsm8k(script.Config(data=str(rows), eval_size=3))[1] == val[:3]
    train_again, test = script.gsm8k(script.Config(data=str(rows), split="test", eval_size=1000))
    assert [answer for *_, answer in test] == [str(i + 2) for i in range(7)]
    assert train_again == train_rows  # --split test takes no further row into the training


@scripts
def test_other_files_in_the_folder_are_not_read(script, rows, tmp_path):
    folder = write_rows(tmp_path / "rows")
    (folder / "train_more.jsonl").write_text((folder / "test.jsonl").read_text())
    (folder / "notes.json").write_text("{")
    read = script.gsm8k(script.Config(data=str(folder), eval_size=0))
    assert read == script.gsm8k(script.Config(data=str(rows), eval_size=0))


@scripts
def test_rows_of_the_hub_are_read_the_same_way(script, rows, monkeypatch):
    calls = []
    splits = {"train": [*map(word_problem, range(520))], "test": [word_problem(0)]}
    monkeypatch.setattr(script, "load_dataset", lambda *args: calls.append(args) or splits)
    assert script.gsm8k(script.Config()) == script.gsm8k(script.Config(data=str(rows)))
    assert calls[0] == ("openai/gsm8k", "main") and str(rows) in str(calls[1])


@scripts
def test_missing_data_ends_in_one_line_that_names_the_flags(script, rows, tmp_path):
    lone = write_rows(tmp_path / "lone")
    (lone / "test.jsonl").unlink()
    missing = [("", "val"), (tmp_path / "none", "val"), (lone, "val"), (rows, "train")]
    for data, split in missing:  # no hub here, no folder, no test.jsonl, no such split
        with pytest.raises(SystemExit, match=f"^error: --data {data} .*--split[^\n]+$"):
            script.gsm8k(script.Config(data=str(data), split=split))


@scripts
def test_pass_at_k(script):
    # 1 - C(6, 4) / C(8, 4) = 1 - 15 / 70
    assert script.pass_at_k(8, 2, 4) == pytest.approx(0.785714, abs=1e-6)
    assert script.pass_at_k(8, 0, 8) == 0 and script.pass_at_k(8, 1, 8) == 1
    draws = [any(x < 2 for x in random.Random(i).sample(range(8), 3)) for i in range(4000)]
    assert script.pass_at_k(8, 2, 3) == pytest.approx(sum(draws) / 4000, abs=0.03)
    for n, c, k in ((4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError):
            script.pass_at_k(n, c, k)


MODEL = make_model()


def evaluated(script, problems, **knobs):
    """evaluate's results as a dict."""
    lines = script.evaluate(MODEL, make_tokenizer(), problems, script.Config(**knobs), "now")
    assert all(re.fullmatch(r"[\w@]+_now: .+", line) for line in lines)
    return dict(line.replace("_now", "").split(": ") for line in lines)


@scripts
@pytest.mark.parametrize("count, batch_size", [(1, 4), (7, 2), (8, 2), (7, 100)])
@pytest.mark.parametrize("samples", [0, 3])
def test_evaluation_counts_each_problem_once(script, monkeypatch, count, batch_size, samples):
    problems = [(f"Question {i * 7919}?", "", str(i)) for i in range(count)]
    scored = []
    monkeypatch.setattr(script, "reward", lambda c, a: scored.append(a) or float(int(a) % 3 == 0))
    knobs = {"batch_size": batch_size, "group_size": 2, "max_new_tokens": 6}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    result = evaluated(script, problems, eval_samples=samples, **knobs)
    assert torch.equal(torch.get_rng_state(), before)  # as it was found
    assert sorted(scored) == sorted([a for *_, a in problems] * (1 + samples))
    k, p = (count + 2) // 3, (count + 2) // 3 / count
    assert result["accuracy"] == f"{p:.3f} ({k}/{count})"
    assert result["se"] == f"{math.sqrt(p * (1 - p) / count):.3f}"
    # Wilson's bounds are the solutions q of |p - q| = 1.96 sqrt(q (1 - q) / n).
    for q in map(float, result["interval"].split(" to ")):
        spread = 1.96 * math.sqrt(max(q * (1 - q), 0) / count)
        assert abs(p - q) == pytest.approx(spread, abs=2e-3)
    # Every sample of a problem scores, or none.
    shown = {key: value for key, value in result.items() if key.startswith("pass@")}
    assert shown == {f"pass@{i}": f"{p:.3f}" for i in range(1, samples + 1)}
    # Length and truncation, one problem at a time.
    lengths, cut, config = [], 0, script.Config(**knobs)
    for problem in problems:
        batch = script.rollout(MODEL, make_tokenizer(), [problem], 1, config, True)
        lengths.append(int(batch[3].sum()))
        cut += batch[2][0, -1].item() != 257
    assert result["length"] == f"{sum(lengths) / count:.1f}"
    assert result["truncated"] == f"{cut / count:.3f}"


@scripts
def test_pass_at_k_counts_each_problem_s_own_samples(script, monkeypatch):
    """Problem 0 has 2 right samples of 4, problem 1 none: pass@2 is (1 - C(2, 2) / C(4, 2)) / 2."""
    greedy, sampled = torch.zeros(2, 1), torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 0]])
    ids, mask = pad([[1, 257], [2, 257]])
    batches = iter([(None, None, ids, mask, greedy), (None, None, None, None, sampled)])
    monkeypatch.setattr(script, "rollout", lambda *args: next(batches))
    result = evaluated(script, [("Q", "", "1")] * 2, eval_samples=4)
    shown = [result[f"pass@{k}"] for k in (1, 2, 3, 4)]
    assert shown == ["0.250", "0.417", "0.500", "0.500"] and result["accuracy"] == "0.000 (0/2)"


@scripts
def test_truncated_is_the_share_without_a_stop_token(script, monkeypatch):
    # The pad id is the stop token here.
    ids = torch.tensor([[1, 257, 257], [1, 2, 3], [1, 2, 257], [257, 257, 257]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 0]])
    monkeypatch.setattr(script, "sample", lambda *args: (ids, mask))
    result = evaluated(script, [("Q", "", "1")] * 4, max_new_tokens=3)
    assert result["truncated"] == "0.250" and result["length"] == "2.2"


@scripts
def test_interval_at_70_of_200_and_at_0(script, monkeypatch):
    monkeypatch.setattr(script, "reward", lambda completion, answer: float(int(answer) < 70))
    problems = [("Q", "", str(i)) for i in range(200)]
    result = evaluated(script, problems, max_new_tokens=1)
    assert result["accuracy"] == "0.350 (70/200)" and result["se"] == "0.034"
    low, high = map(float, result["interval"].split(" to "))
    assert (low, high) == pytest.approx((0.287, 0.418), abs=0.001)  # 35% +- 6.6 points
    monkeypatch.setattr(script, "reward", lambda completion, answer: 0.0)
    assert evaluated(script, problems, max_new_tokens=1)["interval"] == "0.000 to 0.019"


@scripts
@pytest.mark.parametrize("size, sizes", [(0, [4, 4]), (3, [3, 1, 3, 1]), (9, [4, 4])])
def test_micro_batches_cover_each_row_once_without_needless_padding(script, size, sizes):
    prompts, lengths = [[5, 6, 7], [8]], [4, 1, 3, 2, 2, 3, 1, 1]
    ids, mask = pad([[10 + i] * n for i, n in enumerate(lengths)])
    seen = []
    for rows, part in script.micro_batches(*prompts_of(prompts), ids, mask, size):
        prompt_ids, prompt_mask, part_ids, part_mask = part
        assert prompt_ids.tolist() == [prompts[int(rows[0]) // 4]] and prompt_mask.all()
        assert part_ids.shape == part_mask.shape == (len(rows), max(lengths[i] for i in rows))
        for i, row, real in zip(rows.tolist(), part_ids, part_mask.bool()):
            assert row[real].tolist() == [10 + i] * lengths[i]
        seen.append(rows.tolist())
    assert [len(rows) for rows in seen] == sizes and sum(seen, []) == list(range(8))


@pytest.fixture
def gradients(updates, train, tiny, monkeypatch):
    """A run's gradients; rewards by a checksum of the text, so that some groups are flat."""
    groups = []
    for script in map(SCRIPTS.get, GSM8K):
        advantages = script.group_advantages
        monkeypatch.setattr(script, "reward", lambda text, _: float(sum(text.encode()) % 5 == 0))
        monkeypatch.setattr(
            script,
            "group_advantages",
            lambda r, *a, f=advantages, **k: groups.append(r) or f(r, *a, **k),
        )

    def of(name, **knobs):
        updates.clear()
        groups.clear()
        train(name, tiny, **{"batch_size": 6, "eval_size": 1} | knobs)
        assert len({bool(r.std()) for rewards in groups for r in rewards}) == 2  # both kinds
        return torch.stack(updates)

    return of


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name, count", [*zip(GSM8K, [2, 3, 2])])
def test_gradient_does_not_depend_on_micro_batch(name, count, gradients):
    knobs = {"group_size": 4} | ({} if name == "gsm8k_grpo_autoresearch" else {"steps": 1})
    whole, *others = (gradients(name, micro_batch=size, **knobs) for size in (0, 1, 3))
    assert len(whole) == count
    for other in others:
        assert all(difference(a, b) < 1e-5 for a, b in zip(other, whole))


def test_three_flags_turn_textbook_grpo_into_reinforce(gradients):
    flags = {"beta": 0.0, "inner_epochs": 1, "scale_by_std": False, "group_size": 3, "lr": 1e-3}
    grpo = gradients("gsm8k_grpo", **flags)
    reinforce = gradients("gsm8k_grpo_autoresearch", group_size=3, lr=1e-3)
    assert len(grpo) == len(reinforce) == 2
    assert all(difference(a, b) < 1e-5 for a, b in zip(grpo, reinforce))
    for flag, value in (("beta", 0.5), ("inner_epochs", 2), ("scale_by_std", True)):
        other = gradients("gsm8k_grpo", **flags | {flag: value})  # each flag is needed
        assert len(other) != 2 or max(difference(a, b) for a, b in zip(other, grpo)) > 1e-2


def test_reinforce_is_its_plain_formula(gradients, monkeypatch, tiny):
    """Each row alone and whole through the model: no cache, no padding, no micro-batches."""
    script, taken = SCRIPTS["gsm8k_grpo_autoresearch"], []
    rollout = script.rollout
    monkeypatch.setattr(script, "rollout", lambda *a: taken.append(rollout(*a)) or taken[-1])
    ours = gradients("gsm8k_grpo_autoresearch", group_size=3)[0]
    prompt_ids, prompt_mask, ids, mask, rewards = taken[0]
    model = script.load(str(tiny), "cpu")[0]
    for i, (row, real) in enumerate(zip(ids, mask.bool())):
        b = i // 3
        prompt, completion = prompt_ids[b][prompt_mask[b].bool()], row[real]
        logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, completion[:, None])
        advantage = rewards[b, i % 3] - rewards[b].mean()
        (-(advantage * logprobs).sum() / mask.sum()).backward()
    assert difference(ours, torch.cat([p.grad.flatten() for p in model.parameters()])) < 1e-4


def test_reinforce_without_a_mixed_group_changes_nothing(train, tiny, monkeypatch):
    script = SCRIPTS["gsm8k_grpo_autoresearch"]
    monkeypatch.setattr(script, "reward", lambda completion, answer: 1.0)
    monkeypatch.setattr(script, "token_logprobs", None)  # no pass for a group of equal rewards
    lines = steps(train("gsm8k_grpo_autoresearch", tiny))
    assert len(lines) == 2 and all("reward 1.000" in x and "grad_norm 0.000" in x for x in lines)


@pytest.mark.parametrize("name", GSM8K)
def test_eval_flags_do_not_change_the_training(name, train, tiny):
    knobs = {"lr": 1e-3, "max_new_tokens": 4}
    plain = steps(train(name, tiny, **knobs))
    assert steps(train(name, tiny, eval_size=9, **knobs)) == plain
    assert steps(train(name, tiny, eval_samples=3, **knobs)) == plain


def test_warm_up_trains_the_gold_solution_and_its_stop_token(train, tiny, monkeypatch):
    script, learned, tokenizer = SCRIPTS["gsm8k_sft_grpo"], [], make_tokenizer()
    logprobs = script.token_logprobs

    def keep(model, prompt_ids, prompt_mask, ids, mask):
        prompt, text = tokenizer.decode(prompt_ids[0]), tokenizer.decode(ids[0][mask[0].bool()])
        learned.append((re.search(r"has (\d+) pens", prompt)[1], text))
        return logprobs(model, prompt_ids, prompt_mask, ids, mask)

    monkeypatch.setattr(script, "token_logprobs", keep)
    train("gsm8k_sft_grpo", tiny, sft_steps=1, steps=0)
    assert len(learned) == 4
    for n, text in learned:
        assert text == f"She has {n}+2={int(n) + 2} pens.\n\\boxed{{{int(n) + 2}}}<|im_end|>"


def test_grpo_starts_from_the_warmed_up_model_with_a_fresh_optimizer(train, tiny, monkeypatch):
    script, copies, made = SCRIPTS["gsm8k_sft_grpo"], [], []
    keep = SimpleNamespace(deepcopy=lambda m: copies.append(copy.deepcopy(m)) or copies[-1])
    monkeypatch.setattr(script, "copy", keep)
    adamw = torch.optim.AdamW
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda *a, **k: made.append(adamw(*a, **k)) or made[-1]
    )
    train("gsm8k_sft_grpo", tiny, sft_steps=3, sft_lr=1e-2, lr=1e-4, steps=1)
    start, (reference,) = script.load(str(tiny), "cpu")[0], copies
    moved = (start.lm_head.weight - reference.lm_head.weight).abs().max()
    assert moved > 1e-2 and not any(p.requires_grad for p in reference.parameters())
    assert [optimizer.param_groups[0]["lr"] for optimizer in made] == [1e-2, 1e-4]


def test_without_a_warm_up_it_is_plain_grpo(train, tiny):
    knobs = {"lr": 1e-3, "max_new_tokens": 4}
    lines = steps(train("gsm8k_sft_grpo", tiny, sft_steps=0, **knobs))
    assert lines == steps(train("gsm8k_grpo", tiny, **knobs)) and len(lines) == 2


@pytest.mark.parametrize("split", ["val", "test"])
def test_autoresearch_stops_by_the_clock_and_names_the_split(split, train, tiny):
    name = "gsm8k_grpo_autoresearch"
    started = time.perf_counter()
    out = train(name, tiny, minutes=0.02, split=split, eval_samples=2)
    assert 1.2 < time.perf_counter() - started < 60
    result = summary(out)
    assert [key for key in result if split in key or key == "steps"] == [
        f"{split}_acc",
        *(
            f"{key}_{split}"
            for key in ("length", "se", "truncated", "interval", "pass@1", "pass@2")
        ),
        "steps",
    ]
    assert len(steps(out)) == int(result["steps"]) >= 1 and result["train_seconds"] in "12"
    out = train(name, tiny, minutes=0.0)
    assert summary(out)["steps"] == "0" and not steps(out)  # the untrained model's accuracy
