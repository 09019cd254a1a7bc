#!/usr/bin/env python3
"""make_tables.py - writes the same rows as JSONL and as other programs write tables, for tests/data/test_tables.c.

Writes tests/fixtures/tables/: rows.jsonl, and the same rows as CSV and TSV of pandas and datasets. Needs
`pip install pandas datasets`.

    python tests/parity/make_tables.py
"""
import json
import sys
from pathlib import Path

import datasets
import pandas as pd

OUT = Path(__file__).resolve().parents[1] / "fixtures/tables"
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2, 3]}'}}
CHATS = [
    [("user", "What's 1 + 1?"), ("assistant", 'It is "2".')],
    [("system", "Be brief,\nplease;\t\"now\""), ("user", "é 😀 \\n 'x' \"y\""), ("assistant", "ok\r\n\x07\u2028end")],
    [("user", ""), ("assistant", "[1, 2]"), ("user", "None"), ("assistant", "True")],
    [("user", "add"), ("assistant", ""), ("tool", "5"), ("assistant", "five")],
]
TEXTS = [("a", "b"), ('He said "hi", then left', "two\nlines\n"), ("semi;colon\ttab", " é 😀 "), ("'", '""'),
         ("10", "007"), ("NA", "x" * 300), ("[1]", "{'a': 1}")]


def messages(chat, calls):
    rows = []
    for i, (role, content) in enumerate(chat):
        row = {"role": role, "content": content}
        if calls:
            calls_tool = role == "assistant" and i + 1 < len(chat) and chat[i + 1][0] == "tool"
            row["tool_calls"] = [CALL] if calls_tool else None
        rows.append(row)
    return rows


def write_jsonl(name, rows):
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (OUT / name).write_text(text, encoding="utf-8", newline="")


def main():
    OUT.mkdir(exist_ok=True)
    chats = [{"messages": messages(chat, True)} for chat in CHATS]
    texts = [{"prompt": a, "completion": b} for a, b in TEXTS]
    write_jsonl("chats.jsonl", chats)
    write_jsonl("texts.jsonl", texts)
    frame = pd.DataFrame(chats)
    frame.to_csv(OUT / "chats_pandas.csv")
    frame.to_csv(OUT / "chats_pandas.tsv", sep="\t", index=False)
    frame = pd.DataFrame({"messages": [json.dumps(row["messages"]) for row in chats]})
    frame.to_csv(OUT / "chats_json.csv", index=False)
    datasets.Dataset.from_list(chats).to_csv(OUT / "chats_datasets.csv")
    frame = pd.DataFrame(texts)
    frame.to_csv(OUT / "texts_pandas.csv", index=False)
    frame.to_csv(OUT / "texts_bom.csv", index=False, encoding="utf-8-sig", sep=";", lineterminator="\r\n")
    frame.to_csv(OUT / "texts.csv.gz", compression={"method": "gzip", "mtime": 0})
    datasets.Dataset.from_list(texts).to_csv(OUT / "texts_datasets.tsv", sep="\t")


if __name__ == "__main__":
    sys.exit(main())
