#!/usr/bin/env python3
"""make_chat_vectors.py - renders conversations with the published harmony template, for tests/data/test_chat.c.

Writes tests/fixtures/chat/harmony.json: rows, the rendered texts, and the byte spans that carry loss, which the script
finds in the text. The template is chat_template.jinja of openai/gpt-oss-20b; needs `pip install jinja2`.

    python tests/parity/make_chat_vectors.py chat_template.jinja
"""
import json
import re
import sys
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

OUT = Path(__file__).resolve().parents[2] / "tests/fixtures/chat/harmony.json"
DATE = "2025-06-28"
ASSISTANT = "<|start|>assistant"


def system(text, role="system"):
    return {"role": role, "content": text}


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments, wrapped=True, **more):
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function} if wrapped else function]
    return {"role": "assistant", "tool_calls": calls, **more}


def result(content):
    return {"role": "tool", "tool_call_id": "c1", "content": content}


def tool(name, description, properties=None, **more):
    function = {"name": name, "description": description}
    if properties is not None:
        function["parameters"] = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", "Gets the current weather.", {
    "location": {"type": "string", "description": "The city"},
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}}, required=["location"])
TYPES = tool("types", "Every type.\nOn two lines.", {
    "s": {"type": "string", "nullable": True}, "one": {"type": "string", "enum": ["only"]},
    "mixed": {"type": "string", "enum": ["a", 1, 2.5, True, None]}, "n": {"type": "number", "default": 1e-7},
    "i": {"type": "integer", "default": -3}, "b": {"type": "boolean", "default": False, "nullable": True},
    "a0": {"type": "array"}, "a1": {"type": "array", "nullable": True, "items": {}},
    "as": {"type": "array", "items": {"type": "string", "enum": ["x"]}, "default": ["x", "ü"]},
    "an": {"type": "array", "items": {"type": "number"}, "nullable": True},
    "ai": {"type": "array", "items": {"type": "integer"}}, "ab": {"type": "array", "items": {"type": "boolean"}},
    "aa": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
    "ao": {"type": "array", "items": {"type": ["object", "object"]}},
    "a50": {"type": "array", "items": {"oneOf": [{"type": "string", "description": "é" * 41}]}},
    "a51": {"type": "array", "items": {"oneOf": [{"type": "string", "description": "é" * 42}]}},
    "o": {"type": "object"}, "oe": {"type": "object", "properties": {}},
    "op": {"type": "object", "required": ["x"], "properties": {
        "x": {"type": "number"}, "items": {"type": "object", "properties": {"deep": {"type": "string"}}}}},
    "u": {"type": ["string", "null"], "default": None}, "u1": {"type": ["integer"]}, "u0": {"type": []},
    "of": {"oneOf": [{"type": "string", "description": "a name", "default": "q"}, {"type": "integer", "default": 0},
                     {"type": "object"}], "default": "x"},
    "of1": {"oneOf": [{"type": "object", "properties": {"k": {"type": "boolean"}}}]}, "of0": {"oneOf": []},
    "both": {"enum": ["a"], "oneOf": [{"type": "string"}], "default": "a"},
    "none": {}, "odd": {"type": "file", "description": "Strange"}, "yes": True}, required=["s", "a0", "op", "none"])
EMPTY = [tool("now", "The time."), tool("also", "", {}), tool("third", "x", None)]
VALUES = {"float": [0.0, -0.0, 1.0, 0.1, 1e15, 1e16, 123456789012345680.0, 1e-4, 1e-5, 5e-324, 1.7976931348623157e308,
                    2.5e-8, 3.141592653589793, 100.5, 9007199254740993.0],
          "int": [0, -1, 9223372036854775807, -9223372036854775808], "text": "\"\\/\b\f\n\r\t\x00\x1f\x7f\u2028é世😀",
          "other": [None, True, False, {}, [], [[]], {"a": {"b": []}}], "": "empty key"}

# name, messages, and by keyword: tools; the options; `row` when moetrain's form differs from what the template takes
CASES = [
    ("single", [user("What is 2 + 2?"), answer("2 + 2 = 4.")], {}),
    ("several turns", [system("Answer in one line."), user("Hello, y'all!\nHow are you? 😁"), answer("Fine — thanks.\n"),
                       user("  1234567 + 1?  "), answer("1234568")], {}),
    ("prompt", [system("Answer in one line."), user("你好，世界")], {"generation_prompt": True}),
    ("prompt after answers", [user("a"), answer("b", thinking="c"), user("d")], {"generation_prompt": True}),
    ("prompt after an answer", [user("a"), answer("b", thinking="c")], {"generation_prompt": True}),
    ("reasoning", [user("What is 2 + 2?"), answer("4", thinking="Simple arithmetic."), user("And 9 / 2?"),
                   answer("4.5", thinking="Divide nine by two.")], {}),
    ("empty reasoning", [user("a"), answer("b", thinking="")], {}),
    ("tool call", [system("Use a friendly tone."), user("Weather in Tokyo?"),
                   call("get_weather", {"location": "Tokyo", "unit": "celsius"}, thinking="Need it.", content=""),
                   result('{"temperature": 20, "sunny": true}'), answer("It is 20 °C.", thinking="Report it.")],
     {"tools": [WEATHER]}),
    ("tool call is last", [user("w?"), call("get_weather", {}, thinking="Think.")], {"tools": [WEATHER]}),
    ("tool call then prompt", [user("w?"), call("f", {"a": 1}, content="Think in content."),
                               result({"r": [1.5, None]})], {"tools": [WEATHER], "generation_prompt": True}),
    ("two calls", [user("w?"), call("f", [1], wrapped=False, thinking="one"), result(None),
                   call("g", {}, thinking="two"), result("")], {}),
    ("two calls, answered", [user("w?"), call("f", {}, thinking="one"), result(1), call("g", {}, thinking="two"),
                             result(2), answer("done", thinking="three"), user("more"),
                             call("h", {}, thinking="four")], {}),
    ("call without result", [user("w?"), call("f", {}), answer("a", thinking="b")], {}),
    ("content type", [user("w?"), {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": {}, "content_type": "<|constrain|>json"}}]}], {}),
    ("answers in a row", [user("a"), answer("b"), answer("c"), answer("d", thinking="e")], {}),
    ("answer first", [answer("a"), user("b"), answer("c")], {}),
    ("answer alone", [answer("a", thinking="b")], {}),
    ("developer", [system("Rules.", "developer"), user("a"), answer("b")], {}),
    ("empty system", [system(""), user("a"), answer("b")], {}),
    ("only system", [system("a")], {}),
    ("options", [user("a"), answer("b")], {"reasoning_effort": "high", "model_identity": "You are a test.",
                                           "date": "1999-12-31"}),
    ("think tags are text", [user("2+3?"), answer("<think>\nAdd.\n</think>\n\n5")], {}),
    ("tools alone", [user("a"), answer("b")], {"tools": EMPTY}),
    ("types", [system("x"), user("a"), answer("b")], {"tools": [TYPES, WEATHER]}),
    ("values", [user("v"), call("f", VALUES), result(VALUES), answer("ok")], {}),
    ("no tools", [user("a"), answer("b")], {"tools": []}),
    ("arguments as text", [user("a"), call("f", {"b": [1, 2.0]})],
     {"row": {"messages": [user("a"), call("f", '{"b":[1,2.0]}')]}}),
    ("tools as text", [user("a"), answer("b")], {"tools": [WEATHER], "row": {
        "messages": [user("a"), answer("b")], "tools": json.dumps([WEATHER])}}),
    ("null is absent", [user("a"), call("f", {}), result("r"), answer("b")], {"row": {"tools": None, "messages": [
        user("a"), call("f", {}, content=None, thinking=None), result("r"),
        answer("b", thinking=None, tool_calls=None, reasoning_content=None)]}}),
    ("no calls", [user("a"), answer("b")], {"row": {"messages": [user("a"), answer("b", tool_calls=[])]}}),
    ("reasoning_content", [user("a"), answer("b", thinking="c")],
     {"row": {"messages": [user("a"), answer("b", reasoning_content="c")]}}),
]


def template(path):
    def refuse(text):
        raise ValueError(text)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    env.globals["raise_exception"] = refuse
    return env.from_string(Path(path).read_text())


def spans(text):
    """The loss spans: each answer to a question, with its reasoning, without the header at the end of the prompt."""
    out, position, answering, asked = [], 0, False, False
    for message in re.finditer(r"<\|start\|>(.*?)<\|message\|>.*?(<\|end\|>|<\|call\|>|<\|return\|>)", text, re.S):
        begin, end = message.span()
        assert begin == position, text[position:begin]
        position = end
        asked = asked or message[1] == "user"
        if asked and message[1].startswith("assistant"):
            begin += 0 if answering else len(ASSISTANT)
            begin, end = len(text[:begin].encode()), len(text[:end].encode())
            if out and out[-1][1] == begin:
                out[-1][1] = end
            else:
                out.append([begin, end])
        answering = "<|channel|>analysis" in message[1]
    assert text[position:] in ("", ASSISTANT)
    return out


def main():
    jinja = template(sys.argv[1])
    lines = []
    for name, messages, more in CASES:
        options = {k: v for k, v in more.items() if k not in ("tools", "row")}
        tools = {"tools": more["tools"]} if "tools" in more else {}
        defined = {k: v for k, v in options.items() if k in ("reasoning_effort", "model_identity")}
        text = jinja.render(messages=messages, strftime_now=lambda _, date=options.get("date", DATE): date,
                            add_generation_prompt=options.get("generation_prompt", False), **tools, **defined)
        row = more.get("row", {"messages": messages, **tools})
        lines.append(json.dumps({"name": name, "options": options, "row": row, "text": text, "spans": spans(text)},
                                separators=(",", ":")))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{len(lines)} cases")


if __name__ == "__main__":
    main()
