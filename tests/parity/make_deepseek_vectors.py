#!/usr/bin/env python3
"""make_deepseek_vectors.py - encodes conversations with DeepSeek V4's own encoder, for tests/data/test_chat.c.

Writes tests/fixtures/chat/deepseek.json: rows, the encoder's text, and the byte spans of its answers. The encoder is
encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash; with COUNT, the script
prints that many random rows instead, for a longer comparison.

    python tests/parity/make_deepseek_vectors.py encoding_dsv4.py [COUNT]
"""
import importlib.util
import json
import random
import sys
from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / "tests/fixtures/chat/deepseek.json"
spec = importlib.util.spec_from_file_location("encoder", sys.argv[1])
encoder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(encoder)
BEGIN, END = "\x01", "\x02"  # marks around the text that the encoder writes for an assistant message
original = encoder.render_message


def marked(index, messages, **more):
    text = original(index, messages, **more)
    return BEGIN + text + END if messages[index]["role"] == "assistant" else text


encoder.render_message = marked


def tool(name, **properties):
    return {"type": "function", "function": {
        "name": name, "description": "Does " + name, "parameters": {"type": "object", "properties": properties}}}


WEATHER = tool("get_weather", city={"type": "string"}, days={"type": "integer", "default": 1})
SEARCH = tool("search", q={"type": "string", "description": "à ★"}, deep={"items": {"x": [1.5, None]}})


def user(text, **more):
    return {"role": "user", "content": text, **more}


def answer(text, reasoning=None, calls=None, **more):
    message = {"role": "assistant", "content": text, **more}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [{"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
                                 for i, n, a in calls]
    return message


def result(of, content):
    return {"role": "tool", "tool_call_id": of, "content": content}


CALLS = [("c1", "get_weather", {"city": "Rôme \"x\"\n", "days": 2}),
         ("c2", "search", {"q": "", "deep": [{"x": [1.5, None]}]}), ("c3", "search", {})]
TWO = [user("a"), answer("b", "why b"), user("c"), answer("d", "why d")]
TOOLS = [user("Weather?"), answer("", "look", CALLS), result("c3", "three"), result("c1", "one"),
         result("c2", [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]), user("and?"),
         answer("Fine — 😁\n", "done")]
ROWS = [(messages, tools, mode)
        for messages, tools in ((TWO, None), (TWO[:3], None), (TOOLS, None), (TOOLS, [WEATHER]), (TOOLS[:5], None),
                                ([{"role": "system", "content": "Be brief."}] + TOOLS, [WEATHER, SEARCH]))
        for mode in ("chat", "thinking")]
ROWS += [
    ([{"role": "system", "content": None}, user("q", task="title"), answer("T"), user("r"), user("s"), answer("")],
     None, "thinking"),
    ([user("q", task="action"), answer("Search"), user("r", task="query"), user("s"), answer("x")], None, "thinking"),
    ([user("q", task="action"), answer("Search")], None, "chat"),
    ([{"role": "developer", "content": "old"}, answer("1", "r1"), {"role": "latest_reminder", "content": "today"},
      {"role": "developer", "content": "new", "response_format": {"type": "object"}}, answer("2", "r2")],
     None, "thinking"),
    ([{"role": "system", "content": "s", "response_format": {"a": [1]}}, {"role": "latest_reminder", "content": "x"},
      {"role": "developer", "content": "d", "tools": [SEARCH]}, answer("1", "r1"), answer("2", "r2")],
     None, "thinking"),
    ([user("q"), answer("half", "r", wo_eos=True)], None, "thinking"),
]


def random_row(rng):
    word = lambda: "".join(rng.choice("ab \n<é｜世\"{") for _ in range(rng.randrange(5)))
    messages, ids = [], []
    for i in range(rng.randrange(1, 9)):
        role = rng.choice(["user"] * 3 + ["assistant"] * 4 + ["tool"] * 3 + ["system", "developer", "latest_reminder"])
        task = {"task": rng.choice(["action", "query", "title"])} if rng.random() < 0.1 else {}
        if role == "assistant":
            ids = ["c%d" % k for k in range(rng.randrange(4))] if rng.random() < 0.5 else ids
            values = [1, -2.5, True, None, "t", [], {"k": ["é"]}, word()]
            calls = [(c, word(), {word() + str(k): rng.choice(values) for k in range(rng.randrange(3))}) for c in ids]
            reasoning = word() if rng.random() < 0.7 else None
            messages.append(answer(word(), reasoning, calls if rng.random() < 0.6 else None))
        elif role == "tool":
            messages.append(result(rng.choice(ids + ["other"]), word()))
        elif role == "user":
            messages.append(user(word(), **task))
        else:
            more = {"tools": [rng.choice([WEATHER, SEARCH])]} if role == "developer" and rng.random() < 0.3 else {}
            messages.append({"role": role, "content": word() + ".", **task, **more})
    tools = rng.choice([None, None, [WEATHER], [SEARCH, WEATHER]])
    return messages, tools, rng.choice(["chat", "thinking", "thinking"])


def case(messages, tools, mode, **more):
    row = {"messages": messages, "chat_template_kwargs": {"thinking_mode": mode, **more}}
    rendered = messages
    if tools:
        row["tools"] = tools
        if messages[0]["role"] not in ("system", "developer"):
            rendered = [{"role": "system", "content": ""}] + messages
        rendered = [{**rendered[0], "tools": tools}] + rendered[1:]
    text = encoder.encode_messages(rendered, thinking_mode=mode, **more)
    spans, clean = [], b""
    for piece in text.split(BEGIN):
        inside, end, after = piece.partition(END)
        if end:
            spans.append([len(clean), len(clean + inside.encode())])
        clean += inside.encode() + after.encode()
    return {"row": row, "text": clean.decode(), "spans": spans}


if len(sys.argv) > 2:
    rng = random.Random(1)
    json.dump([case(*random_row(rng)) for _ in range(int(sys.argv[2]))], sys.stdout, ensure_ascii=False)
    sys.exit()
cases = [case(*row) for row in ROWS]
cases.append(case(TWO, None, "thinking", drop_thinking=False))
cases.append(case(TWO, None, "thinking", reasoning_effort="max"))
OUT.write_text(json.dumps(cases, ensure_ascii=False, indent=0) + "\n")
print(OUT, len(cases), "cases")
