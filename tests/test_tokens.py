"""Prompts, stop tokens, padding and rewards: what the model is fed and what counts."""

import datetime
from types import SimpleNamespace

import pytest
import torch
from conftest import CHATML, having, make_model, make_tokenizer
from transformers.utils import chat_template_utils


def fake(eos):
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))


@having("stop_ids")
@pytest.mark.parametrize("eos, expected", [(7, {7, 9}), ([5, 6], {5, 6, 9}), (None, {9}), (9, {9}), ([9, 5], {5, 9})])
def test_stop_ids_take_an_int_a_list_or_none(script, eos, expected):
    ids = script.stop_ids(fake(eos), SimpleNamespace(eos_token_id=9))
    assert set(ids) == expected and len(ids) == len(expected) and isinstance(ids, list)


@having("stop_ids")
def test_stop_ids_without_any_eos(script):
    assert script.stop_ids(fake(None), SimpleNamespace(eos_token_id=None)) == []


@having("encode_prompt")
def test_prompt_is_the_scripts_system_line_question_and_opening(script, tokenizer):
    text = tokenizer.decode(script.encode_prompt(tokenizer, "What is 3 + 8?"))
    system = f"<|im_start|>system\n{script.SYSTEM}<|im_end|>\n"
    assert text == system + "<|im_start|>user\nWhat is 3 + 8?<|im_end|>\n<|im_start|>assistant\n"


@having("encode_prompt")
def test_template_default_system_line_is_never_used(script):
    template = "{% if messages[0]['role'] != 'system' %}default{% endif %}" + CHATML
    text = make_tokenizer(template).decode(script.encode_prompt(make_tokenizer(template), "Q"))
    assert "default" not in text and script.SYSTEM in text


@having("encode_prompt")
def test_template_that_prints_the_date_gives_the_same_ids_on_two_days(script, monkeypatch):
    tokenizer = make_tokenizer("{{ strftime_now('%d %b %Y') }}" + CHATML)
    prompts = []
    for day in (1, 2):
        frozen = SimpleNamespace(now=lambda day=day: datetime.datetime(2031, 5, day))
        monkeypatch.setattr(chat_template_utils, "datetime", frozen)
        dated = tokenizer.apply_chat_template([{"role": "user", "content": "Q"}], tokenize=False)
        assert f"0{day} May 2031" in dated  # without the script's macro the date does get in
        prompts.append(script.encode_prompt(tokenizer, "Q"))
    assert prompts[0] == prompts[1]


@having("encode_prompt")
def test_plain_text_without_a_chat_template(script):
    tokenizer = make_tokenizer(template=None)
    assert tokenizer.decode(script.encode_prompt(tokenizer, "What is 3 + 8?")) == f"{script.SYSTEM}\nWhat is 3 + 8?\n"


@having("encode_prompt")
@pytest.mark.parametrize("template", [None, "{{ bos_token }}" + CHATML], ids=["plain", "template"])
def test_one_bos_never_two(script, template):
    from tokenizers import processors

    tokenizer = make_tokenizer(template, bos="<|end|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 259)]
    )
    ids = script.encode_prompt(tokenizer, "Q")
    assert ids[0] == 259 and ids.count(259) == 1


@having("encode_completion")
@pytest.mark.parametrize("answer", ["12", " 12", ".5"])
def test_completion_is_encoded_apart_from_the_prompt_and_ends_in_one_eos(script, answer):
    tokenizer = make_tokenizer(template=None, pad="<|im_end|>")  # pad is EOS
    prompt = script.encode_prompt(tokenizer, "x = ")
    completion = script.encode_completion(tokenizer, answer)
    assert tokenizer.decode(completion) == f"{answer}<|im_end|>" and completion.count(257) == 1
    ids, mask = script.pad([completion, completion + [65, 66, 257]], tokenizer.pad_token_id, "right")
    assert ids[0][mask[0].bool()].tolist() == completion  # one supervised EOS, no supervised padding
    fed, fed_mask = script.pad([prompt], tokenizer.pad_token_id, "left")
    assert fed[0].tolist() == prompt  # the sampler is fed these very ids


@having("pad")
def test_pad(script):
    ids, mask = script.pad([[1, 2, 3], [4]], 9, "left")
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    ids, mask = script.pad([[1, 2, 3], [4], []], 9, "right")
    assert ids.tolist() == [[1, 2, 3], [4, 9, 9], [9, 9, 9]] and mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert ids.dtype == mask.dtype == torch.long


@having("toy_data")
@pytest.mark.parametrize(
    "completion, answer, expected",
    [
        ("<answer>11</answer>", "11", 1.0),
        ("<answer> 2 </answer>", "2", 1.0),
        ("<answer>\n2\n</answer> done", "2", 1.0),
        ("<answer>2", "2", 0.0),
        ("2", "2", 0.0),
        ("", "2", 0.0),
        ("<answer></answer>", "2", 0.0),
        ("<answer></answer>", "", 0.0),
        ("<answer>12</answer>", "2", 0.0),
        ("<answer>1</answer> or <answer>2</answer>", "2", 1.0),
        ("<answer>2</answer> or <answer>1</answer>", "2", 0.0),
        ("<answer>2</answer> or <answer>1", "2", 1.0),
        ("<answer>1 <answer>2</answer>", "2", 1.0),
        ("<answer>2</answer> </answer>", "2", 1.0),
        ("<Answer>2</Answer>", "2", 0.0),
    ],
)
def test_toy_reward(script, completion, answer, expected):
    score = script.reward(completion, answer)
    assert score == expected and isinstance(score, float)


@having("toy_data")
def test_reward_is_linear_in_the_length(script):
    assert script.reward("<answer>" * 20_000 + "</answer>" * 20_000, "2") == 0.0


@having("toy_data")
def test_split_is_80_and_20_of_the_100_sums_and_the_same_everywhere(script):
    import minimal_sft

    train, held_out = script.toy_data()
    assert (len(train), len(held_out), len({*train, *held_out})) == (80, 20, 100)
    assert script.toy_data() == minimal_sft.toy_data()
    for question, answer in train + held_out:
        a, b = question.removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(a) + int(b) == int(answer)


@having("near_miss")
def test_near_miss_is_wrong_close_and_drawn_anew(script):
    import random

    rng = random.Random(0)
    for answer in range(19):
        drawn = {int(script.near_miss(str(answer), rng)) for _ in range(200)}
        assert answer not in drawn and min(drawn) >= 0 and all(abs(n - answer) <= 3 for n in drawn) and len(drawn) >= 3


@having("encode_pairs")
def test_pair_shares_its_prompt_and_differs_in_the_number(script, tokenizer):
    import random

    problems = [("What is 3 + 8?", "11"), ("What is 1 + 1?", "2")]
    prompt_ids, _, ids, mask = script.encode_pairs(tokenizer, problems, random.Random(0), "cpu")
    texts = [tokenizer.decode(row[real.bool()]) for row, real in zip(ids, mask)]
    assert len(prompt_ids) == 2 and len(ids) == 4
    assert texts[0] == "<answer>11</answer><|im_end|>" and texts[2] == "<answer>2</answer><|im_end|>"
    assert texts[1] != texts[0] and texts[3] != texts[2]


@having("load")
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_load_makes_a_bf16_checkpoint_float32(script, tmp_path, family):
    make_model(family).to(torch.bfloat16).save_pretrained(tmp_path)
    make_tokenizer(pad=None).save_pretrained(tmp_path)
    model, tokenizer = script.load(str(tmp_path), torch.device("cpu"))
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training
    assert tokenizer.pad_token_id is not None


@having("load")
def test_load_of_something_unknown_names_the_flag(script, tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="--model"):
            script.load(str(folder), torch.device("cpu"))


def test_update_of_1e_6_survives_in_float32_and_not_in_bf16():
    weights = {dtype: torch.nn.Parameter(torch.tensor(0.02, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)}
    for weight in weights.values():
        optimizer = torch.optim.SGD([weight], lr=1e-6)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert weights[torch.float32].item() == pytest.approx(0.0199, abs=1e-7)
    assert weights[torch.bfloat16].item() == pytest.approx(0.02, abs=1e-4)
    assert weights[torch.bfloat16].item() == torch.tensor(0.02, dtype=torch.bfloat16).item()
