#!/usr/bin/env python3
"""hub_server.py - a local server that imitates huggingface.co for tests/data/test_hub.c; each repository has one fault.

    hub_server.py LOG DIR      prints its port; ends when standard input closes

The server answers like huggingface.co: a list of files with hashes, small files by a relative redirect, large files by
a redirect to another host (a second port). It logs each request as a line of LOG: host, method, path, Range,
Authorization. DIR is a checkpoint with train.jsonl and eval.jsonl: the model test/tiny and the data set test/rows.
The data sets view-FAULT have only parquet files, and rows in pages like those of the hub's viewer; their requests are
logged with the query.

A model that a test pushes can then be downloaded from the server. test/NAME has the fault NAME: flaky-push (500, then a
cut connection), refuse-once (the first commit), foreign (an upload address on a third host), no-etag, short-parts."""
import base64
import hashlib
import http.server
import json
import os
import random
import sys
import threading
import time
import urllib.parse

COMMIT = hashlib.sha1(b"commit").hexdigest()
SHARDS = ["model-0000%d-of-00003.safetensors" % i for i in (1, 2, 3)]
VIEWS = {"view-" + name: rows for name, rows in {
    "plain": 950, "splits": 5, "breaks": 950, "changing": 950, "ever-changing": 950, "cut": 5, "partial": 5,
    "huge": 5000000, "unready": 5, "gated": 5, "old": 5, "shifted": 250, "hole": 250, "big": 5, "slow": 40000,
    "empty": 0, "odd": 3, "bare": 3, "shrunk": 950}.items()}
VIEWS["Multilingual-Thinking"] = 60  # data set of the configurations for gpt-oss
STEERING = "\x1b]0;owned\x07\x9b31m"  # escape sequences that set a terminal's title and colour
log = open(sys.argv[1], "a", buffering=1)
lock = threading.Lock()
seen = {}  # (host, address): requests so far
pages = {}  # data set: pages so far
store = {}  # SHA-256: content of LFS
parts_of = {}  # SHA-256: {number: bytes}
hidden = set()  # private repositories
CHUNK = 100000  # bytes of a part


CHAT = (b"{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        b"{% if add_generation_prompt %}assistant: {% endif %}")


def content(name, size):
    return random.Random(name).randbytes(size)


def model_files():
    files = {name: content(name, 300000 + 1000 * i) for i, name in enumerate(SHARDS)}
    weight_map = {"tensor.%d" % i: SHARDS[i % 3] for i in range(12)}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        files[name] = json.dumps({"name": name}).encode()
    for name in ("chat_template.jinja", "README.md"):
        files[name] = name.encode()
    for name in ("pytorch_model-00001-of-00001.bin", "original/model.safetensors", "metal/model.bin", "other.pt"):
        files[name] = content(name, 1000)
    return files


def directory(wanted):
    return {n: open(os.path.join(sys.argv[2], n), "rb").read() for n in sorted(os.listdir(sys.argv[2])) if wanted(n)}


def in_shards(files):
    """The same model with its tensors in two files and an index."""
    whole = files["model.safetensors"]
    n = int.from_bytes(whole[:8], "little")
    head = json.loads(whole[8:8 + n])
    shards, weight_map = {}, {}
    names = sorted(k for k in head if k != "__metadata__")
    for i, part in enumerate((names[::2], names[1::2])):
        path, at, body, mine = "model-0000%d-of-00002.safetensors" % (i + 1), 0, [], {}
        for name in part:
            begin, end = head[name]["data_offsets"]
            mine[name] = dict(head[name], data_offsets=[at, at + end - begin])
            body.append(whole[8 + n + begin:8 + n + end])
            at += end - begin
            weight_map[name] = path
        text = json.dumps(mine).encode()
        text += b" " * ((8 - len(text) % 8) % 8 + i * 40000)  # the second header is longer than the first request
        shards[path] = len(text).to_bytes(8, "little") + text + b"".join(body)
    index = {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}
    return {k: v for k, v in files.items() if k != "model.safetensors"} | shards | index


def repositories():
    repos = {("models", "test/" + name): model_files() for name in (
        "plain breaks throttled flaky down wrong-size endless wrong-hash damaged-once no-range no-range-breaks "
        "lying-range gated private disabled expired slow huge evil loop no-shard no-weights empty").split()}
    del repos["models", "test/no-shard"][SHARDS[1]]
    for name in SHARDS + ["model.safetensors.index.json"]:
        del repos["models", "test/no-weights"][name]
    repos["models", "test/empty"]["chat_template.jinja"] = b""
    repos["models", "test/evil"]["../../evil"] = b"x"
    kimi = {k: v for k, v in model_files().items() if k != "tokenizer.json"}
    code = ("tokenization_kimi.py", "tool_declaration_ts.py", "modeling_kimi.py",
            "additional_chat_templates/tool_use.jinja", "additional_chat_templates/old/a.jinja")
    repos["models", "test/kimi"] = kimi | {"tiktoken.model": b"QQ== 0"} | {name: name.encode() for name in code}
    repos["models", "test/adapter"] = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    repos["models", "test/gguf"] = {"model-Q4_K_M.gguf": b"GGUF"}
    repos["models", "test/slow"].update({name: content(name, 700000 + i) for i, name in enumerate(SHARDS)})
    for name in ("drip", "escape", "escape-503"):
        repos["models", "test/" + name] = model_files()
    repos["models", "test/tiny"] = directory(lambda n: not n.endswith(".jsonl") and "." in n)
    repos["models", "test/head"] = in_shards(repos["models", "test/tiny"])
    repos["models", "test/head-no-range"] = repos["models", "test/head"]
    repos["models", "test/head-no-range-whole"] = repos["models", "test/tiny"]
    for size in (0, 5, 7):
        repos["models", "test/head-short-%d" % size] = repos["models", "test/tiny"] | {"model.safetensors": b"x" * size}
    rows = directory(lambda n: n in ("train.jsonl", "eval.jsonl"))
    repos["datasets", "test/rows"] = {"data/" + n: rows[n] for n in rows} | {"README.md": b"#", ".gitattributes": b""}
    repos["datasets", "test/one"] = {"README.md": b"#", "a b/100%20 \u00e9?#.jsonl": rows["train.jsonl"]}
    for name in VIEWS:
        repos["datasets", "test/" + name] = {"README.md": b"#", "train-0000.parquet": b"PAR1"}
    shards = ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001",
              "more/train-00000-of-00001", "more/less-00000-of-00002", "train-00000-of-00001")
    repos["datasets", "test/shards"] = {n + ".parquet": b"PAR1" + n.encode() for n in shards} | {"README.md": b"#"}
    repos["models", "openai/gpt-oss-20b"] = repos["models", "test/tiny"] | {"chat_template.jinja": CHAT}
    repos["datasets", "HuggingFaceH4/Multilingual-Thinking"] = repos["datasets", "test/Multilingual-Thinking"]
    repos["datasets", "test/parquet"] = {"README.md": b"#", "train-0000.parquet": b"PAR1"}
    return repos


REPOS = repositories()


def conversation(i):
    said = [("system", "reasoning language: French", None), ("user", "How much is %d + 1?" % i, None),
            ("assistant", str(i + 1), "Un de plus que %d." % i)]
    return {"reasoning_language": "French", "user": said[1][1], "final": said[2][1],
            "messages": [{"role": r, "content": c, "thinking": t} for r, c, t in said]}


def is_lfs(path):
    return path.endswith((".safetensors", ".bin", ".pt"))


def git_name(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def etag(path, data):
    return hashlib.sha256(data).hexdigest() if is_lfs(path) else git_name(data)


def tree(files):
    """The same as the Python library asks for it."""
    rows = []
    for path, data in files.items():
        row = {"type": "file", "path": path, "size": len(data), "oid": git_name(data)}
        if is_lfs(path):
            row["lfs"] = {"oid": etag(path, data), "size": len(data), "pointerSize": 130}
        rows.append(row)
    return json.dumps(rows).encode()


def listing(name, files):
    rows = []
    for path, data in files.items():
        size = len(data)
        if path == SHARDS[0]:
            size += {"wrong-size": 10, "huge": 1 << 60}.get(name, 0)
            size -= {"endless": 1000}.get(name, 0)
        row = {"rfilename": path, "size": size, "blobId": git_name(data)}
        if is_lfs(path):
            row["lfs"] = {"sha256": etag(path, data), "size": size, "pointerSize": 130}
        rows.append(row)
    return json.dumps({"id": name, "sha": COMMIT, "siblings": rows}).encode()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def reply(self, status, headers=None, body=b""):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code, message=""):
        self.reply(status, {"X-Error-Code": code, "X-Error-Message": message} if code or message else {}, b"<html>")

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        host = "cdn" if self.server is cdn else "hub"
        token = self.headers.get("Authorization", "-").replace("Bearer ", "")
        path, _, query = self.path.partition("?")
        parts = [urllib.parse.unquote(p) for p in path.split("/")[1:]]
        shown = self.path if path in ("/rows", "/splits") else path
        log.write("%s %s %s %s %s\n" % (host, self.command, shown, self.headers.get("Range", "-"), token))
        with lock:
            seen[host, self.path] = seen.get((host, self.path), 0) + 1
            self.times = seen[host, self.path]
        if host == "cdn":  # /KIND/OWNER/NAME/PATH
            self.large(parts[0], parts[1] + "/" + parts[2], "/".join(parts[3:]))
        elif token == "hf_bad":
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif parts[:2] == ["api", "models"] and len(parts) == 4:
            self.show("/".join(parts[2:]), token)
        elif path in ("/rows", "/splits"):
            self.view(path[1:], dict(urllib.parse.parse_qsl(query)), token)
        elif parts[0] == "api" and parts[1] in ("models", "datasets") and len(parts) > 4:
            self.list(parts[1], parts[2] + "/" + parts[3], parts[5], token)
        elif parts[:2] == ["api", "resolve-cache"]:
            data = REPOS[parts[2], parts[3] + "/" + parts[4]]["/".join(parts[6:])]
            self.send_file("/".join(parts[6:]), data, len(data))
        else:
            kind = "datasets" if parts[0] == "datasets" else "models"
            parts = parts[kind == "datasets":]
            self.resolve(kind, parts[0] + "/" + parts[1], "/".join(parts[4:]), token)

    # ---- pushes

    def answer(self, status, value):
        self.reply(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def show(self, repo, token):
        if ("models", repo) not in REPOS:
            self.answer(404, {"error": "Repository not found"})
        else:
            self.answer(200, {"id": repo, "private": repo in hidden})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        token = self.headers.get("Authorization", "-").replace("Bearer ", "")
        parts = [urllib.parse.unquote(p) for p in self.path.partition("?")[0].split("/")[1:]]
        log.write("hub POST %s - %s\n" % (self.path, token))
        with lock:
            seen["hub", self.path] = seen.get(("hub", self.path), 0) + 1
            self.times = seen["hub", self.path]
        if parts[:2] == ["lfs", "join"]:
            self.join(parts[2], json.loads(body))
        elif token != "hf_good":
            self.answer(401 if token == "-" else 403, {"error": "You don't have the rights to create a model"})
        elif parts == ["api", "repos", "create"]:
            wanted = json.loads(body)
            repo = wanted["organization"] + "/" + wanted["name"]
            REPOS["models", repo] = {}
            hidden.update([repo] if wanted.get("private") or wanted.get("visibility") == "private" else [])
            self.answer(200, {"url": "http://127.0.0.1:%d/%s" % (hub.server_port, repo)})
        elif parts[:2] == ["lfs", "verify"]:
            wanted = json.loads(body)
            found = len(store.get(wanted["oid"], "")) == wanted["size"]
            self.answer(200 if found else 404, {})
        elif parts[4:] == ["preupload", "main"]:
            self.preupload("/".join(parts[2:4]), json.loads(body))
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            self.batch(parts[0] + "/" + parts[1].removesuffix(".git"), json.loads(body))
        elif parts[4:] == ["commit", "main"]:
            self.commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines()])
        else:
            self.refuse(404, "")

    def preupload(self, repo, wanted):
        rows = []
        for file in wanted["files"]:
            assert len(base64.b64decode(file["sample"])) == min(512, file["size"])
            row = {"path": file["path"], "uploadMode": "lfs" if is_lfs(file["path"]) else "regular",
                   "shouldIgnore": file["path"] == "ignored.txt"}
            if file["path"] in REPOS["models", repo]:
                row["oid"] = etag(file["path"], REPOS["models", repo][file["path"]])
            rows.append(row)
        self.answer(200, {"files": rows})

    def batch(self, repo, wanted):
        name, (row,) = repo.split("/")[1], wanted["objects"]
        oid, size = row["oid"], row["size"]
        assert wanted["operation"] == "upload" and self.headers["Accept"] == "application/vnd.git-lfs+json"
        if oid in store:
            self.answer(200, {"objects": [{"oid": oid, "size": size}]})
            return
        here, there = "http://127.0.0.1:%d" % hub.server_port, "http://127.0.0.1:%d" % cdn.server_port
        if name == "foreign":
            there = "ftp://127.0.0.1"
        if size > CHUNK and "multipart" in wanted["transfers"]:
            n = -(-size // CHUNK) - (name == "short-parts")
            head = {"%05d" % i: "%s/%s/%s/%d?signature=1" % (there, name, oid, i) for i in range(1, n + 1)}
            upload = {"href": here + "/lfs/join/" + oid, "header": head | {"chunk_size": str(CHUNK)}}
            actions = {"upload": upload}
        else:
            actions = {"upload": {"href": "%s/%s/%s/0?signature=1" % (there, name, oid)},
                       "verify": {"href": here + "/lfs/verify"}}
        self.answer(200, {"transfer": "multipart", "objects": [{"oid": oid, "size": size, "actions": actions}]})

    def do_PUT(self):
        name, oid, number = self.path.partition("?")[0].split("/")[1:]
        token = self.headers.get("Authorization", "-").replace("Bearer ", "")
        log.write("cdn PUT %s - %s\n" % (self.path, token))
        with lock:
            seen["cdn", self.path] = seen.get(("cdn", self.path), 0) + 1
            times = seen["cdn", self.path]
        if name == "flaky-push" and times == 2:
            self.close_connection = True
            self.rfile.read(1000)
            return
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if name == "flaky-push" and times == 1:
            self.refuse(500, "", STEERING)
        elif token != "-" or self.server is not cdn:
            self.refuse(400, "", "token")
        elif number == "0":
            if hashlib.sha256(data).hexdigest() == oid:
                store[oid] = data
            self.reply(200)
        else:
            with lock:
                parts_of.setdefault(oid, {})[int(number)] = data
            self.reply(200, {} if name == "no-etag" else {"ETag": '"%s"' % hashlib.md5(data).hexdigest()})

    def join(self, oid, wanted):
        data = b"".join(parts_of[oid][i] for i in sorted(parts_of[oid]))
        tags = ['"%s"' % hashlib.md5(parts_of[oid][p["partNumber"]]).hexdigest() for p in wanted["parts"]]
        good = tags == [p["etag"] for p in wanted["parts"]] and hashlib.sha256(data).hexdigest() == oid
        if good:
            store[oid] = data
        self.answer(200 if good else 400, {})

    def commit(self, repo, lines):
        head, files = lines[0], REPOS["models", repo]
        assert head["key"] == "header" and head["value"]["summary"]
        log.write("commit %s %s: %s\n" % (repo, head["value"]["summary"], " ".join(
            sorted(line["value"]["path"] for line in lines[1:]))))
        if repo == "test/refuse-once" and self.times == 1:
            self.answer(400, {"error": "Your README.md is wrong"})
            return
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"], validate=True)
            else:
                assert line["key"] == "lfsFile" and value["algo"] == "sha256"
                assert value["size"] == len(store[value["oid"]])
                files[value["path"]] = store[value["oid"]]
        self.answer(200, {"success": True, "commitOid": COMMIT,
                          "commitUrl": "http://127.0.0.1:%d/%s/commit/%s" % (hub.server_port, repo, COMMIT)})

    # ---- lists and files

    def list(self, kind, repo, revision, token):
        name = repo.split("/")[1]
        if name == "throttled" and self.times == 1:
            self.reply(429, {"RateLimit": '"api";r=0;t=0', "Retry-After": "3000"})
        elif name == "down" or (name == "flaky" and self.times == 1):
            self.reply(503)
        elif name == "escape":
            self.refuse(403, "", STEERING)
        elif name == "escape-503":
            self.reply(503, {"X-Error-Message": STEERING})
        elif name == "drip":
            self.drip()
        elif name == "private" and token != "hf_good":
            self.refuse(401, "RepoNotFound")
        elif name == "disabled":
            self.refuse(403, "", "Access to this resource is disabled.")
        elif (kind, repo) not in REPOS:
            self.refuse(401 if token == "-" else 404, "RepoNotFound")
        elif revision not in ("main", "refs/pr/1", COMMIT):
            self.refuse(404, "RevisionNotFound", "Invalid rev id: " + revision)
        elif "/tree/" in self.path:
            self.reply(200, {}, tree(REPOS[kind, repo]))
        else:
            self.reply(200, {}, listing(name, REPOS[kind, repo]))

    def drip(self):
        """A valid answer without end, sent faster than the client's stall limit."""
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(200):
                self.wfile.write(b" " * 1000)
                time.sleep(0.05)
        except OSError:
            pass

    def view(self, what, query, token):
        """The data set viewer: the list of splits, a page of rows."""
        repo = query["dataset"]
        name = repo.split("/")[1]
        if name == "view-unready":
            self.view_error(500, "ResponseNotReady", "The server is busier than usual and the response is not ready.")
        elif name == "view-gated" and token != "hf_good":
            self.view_error(401, "ExternalUnauthenticatedError", "The dataset does not exist, or is gated.")
        elif name not in VIEWS:
            self.view_error(404, "ResponseNotFound", "Not found.")
        elif what == "splits":
            pairs = [("default", "train")]
            if name == "view-splits":
                pairs = [("a b", "train"), ("a b", "test"), ("c", "train")]
            rows = [{"dataset": repo, "config": c, "split": s} for c, s in pairs]
            self.reply(200, {}, json.dumps({"splits": rows, "pending": [], "failed": []}).encode())
        else:
            self.page(name, query["config"] + "/" + query["split"], int(query["offset"]), int(query["length"]))

    def view_error(self, status, code, message):
        self.reply(status, {"X-Error-Code": code}, json.dumps({"error": message}).encode())

    def page(self, name, split, offset, length):
        total = VIEWS[name]
        if name == "view-big":
            self.view_error(501, "TooBigContentError", "Rows from parquet row groups are too big to be read")
            return
        if name == "view-breaks" and self.times == 1 and offset in (0, 200):
            self.reply(*((429, {"Retry-After": "0"}) if offset else (502, {})))
            return
        with lock:
            pages[name] = pages.get(name, 0) + 1
            if name == "view-ever-changing" or (name == "view-changing" and pages[name] > 4):
                total += pages[name] if name == "view-ever-changing" else 50
            if name == "view-shrunk" and pages[name] > 4:  # the client keeps the first four pages
                total = 250
        end = min(total, offset + length)
        if name == "view-breaks" and offset == 400:
            end = offset + 60
        if name == "view-hole" and offset == 100:
            end = offset
        shift = name == "view-shifted" and offset == 100
        rows = [{"row_idx": i + shift, "row": {"text": "%s %d \u00e9\n" % (split, i), "n": i, "x": [1.5, None]},
                 "truncated_cells": ["text"] if name == "view-cut" and i == 3 else []} for i in range(offset, end)]
        if name == "Multilingual-Thinking":
            for row in rows:
                row["row"] = conversation(row["row_idx"])
        body = json.dumps({"features": [], "rows": rows, "num_rows_total": total, "num_rows_per_page": 100,
                           "partial": name == "view-partial"}).encode()
        head = {"X-Revision": COMMIT if name != "view-old" else "0" * 40, "Content-Length": str(len(body))}
        if name in ("view-odd", "view-bare"):
            body = b"{" if name == "view-odd" else b"{}"
            head["Content-Length"] = str(len(body))
        if name == "view-breaks" and offset == 300 and self.times == 1:
            body = body[:1000]
            self.close_connection = True
        if name == "view-slow":
            time.sleep(0.01)
        self.reply(200, head, body)

    def resolve(self, kind, repo, path, token):
        name = repo.split("/")[1]
        data = REPOS[kind, repo].get(path)
        if name == "gated" and token != "hf_good":
            self.refuse(401 if token == "-" else 403, "GatedRepo", "Access to model is restricted")
            return
        if data is None:
            self.refuse(404, "EntryNotFound")
            return
        head = {"X-Repo-Commit": COMMIT, "ETag": '"%s"' % etag(path, data), "X-Linked-Size": str(len(data))}
        if is_lfs(path):
            head["X-Linked-Etag"] = head["ETag"]
            head["ETag"] = '"xet-%s"' % hashlib.md5(data).hexdigest()
            head["Location"] = "http://127.0.0.1:%d/%s/%s/%s?signature=1" % (cdn.server_port, kind, repo, path)
            if name == "loop":
                head["Location"] = "http://127.0.0.1:%d%s" % (hub.server_port, self.path)
            self.reply(302, head, b"Found. Redirecting")
        else:
            head["Location"] = "/api/resolve-cache/%s/%s/%s/%s" % (kind, repo, COMMIT, urllib.parse.quote(path))
            self.reply(307, head, b"Temporary Redirect")

    def large(self, kind, repo, path):
        name = repo.split("/")[1]
        data = REPOS[kind, repo][path]
        if name == "throttled" and self.times == 1:
            self.reply(429, {"Retry-After": "0"})
        elif name == "flaky" and self.times == 1:
            self.reply(500 + 3 * SHARDS.index(path))
        elif name == "expired" and self.times == 1:
            self.reply(403, {}, b"<Error>AccessDenied</Error>")
        elif name == "wrong-hash" or (name == "damaged-once" and self.times == 1):
            self.send_file(path, data[:5000] + b"?" + data[5001:], len(data))
        elif name == "endless":
            self.close_connection = True
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)
        elif name.startswith("head-no-range"):
            self.send_file(path, data, len(data), ranges=False, pause=0.002)
        elif name == "no-range":
            self.send_file(path, data, 100000 if self.times == 1 else len(data), ranges=False)
        elif name == "no-range-breaks":
            self.send_file(path, data, 100000, ranges=False)
        else:
            self.send_file(path, data, 70000 if name in ("breaks", "lying-range") else len(data),
                           shift=name == "lying-range", pause=0.008 if name == "slow" else 0)

    def send_file(self, path, data, most, ranges=True, shift=False, pause=0):
        """At most `most` bytes of the body; then the connection breaks off."""
        first, wanted = 0, self.headers.get("Range")
        xet, name = "xet-" + hashlib.md5(data).hexdigest(), etag(path, data)
        if wanted and ranges:
            first, last = wanted.removeprefix("bytes=").split("-")
            first = int(first)
            if first >= len(data):
                self.reply(416, {"Content-Range": "bytes */%d" % len(data)})
                return
        size = len(data)
        if wanted and ranges and last:
            data = data[:int(last) + 1]
        self.send_response(206 if wanted and ranges else 200)
        if wanted and ranges:
            self.send_header("Content-Range", "bytes %d-%d/%d" % (first + shift, len(data) - 1, size))
        self.send_header("Content-Length", str(len(data) - first))
        # The host of the large files sends different ETags.
        self.send_header("ETag", '"%s"' % (xet if self.server is cdn else name))
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "HEAD":
            return
        end = min(len(data), first + most)
        self.sent = 0
        try:
            for at in range(first, end, 2048) if pause else ():
                self.wfile.write(data[at:min(at + 2048, end)])
                self.sent += min(2048, end - at)
                time.sleep(pause)
            if not pause:
                self.wfile.write(data[first:end])
                self.sent += end - first
        except OSError:
            self.close_connection = True
        self.close_connection |= end < len(data)
        if "test/head" in self.path:
            log.write("bytes %d\n" % self.sent)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass


hub, cdn = Server(("127.0.0.1", 0), Handler), Server(("127.0.0.1", 0), Handler)
for server in (hub, cdn):
    threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdout.write("%d\n" % hub.server_port)  # in one piece
sys.stdout.flush()
sys.stdin.read()
