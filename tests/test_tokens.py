"""Prompts, completions, stop tokens, toy rewards: what the model is fed and what counts."""

import random
from types import SimpleNamespace

import pytest
import torch
from conftest import DROPS, GSM8K, REFUSES, SCRIPTS, having, make_model, make_tokenizer, save
from tokenizers import processors
from transformers import Qwen2Config, Qwen2ForCausalLM


@having("stop_ids")
@pytest.mark.parametrize(
    "eos, own, expected",
    [(7, 9, [7, 9]), ([6, 5], 9, [5, 6, 9]), (None, 9, [9]), ([9, 5], 9, [5, 9]), (None, None, [])],
)
def test_stop_ids_take_an_int_a_list_or_none(script, eos, own, expected):
    config = SimpleNamespace(eos_token_id=eos)
    model = SimpleNamespace(generation_config=config, device=torch.device("cpu"))
    ids = script.stop_ids(model, SimpleNamespace(eos_token_id=own))
    assert sorted(ids.tolist()) == expected and ids.dtype == torch.long


@having("encode_prompts")
def test_prompt_is_the_instruction_the_question_and_the_opening(script, tokenizer):
    questions = ["What is 3 + 8?", "Q?"]
    ids, mask = script.encode_prompts(tokenizer, questions, "cpu")
    for row, real, question in zip(ids, mask, questions):
        text = tokenizer.decode(row[real.bool()])
        assert text.startswith("<|im_start|>") and text.endswith("\n<|im_start|>assistant\n")
        assert text.count(script.INSTRUCTION) == text.count(question) == 1
        assert text.count("assistant") == 1
    # The short one is padded on the left, and what is real of it is the same alone.
    blank = ids.shape[1] - int(mask[1].sum())
    assert blank == len(questions[0]) - len(questions[1]) and mask[0].all()
    assert mask[1].tolist() == [0] * blank + [1] * (ids.shape[1] - blank)
    assert set(ids[1, :blank].tolist()) == {258}
    assert script.encode_prompts(tokenizer, ["Q?"], "cpu")[0][0].tolist() == ids[1, blank:].tolist()


@having("encode_prompts")
@pytest.mark.parametrize("template", [REFUSES, DROPS], ids=["refuses", "drops"])
def test_instruction_reaches_a_template_without_a_system_turn(script, template):
    tokenizer = make_tokenizer(template, bos="<|end|>")
    ids, _ = script.encode_prompts(tokenizer, ["What is 3 + 8?"], "cpu")
    assert script.INSTRUCTION in tokenizer.decode(ids[0])


@having("load")
def test_base_model_without_a_template_reads_plain_text(script, tmp_path):
    bare = make_tokenizer(template=None, pad=None, bos="<|end|>")
    model, tokenizer = script.load(str(save(tmp_path, make_model("gpt2"), bare)), "cpu")
    ids, mask = script.encode_prompts(tokenizer, ["What is 3 + 8?"], "cpu")
    text = tokenizer.decode(ids[0])
    assert text.startswith("<|end|>") and text.count("<|end|>") == 1 and text.endswith("\n")
    assert text.count(script.INSTRUCTION) == text.count("What is 3 + 8?") == 1 and mask.all()


@having("encode_prompts")
def test_one_bos_although_the_tokenizer_would_add_another(script):
    tokenizer = make_tokenizer("{{ bos_token }}" + make_tokenizer().chat_template, bos="<|end|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 259)]
    )
    ids = script.encode_prompts(tokenizer, ["Q"], "cpu")[0][0].tolist()
    assert ids[0] == 259 and ids.count(259) == 1


@having("encode_completions")
@pytest.mark.parametrize("answer", ["12", " 12", ".5"])
def test_answers_are_not_tokenized_across_the_seam_and_end_in_one_eos(script, answer):
    tokenizer = make_tokenizer("{{ messages[-1].content }}", pad="<|im_end|>")  # pad is EOS
    tokenizer.add_tokens(["= 1", "=  1", "= .", "12"])  # the first three only across the seam
    prompts = script.encode_prompts(tokenizer, ["x = "], "cpu")
    ids, mask = script.encode_completions(tokenizer, [answer, "a long answer"], "cpu")
    prompt, trained = f"{script.INSTRUCTION}\nx = ", ids[0][mask[0].bool()].tolist()
    assert tokenizer.decode(trained) == f"{answer}<|im_end|>"
    assert trained == tokenizer(answer).input_ids + [257] and trained.count(257) == 1
    assert mask[0].tolist() == [1] * len(trained) + [0] * (ids.shape[1] - len(trained))
    assert set(ids[0, len(trained) :].tolist()) == {257}  # in the row, not in the mask
    # Scoring feeds the prompt ids that sampling feeds, and the seam would have changed them.
    fed, model = [], make_model(vocab=264)
    model.register_forward_pre_hook(lambda _, args: fed.append(args[0].tolist()))
    script.sample(model, *prompts, 1, 1, torch.tensor([257]), 257)
    script.token_logprobs(model, *prompts, ids[:1], mask[:1])
    assert fed[0] == fed[1] == prompts[0].tolist() == [tokenizer(prompt).input_ids]
    assert tokenizer(f"{prompt}{answer}").input_ids[: len(fed[0][0])] != fed[0][0]


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
        ("<Answer>2</Answer>", "2", 0.0),
    ],
)
def test_toy_reward(script, completion, answer, expected):
    score = script.reward(completion, answer)
    assert score == expected and isinstance(score, float)


@having("toy_data")
def test_split_is_80_and_20_of_the_100_sums_and_the_same_everywhere(script):
    train, held_out = script.toy_data()
    assert (len(train), len(held_out), len({*train, *held_out})) == (80, 20, 100)
    assert script.toy_data() == SCRIPTS["minimal_sft"].toy_data()
    for question, answer in train + held_out:
        a, b = question.removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(a) + int(b) == int(answer)


@having("encode_pairs")
def test_pair_shares_its_prompt_and_differs_by_1_either_way(script, tokenizer):
    problems = [("What is 3 + 8?", "11"), ("What is 1 + 1?", "2")]
    drawn = set()
    for seed in range(9):
        batch = script.encode_pairs(tokenizer, problems, random.Random(seed), "cpu")
        prompt_ids, _, ids, mask = batch
        texts = [tokenizer.decode(row[real.bool()]) for row, real in zip(ids, mask)]
        assert len(prompt_ids) == 2 and texts[0] == "<answer>11</answer><|im_end|>"
        assert texts[2] == "<answer>2</answer><|im_end|>"
        drawn |= {texts[1], texts[3]}
    assert drawn == {f"<answer>{n}</answer><|im_end|>" for n in (10, 12, 1, 3)}


@having("load")
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_load_makes_a_bf16_checkpoint_float32(script, tmp_path, family, capsys):
    save(tmp_path, make_model(family).to(torch.bfloat16), make_tokenizer(pad=None))
    model, tokenizer = script.load(str(tmp_path), "cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training
    assert tokenizer.pad_token == "<|im_end|>"  # EOS in its place
    shown = capsys.readouterr().out
    assert all(word in shown for word in (f"{script.__name__}.py", str(tmp_path), "cpu", "float32"))


@having("load")
def test_load_of_something_unknown_names_the_flag_in_one_line(script, tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(SystemExit, match=f"^error: --model {folder}[^\n]*$"):
            script.load(str(folder), "cpu")


@having("make_critic")
@pytest.mark.parametrize("tied", [True, False])
def test_critic_starts_at_0_and_shares_nothing_with_the_policy(script, tied):
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    policy = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).eval()
    critic = script.make_critic(policy)
    assert critic.get_output_embeddings().weight.shape == (1, 8)
    assert policy.get_output_embeddings().weight.shape == (20, 8)
    own = {p.data_ptr() for p in policy.parameters()}
    assert not own & {p.data_ptr() for p in critic.parameters()}
    ids = torch.tensor([[1, 2, 3]])
    mask = torch.ones_like(ids)
    values = script.token_values(critic, ids, mask, ids, mask)
    assert values.shape == (1, 3) and not values.any()
    assert torch.equal(critic.model.embed_tokens.weight, policy.model.embed_tokens.weight)


def test_update_of_1e_6_survives_in_float32_and_not_in_bf16():
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.tensor(0.02, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=1e-6)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        ends[dtype] = weight.item()
    assert ends[torch.float32] == pytest.approx(0.0199, abs=1e-7)
    assert ends[torch.bfloat16] == torch.tensor(0.02, dtype=torch.bfloat16).item()


def test_every_script_has_one_of_the_two_tasks():
    for name, script in SCRIPTS.items():
        assert hasattr(script, "extract_answer") == (name in GSM8K) != hasattr(script, "toy_data")
