"""The demo's client of the OpenAI API and of /metrics. Standard library only."""

import json
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

TIMEOUT_S = 120  # for the next byte of a stream: longer than any pause that the services allow themselves

# What a client of this module has to expect and tell in one line.
FAILURES = (OSError, EOFError, RuntimeError, ValueError, KeyError, IndexError)


@dataclass
class Answer:
    """What one streamed answer was made of. Times are of time.monotonic()."""

    model: str
    sent_at: float = 0.0
    times: list = field(default_factory=list)  # one entry per event that carried text or tokens
    token_ids: list = field(default_factory=list)  # when they were asked for
    prompt_token_ids: list = field(default_factory=list)
    text: str = ""
    usage: dict = field(default_factory=dict)

    def gaps_s(self) -> list:
        """Times between tokens."""
        return [after - before for before, after in zip(self.times, self.times[1:])]


def get(url: str, timeout_s: float = 10) -> str:
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return response.read().decode()


def events(response):
    """The JSON of each server-sent event up to [DONE]."""
    for line in response:
        name, _, value = line.decode().rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if name != "data":
            continue  # event names, comments, the empty line between events
        if value == "[DONE]":
            return
        yield json.loads(value)
    raise EOFError("the stream ended without [DONE]")


def chat(api: str, prompt: str, max_tokens: int, on_text, with_token_ids: bool = False) -> Answer:
    """Streams the greedy answer to one question; calls on_text(piece of text, answer so far) as it comes."""
    answer = Answer(model=json.loads(get(f"{api}/v1/models"))["data"][0]["id"])
    body = {
        "model": answer.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": with_token_ids,
    }
    request = urllib.request.Request(
        f"{api}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    answer.sent_at = time.monotonic()
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        for event in events(response):
            if "error" in event:
                raise RuntimeError(event["error"].get("message", event["error"]))
            answer.usage = event.get("usage") or answer.usage
            for choice in event.get("choices", []):
                answer.prompt_token_ids += choice.get("prompt_token_ids", [])
                ids, text = choice.get("token_ids", []), choice.get("delta", {}).get("content") or ""
                if ids or text:
                    answer.times.append(time.monotonic())
                    answer.token_ids += ids
                    answer.text += text
                    on_text(text, answer)
    if not answer.times or not answer.usage:
        raise RuntimeError("the answer was empty or came without its usage")
    return answer


def counters(api: str) -> dict:
    """All metrics of a service by name, summed over their labels."""
    sums = {}
    for name, value in re.findall(r"^([a-z_:]+)(?:\{.*\})? ([-+.0-9e]+)$", get(f"{api}/metrics"), re.MULTILINE):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def explain(api: str, failure: Exception) -> str:
    if isinstance(failure, urllib.error.HTTPError):
        return f"{api} answered {failure.code}: {failure.read().decode(errors='replace')}"
    return f"{api}: {failure}"
