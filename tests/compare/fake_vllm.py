"""Stands in for `python -m vllm.entrypoints.cli.main serve`: /v1/completions, /reset_prefix_cache, /health, /metrics.

FAKE_MODE "refuses" has the plugin end the start, as it does where it does not serve; FAKE_PIDS names a file that gets
the server's pid.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fake_toy import TOPK, best, common

ADDITIONAL = "--additional-config"
ASKED = json.loads(sys.argv[sys.argv.index(ADDITIONAL) + 1]) if ADDITIONAL in sys.argv else {}
PLUGIN = ASKED.get("nsa_plugin", {}).get("enabled", False) and os.environ["NSA_PLUGIN_ENABLED"] == "1"
WRONG = PLUGIN and os.environ.get("NSA_PLUGIN_FAULT", "none") != "none"
MODEL = sys.argv[sys.argv.index("--served-model-name") + 1]
cache: list[list[int]] = []
lock = threading.Lock()
batches = 0


def predict(context: list[int], company: int) -> dict[int, float]:
    return best(context, company, plugin=PLUGIN, wrong=WRONG)


def choice(index: int, prompt: list[int], body: dict, company: int) -> dict:
    context, tokens, chosen, tops = list(prompt), [], [], []
    for _ in range(body["max_tokens"]):
        top = predict(context, company)
        token = next(iter(top))
        tokens.append(f"token_id:{token}" if body.get("return_tokens_as_token_ids") else "")
        chosen.append(top[token])
        tops.append({f"token_id:{one}": value for one, value in [*top.items()][: body.get("logprobs", 0)]})
        context.append(token)
    made = {"index": index, "text": "", "finish_reason": "length", "logprobs": None, "prompt_logprobs": None}
    if "logprobs" in body:
        made["logprobs"] = {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops}
    if "prompt_logprobs" in body:
        shift = 3 if WRONG and len(prompt) > TOPK else 0
        values = [predict(prompt[:at], company).get(prompt[at], -12.0) + shift for at in range(1, len(prompt))]
        pairs = zip(prompt[1:], values, strict=True)
        made["prompt_logprobs"] = [None] + [{str(token): {"logprob": value, "rank": 1}} for token, value in pairs]
    return made


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def reply(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        labels = 'attention="sparse_decode",engine="0",phase="decode",provider="cuda"'
        self.reply(f"vllm:nsa_plugin_batches_total{{{labels}}} {batches}.0\n".encode() if PLUGIN else b"")

    def do_POST(self) -> None:
        global batches
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        if self.path == "/reset_prefix_cache" and os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            cache.clear()
            return self.reply(b"")
        if self.path != "/v1/completions" or body["model"] != MODEL:
            return self.reply(b'{"detail": "Not Found"}', 404)
        prompts = body["prompt"]
        with lock:
            cached = max((common(prompts[0][:-1], other) for other in cache), default=0) // 4 * 4
            cache.extend(prompts)
            batches += 1
        if body.get("stream"):
            return self.stream(body["max_tokens"])
        choices = [choice(index, prompt, body, len(prompts)) for index, prompt in enumerate(prompts)]
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": cached}}
        return self.reply(json.dumps({"choices": choices, "usage": usage}).encode())

    def stream(self, tokens: int) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for count in range(1, tokens + 1):
            event = {"choices": [{"index": 0, "text": ""}], "usage": {"completion_tokens": count}}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True


with open(os.environ["FAKE_PIDS"], "a") as pids:
    pids.write(f"{os.getpid()}\n")
if PLUGIN and os.environ["FAKE_MODE"] == "refuses":
    print("PatchError: nsa-plugin's backend for vLLM does not serve there", flush=True)
    sys.exit(1)
if PLUGIN:
    report = {"active": True, "notes": [], "settings": {}, "text": "on"}
    Path(os.environ["NSA_PLUGIN_REPORT"]).write_text(json.dumps(report))
Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
