"""Start servers at the same time, and stop them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import datetime

from nsa_plugin.tools.compare.measured import STOCK
from nsa_plugin.tools.compare.role_server import RoleServer, StartCancelledError
from nsa_plugin.tools.serving.client import settle
from nsa_plugin.tools.serving.engine import CompareError, ServedEngine
from nsa_plugin.tools.serving.process import ServerError

HEARTBEAT_S = 15.0
_DEAD_S, _SETTLE_S = 10.0, 60.0  # a server on empty caches compiles for as long before it answers
_TAIL_LINES, _TAIL_WIDTH = 40, 240
_SHOWN_WIDTH = 150

Say = Callable[[str], None]


def speaker(write: Callable[[str], None]) -> Say:
    """A function that writes lines with the time of day and the seconds since now."""
    started = time.monotonic()
    return lambda text: write(f"{datetime.now():%H:%M:%S} {time.monotonic() - started:6.1f} s  {text}")


def start_all(servers: Sequence[RoleServer]) -> None:
    """Start the servers at the same time, and wait until each is healthy or has failed.

    The run of a failed server has its `error` set. If stock fails, the others are stopped without an error: there is
    nothing to compare them with. On an exception (Ctrl-C, a signal turned into one) servers that are still starting are
    stopped; healthy ones are left to the caller, as on success.
    """
    with ThreadPoolExecutor(max_workers=len(servers)) as pool:
        try:
            starting: dict[Future[None], RoleServer] = {}
            for one in servers:
                one.say(f"starting, {one.server.spec.start_timeout:.0f} s allowed, log {one.log}")
                starting[pool.submit(one.start)] = one
            said = time.monotonic()
            while starting:
                pause = max(0.0, said + HEARTBEAT_S - time.monotonic())
                for future in wait(starting, pause, FIRST_COMPLETED).done:
                    one = starting.pop(future)
                    if not _started(one, future.exception()) and one.role == STOCK:
                        for other in servers:
                            other.cancel()
                if starting and time.monotonic() >= said + HEARTBEAT_S:
                    said = time.monotonic()
                    for one in starting.values():
                        last = "".join(one.tail(1))[:_SHOWN_WIDTH] or "nothing logged yet"
                        one.say(f"starting for {one.seconds:.0f} s: {last}")
        except BaseException:
            for one in servers:
                one.cancel()
            raise  # once the pool's threads have ended


def _started(one: RoleServer, error: BaseException | None) -> bool:
    if error is None:
        one.say(f"healthy after {one.run.start_seconds} s")
        one.note_plugin()
    elif isinstance(error, ServerError):
        for line in one.tail(_TAIL_LINES):
            one.say(f"| {line[:_TAIL_WIDTH]}")
        one.fail(error)
    elif not isinstance(error, StartCancelledError):
        raise error
    return error is None


def recover(one: RoleServer, engine: ServedEngine, left: float) -> bool:
    """After a request that failed or was given up, check that the server lives and is idle.

    Args:
        left: seconds until the deadline. With none left, nothing follows that a busy server could disturb.

    Returns:
        False if the server is dying, which says more than a broken connection, or stays busy. Its run has failed then.
    """
    until = time.monotonic() + left
    try:
        try:
            if left > 0:
                settle(engine, one.server.url, min(_SETTLE_S, left))
            else:
                one.server.check_alive()
        except CompareError as error:
            one.server.check_alive(min(_DEAD_S, max(0.0, until - time.monotonic())))
            if time.monotonic() < until:
                raise ServerError(f"the server does not become idle: {error}") from error
    except ServerError as failed:
        one.fail(failed)
        return False
    return True


def finish_all(servers: Sequence[RoleServer], say: Say) -> None:
    """Stop the servers at the same time; see `RoleServer.finish`. Stopped servers are skipped.

    An interrupt here leaves nothing behind: Python waits for the threads when it ends, and each server's supervisor
    ends it even without this process.
    """
    up = [one.role for one in servers if one.up]
    with ThreadPoolExecutor(max_workers=max(1, len(servers))) as pool:
        for future in [pool.submit(one.finish) for one in servers]:
            future.result()
    if up:
        say(f"{', '.join(up)}: stopped")
