"""Kills FFN ranks while an answer is being written, and shows that the answer is none the worse for it.

    python kill.py http://HOST:PORT PROMPT --folder .deps/demo --shards S --replicas R --oracle BINARY --model DIR

The same greedy request twice: once undisturbed, once with `kill -9` in mid-sentence: first the replica in use of one
shard, then every replica of another. Whoever started the ranks starts the killed ones again, on their old addresses.
Standard library only. Exit code 0 when the request ended well and the oracle found every token right.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from api import FAILURES, Answer, chat, counters, explain
from page import MARGIN, STYLE, conversation_begins

MIN_TOKENS = 16  # below, there is no middle to kill in
TOKENS_TO_RECOVER = 10  # the pause is the longest wait for one of so many tokens after the kill


@dataclass
class Rank:
    """An FFN rank as the demo's folder knows it."""

    name: str
    shard: int
    folder: Path

    def pid(self) -> int:
        return int((self.folder / f"{self.name}.pid").read_text())

    def hops(self) -> float:
        address = (self.folder / f"{self.name}.address").read_text().strip()
        return counters(f"http://{address}")["afd_ffn_hops_total"]


@dataclass
class Kill:
    """One mishap: what happens when, and what came of it."""

    after_tokens: int
    victims: list
    what: str
    rescue: str
    pids: list = field(default_factory=list)
    at_event: int = 0

    def happen(self, answer: Answer, between_tokens_s: float) -> None:
        time.sleep(between_tokens_s / 2)  # in the middle of the next step, with hops on their way
        self.at_event = len(answer.times)
        self.pids = [rank.pid() for rank in self.victims]
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)

    def names(self) -> str:
        return " and ".join(rank.name for rank in self.victims)

    def pause_s(self, answer: Answer) -> float:
        return max(answer.gaps_s()[self.at_event - 1 : self.at_event - 1 + TOKENS_TO_RECOVER])


def choose_kills(ranks: list, num_shards: int, num_tokens: int) -> list:
    """The busy replica of the first shard a quarter into the text, every replica of the last shard after the middle."""
    first = [rank for rank in ranks if rank.shard == 0]
    last = [rank for rank in ranks if rank.shard == num_shards - 1]
    busy = max(first, key=Rank.hops)
    others = " or ".join(rank.name for rank in first if rank is not busy)
    return [
        Kill(num_tokens // 4, [busy], f"serving shard 0 of {num_shards}", f"its replica {others} went on"),
        Kill(
            num_tokens * 5 // 9,
            last,
            f"all there is of shard {num_shards - 1} of {num_shards}",
            "a process started in their place went on",
        ),
    ]


def tell(kill: Kill, answer: Answer) -> None:
    numbers = ", ".join(map(str, kill.pids))
    print(f"  {STYLE.red}⚡{STYLE.plain}     kill -9 {kill.names()} (pid {numbers}) after token {kill.after_tokens}: {kill.what}")
    print(f"{MARGIN}{kill.rescue}: {STYLE.bold}a pause of {kill.pause_s(answer) * 1000:.0f} ms{STYLE.plain}")


def check(good: bool, text: str) -> bool:
    mark = f"{STYLE.green}✓" if good else f"{STYLE.red}✗"
    print(f"  {mark}{STYLE.plain}      {text}")
    return good


def ask_oracle(args, answer: Answer) -> bool:
    tokens = {"prompt_token_ids": answer.prompt_token_ids, "token_ids": answer.token_ids}
    command = [args.oracle, "--model", args.model, "--dtype", args.dtype]
    oracle = subprocess.run(command, input=json.dumps(tokens), capture_output=True, text=True, timeout=600)
    return check(oracle.returncode == 0, f"the oracle: {(oracle.stdout or oracle.stderr).strip()}")


def undisturbed(args) -> tuple:
    """The answer as it should be, and the usual time between its tokens, seconds."""
    answer = chat(args.api, args.prompt, args.max_tokens, lambda *_: None, with_token_ids=True)
    if len(answer.token_ids) < MIN_TOKENS:
        raise ValueError(f"the answer has {len(answer.token_ids)} tokens: ask for a longer text")
    usual_s = sorted(answer.gaps_s())[len(answer.gaps_s()) // 2]
    check(True, f"first undisturbed: {len(answer.token_ids)} tokens, {usual_s * 1000:.0f} ms apart. Now again:\n")
    return answer, usual_s


def show(args) -> bool:
    ranks = [Rank(f"F{i}", i // args.replicas, args.folder) for i in range(args.shards * args.replicas)]
    expected, usual_s = undisturbed(args)
    before = counters(args.api)
    kills = choose_kills(ranks, args.shards, len(expected.token_ids))
    pending = list(kills)
    page = conversation_begins(args.prompt)

    def on_text(text: str, answer: Answer) -> None:
        page.write(text)
        if pending and len(answer.token_ids) >= pending[0].after_tokens:
            page.mark("".join(f"⚡{rank.name}" for rank in pending[0].victims))
            pending.pop(0).happen(answer, usual_s)

    try:
        answer = chat(args.api, args.prompt, args.max_tokens, on_text, with_token_ids=True)
    finally:
        page.end()
    if pending:
        raise RuntimeError("the text ended before everything had happened")
    print()
    for kill in kills:
        tell(kill, answer)
    print()
    after = counters(args.api)
    replays, losses, failed = (
        int(after.get(name, 0) - before.get(name, 0))
        for name in ("afd_hop_replays_total", "afd_ffn_losses_total", "afd_requests_failed_total")
    )
    num_killed = sum(len(kill.victims) for kill in kills)
    same = answer.token_ids == expected.token_ids
    verdicts = [
        check(failed == 0, f"the request ended as if nothing had happened: {len(answer.token_ids)} tokens, no error"),
        check(losses >= num_killed, f"{losses} FFN ranks lost; {replays} hops replayed (afd_hop_replays_total)"),
        ask_oracle(args, answer),
        check(same, "token for token what came undisturbed" if same else "other tokens than undisturbed"),
    ]
    return all(verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("api")
    parser.add_argument("prompt")
    parser.add_argument("--folder", type=Path, required=True, help="with F<rank>.pid and F<rank>.address")
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--oracle", required=True, help="the binary of that name")
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--dtype", required=True, help="what the services compute in")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return 0 if show(args) else 1
    except FAILURES as failure:
        print(explain(args.api, failure), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
