"""The sampler and the scoring against plain forward passes, generate, and at their edges."""

from types import SimpleNamespace

import pytest
import torch
from conftest import having, make_model, prompts_of

STOP, NONE = torch.tensor([257]), torch.tensor([], dtype=torch.long)


def prompts(lengths=(9, 5, 1), seed=1):
    """Random prompts, as lists of ids and as a padded batch."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]
    return rows, prompts_of(rows)


def plain(model, prompt, completion):
    """Log-probabilities of one completion by one forward pass over the whole, unpadded row."""
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@having("token_logprobs")
def test_values_and_gradients_equal_those_of_a_plain_forward_pass(script, model):
    """Cached, padded, 4 completions to a prompt, against each row alone and whole."""
    rows, batch = prompts()
    torch.manual_seed(0)
    ids, mask = script.sample(model, *batch, 4, 12, torch.arange(200, 258), 258)
    assert ids.shape == mask.shape == (12, int(mask.sum(1).max())) and not mask.all()
    logprobs = script.token_logprobs(model, *batch, ids, mask)
    assert logprobs.dtype == torch.float32 and logprobs.shape == ids.shape
    (logprobs * mask).sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for i, row in enumerate(ids):
        completion = row[mask[i].bool()].tolist()
        expected = plain(model, rows[i // 4], completion)
        assert (logprobs[i, : len(completion)] - expected).abs().max() < 1e-4
        expected.sum().backward()
    for a, b in zip(ours, [p.grad for p in model.parameters()]):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * b.abs().max())


@having("sample")
def test_the_samplers_probabilities_are_those_that_are_trained(script, model, monkeypatch):
    _, batch = prompts()
    drawn, multinomial = [], torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda p, n: drawn.append(p) or multinomial(p, n))
    torch.manual_seed(0)
    ids, mask = script.sample(model, *batch, 4, 12, NONE, 258)
    sampled = torch.stack(drawn, 1).log().gather(2, ids[:, :, None])[:, :, 0]
    logprobs = script.token_logprobs(model, *batch, ids, mask)
    assert mask.all() and (logprobs - sampled).abs().max() < 1e-4


@having("sample")
def test_greedy_sampling_equals_generate(script, model):
    rows, batch = prompts()
    ids, mask = script.sample(model, *batch, 1, 10, STOP, 258, greedy=True)
    limits = {"max_new_tokens": 10, "eos_token_id": 257, "pad_token_id": 258, "do_sample": False}
    for i, row in enumerate(rows):
        out = model.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row)), **limits)
        assert ids[i][mask[i].bool()].tolist() == out[0, len(row) :].tolist()


class Scripted(torch.nn.Module):
    """A model that predicts the given tokens (rows, T) one after the other, whatever it reads."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.passes = torch.tensor(tokens), 0

    def forward(self, ids, cache, attention_mask, **kwargs):
        cache.update(torch.zeros(len(ids), 1, ids.shape[1], 1), torch.zeros(len(ids), 1, 1, 1), 0)
        assert attention_mask.shape == (len(ids), cache.get_seq_length())
        target = self.tokens[: len(ids), self.passes, None, None]
        self.passes += 1
        return SimpleNamespace(logits=torch.full((len(ids), 1, 10), -1e4).scatter(2, target, 1e4))


@having("sample")
@pytest.mark.parametrize("greedy", [True, False])
def test_mask_comes_from_the_first_stop_id_and_holds_it(script, greedy):
    # Row 0: a b EOS; row 1: the other stop id at once; row 2 never stops. Pad is EOS.
    model = Scripted([[3, 4, 9, 0, 0], [8, 0, 0, 0, 0], [5, 5, 5, 5, 6]])
    prompt = torch.ones(3, 2, dtype=torch.long)
    ids, mask = script.sample(model, prompt, prompt, 1, 5, torch.tensor([8, 9]), 9, greedy)
    assert mask.tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    # A truncated row keeps the token that it sampled last.
    assert ids.tolist() == [[3, 4, 9, 9, 9], [8, 9, 9, 9, 9], [5, 5, 5, 5, 6]]
    assert model.passes == 5  # no pass after the last token


@having("sample")
def test_no_column_and_no_pass_beyond_the_longest_row(script):
    model = Scripted([[3, 9, 0, 0], [4, 4, 9, 0]])
    prompt = torch.ones(2, 2, dtype=torch.long)
    ids, mask = script.sample(model, prompt, prompt, 1, 4, torch.tensor([9]), 0)
    assert ids.tolist() == [[3, 9, 0], [4, 4, 9]] and mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert model.passes == 3


@having("sample")
def test_rows_go_on_as_if_alone_while_others_have_finished(script, model):
    rows, batch = prompts(range(1, 13))
    stops = torch.arange(40, 60)
    ids, mask = script.sample(model, *batch, 1, 30, stops, 258, greedy=True)
    assert len(mask.sum(1).unique()) > 3 and set(ids[mask == 0].tolist()) == {258}
    for i, row in enumerate(rows):
        one, real = script.sample(model, *prompts_of([row]), 1, 30, stops, 258, greedy=True)
        assert real.all() and ids[i][mask[i].bool()].tolist() == one[0].tolist()


@having("sample")
def test_every_row_may_stop_at_its_first_token(script, model):
    rows, batch = prompts()
    ids, mask = script.sample(model, *batch, 2, 8, torch.arange(260), 0)
    assert ids.shape == (6, 1) and mask.all()
    logprobs = script.token_logprobs(model, *batch, ids, mask)
    assert logprobs.shape == (6, 1)
    assert (logprobs[0] - plain(model, rows[0], ids[0].tolist())).abs().max() < 1e-4


@having("sample")
def test_the_whole_softmax_is_sampled_whatever_generation_config_says(script):
    model = make_model(vocab=1000)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # all logits 0
    model.generation_config.update(
        top_k=20, top_p=0.8, temperature=0.1, repetition_penalty=1.1, do_sample=True
    )
    torch.manual_seed(0)
    prompt = torch.ones(1, 3, dtype=torch.long)
    ids, _ = script.sample(model, prompt, prompt, 2000, 1, NONE, 0)
    assert len(ids.unique()) >= 800  # of 1,000: 2,000 draws leave out 135 on average


@having("sample")
def test_logits_that_are_not_a_number_are_never_sampled_from(script, model):
    with torch.no_grad():
        next(model.parameters())[3] = float("nan")
    prompt = torch.full((2, 3), 3)
    with pytest.raises(RuntimeError):  # torch.multinomial's own
        script.sample(model, prompt, torch.ones_like(prompt), 2, 4, NONE, 0)


@having("sample")
def test_a_model_that_ignores_the_cache_is_refused(script, model, monkeypatch):
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, cache, **kw: forward(*args, **kw))
    _, batch = prompts()
    with pytest.raises(AssertionError, match="needs transformers 5.24"):
        script.sample(model, *batch, 1, 4, NONE, 0)


@having("token_logprobs")
def test_prompts_are_read_once_and_need_no_logits_but_their_last(script, model):
    """A prompt 50 times longer than its completions: memory grows with the completions only."""
    _, batch = prompts((200, 150))
    read, predicted = [], []
    model.register_forward_pre_hook(lambda _, args: read.append(tuple(args[0].shape)))
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _, args, out: predicted.append(out.shape[0] * out.shape[1]))
    ids, mask = script.sample(model, *batch, 3, 4, NONE, 258)
    assert read == [(2, 200), (6, 1), (6, 1), (6, 1)] and predicted == [2, 6, 6, 6]
    read.clear()
    predicted.clear()
    script.token_logprobs(model, *batch, ids, mask)
    assert read == [(2, 200), (6, 4)] and predicted == [2, 6 * 4]


@having("sample")
def test_prompt_and_completion_may_fill_all_learned_positions(script):
    model = make_model("gpt2")  # 512 positions
    _, batch = prompts((500, 8))
    ids, mask = script.sample(model, *batch, 1, 12, NONE, 0, greedy=True)
    assert mask.all() and ids.shape == (2, 12)
    assert script.token_logprobs(model, *batch, ids, mask).isfinite().all()
