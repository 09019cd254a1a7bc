#!/usr/bin/env python3
"""make_named.py - renders the chat templates of data/chat/chat_named.c with transformers, for
tests/data/test_chat_named.c: tests/fixtures/chat/named.json. Needs `pip install transformers jinja2`.

    python tests/parity/make_named.py [NAME=PUBLISHED_TEMPLATE ...]

A published template must render the conversations as the named one does.
"""
import json
import re
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import _compile_jinja_template

ROOT = Path(__file__).resolve().parents[2]
CHATS = [
    [("user", "What is 1 + 1?"), ("assistant", "2")],
    [("system", " Be brief. "), ("user", " q\n"), ("assistant", "é <b> "), ("user", "r"), ("assistant", "s\n")],
]
# With reasoning; each also with both values of enable_thinking.
REASONING = ("gemma4", "lfm2", "minimax", "nemotron")
THOUGHTS = [
    [("user", "q"), ("assistant", "a", "why\na"), ("user", "r"), ("assistant", " b", "w")],
    [("system", "S"), ("user", "q"), ("assistant", "a", "w"), ("user", "r"), ("assistant", "b")],
]


def templates():
    """Names and texts, from the C source."""
    source = (ROOT / "data/chat/chat_named.c").read_text()
    macro = re.search(r"#define LAST_QUESTION((?:.*\\\n)+.*\n)", source)[1]
    source = source.replace(macro, "\n").replace("LAST_QUESTION", macro.replace("\\\n", "\n"))
    for block in re.findall(r'\{"(\w+)",\s*\{[^}]*\},\s*((?:"(?:[^"\\]|\\.)*"\s*)+)\}', source):
        literals = re.findall(r'"((?:[^"\\]|\\.)*)"', block[1])
        yield block[0], "".join(s.replace("\\\\", "\\") for s in literals)


def conversations(name):
    for chat in CHATS + THOUGHTS * (name in REASONING):
        messages = [{"role": m[0], "content": m[1]} | ({"reasoning_content": m[2]} if m[2:] else {}) for m in chat]
        for kwargs in [{}] + [{"enable_thinking": value} for value in (False, True)] * (chat in THOUGHTS):
            yield messages, kwargs


def main():
    cases = []
    published = dict(word.split("=") for word in sys.argv[1:])
    for name, text in templates():
        template = _compile_jinja_template(text)
        other = _compile_jinja_template(Path(published[name]).read_text()) if name in published else template
        for messages, kwargs in conversations(name):
            for prompt in (False, True):
                shown = messages[:-1] if prompt else messages
                values = dict(kwargs, messages=shown, add_generation_prompt=prompt, eos_token="</s>",
                              bos_token="]~!b[" if name == "minimax" else "<s>")
                rendered = template.render(values)
                if other.render(values) != rendered:
                    sys.exit(f"{name}, {kwargs}: {rendered!r}\n{other.render(values)!r}")
                cases.append({"name": name, "messages": shown, "prompt": prompt, "chat_template_kwargs": kwargs,
                              "text": rendered})
    path = ROOT / "tests/fixtures/chat/named.json"
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(len(cases), "cases")


if __name__ == "__main__":
    main()
