"""Asks a chat model over the OpenAI API and shows the answer as it comes, with what it cost.

    python chat.py http://HOST:PORT PROMPT [--max-tokens N]

Standard library only. Exit code 1 when the server refuses, breaks off or says nothing.
"""

import argparse
import sys

from api import FAILURES, Answer, chat, explain
from page import MARGIN, STYLE, conversation_begins


def summary(answer: Answer) -> str:
    tokens_in, tokens_out = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
    first_s, decode_s = answer.times[0] - answer.sent_at, answer.times[-1] - answer.times[0]
    parts = [f"{tokens_in} tokens in, {tokens_out} out", f"first after {first_s * 1000:.0f} ms"]
    if tokens_out > 1 and decode_s > 0:
        parts.append(f"then {(tokens_out - 1) / decode_s:.1f} tokens/s")
    return " · ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("api")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    page = conversation_begins(args.prompt)
    try:
        answer = chat(args.api, args.prompt, args.max_tokens, lambda text, _: page.write(text))
    except FAILURES as failure:
        page.end()
        print(explain(args.api, failure), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        page.end()
        return 130
    page.end()
    print(f"{MARGIN}{STYLE.dim}{summary(answer)}{STYLE.plain}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
