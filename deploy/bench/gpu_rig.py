"""A pair of services on GPUs, and what is asked of it. Used by gpu_pair.py and gpu_loss.py."""
import json
import socket
import threading
import time

from gpu_serve import Process, model_folder

MODEL = "deepseek-v2-lite"

SHARED_ON_ATTENTION = ["--shared-experts", "attention"]

# By layout: more of the processes' environment.
EXTRA = {"1A1F nccl, guarded": {"NCCL_GRAPH_MIXING_SUPPORT": "1"}}


def ffn_command(args, model, *more):
    return [str(args.bin / "ffn-svc"), "serve", "--device", "cuda:0", "--model", str(model), *more]


def dummy_weights(args):
    return ["--load-format", "dummy", "--dtype", "bfloat16", "--max-tokens-per-stage", str(args.batched_tokens)]


def full_size_ffn(args):
    return ffn_command(args, model_folder(args, MODEL, None), *dummy_weights(args))


class Pair:
    """Attention and its FFN ranks, started together and ready. `ffns` are commands with the GPU that each runs on; `listen` is
    where a lone one does; `both` roles have more options."""

    def __init__(self, args, label, ffns, attention, link, listen=None, both=()):
        self.extra = EXTRA.get(label, {})
        self.args, self.begun, self.attention, self.ffns = args, time.time(), None, []
        self.name = label.replace(" ", "-").replace(",", "")
        both = [*both, *args.both]
        ffns = [([*command, *both], gpu) for command, gpu in ffns]
        self.first_ffn = ffns[0]
        attention = [*attention, *both]
        self.command, self.lives = attention, 0
        try:
            addresses = [listen or free_address() for _ in ffns]
            for rank, ((command, gpu), listen) in enumerate(zip(ffns, addresses)):
                self.ffns.append(Process(f"{self.name}-ffn{rank}", command, args.out, gpus=gpu, extra=self.extra, listen=listen))
            self.command = [*attention, "--ffn", ",".join(addresses), "--link", link]
            self.start_attention()
        except BaseException:
            self.stop()
            raise
        self.started_s = time.time() - self.begun

    def another_ffn(self, listen):
        """In the first one's place, after it has gone."""
        command, gpu = self.first_ffn
        self.ffns.append(Process(f"{self.name}-ffn-again", command, self.args.out, gpus=gpu, extra=self.extra, listen=listen))

    def start_attention(self):
        """Again, after it has gone."""
        self.lives += 1
        self.command = [*self.command, *(self.args.attention if self.lives == 1 else [])]
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


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return "127.0.0.1:{}".format(free.getsockname()[1])
