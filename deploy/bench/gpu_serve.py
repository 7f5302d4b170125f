#!/usr/bin/env python3
"""Checks and measures the services on GPUs, with nothing but a Python that has torch (whose libraries they load).

    gpu_serve.py [--bin DIR] [--fixtures DIR] [--out DIR] SECTION...

Sections: fixtures (every tiny checkpoint in float32, greedy, token for token, and in bfloat16 through the decode
kernels, saved for the oracle), shallow (decode kernels against those for prompts on few layers of full width), mono
(one GPU, full-size dummy weights). Tables are printed last. Two GPUs: gpu_pair.py.
"""
import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

FAMILIES = [
    "tiny-llama",
    "tiny-mixtral",
    "tiny-qwen3-moe",
    "tiny-olmoe",
    "tiny-deepseek-v2",
    "tiny-deepseek-v2-group",
    "tiny-deepseek-v3",
]


def library_path():
    """Where torch and CUDA's libraries are; NCCL under the name that it is looked up by."""
    import importlib.util

    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    wheels = torch.parent / "nvidia"
    links = pathlib.Path("/tmp/afd-links")
    links.mkdir(exist_ok=True)
    link = links / "libnccl.so"
    if not link.exists():
        link.symlink_to(wheels / "nccl/lib/libnccl.so.2")
    parts = [links, torch / "lib", wheels / "cu13/lib", wheels / "nccl/lib"]
    return ":".join(map(str, parts))


class Process:
    """A service; `ready` once it serves."""

    def __init__(self, name, command, out, gpus="0", extra=None, listen="127.0.0.1:0"):
        self.name, self.log = name, open(out / f"{name}.log", "w")
        self.address_file = pathlib.Path(f"/tmp/{name}.address")
        self.address_file.unlink(missing_ok=True)
        env = dict(os.environ, LD_LIBRARY_PATH=library_path(), CUDA_VISIBLE_DEVICES=gpus, NCCL_NVLS_ENABLE="0")
        env.update(extra or {})
        command = [*command, "--address-file", str(self.address_file), "--listen", listen]
        self.begun = time.time()
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=env)

    def address(self, deadline):
        while time.time() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}: {self.tail()}")
            if self.address_file.exists():
                return self.address_file.read_text().strip()
            time.sleep(0.05)
        raise RuntimeError(f"{self.name} did not listen: {self.tail()}")

    def ready(self, seconds):
        deadline = time.time() + seconds
        address = self.address(deadline)
        while time.time() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}: {self.tail()}")
            try:
                with urllib.request.urlopen(f"http://{address}/ready", timeout=2) as answer:
                    if answer.status == 200:
                        self.started_s = time.time() - self.begun
                        return address
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} was not ready: {self.tail()}")

    def tail(self):
        self.log.flush()
        return pathlib.Path(self.log.name).read_text()[-1500:]

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()


def post(address, path, body, timeout=120):
    request = urllib.request.Request(
        f"http://{address}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


def get(address, path):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return json.load(answer)


def metrics(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return dict(re.findall(r"^(afd_[^ ]+) ([0-9.e+-]+)$", text, re.M))


def complete(address, name, prompt, count):
    body = {"model": name, "prompt": prompt["input_ids"], "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return post(address, "/v1/completions", body)["choices"][0]["text"]


def fixtures(args, lines):
    """All families at once, each in a process of its own, in float32 and in bfloat16."""
    runs = {}
    for dtype in ("float32", "bfloat16"):
        for name in FAMILIES:
            model = args.fixtures / "tiny" / name
            command = [str(args.bin / "attention-svc"), "serve", "--model", str(model), "--ffn", "local"]
            command += ["--device", "cuda:0", "--dtype", dtype, "--kv-cache-blocks", "512", "--max-num-seqs", "16"]
            runs[name, dtype] = Process(f"{name}-{dtype}", command, args.out)
    failed = 0
    saved = []
    for (name, dtype), process in runs.items():
        expected = json.loads((args.fixtures / "expected" / f"{name}.json").read_text())["prompts"]
        same, prompts, why = 0, len(expected), ""
        try:
            address = process.ready(150)
            found = [None] * prompts

            def ask(i):
                found[i] = complete(address, name, expected[i], len(expected[i]["generated_ids"]))

            # One by one, then all at once: other batch sizes, other graphs.
            for together in (False, True):
                threads = [threading.Thread(target=ask, args=(i,)) for i in range(prompts)]
                for thread in threads:
                    thread.start()
                    if not together:
                        thread.join()
                for thread in threads:
                    thread.join()
                for i, prompt in enumerate(expected):
                    if found[i] == prompt["generated_text"]:
                        same += 1
                    else:
                        why = f"{prompt['id']}: {found[i]!r} is not {prompt['generated_text']!r}"[:160]
                    saved.append({"model": name, "dtype": dtype, "prompt": prompt["input_ids"], "text": found[i]})
            counted = metrics(address)
            graphs = counted.get("afd_graph_replays_total", "0")
            eager = {k: v for k, v in counted.items() if k.startswith("afd_graph_eager") and float(v) > 0}
        except Exception as error:  # noqa: BLE001 - said in the table
            why, graphs, eager = str(error)[-600:], "-", {}
        ok = same == 2 * prompts
        failed += dtype == "float32" and not ok
        lines.append(f"  {name:24} {dtype:9} {same:3} of {2 * prompts} equal  graphs {graphs}  {eager or ''} {why}")
        process.stop()
    (args.out / "completions.json").write_text(json.dumps(saved))
    lines.append("fixtures: " + ("FAILED" if failed else "every float32 completion is equal"))
    return failed == 0


PEERS = {1: (3.13, 4.49), 8: (6.50, 8.18), 32: (9.58, 11.1), 64: (10.45, 12.2), 128: (11.26, 13.2)}
FLOORS = {1: 1.08, 8: 3.99, 32: 6.77, 64: 7.27, 128: 7.75}


def model_folder(args, name, layers):
    """The configuration, cut to its first layers if asked for: random weights are chaotic over many."""
    folder = args.fixtures / "configs" / name
    if not layers:
        return folder
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    cut = pathlib.Path(f"/tmp/cut/{layers}/{name}")
    cut.mkdir(parents=True, exist_ok=True)
    (cut / "config.json").write_text(json.dumps(config))
    return cut


def full_size(args, name, *more, layers=None):
    """The command of an attention rank with full-size dummy weights."""
    command = [str(args.bin / "attention-svc"), "serve", "--model", str(model_folder(args, name, layers))]
    command += ["--load-format", "dummy", "--dtype", "bfloat16", "--device", "cuda:0", "--max-num-seqs", "128"]
    command += ["--max-model-len", "2048", "--block-size", "64", "--kv-cache-memory", "12GiB"]
    return [*command, "--max-num-batched-tokens", str(args.batched_tokens), "--no-prefix-cache", *more]


def forced(address, name, prompt, text):
    """How far each token of `text` (ids, as models without a tokenizer answer) is from the best one, by the prefill path."""
    chosen = [int(word) for word in text.split()]
    body = {"model": name, "prompt": prompt + chosen, "max_tokens": 1, "prompt_logprobs": 1, "temperature": 0}
    told = post(address, "/v1/completions", body)["choices"][0]["prompt_logprobs"][len(prompt) :]
    return [max(one["logprob"] for one in entry.values()) - entry[str(token)]["logprob"] for token, entry in zip(chosen, told)]


def judge(address, name, lines, label):
    """What the decode kernels chose, teacher-forced as a prompt: through other kernels, and products of many rows."""
    prompts = [[(7919 * (i + 1) * (k + 3)) % 100000 + 3 for k in range(150 + 31 * i)] for i in range(6)]
    texts = [None] * len(prompts)

    def ask(i):
        texts[i] = complete(address, name, {"input_ids": prompts[i]}, 48)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gaps = [gap for prompt, text in zip(prompts, texts) for gap in forced(address, name, prompt, text)]
    judged = len(gaps)
    worst, mean, best = max(gaps), sum(gaps) / len(gaps), sum(gap == 0 for gap in gaps)
    good = worst <= 1.0 and judged == 48 * len(prompts)
    lines.append(f"{label}: {judged} tokens of 6 sequences, {best} the best, mean gap {mean:.3f}, largest {worst:.3f} (allowed 1.0) {'ok' if good else 'FAILED'}")
    return good


def bench(args, address, name, concurrency, output_len):
    """So many requests at once, as `attention-svc bench` tells of them."""
    command = [str(args.bin / "attention-svc"), "bench", "--url", f"http://{address}", "--model", name]
    command += ["--concurrency", str(concurrency), "--requests-per-level", str(max(concurrency, 2))]
    command += ["--input-len", str(args.input_len), "--output-len", str(output_len), "--vocab-size", "100000", "--json", "-"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, env=dict(os.environ, LD_LIBRARY_PATH=library_path()))
    if ran.returncode:
        raise RuntimeError(ran.stderr[-300:])
    return json.loads(ran.stdout)["servers"][0]["levels"][0]


def measure(args, address, name, lines, label, peer, gpus=1):
    """TPOT, TTFT and tokens a second at each concurrency, beside floors and peers; `gpus` share the tokens."""
    for concurrency in args.concurrency:
        before = metrics(address)
        try:
            level = bench(args, address, name, concurrency, args.output_len)
        except RuntimeError as error:
            lines.append(f"  {label} {concurrency}: FAILED {error}")
            continue
        after = metrics(address)
        steps = float(after["afd_steps_total"]) - float(before["afd_steps_total"])

        def grown(name):
            return float(after.get(name, 0)) - float(before.get(name, 0))

        def part(name):
            return grown(f'afd_engine_seconds_total{{part="{name}"}}') * 1e3 / max(steps, 1)

        # Of decode steps alone, us: what the host does for one, and how long the device has nothing to do between two.
        host = grown('afd_decode_step_seconds_total{where="host"}') * 1e6 / max(grown("afd_decode_steps_total"), 1)
        idle = grown('afd_decode_step_seconds_total{where="idle"}') * 1e6 / max(grown("afd_decode_gaps_total"), 1)

        lines.append(
            f"  {label:22} {concurrency:4}  {level['itl_ms']['p50']:7.3f} {level['tpot_ms']['p50']:7.3f} "
            f"{level['ttft_ms']['p50']:8.1f} {level['output_tokens_per_s']:9.0f} {level['output_tokens_per_s'] / gpus:8.0f} {host:6.0f} {idle:6.1f}  "
            f"{PEERS.get(concurrency, (0, 0))[peer]:6.2f} {FLOORS.get(concurrency, 0):6.2f}   "
            f"sched {part('schedule'):.3f} attn {part('attention'):.3f} sample {part('sample'):.3f} step {part('step'):.3f} x{steps:.0f}"
        )


HEAD = "  layout                 conc   ITL p50 TPOT p50 TTFT p50   tokens/s  per GPU  host us idle us  peer   floor   engine, ms a step"


def shallow(args, lines):
    """Decode kernels against those for prompts on few layers of full width, for every model and graph mode."""
    good = True
    for name in ("deepseek-v2-lite", "qwen3-30b-a3b"):
        for layers in (1, 2, 4):
            command = full_size(args, name, "--ffn", "local", layers=layers)
            process = Process(f"shallow-{name}-{layers}", command, args.out)
            try:
                address = process.ready(100)
                good &= judge(address, name, lines, f"  {name} x {layers}")
                counted = metrics(address)
                eager = {k: v for k, v in counted.items() if k.startswith("afd_graph_eager") and float(v) > 0}
                lines.append(f"    graphs {counted.get('afd_graph_replays_total')} {eager}")
            except Exception as error:  # noqa: BLE001
                good = False
                lines.append(f"  {name} x {layers}: FAILED: {str(error)[-800:]}")
            finally:
                process.stop()
    return good


def mono(args, lines):
    """One GPU."""
    name, good = args.model, True
    lines.append(f"{name}, one GPU, {args.input_len} in, {args.output_len} out; ms")
    lines.append(HEAD)
    for mode in args.modes.split(","):
        process = Process(f"mono-{mode}", full_size(args, name, "--ffn", "local", "--graph-mode", mode), args.out)
        try:
            address = process.ready(150)
            lines.append(f"  ready after {process.started_s:.1f} s (graph mode {mode})")
            judge(address, name, lines, f"  {mode}, all layers (random weights are chaotic over 27; not counted)")
            measure(args, address, name, lines, f"mono {mode}", 0)
        except Exception as error:  # noqa: BLE001
            good = False
            lines.append(f"  mono {mode}: FAILED: {str(error)[-1500:]}")
        finally:
            process.stop()
    return good


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=lambda text: pathlib.Path(text).resolve(), default=pathlib.Path("target/debug").resolve())
    parser.add_argument("--fixtures", type=pathlib.Path, default=pathlib.Path("tests/fixtures"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    parser.add_argument("--model", default="deepseek-v2-lite")
    parser.add_argument("--modes", default="decode,none")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32, 64, 128])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--batched-tokens", type=int, default=8192, help="most tokens of a step")
    parser.add_argument("sections", nargs="+")
    args = parser.parse_args()
    lines, good = [], True
    for section in args.sections:
        begun = time.time()
        try:
            good &= {"fixtures": fixtures, "shallow": shallow, "mono": mono}[section](args, lines)
        except Exception as error:  # noqa: BLE001 - the others have their turn
            good = False
            lines.append(f"{section}: FAILED: {error}")
        lines.append(f"({section}: {time.time() - begun:.0f} s)")
    text = "\n".join(lines)
    (args.out / "serve.txt").write_text(text + "\n")
    print(text)
    sys.exit(not good)


if __name__ == "__main__":
    main()
