#!/usr/bin/env python3
"""make_tables.py - writes the same rows as JSONL and as other programs write tables, for tests/data/test_tables.c.

Writes tests/fixtures/tables/: chats.jsonl, texts.jsonl, nested.jsonl, numbers.jsonl, and the same rows as CSV and TSV
of pandas and datasets, as parquet of pyarrow in every encoding and codec that is read, and as Arrow files. Needs
`pip install pandas pyarrow datasets`.

    python tests/parity/make_tables.py
"""
import json
import shutil
import sys
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

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


# Lists of lists, empty and missing parts, every type of number; tests compare the JSON of each row.
NESTED = [
    {"a": [[1, 2], [], [3]], "s": {"x": 1.5, "y": None}, "b": True, "u": 2**64 - 1, "f": 0.25, "n": None,
     "l": ["p", None]},
    {"a": [], "s": None, "b": False, "u": 0, "f": -2.0, "n": None, "l": []},
    {"a": None, "s": {"x": None, "y": ["é", ""]}, "b": None, "u": None, "f": None, "n": None, "l": None},
    {"a": [None, [None, 4]], "s": {"x": 1e300, "y": []}, "b": True, "u": 7, "f": 3.0, "n": None, "l": ["q"]},
]
NESTED_TYPE = pa.schema([
    ("a", pa.list_(pa.list_(pa.int32()))), ("s", pa.struct([("x", pa.float64()), ("y", pa.list_(pa.string()))])),
    ("b", pa.bool_()), ("u", pa.uint64()), ("f", pa.float32()), ("n", pa.null()), ("l", pa.large_list(pa.string()))])
CODECS = ["none", "snappy", "gzip", "zstd", "lz4", "brotli"]
# Name of a file, and how the columns of texts.jsonl are encoded.
ENCODINGS = {"plain": "PLAIN", "delta_length": "DELTA_LENGTH_BYTE_ARRAY", "delta_bytes": "DELTA_BYTE_ARRAY"}


def write_parquet(chats, texts):
    table = pa.Table.from_pylist(chats)
    for i, codec in enumerate(CODECS):
        pq.write_table(table, OUT / f"chats_{codec}.parquet", compression=codec, row_group_size=3,
                       data_page_version="2.0" if i % 2 else "1.0")
    table = pa.Table.from_pylist(texts)
    for name, encoding in ENCODINGS.items():
        pq.write_table(table, OUT / f"texts_{name}.parquet", use_dictionary=False, column_encoding=encoding,
                       data_page_size=64, write_batch_size=2, data_page_version="2.0")
    pd.DataFrame(texts).to_parquet(OUT / "texts_pandas.parquet")
    pq.write_table(table, OUT / "texts_lz4.parquet", use_dictionary=False, compression="lz4")
    pd.DataFrame(texts).to_feather(OUT / "texts.feather")  # in LZ4
    nested = pa.Table.from_pylist(NESTED, schema=NESTED_TYPE)
    pq.write_table(nested, OUT / "nested.parquet", row_group_size=2)
    pq.write_table(nested, OUT / "nested_v2.parquet", data_page_version="2.0", compression="zstd")
    pq.write_table(nested, OUT / "nested_old.parquet", use_compliant_nested_type=False, use_dictionary=False)
    # 300 rows of numbers: runs of several lengths, blocks of deltas, negative and wide steps
    numbers = pa.table({"i": pa.array([(i * i * 7919) % 1000 - 500 for i in range(300)], pa.int32()),
                        "j": pa.array([(-1)**i * 2**(i % 62) for i in range(300)], pa.int64()),
                        "k": pa.array([None if i % 7 == 3 else i // 40 for i in range(300)], pa.int64()),
                        "b": pa.array([i // 9 % 2 == 0 for i in range(300)])})
    pq.write_table(numbers, OUT / "numbers_delta.parquet", use_dictionary=False, data_page_version="2.0",
                   column_encoding={"i": "DELTA_BINARY_PACKED", "j": "DELTA_BINARY_PACKED", "k": "PLAIN", "b": "RLE"})
    pq.write_table(numbers, OUT / "numbers.parquet")
    write_jsonl("numbers.jsonl", numbers.to_pylist())
    write_jsonl("nested.jsonl", NESTED)
    write_refused(OUT / "refused_lzo.parquet")
    split = pa.table({"i": pa.array([i * 65537 - 9 for i in range(40)], pa.int32()),
                      "j": pa.array([None if i % 7 == 3 else (-1)**i * 2**(i % 62) for i in range(40)], pa.int64()),
                      "f": pa.array([i / 8 - 2 for i in range(40)], pa.float32()),
                      "d": pa.array([[1.5**i, None][:i % 3] for i in range(40)], pa.list_(pa.float64()))})
    columns = {"i": "BYTE_STREAM_SPLIT", "j": "BYTE_STREAM_SPLIT", "f": "BYTE_STREAM_SPLIT",
               "d.list.element": "BYTE_STREAM_SPLIT"}
    pq.write_table(split, OUT / "split.parquet", use_dictionary=False, column_encoding=columns, row_group_size=30)
    write_jsonl("split.jsonl", split.to_pylist())
    odd = pa.table({"text": ["ab", "cd"], "d": pa.array([1, 2]).cast(pa.decimal128(25, 2)),
                    "t": pa.array([1, 2]).cast(pa.timestamp("ns")), "z": [b"\xff", b"a"]})
    pq.write_table(odd, OUT / "odd.parquet", use_deprecated_int96_timestamps=True)


def write_refused(path):
    """A file with the number of LZO, which pyarrow does not write, in place of Brotli's: field 4 of a column's metadata
    is a zigzag integer behind field 3, the list of the column's path."""
    pq.write_table(pa.table({"f": pa.array([1.0, 2.0])}), path, compression="brotli")
    data = path.read_bytes()
    assert data.count(b"f\x15\x08") == 1
    path.write_bytes(data.replace(b"f\x15\x08", b"f\x15\x06"))


def write_arrow(chats):
    nested = pa.Table.from_pylist(NESTED, schema=NESTED_TYPE)
    for name, new, options in (("stream", pa.ipc.new_stream, {}), ("file", pa.ipc.new_file, {"compression": "zstd"}),
                               ("lz4", pa.ipc.new_file, {"compression": "lz4"})):
        with new(OUT / f"nested_{name}.arrow", NESTED_TYPE, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(nested, max_chunksize=3)
    saved = OUT / "saved"
    shutil.rmtree(saved, ignore_errors=True)
    datasets.Dataset.from_list(chats).save_to_disk(saved, num_shards=2)
    odd = pa.table({"text": ["ab", "cd"], "d": pa.array(["x", "y"]).dictionary_encode(), "z": [b"\xff", b"a"],
                    "h": pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)), "m": pa.array([1, 2], pa.date32())})
    with pa.ipc.new_stream(OUT / "odd.arrow", odd.schema) as writer:
        writer.write_table(odd)


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
    write_parquet(chats, texts)
    write_arrow(chats)


if __name__ == "__main__":
    sys.exit(main())
