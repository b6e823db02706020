"""Seconds and memory of a GRPO step, against its floor and what people would use. Not a test.

    uv run python tests/bench.py --model out/sft
    uv run python tests/bench.py --model out/sft --script gsm8k_grpo --new_tokens 128
    uv run python tests/bench.py --model out/sft --peers
    uv run python tests/bench.py --model out/sft --prompts 1 --grid
    uv run python tests/bench.py --model out/sft --memory

The floor of a phase is the model alone, on as many real tokens and in as many calls, without masks
or padding: as many cached one-token passes for sampling, one forward pass for scoring, one forward
and backward pass for the update. Rounds are interleaved, and the median of each is printed. With
--peers, a whole step of minimal_grpo.py (sampling, reference, two inner epochs with an optimizer
step each) is compared with TRL's GRPOTrainer and with the loop that tutorials use: one rollout at a
time, its prompt read anew, every row padded to one fixed length, log-softmax over prompt and
completion, and one more forward pass for the old log-probabilities.
"""

import argparse
import copy
import resource
import statistics
import subprocess
import sys
import time

import torch
from conftest import SCRIPTS
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, Qwen2Config


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="out/sft", help="local folder or hub name")
    parser.add_argument("--script", default="minimal_grpo", choices=["minimal_grpo", "gsm8k_grpo"])
    parser.add_argument("--device", default="")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="no stop token: all rows at the limit")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--grid", action="store_true", help="as groups and completions grow")
    parser.add_argument("--memory", action="store_true", help="counted against measured peaks")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # a peer, in its own process
    return parser.parse_args()


def load(args):
    """Script, model, tokenizer, prompts of different lengths, stop ids."""
    script = SCRIPTS[args.script]
    model, tokenizer = script.load(args.model, args.device)
    questions = [f"{'Ann buys pens. ' * (2 + 3 * i % 7)}How many?" for i in range(args.prompts)]
    if args.script == "minimal_grpo":
        questions = [question for question, _ in script.toy_data()[0][: args.prompts]]
    prompts = script.encode_prompts(tokenizer, questions, model.device)
    stops = script.stop_ids(model, tokenizer)
    if args.full:
        model.generation_config.eos_token_id, stops = None, stops[:0]
    return script, model, tokenizer, prompts, stops


def peak_gb(device):
    """Peak memory so far in 10^9 bytes: torch's count on CUDA, else that of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def clock(device, function):
    """Seconds of one call, the accelerator's work included."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    started = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def work(args, script, model, tokenizer, prompts, stops):
    """A line about the rollout, and of each phase: name, our function, its floor, real tokens."""
    B, G, T = args.prompts, args.group, args.new_tokens

    def sampling():
        torch.manual_seed(0)  # the same rollout every time
        return script.sample(model, *prompts, G, T, stops, tokenizer.pad_token_id)

    ids, mask = sampling()
    T, parts = ids.shape[1], [(*prompts, ids, mask)]
    if hasattr(script, "micro_batches"):
        parts = [part for _, part in script.micro_batches(*prompts, ids, mask, 0)]
    prompt_length, length = round(prompts[1].sum().item() / B), round(mask.sum().item() / (B * G))

    @torch.no_grad()
    def sampling_floor():
        cache, token = DynamicCache(), ids[:, :1]
        model(prompts[0][:, -prompt_length:], cache=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(G)
        for _ in range(T - 1):
            model(token, cache=cache)

    def forward_floor():
        """The logits of each part, to be used before the next part's: ours does so too."""
        for b, rows in ((len(part[0]), len(part[2])) for part in parts):
            cache = DynamicCache()
            first = model(prompts[0][:b, -prompt_length:], cache=cache, logits_to_keep=1).logits
            cache.batch_repeat_interleave(rows // b)
            yield first.sum() + model(ids[:rows, :length], cache=cache).logits.sum()

    @torch.no_grad()
    def scoring():
        for part in parts:
            script.token_logprobs(model, *part)

    @torch.no_grad()
    def scoring_floor():
        for _ in forward_floor():
            pass

    def update():
        for part in parts:
            (script.token_logprobs(model, *part) * part[-1]).sum().backward()
        model.zero_grad()

    def update_floor():
        for total in forward_floor():
            total.backward()
        model.zero_grad()

    real = prompts[1].sum().item() + mask.sum().item()
    padding = 1 - real / sum(part[0].numel() + part[2].numel() for part in parts)
    text = (
        f"{B} x {G} rows, prompts of {prompt_length}, completions of {length} tokens on average, "
        f"up to {T}; {padding:.0%} of the scored tokens are padding"
    )
    return text, (
        ("sampling", sampling, sampling_floor, mask.sum().item()),
        ("scoring", scoring, scoring_floor, real),
        ("update", update, update_floor, real),
    )


def phases(args):
    """The table of the three phases: ours, the floor, their ratio."""
    _, model, *_ = loaded = load(args)
    text, rows = work(args, *loaded)
    print(f"{args.script}, {args.model}, {model.device}: {text}\n")
    print("| phase | seconds | floor | ratio | tokens per second |\n|---|---|---|---|---|")
    for name, ours, floor, tokens in rows:
        ours(), floor()  # warm up
        both = (ours, floor)
        times = [[clock(model.device, function) for function in both] for _ in range(args.rounds)]
        a, b = (statistics.median(column) for column in zip(*times))
        ratio = statistics.median(x / y for x, y in times)
        print(f"| {name} | {a:.2f} | {b:.2f} | {ratio:.2f} | {tokens / a:.0f} |", flush=True)
    print(f"\npeak memory: {peak_gb(model.device):.2f} GB")


def grid(args):
    """Seconds of the phases as groups and completions grow; every row runs to the limit."""
    args.full = True
    _, model, *_ = loaded = load(args)
    print("| completions per prompt | new tokens | sampling | scoring | update |")
    print("|---|---|---|---|---|")
    for args.group in (4, 8, 16, 32):
        for args.new_tokens in (16, 64, 256):
            _, rows = work(args, *loaded)
            seconds = (f"{clock(model.device, ours):.1f} |" for _, ours, _, _ in rows)
            print(f"| {args.group} | {args.new_tokens} |", *seconds, flush=True)


def counted_gb(config, B, G, P, T, trained=1, frozen=1):
    """Peak of an update in 10^9 bytes: float32 numbers, B prompts of P tokens, B*G rows of T.

    Counted are weights, gradients and AdamW's two moments of each trained model, the weights of
    frozen ones, and what the backward pass needs. Per token and layer: six hidden states (each of
    two norms keeps its input, the normalised and the scaled one), queries, outputs, repeated keys
    and values, four MLP states; the prompt's keys and values once more per row, repeated. Per
    completion token three rows of V logits: forward, the model's, the joined ones and their
    log-softmax; backward, the log-softmax, its gradient and that of the logits. The gradient of the
    tied embedding a second time.
    """
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    h, layers, V = config.hidden_size, config.num_hidden_layers, config.vocab_size
    heads = config.num_attention_heads
    q = (getattr(config, "head_dim", None) or h // heads) * heads
    token = 6 * h + 4 * q + 4 * config.intermediate_size
    states = layers * (token * B * (P + G * T) + 2 * q * B * G * P)
    weights = (4 * trained + frozen) * parameters
    return 4 * (weights + trained * (states + V * h) + 3 * V * B * G * T) / 1e9


def qwen_gb():
    """Counted for Qwen2.5-0.5B: toy prompts of 45 tokens, GSM8K's of 150, full completions."""
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    table = [
        ("minimal_sft.py", "", (8, 1, 45, 10), 1, 0),
        ("minimal_dpo.py", "", (8, 2, 45, 10), 1, 1),
        ("minimal_grpo.py", "", (8, 4, 45, 12), 1, 1),
        ("minimal_ppo.py", "", (16, 1, 45, 12), 2, 1),
        ("minimal_ppo.py", "--batch_size 4", (4, 1, 45, 12), 2, 1),
    ]
    for script, frozen in (("gsm8k_grpo.py", 1), ("gsm8k_grpo_autoresearch.py", 0)):
        for rows in (8, 4, 2, 1):  # gsm8k_sft_grpo.py is as gsm8k_grpo.py
            table.append((script, f"--micro_batch {rows}", (1, rows, 150, 512), 1, frozen))
    print("\n| script | flags | counted GB |\n|---|---|---|")
    for script, flags, shape, trained, frozen in table:
        print(f"| {script} | {flags} | {counted_gb(config, *shape, trained, frozen):.1f} |")


def one(args, *flags):
    """A peer in a process of its own: seconds of two steps, start and peak in GB, P."""
    command = [sys.executable, __file__, "--model", args.model, *map(str, flags)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return map(float, output.split("RESULT ")[1].split())


def memory(args):
    """Counted and measured peaks of a step of minimal_grpo.py, on CPU."""
    config = AutoConfig.from_pretrained(args.model)
    print("| prompts | completions | new tokens | counted GB | measured GB | ratio |")
    print("|---|---|---|---|---|---|")
    for B, G, T in ((4, 8, 24), (4, 8, 64), (2, 8, 128), (4, 8, 128)):
        shape = "--prompts", B, "--group", G, "--new_tokens", T
        *_, start, peak, P = one(args, "--one", "ours", "--full", "--device", "cpu", *shape)
        counted = start + counted_gb(config, B, G, P, T)
        ratio = counted / peak
        print(f"| {B} | {G} | {T} | {counted:.2f} | {peak:.2f} | {ratio:.2f} |", flush=True)
    qwen_gb()


def ours(args, steps):
    """Seconds of each step: sampling, reference, two inner epochs."""
    script, model, tokenizer, prompts, stops = load(args)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    advantages = torch.randn(args.prompts * args.group, 1, device=model.device)
    limits = args.group, args.new_tokens, stops, tokenizer.pad_token_id

    def step():
        ids, mask = script.sample(model, *prompts, *limits)
        with torch.no_grad():
            ref = script.token_logprobs(reference, *prompts, ids, mask)
        old = None
        for _ in range(2):
            new = script.token_logprobs(model, *prompts, ids, mask)
            old = new.detach() if old is None else old
            losses, _ = script.clipped_surrogate(new, old, advantages, 0.2)
            losses = losses + 0.04 * (new - old).exp() * script.kl_to_reference(new, ref)
            script.masked_mean(losses, mask).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    seconds = [clock(model.device, step) for _ in range(steps)]
    return seconds, peak_gb(model.device), prompts[0].shape[1]


def sequential(args, steps):
    """The tutorials' loop on the same work."""
    script, model, tokenizer, (prompt_ids, prompt_mask), stops = load(args)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    advantages = torch.randn(args.prompts * args.group, 1, device=model.device)
    P, T, pad = prompt_ids.shape[1], args.new_tokens, tokenizer.pad_token_id

    def logprobs(m, ids, mask):
        everything = m(ids, attention_mask=mask).logits.log_softmax(-1)[:, :-1]
        return everything.gather(-1, ids[:, 1:, None])[:, -T:, 0]

    def step():
        ids = torch.full((args.prompts * args.group, P + T), pad, device=model.device)
        mask = torch.zeros_like(ids)
        for i in range(len(ids)):
            row, real = prompt_ids[i // args.group], prompt_mask[i // args.group].bool()
            out = model.generate(
                row[real][None],
                attention_mask=prompt_mask[i // args.group][real][None],
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                max_new_tokens=T,
                eos_token_id=stops.tolist() or None,
                pad_token_id=pad,
            )[0]
            start = P - int(real.sum())
            ids[i, start : start + len(out)] = out
            mask[i, start : start + len(out)] = 1
        with torch.no_grad():
            ref, old = logprobs(reference, ids, mask), logprobs(model, ids, mask)
        for _ in range(2):
            new = logprobs(model, ids, mask)
            losses, _ = script.clipped_surrogate(new, old, advantages, 0.2)
            losses = losses + 0.04 * (new - old).exp() * script.kl_to_reference(new, ref)
            optimizer.zero_grad()
            script.masked_mean(losses, mask[:, -T:]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return [clock(model.device, step) for _ in range(steps)], peak_gb(model.device), P


def trl(args, steps):
    """TRL's GRPOTrainer with its own generation, float32."""
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    _, model, tokenizer, (prompt_ids, prompt_mask), _ = load(args)
    tokenizer.padding_side = "left"
    texts = [tokenizer.decode(ids[real.bool()]) for ids, real in zip(prompt_ids, prompt_mask)]
    times = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            times.append(time.perf_counter())

    config = GRPOConfig(
        output_dir="out/bench_trl",
        use_cpu=model.device.type == "cpu",
        bf16=False,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=args.prompts * args.group,
        num_generations=args.group,
        max_completion_length=args.new_tokens,
        num_iterations=2,
        max_steps=2 * steps,
        beta=0.04,
        learning_rate=1e-6,
        loss_type="bnpo",
        logging_steps=1000,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: torch.randn(len(completions)).tolist(),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": x} for x in texts] * (steps + 1)),
        callbacks=[Clock()],
        processing_class=tokenizer,
    )
    times.append(time.perf_counter())
    trainer.train()
    ends = times[::2]  # two updates a rollout
    return [b - a for a, b in zip(ends, ends[1:])], peak_gb(model.device), 0


PEERS = {"ours": ours, "sequential": sequential, "trl": trl}


def peers(args):
    """Each in processes of its own, in turn; the first step of each process warms up."""
    seconds, peaks = {name: [] for name in PEERS}, {name: [] for name in PEERS}
    for _ in range(args.rounds):
        for name in PEERS:
            *values, _, peak, _ = one(args, *sys.argv[1:], "--one", name)
            seconds[name] += values[1:]
            peaks[name].append(peak)
    base = statistics.median(seconds["ours"])
    print("| scheme | seconds per step | ratio to ours | peak GB |\n|---|---|---|---|")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.1f} | {median / base:.2f} | {max(peaks[name]):.2f} |")


if __name__ == "__main__":
    args = arguments()
    if args.one:
        torch.manual_seed(0)
        start = peak_gb(torch.device("cpu"))
        values, peak, prompt = PEERS[args.one](args, 2)
        print("RESULT", *values, start, peak, prompt)
    else:
        modes = {"peers": peers, "grid": grid, "memory": memory}
        next((modes[name] for name in modes if getattr(args, name)), phases)(args)
