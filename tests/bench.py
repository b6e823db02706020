"""Seconds and memory of one GRPO step, against its floor and against what people would use instead. Not a test.

    uv run python tests/bench.py --model out/sft
    uv run python tests/bench.py --model out/sft --script gsm8k_grpo --new_tokens 128
    uv run python tests/bench.py --model out/sft --peers
    uv run python tests/bench.py --model out/sft --prompts 1 --grid
    uv run python tests/bench.py --model out/sft --memory

The floor of a phase is the model alone, on as many real tokens and in as many calls, without masks or padding: as many
cached one-token passes for sampling, one forward pass for scoring, one forward and backward pass for the update. Rounds
are interleaved, and the median of each is printed. With --peers, a whole rollout batch (sampling, reference, two inner
epochs with an optimizer step each) is compared with TRL's GRPOTrainer and with the loop that tutorials use: one rollout
at a time, its prompt read anew, every row padded to one fixed length, log-softmax over prompt and completion, and one
more forward pass for the old log-probabilities.
"""

import argparse
import copy
import inspect
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
    parser.add_argument("--random", action="store_true", help="random weights: only the model's config is used")
    parser.add_argument("--script", default="minimal_grpo", choices=["minimal_grpo", "gsm8k_grpo"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--grid", action="store_true", help="seconds as groups and completions grow")
    parser.add_argument("--memory", action="store_true", help="counted against measured peaks of minimal_grpo.py")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # a peer, in a process of its own
    return parser.parse_args()


def load(args):
    script = SCRIPTS[args.script]
    if not args.random:
        return script, *script.load(args.model, args.device)
    _, tokenizer = script.load(args.model, "cpu")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.float32)
    device = torch.accelerator.current_accelerator(True) if args.device == "auto" else args.device
    return script, model.to(device or "cpu").eval(), tokenizer


def problem_prompts(script, tokenizer, count):
    """Questions of different lengths, as in training."""
    if hasattr(script, "toy_data"):
        questions = [q for q, _ in script.toy_data()[0][:count]]
    else:
        questions = ["Ann buys some pens. " * (2 + 3 * i % 7) + "How many pens has she?" for i in range(count)]
    return script.pad([script.encode_prompt(tokenizer, q) for q in questions], tokenizer.pad_token_id, "left")


def clock(device, function):
    """Seconds of one call, the accelerator's work included."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    started = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def bare(model, ids, cache, **kwargs):
    """Logits of the model alone, after the cached tokens. The cache has two names, see `forward` in the scripts."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(ids, use_cache=True, **{name: cache}, **kwargs).logits


def work(args, script, model, tokenizer):
    """A line about the rollout, and of each phase: name, our function, its floor, real tokens."""
    device, (B, G, T) = model.device, (args.prompts, args.group, args.new_tokens)
    prompt_ids, prompt_mask = (x.to(device) for x in problem_prompts(script, tokenizer, B))
    stops = [] if args.random or args.grid else script.stop_ids(model, tokenizer)

    def sampling():
        torch.manual_seed(0)  # the same rollout every time
        return script.sample(model, prompt_ids, prompt_mask, G, T, stops, tokenizer.pad_token_id)

    ids, mask = sampling()
    if args.random:  # uniformly drawn lengths
        lengths = torch.randint(max(1, T // 4), T + 1, (B * G,))
        mask = (torch.arange(T) < lengths[:, None]).long().to(device)
    T = ids.shape[1]
    mean_prompt, mean_completion = round(prompt_mask.sum().item() / B), round(mask.sum().item() / (B * G))
    advantages = torch.randn(B, G, device=device)

    @torch.no_grad()
    def sampling_floor():
        cache = DynamicCache()
        bare(model, prompt_ids[:, -mean_prompt:], cache, logits_to_keep=1)
        cache.batch_repeat_interleave(G)
        token = torch.zeros(B * G, 1, dtype=torch.long, device=device)
        for _ in range(T - 1):
            bare(model, token, cache)

    def parts():
        if hasattr(script, "micro_batches"):
            return [p for p, _ in script.micro_batches(prompt_ids, prompt_mask, ids, mask, advantages, 0, False)]
        return [(prompt_ids, prompt_mask, ids, mask)]

    def calls(part):
        """Passes over the completions of a part: as many rectangles, unmasked, are its floor."""
        return len(list(script.similar_lengths(part[-1])))

    def forward_floor():
        """The logits of each part, all its calls, to be used before the next part's: ours does so too."""
        for part in parts():
            b, rows = len(part[0]), len(part[2])
            cache = DynamicCache()
            logits = [bare(model, prompt_ids[:b, :mean_prompt], cache, logits_to_keep=1)]
            for chunk in torch.arange(rows, device=device).chunk(calls(part)):
                own = DynamicCache(cache)
                own.batch_select_indices(chunk * b // rows)
                logits.append(bare(model, ids[chunk, : mean_completion - 1], own))
            yield logits

    @torch.no_grad()
    def scoring():
        for part in parts():
            script.token_logprobs(model, *part)

    @torch.no_grad()
    def scoring_floor():
        for _ in forward_floor():
            pass

    def update():
        for part in parts():
            logprobs = script.token_logprobs(model, *part)
            surrogate, _ = script.clipped_surrogate(
                logprobs, logprobs.detach(), torch.ones(len(logprobs), 1).to(device), 0.2
            )
            script.masked_mean(surrogate, part[-1]).backward()
        model.zero_grad()

    def update_floor():
        for logits in forward_floor():
            sum(part.mean() for part in logits).backward()
        model.zero_grad()

    real = prompt_mask.sum().item() + mask.sum().item()
    done = sum(p[0].numel() for p in parts())
    for part in parts():
        lengths = part[-1].sum(1)
        done += sum((lengths[rows].max() * len(rows)).item() for rows in script.similar_lengths(part[-1]))
    text = (
        f"{B} x {G} rows, prompts of {mean_prompt}, completions of {mean_completion} tokens on average, up to {T}; "
        f"{1 - real / done:.0%} of the scored tokens are padding"
    )
    return text, (
        ("sampling", sampling, sampling_floor, mask.sum().item()),
        ("scoring", scoring, scoring_floor, real),
        ("update", update, update_floor, real),
    )


def phases(args):
    """The table of the three phases: ours, the floor, their ratio."""
    script, model, tokenizer = load(args)
    text, rows = work(args, script, model, tokenizer)
    print(f"{args.script}, {args.model}, {model.device}: {text}\n")
    print("| phase | seconds | floor | ratio | tokens per second |\n|---|---|---|---|---|")
    for name, ours, floor, tokens in rows:
        ours(), floor()  # warm up
        times = [(clock(model.device, ours), clock(model.device, floor)) for _ in range(args.rounds)]
        a, b = (statistics.median(column) for column in zip(*times))
        ratio = statistics.median(x / y for x, y in times)
        print(f"| {name} | {a:.2f} | {b:.2f} | {ratio:.2f} | {tokens / a:.0f} |", flush=True)
    print(f"\npeak memory: {script.peak_gb(model.device):.2f} GB")


def grid(args):
    """Seconds of sampling, scoring and update as groups and completions grow; every row runs to the limit."""
    script, model, tokenizer = load(args)
    print("| completions per prompt | new tokens | sampling | scoring | update |\n|---|---|---|---|---|")
    for args.group in (4, 8, 16, 32):
        for args.new_tokens in (16, 64, 256):
            _, rows = work(args, script, model, tokenizer)
            seconds = (clock(model.device, ours) for _, ours, _, _ in rows)
            print(f"| {args.group} | {args.new_tokens} |", *(f"{s:.1f} |" for s in seconds), flush=True)


def counted_gb(config, prompts, completions, rows, prompt, trained=1, frozen=1):
    """Peak of an update in 10^9 bytes, by counting float32 numbers.

    prompts, completions: tokens of a pass, with `rows` completions behind prompts of `prompt` tokens. Counted are
    weights, gradients and AdamW's two moments of each trained model, the weights of frozen ones, and what the backward
    pass needs: per token and layer, six hidden states (each of two norms keeps its input, the normalised and the scaled
    one), queries, outputs, repeated keys and values, four MLP states; per completion token its log-softmax, and two
    more rows of logits while it runs back; the gradient of the tied embedding a second time. Gradients come as states
    go, but no allocator gives the room back at once.
    """
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    h, layers, V = config.hidden_size, config.num_hidden_layers, config.vocab_size
    q = (getattr(config, "head_dim", None) or h // config.num_attention_heads) * config.num_attention_heads
    states = layers * ((6 * h + 4 * q + 4 * config.intermediate_size) * (prompts + completions) + 2 * q * rows * prompt)
    return 4 * ((4 * trained + frozen) * parameters + trained * (states + V * h) + 3 * V * completions) / 1e9


def qwen_gb():
    """Counted peaks for Qwen2.5-0.5B: toy prompts of 45 tokens, GSM8K prompts of 150, completions at their limit."""
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    print("\n| script | flags | counted GB |\n|---|---|---|")
    for script, frozen, B, G, T in (
        ("minimal_sft.py", 0, 8, 1, 10),
        ("minimal_dpo.py", 1, 8, 2, 10),
        ("minimal_grpo.py", 1, 8, 4, 12),
    ):
        gb = counted_gb(config, 45 * B, B * G * T, B * G, 45, frozen=frozen)
        print(f"| {script} | | {gb:.1f} |")
    for B in (16, 4):
        gb = counted_gb(config, 45 * B, B * 12, B, 45, trained=2)
        print(f"| minimal_ppo.py | --batch_size {B} | {gb:.1f} |")
    for script, frozen in (("gsm8k_grpo.py, gsm8k_sft_grpo.py", 1), ("gsm8k_grpo_autoresearch.py", 0)):
        for rows in (8, 4, 2, 1):
            gb = counted_gb(config, 150, rows * 512, rows, 150, frozen=frozen)
            print(f"| {script} | --micro_batch {rows} | {gb:.1f} |")


def memory(args):
    """Counted and measured peaks of a rollout batch of minimal_grpo.py, on CPU with random weights."""
    config = AutoConfig.from_pretrained(args.model)
    print("| prompts | completions | new tokens | counted GB | measured GB | ratio |\n|---|---|---|---|---|---|")
    for B, G, T in ((4, 8, 24), (4, 8, 64), (2, 8, 128), (4, 8, 128)):
        shape = ["--prompts", str(B), "--group", str(G), "--new_tokens", str(T)]
        fixed = ["--model", args.model, "--random", "--device", "cpu", "--one", "ours"]
        command = [sys.executable, __file__, *fixed, *shape]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        *_, start, peak, prompt = map(float, out.split("RESULT ")[1].split())
        counted = start + counted_gb(config, B * prompt, B * G * (T - 1), B * G, prompt)
        print(f"| {B} | {G} | {T} | {counted:.2f} | {peak:.2f} | {counted / peak:.2f} |", flush=True)
    qwen_gb()


def ours(args, batches):
    """Seconds of each rollout batch: sampling, reference, two inner epochs."""
    script, model, tokenizer = load(args)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    prompts = [x.to(model.device) for x in problem_prompts(script, tokenizer, args.prompts)]
    stops = [] if args.random else script.stop_ids(model, tokenizer)
    advantages = torch.randn(args.prompts * args.group, 1, device=model.device)

    def batch():
        ids, mask = script.sample(model, *prompts, args.group, args.new_tokens, stops, tokenizer.pad_token_id)
        ref = script.token_logprobs(reference, *prompts, ids, mask)
        old = None
        for _ in range(2):
            logprobs = script.token_logprobs(model, *prompts, ids, mask)
            old = logprobs.detach() if old is None else old
            surrogate, _ = script.clipped_surrogate(logprobs, old, advantages, 0.2)
            loss = script.masked_mean(surrogate + 0.04 * script.kl_to_reference(logprobs, ref), mask)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return [clock(model.device, batch) for _ in range(batches)], script.peak_gb(model.device), prompts[0].shape[1]


def sequential(args, batches):
    """The tutorials' loop on the same work."""
    script, model, tokenizer = load(args)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    prompt_ids, prompt_mask = problem_prompts(script, tokenizer, args.prompts)
    rows = [ids[real.bool()].to(model.device) for ids, real in zip(prompt_ids, prompt_mask)]
    advantages = torch.randn(args.prompts * args.group, 1, device=model.device)
    P, T = prompt_ids.shape[1], args.new_tokens
    stops = None if args.random else script.stop_ids(model, tokenizer)

    def logprobs(m, ids, mask):
        everything = m(ids, attention_mask=mask).logits.log_softmax(-1)[:, :-1]
        return everything.gather(-1, ids[:, 1:, None])[:, -T:, 0]

    def batch():
        done = []
        for row in rows:
            for _ in range(args.group):
                out = model.generate(
                    row[None],
                    attention_mask=torch.ones_like(row[None]),
                    do_sample=True,
                    top_k=0,
                    top_p=1.0,
                    temperature=1.0,
                    max_new_tokens=T,
                    eos_token_id=stops,
                    pad_token_id=tokenizer.pad_token_id,
                )[0]
                done.append((P - len(row), out))
        ids = torch.full((len(done), P + T), tokenizer.pad_token_id, device=model.device)
        mask = torch.zeros_like(ids)
        for i, (start, out) in enumerate(done):
            ids[i, start : start + len(out)] = out
            mask[i, start : start + len(out)] = 1
        with torch.no_grad():
            ref, old = logprobs(reference, ids, mask), logprobs(model, ids, mask)
        for _ in range(2):
            new = logprobs(model, ids, mask)
            surrogate, _ = script.clipped_surrogate(new, old, advantages, 0.2)
            loss = script.masked_mean(surrogate + 0.04 * script.kl_to_reference(new, ref), mask[:, -T:])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return [clock(model.device, batch) for _ in range(batches)], script.peak_gb(model.device), P


def trl(args, batches):
    """TRL's GRPOTrainer with its own generation, float32."""
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    script, model, tokenizer = load(args)
    model.config._name_or_path = args.model
    if args.random:  # no row stops early, as in the others
        model.generation_config.eos_token_id = None
    tokenizer.padding_side = "left"
    questions = [q for q, _ in script.toy_data()[0][: args.prompts]]
    chat = [[{"role": "system", "content": script.SYSTEM}, {"role": "user", "content": q}] for q in questions]
    times = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            times.append(time.perf_counter())

    rows = args.prompts * args.group
    config = GRPOConfig(
        output_dir="out/bench_trl",
        use_cpu=model.device.type == "cpu",
        bf16=False,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=rows,
        num_generations=args.group,
        max_completion_length=args.new_tokens,
        num_iterations=2,
        max_steps=2 * batches,
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
        train_dataset=datasets.Dataset.from_list([{"prompt": c} for c in chat] * (batches + 1)),
        callbacks=[Clock()],
        processing_class=tokenizer,
    )
    started = time.perf_counter()
    trainer.train()
    ends = [started, *times[1::2]]
    return [b - a for a, b in zip(ends, ends[1:])], script.peak_gb(model.device), 0


PEERS = {"ours": ours, "sequential": sequential, "trl": trl}


def peers(args):
    """Each in processes of its own, in turn; the first batch of each process warms up."""
    seconds, memory = {name: [] for name in PEERS}, {}
    for _ in range(args.rounds):
        for name in PEERS:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            *values, _, peak, _ = map(float, out.split("RESULT ")[1].split())
            seconds[name] += values[1:]
            memory[name] = max(peak, memory.get(name, 0))
    base = statistics.median(seconds["ours"])
    print("| scheme | seconds per rollout batch | ratio to ours | peak GB |\n|---|---|---|---|")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.1f} | {median / base:.2f} | {memory[name]:.2f} |")


if __name__ == "__main__":
    args = arguments()
    if args.one:
        torch.manual_seed(0)
        start = SCRIPTS[args.script].peak_gb(torch.device("cpu"))
        values, peak, prompt = PEERS[args.one](args, 2)
        print("RESULT", *values, start, peak, prompt)
    elif args.peers:
        peers(args)
    elif args.grid:
        grid(args)
    elif args.memory:
        memory(args)
    else:
        phases(args)
