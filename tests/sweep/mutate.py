"""mutate.py - hostile versions of a file: damaged bytes, extreme values, unusual structure, special files."""
import copy
import gzip
import json
import os
import random
import struct

# Texts that replace a JSON value; "@" stands for them until the JSON text is written.
RAW = ["1e400", "-1e400", "NaN", "Infinity", "1" + "0" * 400, "9223372036854775808", "-9223372036854775809", "1e-400",
       "0." + "0" * 500 + "1", '"\\ud800"', '"\\u0000"', '"\\u0000a"', "01", "'a'", "tru", "", ",", "}", '"', "/**/1",
       "[" * 100000, '{"a":' * 50000, "[" * 900 + "]" * 900]
VALUES = [None, True, False, 0, -1, 1, 2, 3, 0.5, -0.0, 1e308, 1e-320, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62,
          2**63 - 1, -2**63, "", "x", "x" * 100000, "../../x", "/dev/zero", "\x1b[31m", "%s%n",
          "\u202e\U0001f600", "a\nb", "0", [], {}, [[]], [None] * 1000, [0] * 100000, ["a"] * 20000, {"": 0},
          {"a": {"a": {}}}, [1, 2, 3], [-1, 2**62]]
SPECIAL = ["missing", "empty", "folder", "fifo", "loop", "dangling", "zero", "null", "sparse", "socket"]


def nodes(value, path=()):
    """Paths of all values of a JSON text."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, v in inner:
        found += nodes(v, path + (key,))
    return found


def at(value, path):
    for key in path:
        value = value[key]
    return value


def change_json(rng, value, few=400):
    """Changes one or two nodes in a copy of the value; returns the text."""
    root = [copy.deepcopy(value)]
    raw = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        # upper levels have the keys that moetrain reads by name, so they are chosen as often as the many leaves
        paths = nodes(root)
        depth = rng.randint(1, max(len(p) for p in paths))
        path = rng.choice([p for p in paths if len(p) == depth][:few])
        parent, key = at(root, path[:-1]), path[-1]
        how = rng.randrange(10)
        if how < 5:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
        elif how < 7:
            raw.append(rng.choice(RAW))
            parent[key] = f"@{len(raw) - 1}@"
        elif how == 7 and len(path) > 1:
            del parent[key]
        elif how == 8 and isinstance(parent, dict):
            parent[rng.choice(["", "a", "x" * 70000, str(key) + " ", "\x07", "__proto__"])] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(at(root, rng.choice(paths)))
        if not root:
            root = [None]
    text = json.dumps(root[0]) if root else ""
    for i, r in enumerate(raw):
        text = text.replace(f'"@{i}@"', r)
    if rng.randrange(12) == 0:  # a key twice
        text = text.replace('": ', '": 1, "', 1) if rng.random() < 0.3 else text[:-1] + ", " + text[1:]
    return text.encode("utf-8", "surrogatepass")


def change_bytes(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 3))):
        n = len(data)
        a = rng.randrange(n + 1)
        how = rng.randrange(7)
        if how == 0:
            del data[a:]
        elif how == 1:
            for _ in range(rng.randint(1, 8)):
                if n:
                    data[rng.randrange(n)] ^= 1 << rng.randrange(8)
        elif how == 2:
            data[a:a + rng.randint(1, 64)] = rng.randbytes(rng.randint(0, 64))
        elif how == 3:
            data[a:a] = rng.choice([b"\xff\xfe", b"\xef\xbb\xbf", b"\0", b"\xc0\x80", b"\xed\xa0\x80", b"\n", b"\"",
                                    b"{", b"]"])
        elif how == 4:
            data[a:a] = data[a:a + rng.randint(1, 4096)]
        elif how == 5:
            del data[a:a + rng.randint(1, 64)]
        else:
            data[a:a + 16] = bytes(16)
    return bytes(data)


def change_safetensors(rng, data):
    size = struct.unpack("<Q", data[:8])[0]
    header, body = data[8:8 + size], bytearray(data[8 + size:])
    how = rng.randrange(10)
    if how < 5:
        header = change_tensors(rng, json.loads(header))
    elif how == 5:
        sizes = [0, 1, 7, size - 1, size + 1, len(data), 2**31, 2**63, 2**64 - 1, 10**8]
        return struct.pack("<Q", rng.choice(sizes)) + data[8:]
    elif how == 6:
        bits = rng.choice([b"\xff\xff\xff\xff", b"\x80\x7f\x80\x7f", b"\x80\xff\x80\xff", b"\x00\x00\x80\x7f",
                           b"\xff\x7f\xff\x7f"])
        for _ in range(rng.choice((1, 50, 5000))):
            a = rng.randrange(max(len(body) - 4, 1)) & ~3
            body[a:a + 4] = bits[:len(body) - a]
    elif how == 7:
        del body[rng.randrange(len(body) + 1):]
    elif how == 8:
        body += rng.randbytes(rng.randint(1, 100))
    else:
        return change_bytes(rng, data[:8 + size]) + bytes(body)
    return struct.pack("<Q", len(header)) + header + bytes(body)


def change_tensors(rng, header):
    names = [n for n in header if n != "__metadata__"]
    name = rng.choice(names)
    t = header[name]
    how = rng.randrange(6)
    if how == 0:
        return change_json(rng, header)
    if how == 1:
        t["dtype"] = rng.choice(["F32", "BF16", "F16", "U8", "I64", "BOOL", "F8_E4M3", "F4", "", "F64", None,
                                 "x" * 999])
    elif how == 2:
        t["shape"] = rng.choice([[], [0], [-1], [2**62, 4], [2**32, 2**32], [1] * 300, t["shape"][::-1],
                                 t["shape"] + [1], [2**63], [1.5], None, [sum(t["shape"])], [0, 2**62]])
    elif how == 3:
        a, b = t["data_offsets"]
        t["data_offsets"] = rng.choice([[b, a], [a, b + 1], [a + 1, b], [-1, b], [0, 2**63 - 1], [2**63, 2**63], [a],
                                        [a, a], [0, b], [a, b, b], [a, 2**64], [a + 0.5, b]])
    elif how == 4:
        header[rng.choice(["", "x", "\x1b[2J", name + ".x", "x" * 70000])] = header.pop(name)
    else:
        header[rng.choice(names)] = t  # two names share bytes
    return json.dumps(header).encode()


def change_lines(rng, data):
    lines = data.split(b"\n")
    i = rng.randrange(len(lines))
    how = rng.randrange(8)
    if how < 4:
        try:
            lines[i] = change_json(rng, json.loads(lines[i]))
        except ValueError:
            lines[i] = rng.randbytes(40)
    elif how == 4:
        lines[i] = lines[i] * rng.choice((2, 1000))
    elif how == 5:
        lines.insert(i, rng.choice([b"", b"\0", b"[]", b"1", b"null", b"{}", b"{" * 100000, b"\xff" * 50,
                                    b"x" * 1000000]))
    else:
        return change_bytes(rng, data)
    return b"\n".join(lines)


def change_gzip(rng, data):
    if rng.random() < 0.6:
        return change_bytes(rng, data)
    lines = change_lines(rng, gzip.decompress(data))
    return gzip.compress(lines) * rng.choice((1, 2)) + rng.choice([b"", b"", b"\0", b"tail"])


def change_text(rng, data):
    """Changes a template or an INI file: repeats, moves or replaces parts by costly or invalid ones."""
    text = data.decode("utf-8", "replace")
    how = rng.randrange(6)
    a = rng.randrange(len(text) + 1)
    b = min(len(text), a + rng.randint(1, 30))
    if how == 0:
        text = text[:a] + rng.choice(PIECES) + text[a:]
    elif how == 1:
        text = text[:a] + rng.choice(PIECES) + text[b:]
    elif how == 2:
        text = text[:a] + text[a:b] * rng.choice((2, 5000)) + text[b:]
    elif how == 3:
        text = rng.choice(PIECES) * rng.choice((1, 2000)) + text
    else:
        return change_bytes(rng, data)
    return text.encode("utf-8", "surrogatepass")


PIECES = ["{{ 'x' * 999999999 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ messages }}", "{%", "}}", "{{ ((((",
          "{% if %}", "{{ 1/0 }}", "{{ x.y.z }}", "{{ [1]*99999999 }}", "{% set x = x ~ x %}", "{{ '' | join(1) }}",
          "{{ raise_exception('no \x1b[2J') }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "[model]\n",
          "path = a\n", "=\n", "[", "]\n", "[lora]\nr = 1\nr = 2\n", "; \n", "\0", "\x1b[2J", "x" * 70000, "\r",
          "\u2028", "[train]\nsteps = 99999999999999999999\n", "%s%s%n"]

CHANGES = {"json": lambda rng, d: change_json(rng, json.loads(d)) if rng.random() < 0.75 else change_bytes(rng, d),
           "safetensors": change_safetensors, "lines": change_lines, "gzip": change_gzip, "text": change_text,
           "bytes": change_bytes}


def hostile(kind, seed, data):
    return CHANGES[kind](random.Random(seed), data)


def special(how, path):
    """Creates a special file at the path: FIFO, link, directory and the like."""
    if how == "missing":
        return
    if how == "empty":
        open(path, "w").close()
    elif how == "folder":
        os.mkdir(path)
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "socket":
        os.mknod(path, 0o140644)
    elif how == "sparse":
        with open(path, "w") as f:
            f.truncate(1 << 40)
    else:
        os.symlink({"loop": path, "dangling": "/nowhere/at/all", "zero": "/dev/zero", "null": "/dev/null"}[how], path)
