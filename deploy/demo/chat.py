"""Asks a chat model over the OpenAI API and shows the answer as it comes, with what it cost.

    python chat.py http://HOST:PORT PROMPT [--max-tokens N]

Standard library only. Exit code 1 when the server refuses, breaks off or says nothing.
"""

import argparse
import json
import shutil
import sys
import time
import urllib.error
import urllib.request

MARGIN = "         "


class Page:
    """Writes streamed text between margins. Off a terminal it passes through unchanged."""

    def __init__(self):
        self.wraps = sys.stdout.isatty()
        self.width = min(shutil.get_terminal_size().columns, 100) - len(MARGIN) - 1
        self.column = 0
        self.word = ""

    def write(self, text: str) -> None:
        if not self.wraps:
            print(text, end="", flush=True)
            return
        for character in text:
            if character in " \n":
                self._put_word()
                self._break_line() if character == "\n" else self._put(" ")
            else:
                self.word += character
        sys.stdout.flush()

    def end(self) -> None:
        self._put_word()
        print(flush=True)

    def _put_word(self) -> None:
        if self.column + len(self.word) > self.width and self.column > 0:
            self._break_line()
        self._put(self.word)
        self.word = ""

    def _put(self, text: str) -> None:
        if self.column == 0:
            text = text.lstrip(" ")
        sys.stdout.write(text)
        self.column += len(text)

    def _break_line(self) -> None:
        sys.stdout.write("\n" + MARGIN)
        self.column = 0


def events(response):
    """The JSON of each server-sent event up to [DONE]."""
    for line in response:
        field, _, value = line.decode().rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if field != "data":
            continue  # event names, comments, the empty line between events
        if value == "[DONE]":
            return
        yield json.loads(value)
    raise EOFError("the stream ended without [DONE]")


def get_json(url: str, timeout_s: float = 10):
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return json.load(response)


def chat(api: str, prompt: str, max_tokens: int, page: Page) -> dict:
    """Streams one answer onto the page; returns times (seconds since the request was sent) and token counts."""
    body = {
        "model": get_json(f"{api}/v1/models")["data"][0]["id"],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{api}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    sent, first, last, usage, finish_reason = time.monotonic(), None, None, None, None
    with urllib.request.urlopen(request, timeout=60) as response:
        for event in events(response):
            if "error" in event:
                raise RuntimeError(event["error"].get("message", event["error"]))
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                finish_reason = choice.get("finish_reason") or finish_reason
                if text := choice.get("delta", {}).get("content"):
                    last = time.monotonic()
                    first = first or last
                    page.write(text)
    if first is None or usage is None:
        raise RuntimeError("the answer was empty or came without its usage")
    return {
        "model": body["model"],
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "finish_reason": finish_reason,
        "first_token_s": first - sent,
        "decode_s": last - first,
    }


def summary(stats: dict) -> str:
    decoded = stats["completion_tokens"] - 1
    parts = [f"{stats['prompt_tokens']} tokens in, {stats['completion_tokens']} out"]
    parts.append(f"first after {stats['first_token_s'] * 1000:.0f} ms")
    if decoded > 0 and stats["decode_s"] > 0:
        parts.append(f"then {decoded / stats['decode_s']:.1f} tokens/s")
    return " · ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("api")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    bold, dim, plain = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "", "")
    print(f"  {dim}you  {plain}  {args.prompt}\n  {dim}model{plain}  {bold}", end="", flush=True)
    page = Page()
    try:
        stats = chat(args.api, args.prompt, args.max_tokens, page)
    except urllib.error.HTTPError as refusal:
        print(f"{plain}\n{args.api} answered {refusal.code}: {refusal.read().decode(errors='replace')}", file=sys.stderr)
        return 1
    except (OSError, EOFError, RuntimeError, ValueError, KeyError) as failure:
        print(f"{plain}\n{args.api}: {failure}", file=sys.stderr)
        return 1
    page.end()
    print(f"{plain}  {dim}{' ' * 5}  {summary(stats)}{plain}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
