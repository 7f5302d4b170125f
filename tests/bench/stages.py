"""Whether `--stages auto` finds the number of stages that is the faster one: beside pairs that always use 1, 2, ....

    python3 tests/bench/stages.py [--model FOLDER] [--binaries FOLDER] [--rounds 30] [--fixed 1,2] [--json FILE]

One pair (one attention rank, one FFN rank) for each choice, all running all the time, measured in turn under each load:
decode of 8 and of 16 requests, and prompts with hardly an answer. A busy machine slows all of them alike; what is told is
the median, over the rounds, of auto's rate beside that of the better fixed choice in the same round, with the quartiles.
The better one is the one with the higher median rate. Goal: within 3 %. Ends with 1 where a load misses it. `--loads` picks
loads by name, `--warm-up` says how many rounds go uncounted: auto is to have looked around by then. Thirty rounds of
decode-8 and prefill take about seven minutes on two cores, by the processor time of a round.
"""
import json
import statistics
import sys
import tempfile

from service import Load, Pair, difference, parser, quartiles

# Name, requests in flight, requests of a measurement, tokens of a prompt and of an answer, whose rate is told.
LOADS = [("decode-8", 8, 8, 16, 32, "output_tokens_per_s"),
         ("decode-16", 16, 16, 16, 32, "output_tokens_per_s"),
         ("prefill", 8, 16, 96, 4, "total_tokens_per_s")]
GOAL = 0.97


def measure(options, pairs):
    """Rates by load and choice, and how often auto used which count, by load."""
    rates = {load[0]: {choice: [] for choice in pairs} for load in options.loads}
    used = {}
    for name, concurrency, requests, input_len, output_len, what in options.loads:
        for turn in range(options.warm_up + options.rounds):
            if turn == options.warm_up:
                before = pairs["auto"].attention[0].counters()
            # Whoever comes first in a round comes last in the next: no pair has the better place.
            for choice in list(pairs)[:: 1 if turn % 2 else -1]:
                rate = Load(options, pairs[choice].attention[0], concurrency, requests, input_len, output_len).level()[what]
                if turn >= options.warm_up:
                    rates[name][choice].append(rate)
                print(f"{name} {turn - options.warm_up + 1}/{options.rounds}: {choice} {rate:.1f} tokens/s", file=sys.stderr)
        after = pairs["auto"].attention[0].counters()
        steps = {count: difference(before, after, f'afd_steps_by_stages_total{{stages="{count}"}}') for count in range(1, 5)}
        used[name] = {count: int(number) for count, number in steps.items() if number}
    return rates, used


def judge(options, rates, used):
    """Prints the table. Returns its rows, and whether every goal is met."""
    print(f"{options.model}, one attention and one FFN rank, {options.dtype}, {options.threads} threads each; tokens/s, "
          f"medians of {options.rounds} rounds")
    choices = list(next(iter(rates.values())))
    print(f"{'load':<10}" + "".join(f"{choice:>8}" for choice in choices)
          + f" {'better':>7} {'auto beside it':>15} {'quartiles':>16}  steps of auto by stages")
    rows, met = [], True
    for name, by_choice in rates.items():
        medians = {choice: statistics.median(found) for choice, found in by_choice.items()}
        better = max((choice for choice in choices if choice != "auto"), key=medians.get)
        low, median, high = quartiles([auto / fixed for auto, fixed in zip(by_choice["auto"], by_choice[better])])
        print(f"{name:<10}" + "".join(f"{medians[choice]:>8.1f}" for choice in choices)
              + f" {better:>7} {median:>15.3f} {f'{low:.3f} to {high:.3f}':>16}  {used[name]}")
        rows.append({"load": name, "medians": medians, "better": better, "ratio": median, "quartiles": [low, high],
                     "steps_by_stages": used[name], "rates": by_choice, "met": median >= GOAL})
        met &= median >= GOAL
    print(f"{'goals met' if met else 'goals missed'}: at least {GOAL} of the better fixed choice")
    return rows, met


def main():
    args = parser(__doc__)
    args.add_argument("--fixed", type=lambda text: text.split(","), default=["1", "2"])
    args.add_argument("--loads", type=lambda text: text.split(","), default=[load[0] for load in LOADS])
    args.add_argument("--warm-up", type=int, default=5)
    options = args.parse_args()
    options.loads = [load for load in LOADS if load[0] in options.loads]
    with tempfile.TemporaryDirectory() as options.folder:
        pairs = {choice: Pair(options, f"stages-{choice}", attention=["--stages", choice])
                 for choice in [*options.fixed, "auto"]}
        rates, used = measure(options, pairs)
        for pair in pairs.values():
            pair.end()
    rows, met = judge(options, rates, used)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
