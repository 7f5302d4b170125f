#!/usr/bin/env python3
"""Checks and measures the pair on two GPUs, attention on the first and the FFN on the second. Beside gpu_serve.py.

    gpu_pair.py [--bin DIR] [--fixtures DIR] [--out DIR] SECTION...

Sections: fixtures (tiny checkpoints in float32, greedy, token for token, over every kind of link), shards (the same with
two FFN shards, and few layers of full width in bfloat16 through the decode kernels), pair (full-size dummy weights by
layout, beside peers and floors), sampled (tokens drawn on the device, against what teacher-forcing says could be
drawn), profile (a timeline of both GPUs), prompts (the same of steps that read 64 prompts, by what each GPU waits for),
loss (kill -9 of the FFN, and of attention, while requests decode; a new one comes up in
its place, and what was answered is judged). A section's table is printed when it ends.
"""
import argparse
import json
import math
import os
import pathlib
import re
import signal
import socket
import sys
import threading
import time

from gpu_serve import FAMILIES, HEAD, Process, bench, complete, forced, full_size, judge, measure, metrics
from gpu_serve import model_folder, post

MODEL = "deepseek-v2-lite"

# label, link, more options of the attention rank
LAYOUTS = {
    "ipc": ("1A1F cuda-ipc", "cuda-ipc", []),
    "ipc1": ("1A1F ipc, 1 stage", "cuda-ipc", ["--stages", "1"]),
    "ipc2": ("1A1F ipc, 2 stages", "cuda-ipc", ["--stages", "2"]),
    "eager": ("1A1F ipc, eager", "cuda-ipc", ["--stages", "1", "--graph-mode", "none"]),
    "nccl": ("1A1F nccl", "nccl", []),
    # With NCCL's guard for graphs beside other work, which the services do not need.
    "nccl1": ("1A1F nccl, guarded", "nccl", ["--stages", "1"]),
}
EXTRA = {"1A1F nccl, guarded": {"NCCL_GRAPH_MIXING_SUPPORT": "1"}}


def ffn_command(args, model, *more):
    return [str(args.bin / "ffn-svc"), "serve", "--device", "cuda:0", "--model", str(model), *more]


def dummy_weights(args):
    return ["--load-format", "dummy", "--dtype", "bfloat16", "--max-tokens-per-stage", str(args.batched_tokens)]


def full_size_ffn(args):
    return ffn_command(args, model_folder(args, MODEL, None), *dummy_weights(args))


class Pair:
    """Attention and its FFN ranks, ready. `ffns` are commands with the GPU that each runs on."""

    def __init__(self, args, label, ffns, attention, link, listen="127.0.0.1:0"):
        self.extra = EXTRA.get(label, {})
        self.args, self.begun, self.attention, self.ffns = args, time.time(), None, []
        self.name = label.replace(" ", "-").replace(",", "")
        self.command, self.lives = attention, 0
        try:
            for rank, (command, gpu) in enumerate(ffns):
                self.ffns.append(Process(f"{self.name}-ffn{rank}", command, args.out, gpus=gpu, extra=self.extra, listen=listen))
            addresses = [ffn.address(time.time() + 120) for ffn in self.ffns]
            self.command = [*attention, "--ffn", ",".join(addresses), "--link", link]
            self.start_attention()
        except BaseException:
            self.stop()
            raise
        self.started_s = time.time() - self.begun

    def start_attention(self):
        """Again, after it has gone."""
        self.lives += 1
        self.attention = Process(f"{self.name}-attention{self.lives}", self.command, self.args.out, gpus="0", extra=self.extra)
        self.address = self.attention.ready(90)

    def stop(self):
        for process in (self.attention, *self.ffns):
            if process:
                process.stop()


def together(calls):
    """The results of the calls, run at the same time; an exception is a result."""
    found = [None] * len(calls)

    def run(i):
        try:
            found[i] = calls[i]()
        except Exception as error:  # noqa: BLE001
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def tiny_attention(args, name):
    command = [str(args.bin / "attention-svc"), "serve", "--model", str(args.fixtures / "tiny" / name), "--device", "cuda:0"]
    return [*command, "--dtype", "float32", "--kv-cache-blocks", "512", "--max-num-seqs", "16", "--stages", "1"]


def tiny_ffn(args, name, *more):
    return ffn_command(args, args.fixtures / "tiny" / name, "--dtype", "float32", *more)


def expected_of(args, name):
    return json.loads((args.fixtures / "expected" / f"{name}.json").read_text())["prompts"]


def token_for_token(args, lines, name, link, ffns, label):
    """A tiny checkpoint's recorded completions, one by one and all at once."""
    expected = expected_of(args, name)
    same, pair, trouble = 0, None, ""
    try:
        pair = Pair(args, f"{name} {label}", ffns, tiny_attention(args, name), link)
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


def fixtures(args, lines):
    links = [("cuda-ipc", name) for name in FAMILIES] + [(link, "tiny-deepseek-v2") for link in ("nccl", "shm", "tcp")]
    equal = [token_for_token(args, lines, name, link, [(tiny_ffn(args, name), "1")], link) for link, name in links]
    return all(equal)


def shards(args, lines):
    """Two FFN shards. Those of one GPU take turns on it, and a wait holds it for its whole turn: slow, and still right."""
    places = [("both on GPU 1", ("1", "1")), ("one beside attention", ("1", "0"))]
    runs = [("cuda-ipc", name, place) for name in ("tiny-deepseek-v2", "tiny-qwen3-moe") for place in places]
    runs += [("nccl", "tiny-deepseek-v2", places[0]), ("shm", "tiny-deepseek-v2", places[0])]
    good = True
    for link, name, (where, gpus) in runs:
        ffns = [(tiny_ffn(args, name, "--shard", f"{i}/2", "--rank", str(i)), gpu) for i, gpu in enumerate(gpus)]
        good &= token_for_token(args, lines, name, link, ffns, f"{link}, 2 shards, {where}")
    # Qwen with one layer: where the last chosen expert and the next are nearly equal, a rounding changes the choice, and
    # with random weights and no shared experts two layers of that make gaps beyond 1.0 now and then (dense ones: 0.03).
    for name, layers in ((MODEL, 2), ("qwen3-30b-a3b", 1)):
        model, running = model_folder(args, name, layers), None
        dummy = dummy_weights(args)
        ffns = [(ffn_command(args, model, *dummy, "--shard", f"{i}/2", "--rank", str(i)), "1") for i in range(2)]
        try:
            attention = full_size(args, name, "--stages", "1", "--max-capture-size", "8", layers=layers)
            running = Pair(args, f"{name} 2 shards", ffns, attention, "cuda-ipc")
            good &= judge(running.address, name, lines, f"  {name} x {layers}, bfloat16, 2 shards")
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
    lines.append(f"{MODEL}, attention and FFN on a GPU each, {args.input_len} in, {args.output_len} out; ms")
    lines.append(HEAD)
    for label, link, more in args.layouts:
        running = None
        try:
            ffn = full_size_ffn(args)
            running = Pair(args, label, [(ffn, "1")], full_size(args, MODEL, *more), link)
            lines.append(f"  ready after {running.started_s:.1f} s")
            judge(running.address, MODEL, lines, f"  {label} (random weights are chaotic over 27 layers; not counted)")
            measure(args, running.address, MODEL, lines, label, 1, gpus=2)
            counted = metrics(running.address)
            told = {k: v for k, v in counted.items() if "graph" in k and float(v)}
            lines.append(f"    {told}")
        except Exception as error:  # noqa: BLE001
            good = False
            lines.append(f"  {label}: FAILED: {str(error)[-1200:]}")
        finally:
            if running:
                running.stop()
    return good


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


def told(events, lines, label):
    """What a timeline says of its decode steps."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [dict(e, lane=lanes[e["pid"], e["tid"]], end=e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    device = [e for e in slices if e["lane"] == "device"]
    key = lambda e: (e["args"]["step"], e["args"]["layer"], e["lane"].split(",")[0])
    hops = {key(e): e for e in slices if "hops to shard" in e["lane"]}
    computed = [e for e in slices if e["name"].startswith("compute ") and processes[e["pid"]].startswith("F")]
    mean = lambda found: sum(e["dur"] for e in found) / max(len(found), 1)
    attends = [e for e in device if e["name"].startswith("attention")]
    pairs = [(hops.get(key(e)), e) for e in computed]
    inside = [h is not None and h["ts"] - 30 <= e["ts"] and e["end"] <= h["end"] + 30 for h, e in pairs]
    beyond = [h["dur"] - e["dur"] for h, e in pairs if h]
    # From the first attention of a step to the last hop's end, on both devices.
    spans = {}
    for e in (*attends, *hops.values()):
        begin, end = spans.get(e["args"]["step"], (e["ts"], e["end"]))
        spans[e["args"]["step"]] = (min(begin, e["ts"]), max(end, e["end"]))
    span = sum(end - begin for begin, end in spans.values())
    bubbles = [100 - 100 * sum(e["dur"] for e in found) / max(span, 1) for found in (attends, computed)]
    good = len(attends) >= 27 * 9 and len(computed) == len(hops) == len(attends) and sum(inside) >= 0.95 * len(inside)
    lines.append(
        f"  {label}: {sorted(set(lanes.values()))} of {sorted(processes.values())}\n"
        f"      a layer, us: attention {mean(attends):.1f}, hop {mean(list(hops.values())):.1f}, of it the FFN {mean(computed):.1f}; "
        f"{sum(inside)} of {len(inside)} computations inside their hop (within 30 us); hop beyond compute, median {sorted(beyond)[len(beyond) // 2] if beyond else -1:.1f} "
        f"{'ok' if good else 'FAILED'}\n"
        f"      bubbles (eager, with marks): attention {bubbles[0]:.0f} %, FFN {bubbles[1]:.0f} %"
    )
    return good


def prompts(args, lines):
    """Steps that read 64 prompts at once: what each GPU does in them, and what it waits for."""
    ffn = full_size_ffn(args)
    running = Pair(args, "prompts", [(ffn, "1")], full_size(args, MODEL), "cuda-ipc")
    try:
        bench(args, running.address, MODEL, 64, 4)  # everything warm
        out = args.out / "timeline-prompts.json"

        def record():
            out.write_text(json.dumps(post(running.address, "/profile", {"steps": 16, "timeout_s": 20})))

        found = together([record, lambda: time.sleep(0.05) or bench(args, running.address, MODEL, 64, 16)])
        for one in found:
            if isinstance(one, Exception):
                raise one
        steps_of_prompts(json.loads(out.read_text())["traceEvents"], lines)
        return True
    finally:
        running.stop()


def steps_of_prompts(events, lines):
    """A line a step, ms. Between: since the step before had ended on attention's GPU."""
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    roles = {e["pid"]: e["args"]["name"][0] for e in events if e["name"] == "process_name"}
    slices = [dict(e, lane=lanes[e["pid"], e["tid"]], end=e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    before = None
    lines.append("  rows (stages)  step  between  on the devices  attention's busy  FFN's busy  FFN's first hop  FFN's idle between hops")
    for step in (e for e in slices if e["lane"] == "engine" and e["name"].startswith("step ")):
        own = [e for e in slices if e["args"].get("step") == step["args"]["step"]]
        attends = [e for e in own if e["lane"] == "device" and e["name"].startswith("attention")]
        hops = [e for e in own if "hops to shard" in e["lane"]]
        computed = sorted((e for e in own if e["name"].startswith("compute ") and roles[e["pid"]] == "F"), key=lambda e: e["ts"])
        if not attends or not hops or not computed or step["args"]["rows"] <= 64:
            continue
        begin, end = min(e["ts"] for e in attends), max(e["end"] for e in hops)
        idle = sum(max(b["ts"] - a["end"], 0) for a, b in zip(computed, computed[1:]))
        busy = lambda found: sum(e["dur"] for e in found)
        told = [
            step["dur"],
            begin - before if before else 0,
            end - begin,
            busy(attends),
            busy(computed),
            computed[0]["ts"] - begin,
            idle,
        ]
        before = end
        lines.append(f"  {step['args']['rows']:6} ({step['args']['stages']})  " + "  ".join(f"{us / 1e3:8.2f}" for us in told))


def kill_when_decoding(running, process, steps=100):
    """kill -9 once the engine has run so many steps more."""
    until = float(metrics(running.address)["afd_steps_total"]) + steps
    deadline = time.time() + 60
    while float(metrics(running.address)["afd_steps_total"]) < until and time.time() < deadline:
        time.sleep(0.01)
    os.kill(process.process.pid, signal.SIGKILL)


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return "127.0.0.1:{}".format(free.getsockname()[1])


def judge_texts(address, prompts, texts, lines, label):
    """The token oracle: no token further than 1.0 from the best one, teacher-forced."""
    gaps = [forced(address, MODEL, p["input_ids"], t) for p, t in zip(prompts, texts) if isinstance(t, str)]
    told = [gap for one in gaps for gap in one]
    good = bool(told) and max(told) <= 1.0
    worst = f"{sum(gap == 0 for gap in told)} the best, largest gap {max(told, default=-1):.3f}"
    lines.append(f"    {label}: {len(told)} tokens judged, {worst} (allowed 1.0) {'ok' if good else 'FAILED'}")
    return good


def loss(args, lines):
    good = loss_exact(args, lines)
    return loss_full_size(args, lines) and good


def loss_exact(args, lines):
    """In float32 every answer is the recorded one, whatever is killed meanwhile: the FFN, then attention."""
    name, listen, good = "tiny-deepseek-v2", free_address(), True
    expected = expected_of(args, name)
    running = Pair(args, "loss exact", [(tiny_ffn(args, name), "1")], tiny_attention(args, name), "cuda-ipc", listen)
    try:
        until, answers, back = [time.time() + 60], [], []

        def ask(p):
            while time.time() < until[0]:
                answers.append((p, complete(running.address, name, p, len(p["generated_ids"])), time.time()))

        def kill():
            try:
                kill_when_decoding(running, running.ffns[0])
                killed = time.time()
                running.ffns.append(Process("loss-exact-ffn-again", tiny_ffn(args, name), args.out, gpus="1", listen=listen))
                running.ffns[-1].address(time.time() + 60)
                back.append(time.time())
                return killed
            finally:
                until[0] = time.time() + 3

        killed, *others = together([kill, *(lambda p=p: ask(p) for p in expected)])
        wrong = sum(text != p["generated_text"] for p, text, _ in answers)
        after = sum(at > killed for _, _, at in answers) if isinstance(killed, float) else 0
        errors = [repr(one)[:200] for one in others if one is not None]
        counted = metrics(running.address)["afd_ffn_losses_total"]
        good &= wrong == 0 and not errors and after > 0
        lines.append(f"  float32, FFN killed: {len(answers)} answers, {after} of them after the kill, {wrong} wrong; losses {counted} {errors or ''}")
        later = [at for _, _, at in answers if back and at > back[0]]
        if later:
            lines.append(f"    a new FFN was there {back[0] - killed:.1f} s after the kill, the first answer {min(later) - back[0]:.1f} s later")
        asked = [lambda p=p: complete(running.address, name, p, len(p["generated_ids"])) for p in expected * 4]
        failed = together([lambda: kill_when_decoding(running, running.attention, 20), *asked])[1:]
        running.start_attention()
        found = together([lambda p=p: complete(running.address, name, p, len(p["generated_ids"])) for p in expected])
        same = sum(text == p["generated_text"] for text, p in zip(found, expected))
        cut = sum(not isinstance(text, str) for text in failed)
        good &= same == len(expected)
        lines.append(f"  float32, attention killed with {cut} requests in it: a new one on the same FFN answers {same} of {len(expected)} as recorded")
    finally:
        running.stop()
    return good


def loss_full_size(args, lines):
    """Full size in bfloat16, graphs replayed on both sides: what is answered is teacher-forced through the same pair."""
    good, listen = True, free_address()
    ffn = full_size_ffn(args)
    running = Pair(args, "loss", [(ffn, "1")], full_size(args, MODEL, "--stages", "1"), "cuda-ipc", listen)
    try:
        prompts = [{"input_ids": [(7919 * (i + 1) * (k + 3)) % 100000 + 3 for k in range(200)]} for i in range(8)]
        calls = [lambda p=p: complete(running.address, MODEL, p, 600) for p in prompts]
        undisturbed = together(calls)

        def kill():
            kill_when_decoding(running, running.ffns[0])
            running.ffns.append(Process("loss-ffn-again", ffn, args.out, gpus="1", listen=listen))

        found = together([kill, *calls])[1:]
        answered = sum(isinstance(text, str) and len(text.split()) == 600 for text in found)
        same = sum(text == before for text, before in zip(found, undisturbed))
        lines.append(f"  bfloat16, FFN killed: {answered} of 8 answered in full, {same} word for word as without it")
        lines += [f"    {text!r}"[:300] for text in found if not isinstance(text, str)]
        good &= answered == 8
        good &= judge_texts(running.address, prompts, found, lines, "with the kill")
        judge_texts(running.address, prompts, undisturbed, lines, "without it (not counted)")
        cut = together([lambda: kill_when_decoding(running, running.attention), *calls])[1:]
        begun = time.time()
        running.start_attention()
        again = together([lambda p=p: complete(running.address, MODEL, p, 100) for p in prompts])
        failed, answered = sum(not isinstance(text, str) for text in cut), sum(isinstance(text, str) for text in again)
        counted = {k: v for k, v in metrics(running.ffns[-1].address(time.time() + 5)).items() if "stream_steps" in k}
        lines.append(f"  bfloat16, attention killed with {failed} requests in it: a new one is ready after {running.attention.started_s:.1f} s on the same FFN, {answered} of 8 answered")
        lines.append(f"    FFN: {counted}")
        good &= answered == 8 and judge_texts(running.address, prompts, again, lines, "by the new one")
        return good
    finally:
        running.stop()


SECTIONS = {"fixtures": fixtures, "shards": shards, "pair": pair, "sampled": sampled, "profile": profile, "prompts": prompts, "loss": loss}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=lambda text: pathlib.Path(text).resolve(), default=pathlib.Path("target/debug").resolve())
    parser.add_argument("--fixtures", type=pathlib.Path, default=pathlib.Path("tests/fixtures"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    parser.add_argument("--layouts", type=lambda text: [LAYOUTS[n] for n in text.split(",")], default=list(LAYOUTS.values()))
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32, 64, 128])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    # Eight prompts of 1024 a stage, of two, and whoever decodes beside them: without the rest a prompt's end waits for the next step.
    parser.add_argument("--batched-tokens", type=int, default=2 * 8192 + 128, help="most tokens of a step")
    parser.add_argument("--ffn-gpu", default="1", help="where the FFN of sampled and profile is; beside attention it is slow")
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS))
    args = parser.parse_args()
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
