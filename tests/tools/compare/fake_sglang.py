"""Stands in for `python -m sglang.launch_server`: /generate, /flush_cache, /health and /metrics of a toy model.

FAKE_MODE breaks it, and FAKE_LOG names a file that gets a line for each thing that a server of any role does.
"""

import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import fake_toy
from fake_toy import PORT, TOPK, common, least

MODE = os.environ.get("FAKE_MODE", "")
PLUGIN = "--enable-nsa-plugin" in sys.argv and os.environ["NSA_PLUGIN_ENABLED"] == "1"
FAULT = os.environ.get("NSA_PLUGIN_FAULT", "none") if PLUGIN else "none"
cache: list[list[int]] = []
batches = 0
lock = threading.Lock()
streamed = 0


def log(what: str, began: float, **more: object) -> None:
    """The clock is one for all processes."""
    entry = {"port": PORT, "what": what, "began": began, "ended": time.monotonic(), **more}
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(f"{json.dumps(entry)}\n")


def best(context: list[int], company: int) -> dict[int, float]:
    wrong = (FAULT != "none" and MODE != "blind") or (MODE == "wrong" and PLUGIN)
    return fake_toy.best(context, company, engine="sglang", plugin=PLUGIN, wrong=wrong)


def answer(prompt: list[int], body: dict, company: int) -> dict:
    global batches
    with lock:
        shared = max((common(prompt[:-1], other) for other in cache), default=0)
        cache.append(prompt)
        batches += 1
    context, chosen, tops = list(prompt), [], []
    for _ in range(body["sampling_params"]["max_new_tokens"]):
        top = best(context, company)
        token = next(iter(top))
        chosen.append([top[token], token, None])
        tops.append([[value, one, None] for one, value in top.items()][: body.get("top_logprobs_num", 0)])
        context.append(token)
    meta = {"completion_tokens": len(chosen), "cached_tokens": shared // 4 * 4, "finish_reason": {"type": "length"}}
    if MODE == "uncached":
        meta["cached_tokens"] = 0
    if body.get("return_logprob"):
        start = body["logprob_start_len"]
        meta |= {"output_token_logprobs": chosen, "output_top_logprobs": tops}
        if start >= 0:
            rows = [(prompt[:at], prompt[at]) for at in range(start, len(prompt))]
            likely = [best(before, company) for before, _ in rows]
            values = [top.get(token, least(before)) for top, (before, token) in zip(likely, rows, strict=True)]
            count = body.get("top_logprobs_num", 0)
            meta["input_top_logprobs"] = [None] + [
                [[value, one, None] for one, value in top.items()][:count] for top in likely[1:]
            ]
            if FAULT != "none" and MODE != "blind" and len(prompt) > TOPK:
                values = [value + 3 for value in values]
            meta["input_token_logprobs"] = [[None, prompt[start], None]] + [
                [value, token, None] for value, (_, token) in zip(values[1:], rows[1:], strict=True)
            ]
    return {"output_ids": [token for _, token, _ in chosen], "meta_info": meta}


class Handler(fake_toy.Handler):
    def do_GET(self) -> None:
        lines = [
            "# HELP sglang:nsa_plugin_batches_total Batches",
            f'sglang:nsa_plugin_batches_total{{attention="sparse_decode",phase="decode",provider="cuda"}} {batches}.0',
        ]
        if os.environ.get("NSA_PLUGIN_TOKEN_SHARD") == "on" and MODE != "never reshards":
            lines.append('sglang:nsa_plugin_resharded_query_tokens_total{phase="extend",tp_rank="0"} 8192.0')
        if MODE != "never combines":
            lines += [
                f'sglang:nsa_plugin_combined_prefills_total{{kind="{kind}",tp_rank="0"}} {count}.0'
                for kind, count in (("split", 3), ("mixed", 5))
            ]
        self.reply("\n".join(lines if PLUGIN and MODE != "uncounted" else []).encode())

    def do_POST(self) -> None:
        global streamed
        began = time.monotonic()
        body = json.loads(self.body() or b"{}")
        if self.path == "/flush_cache":
            cache.clear()
            log("flush", began)
            return self.reply(b"flushed")
        if PLUGIN and FAULT == "none" and MODE == "crashes":
            print("RuntimeError: an illegal memory access was encountered", flush=True)
            os._exit(9)
        if PLUGIN and MODE == "builds":
            print("kernel topk_kernel was built while serving", flush=True)
        if PLUGIN and MODE == "hangs":
            time.sleep(600)
        prompts = body["input_ids"]
        if PLUGIN and MODE == "late" and len(prompts) == 136:
            time.sleep(600)
        if not PLUGIN and MODE == "exhausts" and len(prompts) > 1000:
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB.", flush=True)
            os._exit(137)
        slow = "slow plugin" if PLUGIN else "slow stock"
        if slow == MODE and len(prompts) > 1000:
            time.sleep(600)
        if isinstance(prompts[0], list):
            starts = body.pop("logprob_start_len")
            pairs = zip(prompts, starts, strict=True)
            made = [answer(prompt, body | {"logprob_start_len": start}, len(prompts)) for prompt, start in pairs]
            log("generate", began)
            return self.reply(json.dumps(made).encode())
        if MODE == "refuses" and len(prompts) == TOPK:
            return self.reply(b"too odd a length", 400)
        if not body.get("stream"):
            data = json.dumps(answer(prompts, body, 1)).encode()
            log("generate", began)
            return self.reply(data)
        streamed += 1
        if PLUGIN and MODE == "crashes timed" and streamed > 4:
            print("RuntimeError: an illegal memory access was encountered", flush=True)
            os._exit(9)
        if PLUGIN and MODE == "hangs timed" and streamed > 4:
            log("hang", began)
            time.sleep(600)
        if PLUGIN and MODE == "refuses timed" and streamed > 4:
            return self.reply(b"too late", 400)
        return self.stream(self.events(prompts, body["sampling_params"]["max_new_tokens"], began))

    def events(self, prompt: list[int], new_tokens: int, began: float) -> Iterator[str]:
        for count in range(1, new_tokens + 1):
            yield json.dumps({"meta_info": {"completion_tokens": count}})
        log("stream", began, prompt=zlib.crc32(bytes(prompt)), length=len(prompt), new_tokens=new_tokens)


if PLUGIN:
    print("kernels that are built from now on are named here\nkernel warm_kernel was built while serving", flush=True)
fake_toy.note_pid()
print("[2026-01-01 00:00:00] Loading weights", flush=True)
if MODE == "starts for ever" or (MODE == "stock dies" and PLUGIN):
    time.sleep(600)
if (PLUGIN and MODE == "dies") or MODE == "stock dies":
    print("ValueError: index_topk is a fruit", flush=True)
    sys.exit(3)
if PLUGIN:
    active = MODE != "inactive"
    variables = {name: f"NSA_PLUGIN_{name.upper()}" for name in ("split_prefill", "token_shard")}
    settings = {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}
    report = {"active": active, "notes": [] if active else ["a note that says why"], "settings": settings, "text": "on"}
    report["facts"] = {"short prompts batched with long ones": "attend as the long ones: no reason"}
    Path(os.environ["NSA_PLUGIN_REPORT"]).write_text(json.dumps(report))
    if MODE != "uncounted":
        print("[2026-01-01] new plan plan-0: extend/mha_one_shot on fa3\n  attention: why", flush=True)
server = fake_toy.Server(Handler)
log("listening", time.monotonic())
server.serve_forever()
