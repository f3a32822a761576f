"""One connection between two launchers: a socket, the handshake, and messages."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress

from paceline_hosts.membership.messages import Message, decode, encode
from paceline_hosts.network.handshake import Handshake, HandshakeError
from paceline_hosts.network.tls import Tls, fingerprint_of


class Connection:
    """A connection to another launcher. No data is read as a message before the handshake is complete.

    Args:
        key: the number of the connection.
        sock: the socket.
        secret: the secret of the run.
        connecting: whether this end opens the connection.
        peer: the address of the other end, if that one opened the connection.
        tls: certificate and key for TLS; None for a connection without TLS.

    Attributes:
        since: when the connection was opened.
        closing_since: when the last message was given to `send`; None while more may follow.
        problem: why the other end is not a launcher of this run (`HandshakeError.how`); "" for no problem.
    """

    def __init__(
        self, key: int, sock: socket.socket, secret: str, connecting: bool, peer: str = "", tls: Tls | None = None
    ) -> None:
        self.key = key
        self.sock = sock
        self.connecting = connecting
        self.peer = peer
        self.since = time.monotonic()
        self.closing_since: float | None = None
        self.problem = ""
        self._tls = tls
        self._is_caller = connecting
        self._in_tls_handshake = False
        self._is_closed = False  # whether the other end has closed the connection during the TLS handshake
        self._tls_wants_write = False  # whether the TLS handshake waits until the socket takes more data
        self._handshake = Handshake(secret, caller=connecting, tls=tls is not None)
        self._out = self._handshake.greeting
        self._waiting: list[Message] = []  # until the handshake is complete
        sock.setblocking(False)

    @property
    def proved(self) -> bool:
        """Whether the other end has proved that it has the secret."""
        return self._handshake.proved

    @property
    def is_in_handshake(self) -> bool:
        """Whether the other end has opened it and has not completed the handshake."""
        return bool(self.peer) and not self.proved

    @property
    def has_unsent(self) -> bool:
        """Whether there is data to send once the socket takes it."""
        return self._tls_wants_write or (bool(self._out) and not self._in_tls_handshake)

    @property
    def all_sent(self) -> bool:
        """Whether all messages have been sent."""
        return not self._out and not self._waiting

    def send(self, message: Message) -> None:
        """Sends a message, now or as soon as the handshake is complete and the socket takes it."""
        self._waiting.append(message)
        self._encode_waiting()
        self.flush()

    def _encode_waiting(self) -> None:
        if self.proved:
            for message in self._waiting:
                self._out += self._handshake.seal(encode(message))
            self._waiting.clear()

    def flush(self) -> None:
        """Sends the data that waits. A closed connection is noticed by `receive`."""
        if self.connecting or self._in_tls_handshake:
            return
        try:
            while self._out:
                self._out = self._out[self.sock.send(self._out) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:
            self._out = b""
            self._waiting = []
        if self.all_sent and self.closing_since is not None:
            with suppress(OSError):
                # The shutdown of the plain socket, because after that of TLS unread data would be taken for plain text.
                socket.socket.shutdown(self.sock, socket.SHUT_WR)

    def receive(self) -> tuple[list[Message], bool]:
        """Returns the messages that have arrived, and whether the connection is still open."""
        if self._handshake.awaits_tls and not self._encrypt():
            return [], not (self.problem or self._is_closed)
        try:
            data = self.sock.recv(1 << 16)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return [], True
        except OSError:
            data = b""
        try:
            lines, answer = self._handshake.receive(data)
            messages = [decode(line) for line in lines]
        except HandshakeError as error:
            self.problem = error.how
            self._out = error.reply  # tells the other end why, in place of what was still to be sent
            self.flush()
            return [], False
        except ValueError:  # the other end has the secret, but this is not a message of this version
            self.problem = "stranger"
            return [], False
        self._out += answer
        if self._handshake.awaits_tls and not self._encrypt():
            return [], not (self.problem or self._is_closed)
        self._encode_waiting()
        self.flush()
        return messages, bool(data)

    def _encrypt(self) -> bool:
        """Continues the TLS handshake as far as possible without waiting. Returns whether it is complete."""
        assert self._tls is not None, "the handshake asks for TLS only where it is used"
        if self._out and not self._in_tls_handshake:
            self.flush()
            return False  # the greeting of the listener is sent before the TLS handshake
        try:
            if not self._in_tls_handshake:
                context = self._tls.caller if self._is_caller else self._tls.listener
                self.sock = context.wrap_socket(
                    self.sock, server_side=not self._is_caller, do_handshake_on_connect=False
                )
                self._in_tls_handshake = True
            assert isinstance(self.sock, ssl.SSLSocket), "it has been wrapped"
            self._tls_wants_write = False
            self.sock.do_handshake()
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except ssl.SSLWantWriteError:
            self._tls_wants_write = True
            return False
        except (ssl.SSLEOFError, ConnectionError):
            self._is_closed = True
            return False
        except (OSError, ValueError):
            self.problem = "stranger"
            return False
        self._in_tls_handshake = False
        certificate = fingerprint_of(self.sock) if self._is_caller else self._tls.fingerprint
        self._out += self._handshake.encrypted(certificate)
        self.flush()
        return True
