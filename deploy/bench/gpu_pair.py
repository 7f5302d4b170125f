#!/usr/bin/env python3
"""Checks and measures the pair on two GPUs, attention on the first and the FFN on the second. Beside gpu_serve.py.

    gpu_pair.py [--bin DIR] [--fixtures DIR] [--out DIR] SECTION...

Sections: fixtures (tiny checkpoints in float32, greedy, token for token, over every kind of link), pair (full-size dummy
weights by layout, beside peers and floors), loss (kill -9 of the FFN while requests decode; a new one comes up at its
address). A section's table is printed when it ends.
"""
import argparse
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time

from gpu_serve import FAMILIES, HEAD, Process, complete, full_size, judge, measure, metrics, model_folder

MODEL = "deepseek-v2-lite"

# label, link, more options of the attention rank
LAYOUTS = {
    "ipc": ("1A1F cuda-ipc", "cuda-ipc", ["--stages", "1"]),
    "ipc2": ("1A1F ipc, 2 stages", "cuda-ipc", ["--stages", "2"]),
    "eager": ("1A1F ipc, eager", "cuda-ipc", ["--stages", "1", "--graph-mode", "none"]),
    "nccl": ("1A1F nccl", "nccl", ["--stages", "1"]),
}


def ffn_command(args, model, *more):
    return [str(args.bin / "ffn-svc"), "serve", "--device", "cuda:0", "--model", str(model), *more]


class Pair:
    """Both services, ready."""

    def __init__(self, args, label, ffn, attention, link, listen="127.0.0.1:0"):
        self.begun, self.attention = time.time(), None
        name = label.replace(" ", "-").replace(",", "")
        self.ffn = Process(f"{name}-ffn", ffn, args.out, gpus="1", listen=listen)
        try:
            address = self.ffn.address(time.time() + 120)
            command = [*attention, "--ffn", address, "--link", link]
            self.attention = Process(f"{name}-attention", command, args.out, gpus="0")
            self.address = self.attention.ready(90)
        except BaseException:
            self.stop()
            raise
        self.started_s = time.time() - self.begun

    def stop(self):
        for process in (self.attention, self.ffn):
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


def fixtures(args, lines):
    good = True
    links = [("cuda-ipc", name) for name in FAMILIES] + [(link, "tiny-deepseek-v2") for link in ("nccl", "shm", "tcp")]
    for link, name in links:
        model = args.fixtures / "tiny" / name
        attention = [str(args.bin / "attention-svc"), "serve", "--model", str(model), "--device", "cuda:0"]
        attention += ["--dtype", "float32", "--kv-cache-blocks", "512", "--max-num-seqs", "16", "--stages", "1"]
        expected = json.loads((args.fixtures / "expected" / f"{name}.json").read_text())["prompts"]
        same, pair, trouble = 0, None, ""
        try:
            pair = Pair(args, f"{name} {link}", ffn_command(args, model, "--dtype", "float32"), attention, link)
            calls = [lambda p=p: complete(pair.address, name, p, len(p["generated_ids"])) for p in expected]
            found = [call() for call in calls] + together(calls)
            same = sum(text == p["generated_text"] for text, p in zip(found, expected * 2))
        except Exception as error:  # noqa: BLE001 - the others have their turn
            trouble = str(error)[-900:]
        finally:
            if pair:
                pair.stop()
        good &= same == 2 * len(expected)
        lines.append(f"  {name:24} {link:9} {same:3} of {2 * len(expected)} equal {trouble}")
    return good


def pair(args, lines):
    good = True
    lines.append(f"{MODEL}, attention and FFN on a GPU each, {args.input_len} in, {args.output_len} out; ms")
    lines.append(HEAD)
    dummy = ["--load-format", "dummy", "--dtype", "bfloat16"]
    for label, link, more in args.layouts:
        running = None
        try:
            ffn = ffn_command(args, model_folder(args, MODEL, None), *dummy)
            running = Pair(args, label, ffn, full_size(args, MODEL, *more), link)
            lines.append(f"  ready after {running.started_s:.1f} s")
            judge(running.address, MODEL, lines, f"  {label} (random weights are chaotic over 27 layers; not counted)")
            measure(args, running.address, MODEL, lines, label, 1)
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


def loss(args, lines):
    """Killed once every request has been decoding for a while; what they would have said undisturbed is asked first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = "127.0.0.1:{}".format(free.getsockname()[1])
    ffn = ffn_command(args, model_folder(args, MODEL, None), "--load-format", "dummy", "--dtype", "bfloat16")
    running = Pair(args, "loss", ffn, full_size(args, MODEL, "--stages", "1"), "cuda-ipc", listen)
    second = None
    try:
        prompts = [{"input_ids": [(7919 * (i + 1) * (k + 3)) % 100000 + 3 for k in range(200)]} for i in range(8)]
        calls = [lambda p=p: complete(running.address, MODEL, p, 600) for p in prompts]
        undisturbed = together(calls)
        killed = {}

        def kill():
            steps = "afd_steps_total"
            until = float(metrics(running.address)[steps]) + 100
            deadline = time.time() + 60
            while float(metrics(running.address)[steps]) < until and time.time() < deadline:
                time.sleep(0.01)
            os.kill(running.ffn.process.pid, signal.SIGKILL)
            killed["at"] = time.time()
            killed["ffn"] = Process("loss-ffn-2", ffn, args.out, gpus="1", listen=listen)

        found = together([kill, *calls])[1:]
        second = killed.get("ffn")
        answered = sum(isinstance(text, str) and len(text.split()) == 600 for text in found)
        same = sum(text == before for text, before in zip(found, undisturbed))
        lines.append(f"  {answered} of 8 requests answered in full after kill -9 of their FFN, {same} as without it")
        lines += [f"    {text!r}" for text in found if not isinstance(text, str)]
        return answered == 8
    finally:
        for process in (running.attention, running.ffn, second):
            if process:
                process.stop()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/debug"))
    parser.add_argument("--fixtures", type=pathlib.Path, default=pathlib.Path("tests/fixtures"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    parser.add_argument("--layouts", type=lambda text: [LAYOUTS[n] for n in text.split(",")], default=list(LAYOUTS.values()))
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32, 64, 128])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("sections", nargs="+", choices=["fixtures", "pair", "loss"])
    args = parser.parse_args()
    told, good = [], True
    for section in args.sections:
        begun, lines = time.time(), [f"== {section}"]
        try:
            good &= {"fixtures": fixtures, "pair": pair, "loss": loss}[section](args, lines)
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
