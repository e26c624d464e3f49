"""Stands in for `vllm serve`: starts grandchildren as vLLM does, and answers /health, or fails on purpose.

The environment says how: FAKE_MODE is healthy, never_healthy, dies or deaf (ignores SIGTERM). FAKE_PIDS names
a file that gets the pids of all processes.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLEEPER = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"


def start_grandchildren(pids: str) -> None:
    sleeper = [sys.executable, "-c", SLEEPER, pids]
    subprocess.Popen(sleeper)
    # One that has left the session, and one whose environment says nothing.
    subprocess.Popen(sleeper, start_new_session=True)
    subprocess.Popen(sleeper, env={"PATH": os.environ["PATH"]})
    # One whose parent is gone.
    subprocess.run([sys.executable, "-c", f"import subprocess, sys; subprocess.Popen({sleeper!r})"], check=True)
    while len(Path(pids).read_text().split()) < 5:
        time.sleep(0.02)


def main() -> None:
    mode, pids = os.environ["FAKE_MODE"], os.environ["FAKE_PIDS"]
    with open(pids, "a") as file:
        file.write(f"{os.getpid()}\n")
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("INFO 11-21 12:00:00 [core.py:1] Loading weights", flush=True)
    start_grandchildren(pids)
    if mode == "dies":
        print("(EngineCore pid=7) ERROR 11-21 12:00:00 [core.py:2] Traceback (most recent call last):")
        print("(EngineCore pid=7) ERROR 11-21 12:00:00 [core.py:2] ValueError: index_topk is a fruit")
        print("RuntimeError: ServedEngine core initialization failed. See root cause above.", flush=True)
        sys.exit(3)
    if mode == "never_healthy":
        time.sleep(600)

    import http.server  # slow, and the tests wait for what is logged above

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"fine")

        def log_message(self, *args: object) -> None:
            pass

    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()


main()
