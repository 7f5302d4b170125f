"""How long a client waits when the FFN rank that serves it is lost and a replica is there.

    python3 tests/bench/recovery.py [--model FOLDER] [--binaries FOLDER] [--losses 100] [--how kill,stop] [--json FILE]

One attention rank, one shard on two FFN ranks, and --streams answers read at once. At a random moment of them the rank in
use is lost: `kill` by kill -9, which breaks its link at once; `stop` by SIGSTOP, which nothing shows but that no answer
comes. What is told of each loss is the longest pause between two pieces of any of the answers, less what the loss has to
take: nothing for a kill, the hop's deadline for a stop (--hop-timeout and 5 ms a row). Beside it stands the longest pause of
the same answers where nothing happens. Then the rank comes back and is in use again before the next one is lost.

Goal: at most 100 ms more than the hop's deadline, every time; no request fails and no token is missing. Ends with 1
otherwise. What the tokens are, and losses without a replica, is what the test `e2e kills` looks at.
"""
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request

from service import Process, gauge, parser

GOAL_MS = 100
PER_ROW_MS = 5
# Losses for one time that nothing happens.
USUAL_EVERY = 5
LIMIT_S = 60


class Answer(threading.Thread):
    """One answer, read piece by piece."""

    def __init__(self, url, prompt, num_tokens):
        super().__init__()
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                "return_token_ids": True}
        self.request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                              {"content-type": "application/json"})
        self.first, self.moments, self.num_tokens, self.failure = threading.Event(), [], 0, None
        self.start()

    def run(self):
        try:
            with urllib.request.urlopen(self.request, timeout=LIMIT_S) as answer:
                for line in answer:
                    if not line.startswith(b"data: {"):
                        continue
                    now, piece = time.monotonic(), json.loads(line[6:])
                    if "error" in piece:
                        raise OSError(piece["error"])
                    self.num_tokens += sum(len(choice.get("token_ids") or []) for choice in piece["choices"])
                    self.moments.append(now)
                    self.first.set()
        except OSError as failure:
            self.failure = failure
        finally:
            self.first.set()

    def longest_pause_s(self, since):
        """Between two pieces of which the second came after that moment."""
        return max((now - last for last, now in zip(self.moments, self.moments[1:]) if now > since), default=0.0)


class Replicas:
    """One attention rank and the two FFN ranks that can serve it."""

    def __init__(self, options):
        self.options = options
        self.common = ["--model", options.model, "--dtype", options.dtype, "--threads", options.threads]
        self.ffn = [self.start_ffn(rank) for rank in range(2)]
        self.addresses = [process.address() for process in self.ffn]
        self.attention = Process(options, "attention", [*self.common, "--ffn", ",".join(self.addresses), "--hop-timeout",
                                                        f"{options.hop_timeout_ms}ms", "--no-prefix-cache"])
        self.attention.wait_ready()
        self.wait_both()

    def start_ffn(self, rank, listen="127.0.0.1:0"):
        return Process(self.options, f"{rank}-ffn", [*self.common, "--rank", rank], listen=listen)

    def wait_both(self):
        deadline = time.monotonic() + LIMIT_S
        while not self.are_both_warm():
            if time.monotonic() > deadline:
                sys.exit("a rank that was lost is not in use again")
            time.sleep(0.01)

    def are_both_warm(self):
        counters = self.attention.counters()
        return gauge(counters, "afd_ffn_peer") == 2 and gauge(counters, "afd_ffn_cold") == 0

    def active(self):
        """The rank that rows go to."""
        hops = [process.counters().get("afd_ffn_batch_hops_count", 0.0) for process in self.ffn]
        while True:
            for rank, process in enumerate(self.ffn):
                if process.counters().get("afd_ffn_batch_hops_count", 0.0) > hops[rank]:
                    return rank

    def lose(self, rank, how):
        self.ffn[rank].process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def recover(self, rank, how):
        if how == "stop":
            self.ffn[rank].process.send_signal(signal.SIGCONT)
        else:
            self.ffn[rank].end()
            self.ffn[rank] = self.start_ffn(rank, self.addresses[rank])
        self.wait_both()

    def end(self):
        for process in [self.attention, *self.ffn]:
            process.end()


def one_loss(options, replicas, how, dice):
    """The longest pause of any answer from the loss on, seconds, and why answers failed. Without `how` nothing is lost."""
    words = [[dice.randrange(100, 1000) for _ in range(16)] for _ in range(options.streams)]
    answers = [Answer(replicas.attention.url(), prompt, options.output_len) for prompt in words]
    for answer in answers:
        answer.first.wait()
    rank = replicas.active()
    time.sleep(dice.random() * options.spread_ms / 1000)
    since = time.monotonic()
    if how:
        replicas.lose(rank, how)
    for answer in answers:
        answer.join()
    if how:
        replicas.recover(rank, how)
    failures = [str(answer.failure or f"{answer.num_tokens} tokens came") for answer in answers
                if answer.failure or answer.num_tokens != options.output_len]
    return max(answer.longest_pause_s(since) for answer in answers), failures


def measure(options, replicas, how):
    dice = random.Random(options.seed)
    allowed_s = 0 if how == "kill" else (options.hop_timeout_ms + PER_ROW_MS * options.streams) / 1000
    usual, over, failures = [], [], []
    for loss in range(options.losses):
        if loss % USUAL_EVERY == 0:
            usual.append(1000 * one_loss(options, replicas, None, dice)[0])
        pause_s, failed = one_loss(options, replicas, how, dice)
        over.append(1000 * (pause_s - allowed_s))
        failures += failed
        print(f"{how} {loss + 1}/{options.losses}: {over[-1]:.0f} ms, {usual[-1]:.0f} where nothing happens", file=sys.stderr)
    return {"how": how, "allowed_ms": 1000 * allowed_s, "usual_ms": usual, "over_ms": over, "failures": failures}


def told(what, values):
    values = sorted(values)
    at = [values[min(len(values) - 1, int(part * len(values)))] for part in (0.5, 0.9, 0.99)]
    return f"{what:<34}" + "".join(f"{value:>8.0f}" for value in [*at, values[-1]])


def judge(options, found):
    print(f"{options.model}, one attention rank, one shard on two FFN ranks, {options.dtype}, {options.threads} threads each, "
          f"{options.streams} answers of {options.output_len} tokens, --hop-timeout {options.hop_timeout_ms} ms")
    print(f"{'longest pause of a client, ms':<34}{'p50':>8}{'p90':>8}{'p99':>8}{'most':>8}")
    met = True
    for case in found:
        over = case["over_ms"]
        print(told("where nothing happens", case["usual_ms"]))
        beyond = f" less {case['allowed_ms']:.0f}" if case["allowed_ms"] else ""
        print(told(f"{len(over)} x {case['how']}{beyond}", over))
        late = sum(value > GOAL_MS for value in over)
        print(f"  {len(case['failures'])} requests failed; {late} of {len(over)} pauses above {GOAL_MS} ms; "
              f"mean {statistics.mean(over):.1f} ms")
        met &= not case["failures"] and late == 0
    print("goal met" if met else f"goal missed: at most {GOAL_MS} ms more than the hop's deadline, and no failure")
    return met


def main():
    args = parser(__doc__)
    args.add_argument("--losses", type=int, default=100)
    args.add_argument("--how", type=lambda text: text.split(","), default=["kill", "stop"])
    args.add_argument("--streams", type=int, default=4)
    args.add_argument("--output-len", type=int, default=32)
    args.add_argument("--hop-timeout-ms", type=int, default=1000)
    args.add_argument("--spread-ms", type=int, default=200)
    args.add_argument("--seed", type=int, default=1)
    options = args.parse_args()
    with tempfile.TemporaryDirectory() as options.folder:
        replicas = Replicas(options)
        found = [measure(options, replicas, how) for how in options.how]
        replicas.end()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0 if judge(options, found) else 1)


if __name__ == "__main__":
    main()
