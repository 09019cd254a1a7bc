#!/usr/bin/env python3
"""openai_client.py - the official client of OpenAI's API (pip install openai) against `moetrain serve`.

    python3 openai_client.py MOETRAIN [REQUESTS]

Models, chat and completions, whole and as streams, log-probabilities, tools, errors; then REQUESTS (300) completions of
three models, 48 at a time, every fifth stream closed after three chunks, against the same texts one at a time."""
import asyncio
import os
import random
import re
import subprocess
import sys
import tempfile
import time

import openai

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
WRONG = [  # what the client raises, for what
    (openai.NotFoundError, {"model": "none"}),
    (openai.BadRequestError, {"temperature": -1}),
    (openai.BadRequestError, {"max_tokens": 10 ** 6}),
    (openai.BadRequestError, {"tool_choice": "required", "tools": TOOLS}),
    (openai.BadRequestError, {"response_format": {"type": "json_object"}}),
    (openai.BadRequestError, {"extra_body": {"guided_regex": "a"}}),
]


class Server:
    def __init__(self, binary, *words):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([binary, "serve", *words, "--port", "0", "--set", "train.device=cpu"],
                                        stderr=self.log)
        while not (found := re.search(r"listening on (http://\S+)", self.text())):
            if self.process.poll() is not None:
                sys.exit(self.text())
            time.sleep(0.1)
        self.url = found[1] + "/v1"

    def text(self):
        return os.pread(self.log.fileno(), 1 << 26, 0).decode()

    def close(self):
        self.process.terminate()
        code = self.process.wait(60)
        assert code == 0, (code, self.text())


def chat(client):
    model = client.models.list().data[0].id
    ask = {"model": model, "messages": HELLO, "max_tokens": 12, "n": 3, "seed": 5, "temperature": 0.9, "logprobs": True,
           "top_logprobs": 3}
    whole = client.chat.completions.create(**ask)
    assert whole.usage.completion_tokens == sum(len(c.logprobs.content) for c in whole.choices)
    assert all(len(t.top_logprobs) == 3 for c in whole.choices for t in c.logprobs.content)
    parts, tokens, usage = {}, 0, None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        for c in chunk.choices:
            parts[c.index] = parts.get(c.index, "") + (c.delta.content or "")
            tokens += len(c.logprobs.content) if c.logprobs else 0
        usage = chunk.usage or usage
    assert [parts[i] for i in range(3)] == [c.message.content for c in whole.choices]
    assert usage.total_tokens == whole.usage.total_tokens and tokens == usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    with_tools = client.chat.completions.create(model=model, tools=TOOLS, max_tokens=4, messages=HELLO + [
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {
            "name": "weather", "arguments": "{\"city\": \"Rome\"}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"}])
    assert with_tools.usage.prompt_tokens > whole.usage.prompt_tokens + 50
    for error, more in WRONG:
        try:
            client.chat.completions.create(**{"model": model, "messages": HELLO, **more})
        except error as e:
            print(f"{error.__name__}: {e.body['message']}")
        else:
            sys.exit(f"no {error.__name__} for {more}")


def completions(client):
    model = client.models.list().data[0].id
    made = client.completions.create(model=model, prompt=["The cat", "One two"], max_tokens=8, logprobs=2, echo=True,
                                     temperature=0)
    for c, prompt in zip(made.choices, ("The cat", "One two")):
        assert c.text.startswith(prompt) and c.logprobs.token_logprobs[0] is None
        assert "".join(c.logprobs.tokens).startswith(c.text)
    texts = [c.choices[0].text for c in client.completions.create(model=model, prompt="The cat", max_tokens=8,
                                                                  temperature=0, stream=True)]
    assert "The cat" + "".join(texts) == made.choices[0].text


async def completion(client, models, number, stream):
    rng = random.Random(number)
    ask = {"model": rng.choice(models), "prompt": f"Number {number}", "seed": number, "max_tokens": rng.randint(1, 40),
           "temperature": rng.choice([0, 0.7, 1]), "presence_penalty": rng.choice([0, 0.5]),
           "extra_body": {"top_k": rng.choice([0, 5])}}
    if not stream:
        return (await client.completions.create(**ask)).choices[0].text
    chunks = await client.completions.create(**ask, stream=True)
    text, n = "", 0
    async for chunk in chunks:
        text += "".join(c.text for c in chunk.choices)
        n += 1
        if number % 5 == 0 and n == 3:
            await chunks.close()
            return None
    return text


async def load(url, count):
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
    models = [m.id async for m in client.models.list()]
    room = asyncio.Semaphore(48)

    async def one(number):
        async with room:
            return await completion(client, models, number, True)

    together = await asyncio.gather(*map(one, range(count)))
    whole = [i for i, text in enumerate(together) if text is not None]
    differ = [i for i in whole if await completion(client, models, i, False) != together[i]]
    print(f"{models}: {len(whole)} of {count} streams to their end, {len(differ)} differ from one at a time")
    assert not differ


def main():
    binary, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 300
    case = os.path.join(ROOT, "tests/fixtures/parity/case_a")
    server = Server(binary, os.path.join(ROOT, "configs/tiny-gptoss"), "--context", "1024")
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    chat(client)
    completions(client)
    server.close()
    server = Server(binary, case, "--adapters", case, "--slots", "2", "--sequences", "16", "--context", "200")
    asyncio.run(load(server.url, count))
    server.close()


if __name__ == "__main__":
    main()
