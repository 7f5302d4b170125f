#!/usr/bin/env python3
"""Checks and measures the pair on two GPUs, attention on the first and the FFN on the second (--ffn-gpu). Beside gpu_serve.py.

    gpu_pair.py [--bin DIR] [--fixtures DIR] [--out DIR] SECTION...

Sections: fixtures (tiny checkpoints in float32, greedy, token for token, over every kind of link), shards (the same with
two FFN shards, and few layers of full width in bfloat16 through the decode kernels), pair (full-size dummy weights by
layout, beside peers and floors), sampled (tokens drawn on the device, against what teacher-forcing says could be
drawn), profile (a timeline of both GPUs), prompts (the same of steps that
read 64 prompts, the first ever and others, by what each GPU waits for),
drain (SIGTERM while steps are under way), loss (kill -9 of the FFN, and of
attention, while requests decode; a new one comes up in its place, and what was answered is judged). A section's table is printed when it ends.

With --ffn-gpu 0 both share one GPU: every hop then waits for the device's turns, so requests are shorter and times mean nothing,
but what is answered is checked all the same. What one GPU cannot show says that it was skipped: NCCL takes a device once.
"""
import argparse
import json
import math
import os
import pathlib
import re
import shlex
import sys
import time

from gpu_loss import drain, loss
from gpu_rig import MODEL, SHARED_ON_ATTENTION, Pair, dummy_weights, expected_of, ffn_command, full_size_ffn, tiny_attention, tiny_ffn, together
from gpu_serve import FAMILIES, HEAD, bench, complete, full_size, get, judge, measure, metrics, model_folder, post
from gpu_timeline import steps_of_prompts, told

# label, link, more options of the attention rank, more options of both roles
LAYOUTS = {
    "ipc": ("1A1F cuda-ipc", "cuda-ipc", [], []),
    "shared": ("1A1F ipc, shared on A", "cuda-ipc", [], SHARED_ON_ATTENTION),
    "shared2": ("1A1F ipc, 2, shared on A", "cuda-ipc", ["--stages", "2"], SHARED_ON_ATTENTION),
    "ipc1": ("1A1F ipc, 1 stage", "cuda-ipc", ["--stages", "1"], []),
    "ipc2": ("1A1F ipc, 2 stages", "cuda-ipc", ["--stages", "2"], []),
    "eager": ("1A1F ipc, eager", "cuda-ipc", ["--stages", "1", "--graph-mode", "none"], []),
    "nccl": ("1A1F nccl", "nccl", [], []),
    "nccl-shared": ("1A1F nccl, shared on A", "nccl", [], SHARED_ON_ATTENTION),
    # Rows by way of the hosts: without graphs.
    "shm": ("1A1F shm", "shm", [], []),
    # With NCCL's guard for graphs beside other work, which the services do not need.
    "nccl1": ("1A1F nccl, guarded", "nccl", ["--stages", "1"], []),
}


def token_for_token(args, lines, name, link, ffns, label, both=()):
    """A tiny checkpoint's recorded completions, one by one and all at once; `both` roles have more options."""
    expected = expected_of(args, name)
    same, pair, trouble = 0, None, ""
    try:
        pair = Pair(args, f"{name} {label}", ffns, tiny_attention(args, name), link, both=both)
        calls = [lambda p=p: complete(pair.address, name, p, len(p["generated_ids"])) for p in expected]
        found = [call() for call in calls] + together(calls)
        same = sum(text == p["generated_text"] for text, p in zip(found, expected * 2))
        trouble = next((repr(text)[-300:] for text in found if not isinstance(text, str)), "")
    except Exception as error:  # noqa: BLE001 - the others have their turn
        trouble = str(error)[-900:]
    finally:
        if pair:
            pair.stop()
    lines.append(f"  {name:24} {label:34} {same:3} of {2 * len(expected)} equal {trouble}")
    return same == 2 * len(expected)


def can(args, link, lines):
    """Whether the link is for this machine; says so if not."""
    if link == "nccl" and args.one_gpu:
        lines.append("  nccl: skipped: it takes two GPUs")
        return False
    return True


def fixtures(args, lines):
    links = [("cuda-ipc", name) for name in args.families] + [(link, "tiny-deepseek-v2") for link in ("nccl", "shm", "tcp")]
    links = [(link, name) for link, name in links if can(args, link, lines)]
    runs = [(link, name, link, []) for link, name in links]
    runs += [(link, name, f"{link}, shared on A", SHARED_ON_ATTENTION) for link, name in links if has_shared(args, name)]
    ffn = lambda name: [(tiny_ffn(args, name), args.ffn_gpu)]
    equal = [token_for_token(args, lines, name, link, ffn(name), label, both) for link, name, label, both in runs]
    return all(equal)


def has_shared(args, name):
    return bool(json.loads((args.fixtures / "tiny" / name / "config.json").read_text()).get("n_shared_experts"))


def shards(args, lines):
    """Two FFN shards. Those of one GPU take turns on it, and a wait holds it for its whole turn: slow, and still right."""
    places = [(f"both on GPU {args.ffn_gpu}", (args.ffn_gpu,) * 2), ("one beside attention", (args.ffn_gpu, "0"))]
    places = places[:1] if args.one_gpu else places
    runs = [("cuda-ipc", name, place) for name in ("tiny-deepseek-v2", "tiny-qwen3-moe") for place in places]
    runs += [("nccl", "tiny-deepseek-v2", places[0]), ("shm", "tiny-deepseek-v2", places[0])]
    good = True
    for link, name, (where, gpus) in runs:
        if not can(args, link, lines):
            continue
        ffns = [(tiny_ffn(args, name, "--shard", f"{i}/2", "--rank", str(i)), gpu) for i, gpu in enumerate(gpus)]
        good &= token_for_token(args, lines, name, link, ffns, f"{link}, 2 shards, {where}")
    for link in ("cuda-ipc", "shm"):
        ffns = [(tiny_ffn(args, "tiny-deepseek-v2", "--shard", f"{i}/2", "--rank", str(i)), args.ffn_gpu) for i in range(2)]
        label = f"{link}, 2 shards, shared on A"
        good &= token_for_token(args, lines, "tiny-deepseek-v2", link, ffns, label, SHARED_ON_ATTENTION)
    # Qwen with one layer: where the last chosen expert and the next are nearly equal, a rounding changes the choice, and
    # with random weights and no shared experts two layers of that make gaps beyond 1.0 now and then (dense ones: 0.03).
    for name, layers, both in ((MODEL, 2, []), (MODEL, 2, SHARED_ON_ATTENTION), ("qwen3-30b-a3b", 1, [])):
        model, running = model_folder(args, name, layers), None
        dummy = dummy_weights(args)
        ffns = [(ffn_command(args, model, *dummy, "--shard", f"{i}/2", "--rank", str(i)), args.ffn_gpu) for i in range(2)]
        try:
            attention = full_size(args, name, "--stages", "1", "--max-capture-size", "8", layers=layers)
            running = Pair(args, f"{name} 2 shards", ffns, attention, "cuda-ipc", both=both)
            good &= judge(running.address, name, lines, f"  {name} x {layers}, bfloat16, 2 shards {' '.join(both)}")
            told = {k: v for k, v in metrics(running.address).items() if "graph" in k and float(v)}
            lines.append(f"    {told}")
        except Exception as error:  # noqa: BLE001
            good = False
            lines.append(f"  {name}, 2 shards: FAILED: {str(error)[-1200:]}")
        finally:
            if running:
                running.stop()
    return good


def pair(args, lines):
    good = True
    where = "both on one GPU" if args.one_gpu else "a GPU each"
    lines.append(f"{MODEL}, attention and FFN, {where}, {args.input_len} in, {args.output_len} out; ms")
    lines.append(HEAD)
    for label, link, more, both in args.layouts:
        if not can(args, link, lines):
            continue
        running = None
        try:
            ffn = full_size_ffn(args)
            running = Pair(args, label, [(ffn, args.ffn_gpu)], full_size(args, MODEL, *more), link, both=both)
            lines.append(f"  ready after {running.started_s:.1f} s")
            judge(running.address, MODEL, lines, f"  {label} (random weights are chaotic over 27 layers; not counted)")
            measure(args, running.address, MODEL, lines, label, 1, gpus=1 if args.one_gpu else 2)
            counted = metrics(running.address)
            told = {k: v for k, v in counted.items() if ("graph" in k or "by_stages" in k) and float(v)}
            lines.append(f"    {told}")
            histogram(running.ffns[0], lines)
        except Exception as error:  # noqa: BLE001
            good = False
            lines.append(f"  {label}: FAILED: {str(error)[-1200:]}")
        finally:
            if running:
                running.stop()
    return good


def histogram(ffn, lines):
    """How evenly rows fall on experts: of all layers' experts, how many got how much of their layer's mean."""
    layers = get(ffn.address(time.time() + 5), "/expert-counts")["layers"].values()
    shares = [rows * len(layer["rows"]) / max(sum(layer["rows"].values()), 1) for layer in layers for rows in layer["rows"].values()]
    edges = [0, 0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, math.inf]
    counts = [sum(low <= share < high for share in shares) for low, high in zip(edges, edges[1:])]
    bars = "  ".join(f"{low:g}+ {count}" for low, count in zip(edges, counts))
    rows = sum(sum(layer["rows"].values()) for layer in layers)
    lines.append(f"    {len(shares)} experts of {len(layers)} layers, {rows} choices; experts by their rows over the layer's mean: {bars}")
    lines.append(f"      least {min(shares, default=0):.2f}, most {max(shares, default=0):.2f} of the mean; never chosen {sum(share == 0 for share in shares)}")


def sampled(args, lines):
    """Draws on the device: each is in its interval, the intervals are those of the prefill path, and a seed repeats itself."""
    good, model = True, model_folder(args, MODEL, 2)
    dummy = dummy_weights(args)
    more = ["--stages", "1", "--log-level", "info,attention_svc::engine::choose=debug"]
    attention = full_size(args, MODEL, *more, layers=2)
    running = Pair(args, "sampled", [(ffn_command(args, model, *dummy), args.ffn_gpu)], attention, "cuda-ipc")
    try:
        rules = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
        prompts = [[(7919 * (i + 1) * (k + 3)) % 100000 + 3 for k in range(60 + 9 * i)] for i in range(12)]

        def ask(i, tokens=64, **more):
            body = {"model": MODEL, "prompt": prompts[i], "max_tokens": tokens, "ignore_eos": True, "seed": 100 + i, **rules, **more}
            return post(running.address, "/v1/completions", body)["choices"][0]

        def counts():
            told = metrics(running.address)
            return [float(told[f"afd_tokens_{name}_total"]) for name in ("generated", "chosen_on_device")]

        before = counts()
        texts = together([lambda i=i: ask(i)["text"] for i in range(12)])
        generated, on_device = [b - a for a, b in zip(before, counts())]
        # Not those of steps that also read a prompt: 12 first ones, and a few beside them.
        good &= on_device >= (generated - 12) * 0.95
        lines.append(f"  {on_device:.0f} of {generated:.0f} tokens chosen on the device (not the first of each of 12 requests)")
        before = counts()
        mixed = together([lambda i=i: ask(i, 32, **({"logprobs": 3} if i % 2 else {"presence_penalty": 0.5})) for i in range(8)])
        mixed += together([lambda i=i: ask(i, 32, **({"presence_penalty": 0.5} if i == 0 else {})) for i in range(4)])
        generated, on_device = [b - a for a, b in zip(before, counts())]
        good &= all(isinstance(one, dict) for one in mixed) and 80 <= on_device <= 3 * 31
        lines.append(f"  beside rows that only the host can choose for: {on_device:.0f} of {generated:.0f} on the device")
        alone = [ask(i)["text"] for i in (0, 0, 1, 1)]
        repeats = alone[0] == alone[1] and alone[2] == alone[3]
        good &= repeats
        lines.append(f"  a seed repeats itself: {repeats}")
        time.sleep(0.5)
        running.attention.log.flush()
        log = (args.out / f"{running.attention.name}.log").read_text()
        drawn = [dict(re.findall(r"(uniform|below|upto|token|index)=([0-9.e-]+)", line)) for line in log.splitlines() if "drawn" in line]
        drawn = [{k: float(v) for k, v in one.items()} for one in drawn]
        outside = sum(not one["below"] - 1e-3 <= one["uniform"] <= one["upto"] + 1e-3 for one in drawn)
        good &= outside == 0 and len(drawn) > 700
        lines.append(f"  {len(drawn)} draws logged, {outside} outside their interval")
        # The same intervals from the prefill path's best 20 log probabilities: they differ by what bfloat16 makes of logits.
        places, unknown = [], 0
        for prompt, text in zip(prompts, texts):
            chosen = [int(word) for word in text.split()]
            body = {"model": MODEL, "prompt": prompt + chosen, "max_tokens": 1, "prompt_logprobs": 20, "temperature": 0}
            told = post(running.address, "/v1/completions", body)["choices"][0]["prompt_logprobs"][len(prompt) :]
            for token, entry in zip(chosen, told):
                found = next((one for one in drawn if one["token"] == token and one["index"] == len(places) % 64), None)
                kept = allowed({int(k): v["logprob"] for k, v in entry.items()}, rules)
                if token not in kept or found is None:
                    unknown += 1
                    places.append(None)
                    continue
                below = sum(p for k, p in kept.items() if k < token)
                places.append(max(below - found["uniform"], found["uniform"] - below - kept[token], 0))
        far = sorted(place for place in places if place is not None)
        good &= unknown <= len(places) * 0.05 and far[len(far) * 95 // 100] < 0.05
        lines.append(
            f"  against teacher-forcing: {len(far)} of {len(places)} tokens among those that could be drawn, uniform number in the interval for "
            f"{sum(f == 0 for f in far)}, 95 % within {far[len(far) * 95 // 100]:.3f}, all within {far[-1]:.3f}"
        )
        for label, more in (("greedy", {"temperature": 0}), ("drawn", {}), ("greedy", {"temperature": 0}), ("drawn", {})):
            begun = time.time()
            together([lambda i=i: ask(i % 12, 128, **more) for i in range(64)])
            lines.append(f"    64 requests of 128 tokens, {label}: {(time.time() - begun) * 1e3:.0f} ms (every draw is logged)")
        return good
    finally:
        running.stop()


def allowed(logprobs, rules):
    """Probabilities of what can be drawn, from the best log probabilities."""
    best = max(logprobs.values())
    weights = {k: math.exp((v - best) / rules["temperature"]) for k, v in logprobs.items()}
    order = sorted(weights, key=lambda k: (-weights[k], k))[: rules["top_k"]]
    total, sum_, kept = sum(weights[k] for k in order), 0, {}
    for k in order:
        if sum_ < rules["top_p"] * total and weights[k] >= rules["min_p"]:
            kept[k] = weights[k]
        sum_ += weights[k]
    total = sum(kept.values())
    return {k: v / total for k, v in kept.items()}


def profile(args, lines):
    """Lanes of both GPUs, by their own events, with one stage and with two; what is computed for a hop lies inside it, on one
    clock. What is not busy is the bubble."""
    return all([profile_stages(args, lines, stages) for stages in ("1", "2")])


def profile_stages(args, lines, stages):
    ffn = full_size_ffn(args)
    running = Pair(args, f"profile {stages}", [(ffn, args.ffn_gpu)], full_size(args, MODEL, "--stages", stages), "cuda-ipc")
    good = True
    try:
        for requests in (1, 64) if stages == "1" else (64,):
            prompts = [[(7919 * (i + 1) * (k + 3)) % 100000 + 3 for k in range(1024)] for i in range(requests)]
            out = args.out / f"timeline-{requests}-{stages}.json"

            def record():
                until = float(metrics(running.address)["afd_steps_total"]) + 40
                while float(metrics(running.address)["afd_steps_total"]) < until:
                    time.sleep(0.01)
                # What `attention-svc profile` asks for and writes.
                out.write_text(json.dumps(post(running.address, "/profile", {"steps": 10, "timeout_s": 20})))

            asked = [lambda p=p: complete(running.address, MODEL, {"input_ids": p}, 200) for p in prompts]
            found = together([record, *asked])
            if isinstance(found[0], Exception):
                raise found[0]
            good &= told(json.loads(out.read_text())["traceEvents"], lines, f"{requests} requests, {stages} stages")
        return good
    finally:
        running.stop()


def prompts(args, lines):
    """Steps that read 64 prompts at once, of a pair that has read none yet and again: what each GPU does in them, and what it
    waits for."""
    ffn = full_size_ffn(args)
    running = Pair(args, "prompts", [(ffn, args.ffn_gpu)], full_size(args, MODEL), "cuda-ipc")
    try:
        for turn in ("first", "again"):
            out = args.out / f"timeline-prompts-{turn}.json"

            def record():
                out.write_text(json.dumps(post(running.address, "/profile", {"steps": 16, "timeout_s": 20})))

            found = together([record, lambda: time.sleep(0.05) or bench(args, running.address, MODEL, 64, 16)])
            for one in found:
                if isinstance(one, Exception):
                    raise one
            lines.append(f"  64 prompts, {turn}: TTFT p50 {found[1]['ttft_ms']['p50']:.0f} ms, with marks on every hop")
            steps_of_prompts(json.loads(out.read_text())["traceEvents"], lines)
        return True
    finally:
        running.stop()


SECTIONS = {"fixtures": fixtures, "shards": shards, "pair": pair, "sampled": sampled, "profile": profile, "prompts": prompts, "drain": drain, "loss": loss}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=lambda text: pathlib.Path(text).resolve(), default=pathlib.Path("target/debug").resolve())
    parser.add_argument("--fixtures", type=pathlib.Path, default=pathlib.Path("tests/fixtures"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    parser.add_argument("--layouts", type=lambda text: [LAYOUTS[n] for n in text.split(",")], default=[LAYOUTS[n] for n in LAYOUTS if n != "shm"])
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32, 64, 128])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    # Eight prompts of 1024 a stage, of two, and whoever decodes beside them: without the rest a prompt's end waits for the next step.
    parser.add_argument("--batched-tokens", type=int, default=2 * 8192 + 128, help="most tokens of a step")
    parser.add_argument("--families", type=lambda text: text.split(","), default=FAMILIES, help="of the section fixtures")
    parser.add_argument("--attention", type=shlex.split, default=[], help="more options of the attention rank")
    parser.add_argument("--both", type=shlex.split, default=[], help="more options of both roles, as --shared-experts attention")
    parser.add_argument("--ffn-gpu", default="1", help="where the FFN is; 0: beside attention, which is slow")
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS))
    args = parser.parse_args()
    args.one_gpu = args.ffn_gpu == "0"
    told, good = [], True
    for section in args.sections:
        begun, lines = time.time(), [f"== {section}"]
        try:
            good &= SECTIONS[section](args, lines)
        except Exception as error:  # noqa: BLE001 - the others have their turn
            good = False
            lines.append(f"{section}: FAILED: {error!r}"[-1500:])
        lines.append(f"({section}: {time.time() - begun:.0f} s)")
        told += lines
        print("\n".join(lines), flush=True)
    (args.out / "pair.txt").write_text("\n".join(told) + "\n")
    sys.exit(not good)


if __name__ == "__main__":
    main()
