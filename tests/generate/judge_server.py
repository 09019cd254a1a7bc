"""judge_server.py - an endpoint of chat completions for tests. Prints its port; ends with its standard input. The score
is the number of letters of the answer; other answers by the first letter: b: HTTP 500 twice, then the score; c: no
number; d: HTTP 401; e: no reply; f: two scores, of which the last counts."""
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

tries = {}


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        answer = text.split("[")[1].split("]")[0]
        tries[answer] = tries.get(answer, 0) + 1
        kind, status, content = answer[:1], 200, f"Thinking of 99.\n\nScore: {len(answer)}"
        if self.path != "/v1/chat/completions" or body["model"] != "m" or body["temperature"] != 0:
            status = 400
        if not text.startswith("Q user: what? A 7 {x}"):
            status = 422
        if kind == "b" and tries[answer] < 3:
            status = 500
        if kind == "c":
            content = "Score: none, sorry"
        if kind == "d" or self.headers["Authorization"] != "Bearer secret":
            status = 401
        if kind == "e":
            time.sleep(100)
        if kind == "f":
            content = "Score: 1\nScore: -2.5/10"
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]} if status == 200
                           else {"error": {"message": "refused"}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
