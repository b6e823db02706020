"""Properties that hold for any input, on inputs that hypothesis makes up."""

from decimal import Decimal

import pytest
import torch
from conftest import having, make_model, pad, prompts_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

common = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
few, many = settings(max_examples=10, **common), settings(max_examples=80, **common)
MODELS = {family: make_model(family, spread=0.1) for family in ("qwen2", "gpt2")}
tokens = st.integers(0, 259)
family = st.sampled_from(sorted(MODELS))


def lists(items, smallest, largest):
    return st.lists(items, min_size=smallest, max_size=largest)


def wider(ids, mask, columns, side, pad_id):
    """The batch with more pad columns on the side."""
    amount = (columns, 0) if side == "left" else (0, columns)
    more = torch.nn.functional.pad
    return more(ids, amount, value=pad_id), more(mask, amount)


@having("token_logprobs")
@few
@given(
    family,
    lists(lists(tokens, 1, 9), 2, 2),
    lists(lists(tokens, 1, 7), 4, 4),
    tokens,
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_padding_changes_nothing(script, family, prompts, completions, pad_id, left, right):
    """A row alone, in a batch, and in a batch with more pad columns: the same numbers."""
    model = MODELS[family]
    batch = [*prompts_of(prompts, pad_id), *pad(completions, pad_id)]
    wide = [*wider(*batch[:2], left, "left", pad_id), *wider(*batch[2:], right, "right", pad_id)]
    with torch.no_grad():
        plain, padded = (script.token_logprobs(model, *x) for x in (batch, wide))
        for i, completion in enumerate(completions):
            one = *prompts_of([prompts[i // 2]]), *pad([completion])
            alone, n = script.token_logprobs(model, *one)[0], len(completion)
            assert (alone - plain[i, :n]).abs().max() < 1e-4
            assert (alone - padded[i, :n]).abs().max() < 1e-4
    assert padded.isfinite().all()
    if hasattr(script, "masked_mean"):
        means = script.masked_mean(plain, batch[3]), script.masked_mean(padded, wide[3])
        assert abs(means[0] - means[1]) < 1e-4
    if hasattr(script, "gae"):
        T, rewards = plain.shape[1], torch.ones(4)
        short = script.gae(rewards, plain, batch[3], 0.9, 0.95)
        for x, y in zip(short, script.gae(rewards, padded, wide[3], 0.9, 0.95)):
            assert (x - y[:, :T]).abs().max() < 1e-3 and not y[:, T:].any()
    if hasattr(script, "micro_batches"):
        for rows, part in script.micro_batches(*wide, 1):
            assert part[0].tolist() == [prompts[int(rows) // 2]] and part[1].all()
            assert part[2].tolist() == [completions[int(rows)]] and part[3].all()


@having("sample")
@few
@given(
    family,
    lists(lists(tokens, 1, 9), 1, 3),
    st.one_of(st.just([]), lists(tokens, 1, 200), st.just(list(range(260)))),
    tokens,
    st.integers(1, 3),
    st.integers(1, 20),
    st.booleans(),
)
def test_samples_end_at_their_first_stop_token_or_at_the_limit(
    script, family, prompts, stops, pad_id, n, limit, greedy
):
    pad_id = stops[0] if stops and pad_id % 2 else pad_id  # pad = EOS is common
    ends = torch.tensor(stops, dtype=torch.long)
    batch = prompts_of(prompts, pad_id)
    ids, mask = script.sample(MODELS[family], *batch, n, limit, ends, pad_id, greedy)
    assert ids.shape == mask.shape == (len(prompts) * n, int(mask.sum(1).max()))
    assert ids.shape[1] <= limit
    for row, real in zip(ids.tolist(), mask.tolist()):
        length = sum(real)
        assert length >= 1 and real == [1] * length + [0] * (len(real) - length)
        assert not set(row[: length - 1]) & set(stops)
        assert row[length - 1] in stops or length == limit
        assert row[length:] == [pad_id] * (len(row) - length)


@having("group_advantages")
@many
@given(lists(lists(st.sampled_from([0.0, 1.0]), 4, 4), 1, 5))
def test_advantages_of_a_group_sum_to_0_and_are_0_where_it_is_flat(script, rewards):
    for scale in (True, False):
        advantages = script.group_advantages(torch.tensor(rewards), scale)
        assert advantages.shape == (len(rewards), 4) and advantages.sum(1).abs().max() < 1e-5
        for row, group in zip(advantages, rewards):
            assert row.any() == (len(set(group)) > 1)
            assert all((x > 0) == (r == 1) for x, r in zip(row, group) if x)


@having("clipped_surrogate")
@many
@given(lists(st.floats(-3, 3), 2, 6), lists(st.floats(-2, 2), 6, 6), st.floats(0.05, 0.5))
def test_clipped_loss_is_never_below_the_unclipped_one(script, logs, advantages, clip):
    logs, advantages = torch.tensor([logs]), torch.tensor([advantages[: len(logs)]])
    loss, clipped = script.clipped_surrogate(logs, torch.zeros_like(logs), advantages, clip)
    plain = -logs.exp() * advantages
    assert (loss >= plain).all() and torch.equal(clipped, (loss > plain).float())
    inside = (logs.exp() - 1).abs() < clip
    assert torch.equal(loss[inside], plain[inside])


@having("kl_to_reference")
@many
@given(lists(st.floats(-1e4, 0), 1, 6), lists(st.floats(-1e4, 0), 6, 6))
def test_kl_estimate_is_finite_and_never_negative(script, policy, reference):
    reference = torch.tensor(reference[: len(policy)])
    kl = script.kl_to_reference(torch.tensor(policy), reference)
    assert (kl >= 0).all() and kl.isfinite().all()
    assert not script.kl_to_reference(reference, reference).any()


noise = st.text(
    alphabet=st.sampled_from("\\boxed{}0123456789.,-$%^/ \n\u2212\u0663xfrac"), max_size=60
)


@having("extract_answer")
@many
@given(st.one_of(st.text(), noise, noise.map(lambda text: rf"\boxed{{{text}}}")))
def test_any_text_has_a_reward_and_never_an_exception(script, text):
    found = script.extract_answer(text)
    assert found is None or Decimal(found).is_finite()
    assert script.reward(text, found or "0") == float(found is not None)


FORMATS = [
    r"\boxed{{{}}}",
    r"\boxed{{${}$}}",
    r"\boxed{{\${}}}",
    r"so \boxed{{ {} \text{{ dollars}} }}.",
    r"\boxed{{x = {}}}",
    r"\boxed{{{}\%}}",
    r"\boxed{{5}} no, \boxed{{{}}}",
]
prices = st.decimals(
    allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=2
)


@having("extract_answer")
@many
@given(prices, prices, st.sampled_from(FORMATS), noise.filter(lambda text: not {*"{}"} & {*text}))
def test_the_gold_number_scores_in_every_form_and_no_other_number(script, gold, other, form, text):
    comma = f"{gold:,}"
    for number in (f"{gold}", comma, comma.replace("-", "\u2212"), f"{gold}00"):
        assert script.reward(text + form.format(number), f"{gold}") == 1.0
        assert script.reward(form.format(number), comma) == 1.0
        assert script.reward(form.format(number), f"{other}") == float(gold == other)


@having("toy_data")
@many
@given(
    st.one_of(st.text(), st.text(alphabet=st.sampled_from("<>/answer 12\n"), max_size=60)),
    st.integers(0, 18),
)
def test_any_text_has_a_toy_reward(script, text, answer):
    score = script.reward(text, str(answer))
    assert score in (0.0, 1.0) and (score == 0.0 or str(answer) in text)
    assert script.reward(f"{text}<answer>{answer}</answer>", str(answer)) == 1.0


@having("pass_at_k")
@many
@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))
    )
)
def test_pass_at_k_is_a_probability_that_grows(script, case):
    n, c, k = case
    value, product = script.pass_at_k(n, c, k), 1.0
    assert 0 <= value <= 1 and (k == 1 or value >= script.pass_at_k(n, c, k - 1))
    for i in range(k):  # k samples drawn without replacement, all of them wrong
        product *= max(n - c - i, 0) / (n - i)
    assert value == pytest.approx(1 - product)
