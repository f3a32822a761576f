"""One connection between two launchers: a socket, the proof of the other end, and messages."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress

from paceline.launch.membership.messages import Message, decode, encode
from paceline.launch.network.handshake import Proof, Unproved
from paceline.launch.network.tls import Tls, fingerprint_of


class Connection:
    """One connection to another launcher; nothing that comes is read as a message before the other end is proved.

    Args:
        key: its number.
        sock: its socket.
        secret: the run's.
        connecting: whether this end opens it.
        peer: the other's address, where that one opened it.
        tls: what to encrypt with; None for nothing.

    Attributes:
        since: when it came to be.
        closing_since: since when the last word is on its way; None while more may be said.
        problem: why the other end is no launcher of this run: "secret" or "stranger" (`Unproved`); "" while it may be.
    """

    def __init__(
        self, key: int, sock: socket.socket, secret: str, connecting: bool, peer: str = "", tls: Tls | None = None
    ) -> None:
        self.key, self.sock, self.connecting, self.peer = key, sock, connecting, peer
        self.since = time.monotonic()
        self.closing_since: float | None = None
        self.problem = ""
        self._tls = tls
        self._is_caller = connecting
        self._shakes_hands = False  # while both ends agree on keys
        self._is_over = False  # the other end has hung up meanwhile
        self._awaits_room = False  # what TLS has to send does not fit in now
        self._proof = Proof(secret, caller=connecting, tls=tls is not None)
        self._out = self._proof.greeting
        self._unsealed: list[Message] = []
        sock.setblocking(False)

    @property
    def proved(self) -> bool:
        """Whether the other end has proved that it has the secret."""
        return self._proof.proved

    @property
    def is_unproved(self) -> bool:
        """Whether somebody has opened it who has not proved anything yet."""
        return bool(self.peer) and not self.proved

    @property
    def has_unsent(self) -> bool:
        """Whether there is something to send once the network takes it."""
        return self._awaits_room or (bool(self._out) and not self._shakes_hands)

    @property
    def all_sent(self) -> bool:
        """Whether all has been sent that was said."""
        return not self._out and not self._unsealed

    def send(self, message: Message) -> None:
        """Sends a message, now or as soon as it can be."""
        self._unsealed.append(message)
        self._seal()
        self.flush()

    def _seal(self) -> None:
        if self.proved:
            for message in self._unsealed:
                self._out += self._proof.seal(encode(message))
            self._unsealed.clear()

    def flush(self) -> None:
        """Sends what waits; a peer that is gone is noticed by reading."""
        if self.connecting or self._shakes_hands:
            return
        try:
            while self._out:
                self._out = self._out[self.sock.send(self._out) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:
            self._out, self._unsealed = b"", []
        if self.all_sent and self.closing_since is not None:
            with suppress(OSError):
                # The socket's own: TLS's would take the end of what is still to be read for plain text.
                socket.socket.shutdown(self.sock, socket.SHUT_WR)

    def receive(self) -> tuple[list[Message], bool]:
        """The messages that have come, and whether the connection goes on."""
        if self._proof.awaits_tls and not self._encrypt():
            return [], not (self.problem or self._is_over)
        try:
            data = self.sock.recv(1 << 16)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return [], True
        except OSError:
            data = b""
        try:
            lines, answer = self._proof.receive(data)
            messages = [decode(line) for line in lines]
        except Unproved as error:
            self.problem = error.how
            self._out = error.reply
            self.flush()
            return [], False
        except ValueError:  # it has the secret, and speaks as no launcher of this version does
            self.problem = "stranger"
            return [], False
        self._out += answer
        if self._proof.awaits_tls and not self._encrypt():
            return [], not (self.problem or self._is_over)
        self._seal()
        self.flush()
        return messages, bool(data)

    def _encrypt(self) -> bool:
        """Agrees on keys with the other end, as far as that goes now; returns whether it is done."""
        assert self._tls is not None, "the proof asks for it"
        if self._out and not self._shakes_hands:
            self.flush()
            return False  # the listener's greeting goes first
        try:
            if not self._shakes_hands:
                context = self._tls.caller if self._is_caller else self._tls.listener
                self.sock = context.wrap_socket(
                    self.sock, server_side=not self._is_caller, do_handshake_on_connect=False
                )
                self._shakes_hands = True
            assert isinstance(self.sock, ssl.SSLSocket), "it has been wrapped"
            self._awaits_room = False
            self.sock.do_handshake()
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except ssl.SSLWantWriteError:
            self._awaits_room = True
            return False
        except (ssl.SSLEOFError, ConnectionError):
            self._is_over = True
            return False
        except (OSError, ValueError):
            self.problem = "stranger"
            return False
        self._shakes_hands = False
        certificate = fingerprint_of(self.sock) if self._is_caller else self._tls.fingerprint
        self._out += self._proof.encrypted(certificate)
        self.flush()
        return True
