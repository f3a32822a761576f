"""What a command of `warm_python` is before it becomes the command: hands all that it has to the server, and waits.

    python -I -S warm_client.py SOCKET WORD...

It begins in 15 ms because it imports built-in modules alone; `socket`, `signal` and `json` would take 50 ms more.
"""

import _signal
import _socket
import marshal
import os
import sys

PASSED_ON = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGTERM, _signal.SIGUSR1, _signal.SIGUSR2)
STREAMS = (0, 1, 2)
MESSAGE_BYTES = 1 << 20


def run(address: str, words: list[str]) -> int:
    """Has the server run `python WORDS` and passes signals on to it; returns its exit code."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    connection.connect(address)
    request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in STREAMS)
    connection.sendmsg([marshal.dumps(request)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    pid = int(connection.recv(MESSAGE_BYTES))
    for number in PASSED_ON:
        _signal.signal(number, lambda number, _frame: os.kill(pid, number))
    code = int(connection.recv(MESSAGE_BYTES) or -_signal.SIGKILL)
    if code < 0:
        if -code in PASSED_ON:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
