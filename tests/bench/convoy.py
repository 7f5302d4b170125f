"""Attention ranks that share one FFN: company where it helps (--board-ms), and no cost where it does not.

    python3 tests/bench/convoy.py [--binaries FOLDER] [--cases bottleneck,attention,idle,slow] [--rounds 15] [--json FILE]

bottleneck  Two busy ranks and an FFN that takes --delay an execution whatever is in it, as if it read large weights: with
            boarding its rows per execution rise to >= 1.8 times those without.
attention   Two busy ranks, and attention is the bottleneck: boarding turns itself off and costs < 3 % of the tokens/s.
idle        A busy rank beside one that nobody asks anything, beside the same rank alone: < 2 %, and nothing is held.
slow        A busy rank whose neighbour's client reads its answer slowly, beside one whose client reads at once: < 10 %.

Per case two deployments run all the time and are measured in turn, round after round; told are medians, over the rounds, of
their ratio in the same round, with quartiles, and what the FFN's own counters say: rows and ranks per execution, ranks that
missed their convoy, and whether boarding was on at the end. Ends with 1 where a goal is missed.
"""
import json
import socket
import statistics
import sys
import tempfile
import threading
import time

from service import MODELS, ROOT, Load, Pair, difference, gauge, mean_between, parser, quartiles

# One seed: after the first round every prompt is in the prefix cache, and what is measured decodes.
SEED = 7
TINY = str(ROOT / "tests/fixtures/tiny/tiny-mixtral")
SMOLLM2 = str(MODELS / "smollm2-135m-moe")
# What the slow client takes of its answers: less than they have.
SLOW_BYTES, SLOW_PAUSE_S = 64, 0.2
# Tokens of an answer that nobody waits for the end of.
ENDLESS = 1900


class Tally:
    """What one deployment came to, round by round."""

    def __init__(self):
        self.values, self.rows, self.ranks, self.stragglers, self.boarding = [], [], [], 0, 0

    def add(self, value, before, after):
        self.values.append(value)
        self.rows.append(mean_between(before, after, "afd_ffn_batch_rows") or 0.0)
        self.ranks.append(mean_between(before, after, "afd_ffn_batch_ranks") or 0.0)
        self.stragglers += difference(before, after, "afd_ffn_stragglers_total")
        self.boarding = after.get("afd_ffn_boarding", 0.0)

    def told(self):
        return {"median": statistics.median(self.values), "rows_per_execution": statistics.median(self.rows),
                "ranks_per_execution": statistics.median(self.ranks), "stragglers": self.stragglers,
                "boarding_at_the_end": self.boarding, "values": self.values}


class Case:
    """Two deployments and what is compared of them: the first beside the second."""

    what, goal = "tokens/s", 0.97
    ranks, concurrency, input_len, seed = [0, 1], 4, 16, None

    def __init__(self, options):
        self.options = options
        options.model = options.given_model or SMOLLM2
        self.board = ["--board-ms", options.board_ms]

    def deployments(self):
        """By name, the one in question first."""
        raise NotImplementedError

    def load(self, name, pair):
        """Puts load on. What came of it, and the FFN's counters before and after."""
        before = pair.ffn.counters()
        shape = (self.concurrency, self.concurrency, self.input_len, self.options.output_len, self.seed)
        loads = [Load(self.options, pair.attention[rank], *shape) for rank in self.ranks]
        rates = [load.tokens_per_s() for load in loads]
        after = pair.ffn.counters()
        return self.value(rates, before, after), before, after

    def value(self, rates, before, after):
        return sum(rates)

    def run(self):
        """Tallies by name; the first round is uncounted."""
        deployments, rounds = self.deployments(), self.options.rounds
        tallies = {name: Tally() for name in deployments}
        for turn in range(rounds + 1):
            # Whoever comes first in a round comes last in the next: nobody has the better place.
            for name in list(deployments)[:: 1 if turn % 2 else -1]:
                value, before, after = self.load(name, deployments[name])
                if turn > 0:
                    tallies[name].add(value, before, after)
                    print(f"{type(self).__name__} {turn}/{rounds}: {name} {value:.2f} {self.what}, "
                          f"{tallies[name].ranks[-1]:.2f} ranks an execution", file=sys.stderr)
        for pair in deployments.values():
            pair.end()
        return tallies


class Bottleneck(Case):
    what, goal = "rows per execution", 1.8

    def deployments(self):
        self.options.model = self.options.given_model or TINY
        args, delay = ["--stages", "1"], ["--inject-delay", self.options.delay]
        return {"with boarding": Pair(self.options, "bottleneck-on", 2, args, self.board + delay),
                "without": Pair(self.options, "bottleneck-off", 2, args, delay)}

    def load(self, name, pair):
        """Only what happens while both are busy: how loads begin and end is nobody's question here."""
        loads = [Load(self.options, rank, self.concurrency, self.concurrency, 8, ENDLESS) for rank in pair.attention]
        deadline = time.monotonic() + 60
        while any(gauge(rank.counters(), "vllm:num_requests_running") < self.concurrency for rank in pair.attention):
            if time.monotonic() > deadline:
                sys.exit("the ranks do not become busy")
            time.sleep(0.05)
        # Once the prompts are over.
        time.sleep(0.5)
        before = pair.ffn.counters()
        time.sleep(self.options.window)
        after = pair.ffn.counters()
        for load in loads:
            load.stop()
        return mean_between(before, after, "afd_ffn_batch_rows"), before, after


class Attention(Case):
    concurrency, input_len, seed = 8, 512, SEED

    def deployments(self):
        args = ["--stages", "1"]
        return {"with boarding": Pair(self.options, "attention-on", 2, args, self.board),
                "without": Pair(self.options, "attention-off", 2, args)}


class Idle(Case):
    goal = 0.98
    ranks = [0]

    def deployments(self):
        return {"beside an idle rank": Pair(self.options, "idle-two", 2, [], self.board),
                "alone": Pair(self.options, "idle-one", 1, [], self.board)}


class Slow(Case):
    goal = 0.9
    ranks = [0]

    def deployments(self):
        return {"beside a slow client": Pair(self.options, "slow-slow", 2), "beside a quick one": Pair(self.options, "slow-quick", 2)}

    def load(self, name, pair):
        client = Client(pair.attention[1].address(), is_slow="slow" in name)
        client.start()
        found = super().load(name, pair)
        client.end()
        return found


class Client(threading.Thread):
    """Asks for long answers, one after the other, and reads them at once, or slowly."""

    def __init__(self, address, is_slow):
        super().__init__(daemon=True)
        host, port = address.rsplit(":", 1)
        self.address, self.is_slow, self.stop = (host, int(port)), is_slow, threading.Event()
        self.began = threading.Event()

    def run(self):
        body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True})
        request = (f"POST /v1/completions HTTP/1.1\r\nHost: {self.address[0]}\r\nContent-Type: application/json\r\n"
                   f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}").encode()
        while not self.stop.is_set():
            with socket.socket() as connection:
                # A small window: what is not read is soon felt at the server.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.settimeout(60)
                connection.connect(self.address)
                connection.sendall(request)
                while not self.stop.is_set() and connection.recv(SLOW_BYTES if self.is_slow else 65536):
                    self.began.set()
                    self.stop.wait(SLOW_PAUSE_S if self.is_slow else 0)

    def start(self):
        super().start()
        if not self.began.wait(60):
            sys.exit("the neighbour's client gets no answer")

    def end(self):
        self.stop.set()
        self.join(timeout=60)


CASES = {"bottleneck": Bottleneck, "attention": Attention, "idle": Idle, "slow": Slow}


def judge(case, name, tallies):
    """Prints what came of a case. Returns it, and whether its goal is met."""
    (first, asked), (second, beside) = tallies.items()
    low, median, high = quartiles([one / other for one, other in zip(asked.values, beside.values)])
    met = median >= case.goal
    print(f"{name}: {case.what}, {first} over {second}: {median:.3f} (quartiles {low:.3f} to {high:.3f}, goal {case.goal}): "
          f"{'met' if met else 'missed'}")
    for label, tally in tallies.items():
        told = tally.told()
        print(f"  {label:<20} {told['median']:8.2f} {case.what}; {told['rows_per_execution']:.2f} rows and "
              f"{told['ranks_per_execution']:.2f} ranks an execution, {told['stragglers']:.0f} missed their convoy, "
              f"boarding {'on' if told['boarding_at_the_end'] else 'off'} at the end")
    told = {label: tally.told() for label, tally in tallies.items()}
    return {"case": name, "ratio": median, "quartiles": [low, high], "goal": case.goal, "met": met, "sides": told}, met


def main():
    args = parser(__doc__, model=None, rounds=15)
    args.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    args.add_argument("--board-ms", type=float, default=20)
    args.add_argument("--delay", default="4ms")
    args.add_argument("--output-len", type=int, default=48)
    args.add_argument("--window", type=float, default=3, help="seconds of the bottleneck case that are counted")
    options = args.parse_args()
    options.given_model = options.model
    rows, all_met = [], True
    for name in options.cases:
        with tempfile.TemporaryDirectory() as options.folder:
            case = CASES[name](options)
            row, met = judge(case, name, case.run())
        rows.append(row)
        all_met &= met
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("goals met" if all_met else "goals missed")
    sys.exit(0 if all_met else 1)


if __name__ == "__main__":
    main()
