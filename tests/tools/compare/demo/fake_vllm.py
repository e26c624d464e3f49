"""Stands in for `vllm serve` with the plugin: serves the checkpoint with the reference model, over HTTP.

FAKE_DEFECT says what is wrong with it: "" nothing; "wrong" it always attends to wrong tokens; "blind" it never
does, though the plugin's settings ask for it; "untraced" it writes no trace; "dies" at the first request;
"uncached" it has no prefix cache. FAKE_CACHE is a directory that keeps answers from one run to the next.
"""

import hashlib
import http.server
import json
import os
import sys
import threading
from pathlib import Path

from nsa_plugin.tools.reference import ReferenceModel

PAGE = 16


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Engine:
    def __init__(self) -> None:
        assert json.loads(flag("--additional-config"))["nsa_plugin"]["enabled"]
        self.defect = os.environ["FAKE_DEFECT"]
        fault = os.environ.get("NSA_PLUGIN_FAULT") == "shift_indices"
        self.broken = self.defect == "wrong" or (fault and self.defect != "blind")
        self.model = ReferenceModel.load(Path(flag("serve")))
        self.chunk = int(flag("--max-num-batched-tokens"))
        self.prompts: list[list[int]] = []
        self.steps = 0
        self.lock = threading.Lock()
        Path(os.environ["NSA_PLUGIN_REPORT"]).write_text(json.dumps({"text": "the fake's own report", "active": True}))

    def complete(self, name: str, body: dict) -> dict:
        with self.lock:
            if self.defect == "dies":
                print("RuntimeError: out of fuel", flush=True)
                os._exit(9)
            (prompt,) = body["prompt"]
            cached = 0 if self.defect == "uncached" else max(map(self.cached, [prompt] * 99, self.prompts), default=0)
            self.prompts.append(prompt)
            tokens, logprobs, top = self.generate(prompt, body["max_tokens"], body["logprobs"])
            self.trace(name, len(prompt), cached, len(tokens))
        return {
            "choices": [
                {
                    "index": 0,
                    "logprobs": {
                        "tokens": [f"token_id:{token}" for token in tokens],
                        "token_logprobs": logprobs,
                        "top_logprobs": top,
                    },
                },
            ],
            "usage": {"prompt_tokens_details": {"cached_tokens": cached}},
        }

    @staticmethod
    def cached(prompt: list[int], earlier: list[int]) -> int:
        common = next((i for i, pair in enumerate(zip(prompt, earlier, strict=False)) if pair[0] != pair[1]), 0)
        return common // PAGE * PAGE

    def generate(self, prompt: list[int], count: int, num_logprobs: int) -> tuple[list, list, list]:
        key = hashlib.sha256(json.dumps([prompt, count, num_logprobs, self.broken]).encode()).hexdigest()
        stored = Path(os.environ["FAKE_CACHE"], key)
        if stored.exists():
            return tuple(json.loads(stored.read_text()))
        tokens, logprobs, top = [], [], []
        for _ in range(count):
            row = self.model.run([*prompt, *tokens], broken=self.broken).logprobs[-1]
            values, candidates = row.topk(num_logprobs)
            tokens.append(int(candidates[0]))
            logprobs.append(float(values[0]))
            top.append({f"token_id:{c}": float(v) for c, v in zip(candidates, values, strict=True)})
        stored.write_text(json.dumps([tokens, logprobs, top]))
        return tokens, logprobs, top

    def trace(self, name: str, prompt: int, cached: int, generated: int) -> None:
        if self.defect == "untraced":
            return
        topk = self.model.config["index_topk"]
        spans = [(start, min(start + self.chunk, prompt)) for start in range(cached, prompt, self.chunk)]
        rows = [
            (end - start, end, "extend", "mha_one_shot" if end <= topk else "sparse_prefill") for start, end in spans
        ]
        rows += [(1, prompt + i, "decode", "sparse_decode") for i in range(1, generated)]
        with open(os.environ["NSA_PLUGIN_TRACE"], "a") as file:
            for q_tokens, kv_tokens, phase, attention in rows:
                self.steps += 1
                requests = [
                    {"request_id": f"cmpl-{name}-0", "q_tokens": q_tokens, "kv_tokens": kv_tokens, "plan": phase},
                    {"request_id": "cmpl-another-0", "q_tokens": 1, "kv_tokens": 9, "plan": "decode"},
                ]
                plans = {
                    phase: {
                        "phase": phase,
                        "attention": attention,
                        "provider": "fake",
                        "reasons": {"attention": f"{kv_tokens} tokens of context against {topk}"},
                    }
                }
                plans.setdefault("decode", {"phase": "decode", "attention": "none", "provider": "", "reasons": {}})
                entry = {"step": self.steps, "pid": 1, "rank": 0, "requests": requests, "plans": plans}
                file.write(json.dumps(entry) + "\n")


def main() -> None:
    engine = Engine()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply('vllm:num_preemptions_total{engine="0",model_name="m"} 2.0\n')

        def do_POST(self) -> None:
            if self.path == "/reset_prefix_cache":
                return self.reply("")
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            return self.reply(json.dumps(engine.complete(self.headers["X-Request-Id"], body)), "application/json")

        def reply(self, text: str, kind: str = "text/plain") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", int(flag("--port"))), Handler).serve_forever()


main()
