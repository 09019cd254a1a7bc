#!/usr/bin/env python3
"""serve_load.py - `moetrain serve` under load, with the standard library alone.

    python3 serve_load.py MOETRAIN [REQUESTS]

REQUESTS (10000) random completions of the base model and two adapters from 24 clients at once. Some clients read
slowly, cut a stream or a connection, or send what is no request. Each whole answer must be that of the same request
alone. The resident memory after the first fifth may grow by 5 % until the end. The last request is answered as the
first one, and the server ends with code 0. Prints a line of counts."""
import http.client
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "tests/fixtures/parity/case_b")
KINDS, CLIENTS, GROWTH = 64, 24, 1.05
HOSTILE = [b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" * 40,
           b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n{",
           b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 40\r\n\r\n{",
           b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\n\r\n", b"\r\n" * 500,
           b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n"]
BODIES = ["{", "[]", "{\"model\": 5}", "{\"prompt\": [[1, \"x\"]]}", "{\"prompt\": [-1]}", "[" * 5000,
          json.dumps({"prompt": "a", "max_tokens": 1e9}), json.dumps({"prompt": "a", "n": 1e9}),
          json.dumps({"prompt": "\ud800", "stop": ""})]


def make_adapter(folder):
    """The trained adapter with another alpha."""
    shutil.copytree(os.path.join(MODEL, "adapter_final"), folder)
    name = os.path.join(folder, "adapter_config.json")
    with open(name) as file:
        config = json.load(file)
    config["lora_alpha"] *= 2
    with open(name, "w") as file:
        json.dump(config, file)


def make_request(i):
    rnd = random.Random(i)
    return {"model": rnd.choice(["case_b", "one", "two"]), "prompt": [rnd.randrange(300) for _ in range(rnd.choice(
        [1, 3, 20, 63, 64, 65, 150]))], "max_tokens": rnd.randint(1, 40), "temperature": rnd.choice([0, 0.7, 1]),
            "seed": i, "n": rnd.choice([1, 1, 2]), "logprobs": rnd.choice([None, 2])}


def post(address, body, timeout=300):
    connection = http.client.HTTPConnection(*address, timeout=timeout)
    connection.request("POST", "/v1/completions", body if isinstance(body, str) else json.dumps(body),
                       {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def whole(address, request):
    connection, answer = post(address, request)
    data = json.loads(answer.read())
    connection.close()
    if answer.status in (429, 503):
        return None
    assert answer.status == 200, (answer.status, data)
    return sorted((c["index"], c["text"], c["finish_reason"], str(c["logprobs"])) for c in data["choices"])


def streamed(address, request, rnd):
    """The texts of a stream that is read to its end, slowly at times; None: cut, or refused."""
    connection, answer = post(address, {**request, "stream": True})
    texts, cut, slow = {}, rnd.random() < 0.4, rnd.random() < 0.1
    if answer.status in (429, 503):
        return None
    assert answer.status == 200, answer.read()
    for number, line in enumerate(answer):
        if cut and number > rnd.randint(0, 9):
            connection.sock.close() if connection.sock else answer.close()
            return None
        if slow:
            time.sleep(0.05)
        if not line.startswith(b"data: {"):
            continue
        data = json.loads(line[6:])
        assert "error" not in data, data
        for c in data["choices"]:
            texts[c["index"]] = texts.get(c["index"], "") + c["text"]
    connection.close()
    return [texts.get(i, "") for i in range(request["n"])]


def hostile(address, rnd):
    if rnd.random() < 0.5:
        connection, answer = post(address, rnd.choice(BODIES))
        answer.read()
        assert 400 <= answer.status < 500, answer.status
        return connection.close()
    with socket.create_connection(address, timeout=60) as s:
        try:
            s.sendall(rnd.choice(HOSTILE))
            if rnd.random() < 0.5:
                s.settimeout(0.5)
                s.recv(1000)
        except OSError:
            pass


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+) kB", file.read())[1])


class Load:
    def __init__(self, address, n, pid):
        self.address, self.n, self.pid = address, n, pid
        self.lock, self.next, self.bad, self.early = threading.Lock(), 0, [], 0
        self.counts = {"whole": 0, "streams": 0, "cut or refused": 0, "left": 0, "hostile": 0}
        self.requests = [make_request(i) for i in range(KINDS)]
        self.want = [whole(address, r) for r in self.requests]

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def one(self, i):
        rnd = random.Random(10 ** 6 + i)
        kind, which = rnd.random(), rnd.randrange(KINDS)
        request = self.requests[which]
        if kind < 0.7:
            got = whole(self.address, request)
            assert got is None or got == self.want[which], (request, got, self.want[which])
            self.count("whole" if got else "cut or refused")
        elif kind < 0.88:
            got = streamed(self.address, {**request, "logprobs": None}, rnd)
            assert got is None or got == [c[1] for c in self.want[which]], (request, got, self.want[which])
            self.count("streams" if got else "cut or refused")
        elif kind < 0.94:
            with socket.create_connection(self.address) as s:
                body = json.dumps(request).encode()
                s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                          b"Content-Length: %d\r\n\r\n%s" % (len(body), body[:rnd.randint(0, len(body))]))
            self.count("left")
        else:
            hostile(self.address, rnd)
            self.count("hostile")

    def run(self):
        while True:
            with self.lock:
                i, self.next = self.next, self.next + 1
                if i == self.n // 5:
                    self.early = resident(self.pid)
            if i >= self.n or self.bad:
                return
            try:
                self.one(i)
            except Exception as error:  # pylint: disable=broad-except
                self.bad.append((i, repr(error)))


def main(binary, n):
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        make_adapter(os.path.join(folder, "two"))
        process = subprocess.Popen(
            [binary, "serve", MODEL, "--adapter", "one=" + os.path.join(MODEL, "adapter_final"), "--adapter",
             os.path.join(folder, "two"), "--port", "0", "--context", "256", "--sequences", "12", "--set",
             "train.device=cpu"], stderr=log)
        read = lambda: os.pread(log.fileno(), 1 << 28, 0).decode()  # noqa: E731
        while not (found := re.search(r"listening on http://([\d.]+):(\d+)", read())):
            assert process.poll() is None, read()
            time.sleep(0.1)
        load = Load((found[1], int(found[2])), n, process.pid)
        threads = [threading.Thread(target=load.run) for _ in range(CLIENTS)]
        start = time.time()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not load.bad, load.bad[:3]
        time.sleep(1)
        assert whole(load.address, load.requests[0]) == load.want[0]
        late = resident(process.pid)
        process.terminate()
        assert process.wait(120) == 0, read()[-3000:]
        print(f"{n} requests in {time.time() - start:.0f} s: {load.counts}; resident {load.early >> 10} MiB after a "
              f"fifth, {late >> 10} MiB at the end")
        assert late <= GROWTH * load.early, "memory grows"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10000)
