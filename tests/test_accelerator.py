"""On CUDA or MPS: the scripts run there, and what they compute is what the CPU computes."""

import re

import pytest
import torch
from conftest import CLIPPED, NAMES, SCRIPTS, make_model, steps, summary
from test_runs import METRICS, metrics

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
DEVICE = getattr(torch.accelerator.current_accelerator(True), "type", "cpu")
VOCABULARY = 151_936  # Qwen2.5's
SUMS = [f"What is {a} + {a + 1}{'?' * a}" for a in range(8)]  # prompts of different lengths


@pytest.fixture(autouse=True)
def precision():
    """`load` sets it for the whole process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_end_to_end(name, tiny, train, monkeypatch):
    """The reference is the policy at first, and memory is read from the model's device."""
    asked, peak = [], torch.accelerator.max_memory_allocated
    monkeypatch.setattr(
        torch.accelerator, "max_memory_allocated", lambda *x: asked.append(*x) or peak(*x))
    device = DEVICE if DEVICE == "cpu" else f"{DEVICE}:{torch.accelerator.device_count() - 1}"
    knobs = {"inner_epochs": 1} if name in CLIPPED else {}
    output = train(name, tiny, device=device, lr=1e-3, **knobs)
    shown = [metrics(line) for line in steps(output)]
    assert len(shown) >= 2 and list(shown[-1]) == METRICS[name]
    assert shown[0]["loss"] == pytest.approx(0.6931, abs=1e-4) or name != "minimal_dpo"
    assert shown[-2].get("kl", 0) == 0
    assert re.match(r"\d+\.\d\d$", summary(output)["peak_gb"]) and asked == [torch.device(device)]


def test_greedy_completions_and_logprobs_are_those_of_the_cpu(tiny):
    """In full float32; as `load` leaves it, CUDA multiplies in TF32, with 10 bits after the dot."""
    script, found = SCRIPTS["minimal_grpo"], []
    for device in ("cpu", DEVICE):
        model, tokenizer = script.load(str(tiny), device)
        prompts = script.encode_prompts(tokenizer, SUMS, model.device)
        limits = 24, script.stop_ids(model, tokenizer), tokenizer.pad_token_id
        with torch.no_grad():
            torch.set_float32_matmul_precision("highest")
            ids, mask = script.sample(model, *prompts, 2, *limits, greedy=True)
            logprobs = script.token_logprobs(model, *prompts, ids, mask)
            if device == "cuda":
                torch.set_float32_matmul_precision("high")
            rounded = script.token_logprobs(model, *prompts, ids, mask)
        found.append([x.cpu() for x in (ids, mask, logprobs * mask, rounded * mask)])
    cpu, accelerator = found
    assert torch.equal(cpu[0], accelerator[0]) and torch.equal(cpu[1], accelerator[1])
    torch.testing.assert_close(cpu[2], accelerator[2], atol=1e-3, rtol=0)
    torch.testing.assert_close(cpu[3], accelerator[3], atol=5e-2, rtol=0)


def test_gradient_of_a_large_head_is_that_of_the_cpu():
    """Its products have 151,936 terms; MPS has cut them off at 32,768."""
    script, gradients = SCRIPTS["minimal_sft"], []
    torch.set_float32_matmul_precision("highest")
    ids, prompt = torch.randint(0, VOCABULARY, (2, 3)), torch.randint(0, VOCABULARY, (2, 2))
    ids[0, 0] = VOCABULARY - 1
    for device in ("cpu", DEVICE):
        model = make_model(vocab=VOCABULARY, spread=0.1).to(device)
        batch = [x.to(device) for x in (prompt, torch.ones_like(prompt), ids, torch.ones_like(ids))]
        (-script.token_logprobs(model, *batch).mean()).backward()
        gradients.append([p.grad.cpu() for p in model.parameters()])
    for cpu, accelerator in zip(*gradients):
        assert (accelerator - cpu).norm() < 1e-3 * cpu.norm()


def test_nothing_of_probability_0_is_drawn(monkeypatch):
    """20,000 draws by `sample` from 20 of 151,936 ids; multinomial on MPS has drawn others."""
    script, rows, length = SCRIPTS["minimal_grpo"], 100, 200
    logits = torch.full((VOCABULARY,), -200.0)  # softmax is 0 in float32
    possible = torch.randperm(VOCABULARY)[:20]
    logits[possible] = torch.linspace(-8, 0, 20)
    logits = logits.to(DEVICE).expand(rows, 1, VOCABULARY)
    prompt = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    seen = torch.ones(rows, 1, dtype=torch.long, device=DEVICE)
    monkeypatch.setattr(script, "prefill", lambda *_: (None, seen, logits))
    monkeypatch.setattr(script, "forward", lambda *_: logits)
    stops = torch.tensor([], dtype=torch.long, device=DEVICE)
    ids, mask = script.sample(None, prompt, prompt + 1, rows, length, stops, pad_id=0)
    assert mask.all() and ids.numel() == 20_000
    assert torch.isin(ids.cpu(), possible).all() and ids.unique().numel() > 10
