"""The official openai package, every call of it that is served, against a running server:
`calls.py URL TOKEN [CA.pem]`.

Prints a line for every call that did what it should and ends with 0, or ends with a traceback.
"""
import math
import ssl
import sys

import openai
from openai import OpenAI

PROMPT = "The ferry leaves at noon"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where to?"},
    {"role": "assistant", "content": "Home."},
    {"role": "user", "content": "Why?"},
]


def models(client, model):
    assert [entry.id for entry in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def completion(client, model):
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2)
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.finish_reason) == ("text_completion", model, "length")
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 8
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert all(max(best.values()) == value for best, value in zip(logprobs.top_logprobs, logprobs.token_logprobs))


def completion_of_token_ids(client, model):
    arguments = dict(model=model, max_tokens=4, temperature=0)
    several = client.completions.create(prompt=[[5, 6], [7, 8]], n=2, echo=True, **arguments)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text
    one = client.completions.create(prompt=[5, 6], **arguments)
    assert several.choices[0].text.endswith(one.choices[0].text)


def completion_stream(client, model):
    arguments = dict(model=model, prompt=PROMPT, max_tokens=24, temperature=0)
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **arguments))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage and all(chunk.usage is None for chunk in chunks[:-1])
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def sampling(client, model):
    arguments = dict(model=model, prompt=PROMPT, max_tokens=12, temperature=1, top_p=0.9, seed=7)
    first, again = (client.completions.create(**arguments) for _ in range(2))
    assert first.choices[0].text == again.choices[0].text
    forced = client.completions.create(model=model, prompt=PROMPT, max_tokens=3, logit_bias={"70": 100},
                                       extra_body={"return_token_ids": True, "ignore_eos": True})
    assert forced.choices[0].token_ids == [70, 70, 70]
    client.completions.create(presence_penalty=1, frequency_penalty=-1, user="u", best_of=1,
                              extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}, **arguments)


def stop(client, model):
    arguments = dict(model=model, prompt=PROMPT, max_tokens=24, temperature=0)
    text = client.completions.create(**arguments).choices[0].text
    cut = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = client.completions.create(stop=[cut], **arguments).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(cut)], "stop")


def chat(client, model):
    arguments = dict(model=model, messages=MESSAGES, max_completion_tokens=8, temperature=0)
    answer = client.chat.completions.create(logprobs=True, top_logprobs=3, **arguments)
    choice = answer.choices[0]
    assert (answer.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
    assert len(choice.logprobs.content) == 8
    assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
    assert len(client.chat.completions.create(n=3, **arguments).choices) == 3


def chat_stream(client, model):
    arguments = dict(model=model, messages=MESSAGES, max_tokens=24, temperature=0)
    whole = client.chat.completions.create(**arguments)
    text, usage = "", None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **arguments):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage == whole.usage
    # The package's own accumulation of a stream, which ends with an exception where the answer was cut.
    with client.chat.completions.stream(**arguments) as events:
        for _ in events:
            pass
        try:
            events.get_final_completion()
            raise AssertionError("the answer was cut at max_tokens")
        except openai.LengthFinishReasonError as error:
            assert error.completion.choices[0].message.content == text


def refusals(client, model):
    cases = [
        (dict(model="nope"), openai.NotFoundError, "model"),
        (dict(temperature=-1), openai.BadRequestError, "temperature"),
        (dict(max_tokens=0), openai.BadRequestError, "max_tokens"),
        (dict(prompt=""), openai.BadRequestError, "prompt"),
        (dict(suffix="x"), openai.BadRequestError, "suffix"),
        (dict(extra_body={"foo": 1}), openai.BadRequestError, "foo"),
    ]
    for change, expected, param in cases:
        try:
            client.completions.create(**(dict(model=model, prompt="x") | change))
        except expected as error:
            assert error.param == param and error.code and error.type == "invalid_request_error", error.body
        else:
            raise AssertionError(f"{change} was accepted")
    try:
        client.chat.completions.create(model=model, messages=[{"role": "wizard", "content": "x"}])
        raise AssertionError("an unknown role was accepted")
    except openai.BadRequestError as error:
        assert error.param == "messages[0].role"
    try:
        # The package writes NaN as JSON does not know it, or refuses to: either way nothing runs.
        client.completions.create(model=model, prompt="x", temperature=math.nan)
        raise AssertionError("NaN was accepted")
    except (openai.BadRequestError, ValueError):
        pass
    try:
        client.with_options(timeout=1e-3).completions.create(model=model, prompt="x", max_tokens=400)
        raise AssertionError("nothing takes less than a millisecond")
    except openai.APITimeoutError:
        pass


def main():
    url, token, *ca = sys.argv[1:]
    http_client = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=ca[0])) if ca else None
    arguments = dict(base_url=f"{url}/v1", max_retries=0, timeout=60, http_client=http_client)
    client = OpenAI(api_key=token, **arguments)
    if ca:
        try:
            OpenAI(api_key="wrong", **arguments).models.list()
            raise AssertionError("a wrong token was accepted")
        except openai.AuthenticationError as error:
            assert error.code == "invalid_api_key"
    model = client.models.list().data[0].id
    calls = [models, completion, completion_of_token_ids, completion_stream, sampling, stop, chat, chat_stream, refusals]
    for call in calls:
        call(client, model)
        print(f"ok {call.__name__}")


if __name__ == "__main__":
    main()
