"""The sampler against the full forward pass, against transformers' own generation, and at its edges."""

import math

import pytest
import torch
from conftest import having, make_model


def prompts(script, lengths=(9, 5, 1), vocab=256, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]
    return rows, script.pad(rows, 258, "left")


def full_logprobs(model, prompt, completion):
    """Log-probabilities of one completion by one plain forward pass over the whole, unpadded row."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].double()
    predictions = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return predictions.gather(1, torch.tensor(completion)[:, None])[:, 0]


@having("token_logprobs")
def test_logprobs_of_cached_padded_shared_prompts_equal_a_plain_forward_pass(script, model):
    rows, (prompt_ids, prompt_mask) = prompts(script)
    torch.manual_seed(0)
    ids, mask = script.sample(model, prompt_ids, prompt_mask, 4, 12, [257], 258)
    assert ids.shape == mask.shape == (12, int(mask.sum(1).max()))
    logprobs = script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask)
    assert logprobs.dtype == torch.float32 and logprobs.shape == ids.shape
    for i, row in enumerate(ids):
        completion = row[mask[i].bool()].tolist()
        expected = full_logprobs(model, rows[i // 4], completion)
        assert (logprobs[i, : len(completion)].double() - expected).abs().max() < 1e-4


@having("token_logprobs")
def test_gradient_flows_through_the_shared_prompt(script, model):
    rows, (prompt_ids, prompt_mask) = prompts(script)
    torch.manual_seed(0)
    ids, mask = script.sample(model, prompt_ids, prompt_mask, 2, 6, [], 258)
    (script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask) * mask).sum().backward()
    shared = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for i, row in enumerate(ids):
        whole = torch.tensor([[*rows[i // 2], *row.tolist()]])
        logprobs = model(whole).logits[0].log_softmax(-1)[len(rows[i // 2]) - 1 : -1]
        logprobs.gather(1, row[:, None]).sum().backward()
    for ours, plain in zip(shared, [p.grad for p in model.parameters()]):
        assert torch.allclose(ours, plain, rtol=1e-3, atol=1e-3 * plain.abs().max())


@having("token_logprobs")
def test_rows_of_uneven_length_are_scored_in_parts_that_hold_little_padding(script, model):
    rows, (prompt_ids, prompt_mask) = prompts(script)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 60, (24,), generator=generator)
    ids = torch.randint(0, 256, (24, 60), generator=generator)  # longer than the longest row
    mask = (torch.arange(60) < lengths[:, None]).long()
    seen = []
    hook = model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    logprobs = script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask)
    hook.remove()
    assert seen[0] == (3, 9) and sum(n for n, _ in seen[1:]) == 24
    sorted_lengths, start = lengths.sort(descending=True)[0], 0
    for n, longest in seen[1:]:
        part = sorted_lengths[start : start + n]
        padding = (part.max() - part).sum().item()
        assert longest == part.max() - 1 and padding <= max(128, n * part.max().item() / 8)
        start += n
    assert 3 <= len(seen) < 8  # a few passes
    (logprobs * mask).sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for i, (row, length) in enumerate(zip(ids, lengths)):
        completion = row[:length]
        prompt = rows[i // 8]
        predictions = model(torch.tensor([[*prompt, *completion.tolist()]])).logits[0].log_softmax(-1)
        plain = predictions[len(prompt) - 1 : -1].gather(1, completion[:, None])[:, 0]
        assert (logprobs[i, :length] - plain).abs().max() < 1e-4
        plain.sum().backward()
    for a, b in zip(ours, [p.grad for p in model.parameters()]):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * b.abs().max())


@having("sample")
def test_finished_rows_leave_the_batch_and_the_others_go_on_as_if_alone(script, model):
    rows, (prompt_ids, prompt_mask) = prompts(script, lengths=range(1, 25))
    stops, seen = list(range(40, 60)), []
    hook = model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    ids, mask = script.sample(model, prompt_ids, prompt_mask, 1, 30, stops, 258, greedy=True)
    hook.remove()
    assert seen[:2] == [24, 24] and min(seen) <= 16 and seen == sorted(seen, reverse=True)
    assert len(mask.sum(1).unique()) > 4 and set(ids[mask == 0].tolist()) == {258}
    for i in range(24):
        one, real = script.sample(model, *script.pad([rows[i]], 258, "left"), 1, 30, stops, 258, greedy=True)
        assert real.all() and ids[i][mask[i].bool()].tolist() == one[0].tolist()


@having("token_logprobs")
def test_padding_changes_no_logprob(script, model):
    rows, (prompt_ids, prompt_mask) = prompts(script, lengths=(6, 6))
    ids = torch.randint(0, 256, (4, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    plain = script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask)
    wide_ids, wide_mask = torch.full((2, 18), 7), torch.zeros(2, 18, dtype=torch.long)
    wide_ids[:, 12:], wide_mask[:, 12:] = prompt_ids, prompt_mask
    long_ids, long_mask = torch.full((4, 15), 7), torch.zeros(4, 15, dtype=torch.long)
    long_ids[:, :5], long_mask[:, :5] = ids, mask
    padded = script.token_logprobs(model, wide_ids, wide_mask, long_ids, long_mask)
    assert padded.isfinite().all() and (padded[:, :5] - plain).abs().max() < 1e-5


@having("sample")
def test_greedy_sampling_equals_generate(script, model):
    rows, (prompt_ids, prompt_mask) = prompts(script)
    ids, mask = script.sample(model, prompt_ids, prompt_mask, 1, 10, [257], 258, greedy=True)
    for i, row in enumerate(rows):
        out = model.generate(
            torch.tensor([row]),
            attention_mask=torch.ones(1, len(row)),
            do_sample=False,
            max_new_tokens=10,
            eos_token_id=257,
            pad_token_id=258,
        )
        assert ids[i][mask[i].bool()].tolist() == out[0, len(row) :].tolist()


class Scripted(torch.nn.Module):
    """A model that predicts the given tokens (rows, T) one after the other, whatever it reads."""

    def __init__(self, tokens, vocab=10):
        super().__init__()
        self.tokens, self.vocab, self.passes, self.training = torch.tensor(tokens), vocab, 0, False

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, logits_to_keep=0):
        from types import SimpleNamespace

        rows = self.tokens if self.passes else self.tokens[: len(input_ids)]
        target = rows[:, self.passes]
        self.passes += 1
        logits = torch.full((len(input_ids), 1, self.vocab), -1e4)
        logits[torch.arange(len(input_ids)), 0, target] = 1e4
        return SimpleNamespace(logits=logits)


@having("sample")
@pytest.mark.parametrize("greedy", [True, False])
def test_mask_comes_from_the_first_stop_id_and_holds_it(script, greedy):
    # Row 0: a b EOS; row 1: the other stop id at once; row 2 never stops. Pad is EOS, and 0 follows the stop.
    model = Scripted([[3, 4, 9, 0, 0], [8, 0, 0, 0, 0], [5, 5, 5, 5, 6]])
    prompt = torch.ones(3, 2, dtype=torch.long)
    ids, mask = script.sample(model, prompt, prompt, 1, 5, [8, 9], 9, greedy)
    assert mask.tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert ids.tolist() == [[3, 4, 9, 9, 9], [8, 9, 9, 9, 9], [5, 5, 5, 5, 6]]  # a row cut off keeps its last token
    assert model.passes == 5  # no pass after the last token


@having("sample")
def test_no_column_and_no_pass_beyond_the_longest_row(script):
    model = Scripted([[3, 9, 0, 0], [4, 4, 9, 0]])
    prompt = torch.ones(2, 2, dtype=torch.long)
    ids, mask = script.sample(model, prompt, prompt, 1, 4, [9], 0)
    assert ids.tolist() == [[3, 9, 0], [4, 4, 9]] and mask.tolist() == [[1, 1, 0], [1, 1, 1]] and model.passes == 3


@having("sample")
def test_every_row_stops_at_its_first_token(script, model):
    rows, (prompt_ids, prompt_mask) = prompts(script)
    ids, mask = script.sample(model, prompt_ids, prompt_mask, 2, 8, list(range(260)), 0)
    assert ids.shape == (6, 1) and mask.all()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    logprobs = script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask)
    assert logprobs.shape == (6, 1) and len(calls) == 1  # the prompt pass has predicted it already
    assert (logprobs[0] - full_logprobs(model, rows[0], ids[0].tolist())).abs().max() < 1e-4


@having("sample")
def test_the_whole_softmax_is_sampled_whatever_generation_config_says(script, model):
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # all logits 0
    model.generation_config.update(top_k=20, top_p=0.8, temperature=0.1, repetition_penalty=1.1, do_sample=True)
    torch.manual_seed(0)
    prompt = torch.ones(1, 3, dtype=torch.long)
    ids, _ = script.sample(model, prompt, prompt, 2000, 1, [], 0)
    assert len(ids.unique()) >= 250  # of 260: 2,000 draws leave out 0.1 of them on average


@having("sample")
def test_2000_draws_of_1000_uniform_ids_give_at_least_800(script):
    model = make_model(vocab=1000)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.generation_config.update(top_k=20, top_p=0.8, repetition_penalty=1.1)
    torch.manual_seed(0)
    prompt = torch.ones(1, 3, dtype=torch.long)
    ids, _ = script.sample(model, prompt, prompt, 2000, 1, [], 0)
    assert len(ids.unique()) >= 800


@having("sample")
def test_training_mode_and_gradient_checkpointing_change_nothing_and_are_left_on(script, model):
    rows, (prompt_ids, prompt_mask) = prompts(script)
    ids, mask = script.sample(model, prompt_ids, prompt_mask, 2, 8, [257], 258, greedy=True)
    logprobs = script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask)
    model.train()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False  # as fine-tuning tools leave it in a checkpoint
    lengths = []
    model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    again, _ = script.sample(model, prompt_ids, prompt_mask, 2, 8, [257], 258, greedy=True)
    assert model.training and torch.equal(again, ids) and not again.requires_grad
    assert set(lengths[1:]) == {1}  # one token a pass: the cache is in use
    assert torch.equal(script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask), logprobs)
    assert model.training


@having("sample")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("greedy", [True, False])
def test_logits_that_are_not_finite_end_the_run(script, model, bad, greedy):
    with torch.no_grad():
        next(model.parameters())[3] = bad
    prompt = torch.full((2, 3), 3)
    with pytest.raises(RuntimeError, match="not finite"):
        script.sample(model, prompt, torch.ones_like(prompt), 2, 4, [], 0, greedy)


@having("sample")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_row_of_logits_that_are_not_finite_ends_the_run(script, bad):
    model = make_model()

    def spoil(module, args, out):
        out[-1] = bad
        return out

    model.get_output_embeddings().register_forward_hook(spoil)
    prompt = torch.full((3, 3), 3)
    with torch.no_grad(), pytest.raises(RuntimeError, match="not finite"):
        script.sample(model, prompt, torch.ones_like(prompt), 2, 4, [], 0)


@having("token_logprobs")
def test_no_logits_are_computed_for_a_prompt_50_times_longer_than_the_completion(script, model):
    rows = torch.randint(0, 256, (2, 200), generator=torch.Generator().manual_seed(0)).tolist()
    prompt_ids, prompt_mask = script.pad(rows, 258, "left")
    predicted = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _, args, out: predicted.append(out.shape[0] * out.shape[1]))
    ids, mask = script.sample(model, prompt_ids, prompt_mask, 3, 4, [], 258)
    assert predicted == [2, 6, 6, 6]
    predicted.clear()
    script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask)
    assert predicted == [2, 6 * 3]


@having("sample")
def test_prompt_and_completion_may_fill_all_learned_positions(script):
    model = make_model("gpt2")
    rows, (prompt_ids, prompt_mask) = prompts(script, lengths=(500, 8))
    # Row 0 stops at once; row 1 goes on beyond what row 0 could have held.
    stop = int(script.sample(model, prompt_ids, prompt_mask, 1, 1, [], 0, greedy=True)[0][0])
    ids, mask = script.sample(model, prompt_ids, prompt_mask, 1, 40, [stop], 0, greedy=True)
    assert mask[0].sum() == 1 and script.token_logprobs(model, prompt_ids, prompt_mask, ids, mask).isfinite().all()
