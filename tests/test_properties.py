"""Properties that hold for any input, on inputs that hypothesis makes up."""

from decimal import Decimal

import pytest
import torch
from conftest import SCRIPTS, having, make_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

few = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
many = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MODELS = {family: make_model(family, spread=0.1) for family in ("qwen2", "gpt2")}
tokens = st.integers(0, 259)
family = st.sampled_from(sorted(MODELS))


@having("token_logprobs")
@few
@given(
    family,
    st.lists(st.lists(tokens, min_size=1, max_size=9), min_size=2, max_size=2),
    st.lists(st.lists(tokens, min_size=1, max_size=7), min_size=4, max_size=4),
    tokens,
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_padding_changes_nothing(script, family, prompts, completions, pad_id, left, right):
    """A row alone, in a batch, and in a batch with more pad columns: the same log-probabilities, means and losses."""
    model = MODELS[family]

    def wider(ids, mask, columns, side):
        amount = (columns, 0) if side == "left" else (0, columns)
        return torch.nn.functional.pad(ids, amount, value=pad_id), torch.nn.functional.pad(mask, amount)

    batch = [*script.pad(prompts, pad_id, "left"), *script.pad(completions, pad_id, "right")]
    wide = [*wider(*batch[:2], left, "left"), *wider(*batch[2:], right, "right")]
    with torch.no_grad():
        plain, padded = script.token_logprobs(model, *batch), script.token_logprobs(model, *wide)
        for i, completion in enumerate(completions):
            alone = script.token_logprobs(
                model, *script.pad([prompts[i // 2]], 0, "left"), *script.pad([completion], 0, "right")
            )
            n = len(completion)
            assert (alone[0] - plain[i, :n]).abs().max() < 1e-4 and (alone[0] - padded[i, :n]).abs().max() < 1e-4
    assert padded.isfinite().all()
    if hasattr(script, "masked_mean"):
        a, b = script.masked_mean(plain, batch[3]), script.masked_mean(padded, wide[3])
        assert abs(a - b) < 1e-4
    if hasattr(script, "gae"):
        T = plain.shape[1]
        short = script.gae(torch.ones(4), plain, batch[3], 0.9, 0.95)
        long = script.gae(torch.ones(4), padded, wide[3], 0.9, 0.95)
        assert all((x - y[:, :T]).abs().max() < 1e-3 and not y[:, T:].any() for x, y in zip(short, long))
    if hasattr(script, "micro_batches"):
        for each in (batch, wide):
            parts = script.micro_batches(*each, torch.ones(2, 2), 1, False)
            assert sorted(p[2][p[3] == 1].tolist() for p, _ in parts) == sorted(completions)
            assert all(p[1].all() and len(p[2]) == 1 for p, _ in parts)


@having("sample")
@few
@given(
    family,
    st.lists(st.lists(tokens, min_size=1, max_size=9), min_size=1, max_size=3),
    st.one_of(st.just([]), st.lists(tokens, min_size=1, max_size=200), st.just(list(range(260)))),
    tokens,
    st.integers(1, 3),
    st.integers(1, 20),
    st.booleans(),
)
def test_samples_end_at_their_first_stop_token_or_at_the_limit(
    script, family, prompts, stops, pad_id, n, limit, greedy
):
    pad_id = stops[0] if stops and pad_id % 2 else pad_id  # pad = EOS is common
    ids, mask = script.sample(MODELS[family], *script.pad(prompts, pad_id, "left"), n, limit, stops, pad_id, greedy)
    assert ids.shape == mask.shape == (len(prompts) * n, int(mask.sum(1).max())) and ids.shape[1] <= limit
    for row, real in zip(ids.tolist(), mask.tolist()):
        length = sum(real)
        assert length >= 1 and real == [1] * length + [0] * (len(real) - length)
        assert not set(row[: length - 1]) & set(stops)
        assert row[length - 1] in stops or length == limit
        assert row[length:] == [pad_id] * (len(row) - length)


@having("group_advantages")
@many
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 0.1, -3.0]), min_size=4, max_size=4), min_size=1, max_size=5))
def test_advantages_of_a_group_sum_to_0_and_are_0_where_it_is_flat(script, rewards):
    r = torch.tensor(rewards)
    for scale in (True, False):
        a = script.group_advantages(r, scale)
        assert a.shape == r.shape and a.sum(1).abs().max() < 1e-4
        for row, group in zip(a, rewards):
            assert row.any() == (len(set(group)) > 1)
            for i in range(4):  # the order of the rewards
                for j in range(4):
                    assert group[i] <= group[j] or row[i] > row[j]


GSM8K_SCRIPTS = having("extract_answer")
noise = st.text(alphabet=st.sampled_from("\\boxed{}0123456789.,-$% \n\u2212\u0663xfrac"), max_size=60)


@GSM8K_SCRIPTS
@many
@given(st.one_of(st.text(), noise), st.one_of(st.text(), noise))
def test_any_text_has_a_reward_and_never_an_exception(script, text, gold):
    found = script.extract_answer(text)
    assert found is None or Decimal(found).is_finite()
    assert script.reward(text, gold) in (0.0, 1.0)
    assert script.reward(text, gold) == 0.0 or Decimal(found) == Decimal(script.extract_answer(rf"\boxed{{{gold}}}"))


FORMATS = [
    r"\boxed{{{}}}",
    r"\boxed{{${}$}}",
    r"\boxed{{\${}}}",
    r"so \boxed{{ {} \text{{ dollars}} }}.",
    r"\boxed{{x = {}}}",
    r"\boxed{{{}\%}}",
    r"\boxed{{5}} no, \boxed{{{}}}",
]


@GSM8K_SCRIPTS
@many
@given(
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=2),
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=2),
    st.sampled_from(FORMATS),
    noise.filter(lambda text: "{" not in text and "}" not in text),
)
def test_the_gold_number_scores_in_every_form_and_no_other_number(script, gold, other, form, before):
    for number in (f"{gold}", f"{gold:,}", f"{gold:,}".replace("-", "\u2212"), f"{gold}00"):
        assert script.reward(before + form.format(number), f"{gold}") == 1.0
        assert script.reward(form.format(number), f"{gold:,}") == 1.0
        assert script.reward(form.format(number), f"{other}") == float(gold == other)
        assert script.reward(form.format(number)[:-2], f"{gold}") == 0.0 or "5" in form  # not closed


@having("toy_data")
@many
@given(st.one_of(st.text(), st.text(alphabet=st.sampled_from("<>/answer 12\n"), max_size=60)), st.integers(0, 18))
def test_any_text_has_a_toy_reward(script, text, answer):
    score = script.reward(text, str(answer))
    assert score in (0.0, 1.0) and (score == 0.0 or str(answer) in text)
    assert script.reward(f"{text}<answer>{answer}</answer>", str(answer)) == 1.0


@having("pass_at_k")
@many
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_a_probability_that_grows(script, case):
    n, c, k = case
    value = script.pass_at_k(n, c, k)
    assert 0 <= value <= 1 and (k == 1 or value >= script.pass_at_k(n, c, k - 1))
    assert value == pytest.approx(
        1 if n - c < k else 1 - torch.prod(1 - k / torch.arange(n - c + 1.0, n + 1)).item(), abs=1e-4
    )


def test_every_family_of_scripts_is_covered():
    assert all(hasattr(s, "extract_answer") or hasattr(s, "toy_data") for s in SCRIPTS.values())
