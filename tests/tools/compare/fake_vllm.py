"""Stands in for `python -m vllm.entrypoints.cli.main serve`: /v1/completions, /reset_prefix_cache, /health, /metrics.

FAKE_MODE "refuses" has the plugin end the start, as it does where it does not serve; "wrong" has it attend to wrong
tokens; with "exhausts" a prompt of more than 1000 tokens is too much for stock, whose engine ends and whose server
answers so before it ends too.
"""

import json
import os
import sys
import threading
from pathlib import Path

import fake_toy
from fake_toy import TOPK, best, common, least

ADDITIONAL = "--additional-config"
ASKED = json.loads(sys.argv[sys.argv.index(ADDITIONAL) + 1]) if ADDITIONAL in sys.argv else {}
PLUGIN = ASKED.get("nsa_plugin", {}).get("enabled", False) and os.environ["NSA_PLUGIN_ENABLED"] == "1"
WRONG = PLUGIN and (os.environ.get("NSA_PLUGIN_FAULT", "none") != "none" or os.environ["FAKE_MODE"] == "wrong")
MODEL = sys.argv[sys.argv.index("--served-model-name") + 1]
cache: list[list[int]] = []
lock = threading.Lock()
batches = 0


def predict(context: list[int], company: int) -> dict[int, float]:
    return best(context, company, engine="vllm", plugin=PLUGIN, wrong=WRONG)


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
        rows = [(prompt[:at], prompt[at]) for at in range(1, len(prompt))]
        values = [predict(before, company).get(token, least(before)) + shift for before, token in rows]
        pairs = zip(prompt[1:], values, strict=True)
        made["prompt_logprobs"] = [None] + [{str(token): {"logprob": value, "rank": 1}} for token, value in pairs]
    return made


class Handler(fake_toy.Handler):
    def do_GET(self) -> None:
        labels = 'attention="sparse_decode",engine="0",phase="decode",provider="cuda"'
        self.reply(f"vllm:nsa_plugin_batches_total{{{labels}}} {batches}.0\n".encode() if PLUGIN else b"")

    def do_POST(self) -> None:
        global batches
        body = json.loads(self.body() or b"{}")
        if self.path == "/reset_prefix_cache" and os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            cache.clear()
            return self.reply(b"")
        if self.path != "/v1/completions" or body["model"] != MODEL:
            return self.reply(b'{"detail": "Not Found"}', 404)
        prompts = body["prompt"]
        if not PLUGIN and os.environ["FAKE_MODE"] == "exhausts" and max(map(len, prompts)) > 1000:
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB.", flush=True)
            self.reply(b'{"error": {"message": "EngineCore encountered an issue.", "code": 500}}', 500)
            self.wfile.flush()
            os._exit(1)
        with lock:
            cached = max((common(prompts[0][:-1], other) for other in cache), default=0) // 4 * 4
            cache.extend(prompts)
            batches += 1
        if body.get("stream"):
            counts = range(1, body["max_tokens"] + 1)
            events = [{"choices": [{"index": 0, "text": ""}], "usage": {"completion_tokens": n}} for n in counts]
            return self.stream([json.dumps(event) for event in events])
        choices = [choice(index, prompt, body, len(prompts)) for index, prompt in enumerate(prompts)]
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": cached}}
        return self.reply(json.dumps({"choices": choices, "usage": usage}).encode())


fake_toy.note_pid()
if PLUGIN and os.environ["FAKE_MODE"] == "refuses":
    print("PatchError: nsa-plugin's backend for vLLM does not serve there", flush=True)
    sys.exit(1)
if PLUGIN:
    report = {"active": True, "notes": [], "settings": {}, "text": "on"}
    Path(os.environ["NSA_PLUGIN_REPORT"]).write_text(json.dumps(report))
fake_toy.Server(Handler).serve_forever()
