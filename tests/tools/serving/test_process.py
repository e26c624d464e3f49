import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from nsa_plugin.tools.serving import process as server_module
from nsa_plugin.tools.serving.logs import error_lines, last_message, log_tail
from nsa_plugin.tools.serving.process import Server, ServerError, ServerSpec, free_ports

from ..processes import alive

FAKE = Path(__file__).with_name("fake_server.py")
NUM_PROCESSES = 5


@pytest.fixture
def pids(tmp_path):
    return tmp_path / "pids"


def fake_spec(tmp_path, pids, mode="healthy", **kwargs):
    return ServerSpec(
        command=lambda port: [sys.executable, str(FAKE), "--port", str(port)],
        log=tmp_path / "server.log",
        environ={"FAKE_MODE": mode, "FAKE_PIDS": str(pids)},
        **kwargs,
    )


def wait_until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_a_healthy_server_answers_and_leaves_nothing(tmp_path, pids):
    with Server(fake_spec(tmp_path, pids)) as server:
        assert server.get("/metrics") == "fine"
        server.check_alive()
        assert len(alive(pids)) == NUM_PROCESSES
        assert set(server.pids()) == set(alive(pids))
    assert alive(pids) == []
    assert server.pids() == []
    with pytest.raises(ServerError):
        server.get("/health")


def test_an_error_inside_leaves_nothing(tmp_path, pids):
    with pytest.raises(ZeroDivisionError), Server(fake_spec(tmp_path, pids)):
        raise ZeroDivisionError
    assert alive(pids) == []


def test_a_server_that_ignores_sigterm_is_killed(tmp_path, pids):
    with Server(fake_spec(tmp_path, pids, "deaf")):
        pass
    assert alive(pids) == []


def test_a_server_that_dies_is_an_error_with_the_root_cause(tmp_path, pids):
    started = time.monotonic()
    with pytest.raises(ServerError) as caught:
        Server(fake_spec(tmp_path, pids, "dies", start_timeout=300)).start()
    assert time.monotonic() - started < 250
    message = str(caught.value)
    assert "exit code 3" in message
    assert message.index("ValueError: index_topk is a fruit") < message.index("RuntimeError: ServedEngine core")
    assert "Loading weights" not in message
    assert alive(pids) == []


def test_a_server_that_is_not_healthy_in_time_is_an_error(tmp_path, pids):
    seen = []

    def progress(seconds, line):
        seen.append((seconds, line))
        if line == "Loading weights":  # a busy machine takes longer than that to start Python
            object.__setattr__(server.spec, "start_timeout", 2.0)

    server = Server(fake_spec(tmp_path, pids, "never_healthy", start_timeout=120.0), progress)
    with pytest.raises(ServerError, match=r"not healthy after 2 s[\s\S]*Loading weights"):
        server.start()
    assert seen[-1][1] == "Loading weights"
    assert seen[-1][0] > 1
    assert alive(pids) == []


def test_a_command_that_does_not_exist_is_an_error(tmp_path, pids):
    spec = ServerSpec(command=lambda port: ["/nonexistent/vllm"], log=tmp_path / "server.log")
    with pytest.raises(ServerError, match=r"exit code 127[\s\S]*cannot start /nonexistent/vllm"):
        Server(spec).start()


def test_a_supervisor_that_was_killed_is_stood_in_for(tmp_path, pids):
    with Server(fake_spec(tmp_path, pids)) as server:
        os.kill(server._process.pid, signal.SIGKILL)
    assert alive(pids) == []


def test_a_process_that_stays_is_an_error(tmp_path, pids, monkeypatch):
    server = Server(fake_spec(tmp_path, pids))
    server.start()
    monkeypatch.setattr(Server, "_kill_members", lambda self, pid: [4711])
    with pytest.raises(ServerError, match="could not be ended: 4711"):
        server.stop()
    assert alive(pids) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("mode", ["healthy", "never_healthy"])
def test_nothing_outlives_whoever_started_it(tmp_path, pids, number, mode):
    """Also a Python that is killed, and one that dies of SIGTERM without a handler, which runs no clean-up."""
    script = textwrap.dedent(f"""
        import signal, sys, time
        from pathlib import Path
        from nsa_plugin.tools.serving.process import Server, ServerSpec
        signal.signal(signal.SIGINT, signal.default_int_handler)
        spec = ServerSpec(
            command=lambda port: [{sys.executable!r}, {str(FAKE)!r}, "--port", str(port)],
            log=Path({str(tmp_path / "server.log")!r}),
            environ={{"FAKE_MODE": {mode!r}, "FAKE_PIDS": {str(pids)!r}}},
        )
        with Server(spec):
            time.sleep(600)
    """)
    asker = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: pids.exists() and len(alive(pids)) == NUM_PROCESSES)
        asker.send_signal(number)
        _, stderr = asker.communicate(timeout=60)
    finally:
        asker.kill()
    if number is signal.SIGINT:
        assert "KeyboardInterrupt" in stderr
        assert alive(pids) == [], "the clean-up is over when the process ends"
    wait_until(lambda: not alive(pids))


def test_ctrl_c_during_the_clean_up_waits_for_it(tmp_path, pids):
    server = Server(fake_spec(tmp_path, pids))
    server.start()
    left = []

    def clean_up():
        with server_module._signals_held():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            server.stop()
            left.extend(alive(pids))
            left.append("the clean-up came to its end")

    with pytest.raises(KeyboardInterrupt):
        clean_up()
    assert left == ["the clean-up came to its end"]


def test_an_answer_that_is_none_is_no_answer(tmp_path, pids):
    """A connection can reach itself while the server does not listen yet."""
    server = Server(fake_spec(tmp_path, pids))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server._port = listener.getsockname()[1]

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(connection.recv(4096))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ServerError, match="GET /health HTTP"):
            server.get("/health")
        thread.join()


def test_a_free_port_is_free():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_ports(1)[0]))


LOG = """\
(APIServer pid=1) INFO 11-21 11:05:00 [api.py:12] Starting
plain words

(EngineCore pid=2) ERROR 11-21 11:05:01 [core.py:9]   File "x.py", line 3, in load
(EngineCore pid=2) ERROR 11-21 11:05:01 [core.py:9] torch.cuda.OutOfMemoryError: no memory
(APIServer pid=1) torch.cuda.OutOfMemoryError: no memory
usage: vllm serve [options]
vllm: error: unrecognized arguments: --fruit
"""


def test_reading_a_log(tmp_path):
    path = tmp_path / "log"
    path.write_text(LOG)
    assert log_tail(path, 1) == ["vllm: error: unrecognized arguments: --fruit"]
    assert log_tail(path, 99)[:2] == ["Starting", "plain words"]
    assert error_lines(path) == [
        "torch.cuda.OutOfMemoryError: no memory",
        "vllm: error: unrecognized arguments: --fruit",
    ]
    assert last_message(path) == "Starting"
    assert log_tail(tmp_path / "none", 3) == []
