"""How the two ends of a connection prove to each other that they have the run's secret, before either reads a message.

    listener -> caller    MAGIC nonce
    caller -> listener    nonce proof             HMAC-SHA256 of both nonces under the secret, and of which end this is
    listener -> caller    proof                   or "refused", and the end

With TLS (`tls.py`) the first line says so, and all that follows is encrypted; both proofs then include the certificate of
the listener.

After that each line is a message with an HMAC of its own, under a key of this connection and direction and with the
number of the message: nothing can be put in, left out, said again or turned round by somebody on the way. Without TLS
messages can be read on the way; they hold names of hosts, ports, the first line of an error, stacks that somebody has asked
for and, of a watched run on hosts that share no folder, the lines of its journal.
"""

from __future__ import annotations

import hmac
import secrets

MAGIC = b"paceline-launch-1"
MAGIC_TLS = MAGIC + b"+tls"
_REFUSED = b"refused"
_LONGEST_UNPROVED = 256
_LONGEST = 1 << 22  # a round of 20,000 nodes has 4 MB
_HEX = 64  # characters of a nonce, a proof, an HMAC


class Unproved(Exception):
    """The other end is no launcher of this run.

    Attributes:
        how: "secret", where it is a launcher with another secret; "tls", where one of the two encrypts and the other does
            not; else "stranger".
        reply: what to send before the connection is closed.
    """

    def __init__(self, how: str, reply: bytes = b"") -> None:
        super().__init__(how)
        self.how, self.reply = how, reply


class Proof:
    """One end of one connection, without its socket.

    Args:
        secret: the run's.
        caller: whether this end opened the connection.
        tls: whether the connection is to be encrypted.

    Attributes:
        greeting: what to send first.
        proved: whether the other end has proved that it has the secret.
        awaits_tls: whether the connection has to be encrypted before anything more is sent.
    """

    def __init__(self, secret: str, *, caller: bool, tls: bool = False) -> None:
        self._secret, self._caller = secret.encode(), caller
        self._magic = MAGIC_TLS if tls else MAGIC
        self._certificate = b""
        self.awaits_tls = tls and not caller
        self._nonce = secrets.token_hex(_HEX // 2).encode()
        self._both = b""
        self._rest = b""
        self._sent = self._received = 0
        self.greeting = b"" if caller else self._magic + b" " + self._nonce + b"\n"
        self.proved = False

    def receive(self, data: bytes) -> tuple[list[bytes], bytes]:
        """The messages in what has come, and what to send in answer.

        Raises:
            Unproved: the connection is to be closed.
        """
        # What is left over has been searched before: only what is new can end a line.
        *ends, rest = data.split(b"\n")
        lines = [self._rest + ends[0], *ends[1:]] if ends else []
        self._rest = rest if ends else self._rest + rest
        messages, reply = list[bytes](), b""
        for line in lines:
            if self.proved:
                messages.append(self._opened(line))
            else:
                reply += self._answer(line)
        if len(self._rest) > (_LONGEST if self.proved else _LONGEST_UNPROVED):
            raise Unproved("stranger")
        return messages, reply

    def encrypted(self, certificate: bytes) -> bytes:
        """The connection is encrypted from now on; returns what to send then.

        Args:
            certificate: the fingerprint of the listener's, as this end knows it.
        """
        self.awaits_tls = False
        self._certificate = certificate
        return self._nonce + b" " + self._hmac(b"caller") + b"\n" if self._caller else b""

    def seal(self, message: bytes) -> bytes:
        """A message as it is sent; it must not hold a newline. Only for an end that has had proof."""
        tag = self._tag(self._caller, self._sent, message)
        self._sent += 1
        return tag + b" " + message + b"\n"

    def _answer(self, line: bytes) -> bytes:
        """What to say to a line that belongs to the proof."""
        if not self._caller:
            nonce, _, proof = line.partition(b" ")
            if len(nonce) != _HEX or len(proof) != _HEX:
                raise Unproved("stranger")
            self._both = self._nonce + nonce
            if not hmac.compare_digest(proof, self._hmac(b"caller")):
                raise Unproved("secret", _REFUSED + b"\n")
            self.proved = True
            return self._hmac(b"listener") + b"\n"
        if not self._both:
            magic, _, nonce = line.partition(b" ")
            if magic not in (MAGIC, MAGIC_TLS) or len(nonce) != _HEX:
                raise Unproved("stranger")
            if magic != self._magic:
                raise Unproved("tls")
            self._both = nonce + self._nonce
            if self._magic == MAGIC_TLS:
                self.awaits_tls = True
                return b""
            return self._nonce + b" " + self._hmac(b"caller") + b"\n"
        if not hmac.compare_digest(line, self._hmac(b"listener")):
            raise Unproved("secret")
        self.proved = True
        return b""

    def _opened(self, line: bytes) -> bytes:
        """The message of a line, whose HMAC must be right."""
        tag, _, message = line.partition(b" ")
        if len(message) > _LONGEST or not hmac.compare_digest(
            tag, self._tag(not self._caller, self._received, message)
        ):
            raise Unproved("stranger")
        self._received += 1
        return message

    def _tag(self, of_caller: bool, number: int, message: bytes) -> bytes:
        key = self._hmac(b"messages of the caller" if of_caller else b"messages of the listener")
        return hmac.digest(key, number.to_bytes(8) + message, "sha256").hex().encode()

    def _hmac(self, purpose: bytes) -> bytes:
        """Of both nonces and of the certificate, if any, for one purpose alone."""
        text = MAGIC + b" " + purpose + b" " + self._both + self._certificate
        return hmac.digest(self._secret, text, "sha256").hex().encode()
