"""A toy model and its HTTP server, shared by the fake engine servers and installed next to them.

Log probabilities follow from the tokens before, with a little noise that depends on the engine, the role and the batch,
as a GPU's arithmetic has. FAKE_PIDS names a file that gets the server's pid.
"""

import os
import sys
import zlib
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VOCAB, TOPK = 256, 64
NOISE = 0.02
PORT = int(sys.argv[sys.argv.index("--port") + 1])


def best(context: list[int], company: int, *, engine: str, plugin: bool, wrong: bool) -> dict[int, float]:
    """The 20 most probable next tokens and their log probabilities.

    Args:
        company: prompts of the batch.
        wrong: attend to wrong tokens where there is something to select.
    """
    seed = zlib.crc32(bytes(context[-8:]) + len(context).to_bytes(2, "big") + bytes([wrong and len(context) > TOPK]))
    noise = zlib.crc32(b"%d/%d/%d/%s" % (seed, company, plugin, engine.encode()))
    # An odd step visits 20 of the 256 tokens, each once.
    step = seed >> 8 | 1
    values = [-1.0 - 0.5 * i + NOISE * (((noise >> i) & 15) / 7.5 - 1) for i in range(20)]
    return {(seed + step * i) % VOCAB: value for i, value in enumerate(values)}


def least(context: list[int]) -> float:
    """The log probability of any other token."""
    return -12.0 - sum(context) % 5


def common(one: list[int], other: list[int]) -> int:
    """Length of the prefix that both have."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Handler(BaseHTTPRequestHandler):
    """Answers requests of HTTP/1.1, whose connections stay open."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a reply of two packets waits for the first to be acknowledged

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def reply(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, events: Iterable[str]) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for event in [*events, "[DONE]"]:
            self.wfile.write(f"data: {event}\n\n".encode())
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Listens on 127.0.0.1 and the port of the command line."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, handler: type[Handler]):
        super().__init__(("127.0.0.1", PORT), handler)


def note_pid() -> None:
    with open(os.environ["FAKE_PIDS"], "a") as pids:
        pids.write(f"{os.getpid()}\n")
