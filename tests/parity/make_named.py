#!/usr/bin/env python3
"""make_named.py - renders the chat templates of data/chat/chat_named.c with transformers, for
tests/data/test_chat_named.c: tests/fixtures/chat/named.json. Needs `pip install transformers jinja2`.

    python tests/parity/make_named.py
"""
import json
import re
from pathlib import Path

from transformers.utils.chat_template_utils import _compile_jinja_template

ROOT = Path(__file__).resolve().parents[2]
CHATS = [
    [("user", "What is 1 + 1?"), ("assistant", "2")],
    [("system", " Be brief. "), ("user", " q\n"), ("assistant", "é <b> "), ("user", "r"), ("assistant", "s\n")],
]


def templates():
    """Names and texts, from the C source."""
    source = (ROOT / "data/chat/chat_named.c").read_text()
    for block in re.findall(r'\{"(\w+)",\s*\{[^}]*\},\s*((?:"(?:[^"\\]|\\.)*"\s*)+)\}', source):
        literals = re.findall(r'"((?:[^"\\]|\\.)*)"', block[1])
        yield block[0], "".join(s.replace("\\\\", "\\") for s in literals)


def main():
    cases = []
    for name, text in templates():
        template = _compile_jinja_template(text)
        for chat in CHATS:
            messages = [{"role": role, "content": content} for role, content in chat]
            for prompt in (False, True):
                shown = messages[:-1] if prompt else messages
                cases.append({"name": name, "messages": shown, "prompt": prompt, "text": template.render(
                    messages=shown, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>")})
    path = ROOT / "tests/fixtures/chat/named.json"
    path.write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(len(cases), "cases")


if __name__ == "__main__":
    main()
