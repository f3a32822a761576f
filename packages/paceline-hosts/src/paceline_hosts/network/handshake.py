"""The handshake: both ends of a connection prove that they have the secret of the run, before either reads a message.

    listener -> caller    MAGIC nonce
    caller -> listener    nonce proof    a proof is an HMAC-SHA256 of both nonces under the secret, different for each end
    listener -> caller    proof          or "refused", and the connection is closed

With TLS (`tls.py`) the first line says so, and everything after it is encrypted. Both proofs then include the certificate of
the listener.

After the handshake each line is a message with its own HMAC, whose key belongs to this connection and direction and which
includes the number of the message. So nobody on the network can insert, drop, repeat or reorder messages. Without TLS they can
be read on the network; they hold names of hosts, ports, the first line of an error, stacks that somebody has asked for and, if
the hosts of a watched run share no folder, the lines of its journal.
"""

from __future__ import annotations

import hmac
import secrets

MAGIC = b"paceline-launch-1"
MAGIC_TLS = MAGIC + b"+tls"
_REFUSED = b"refused"
_LONGEST_IN_HANDSHAKE = 256
_LONGEST = 1 << 22  # the proposal for a round of 20,000 nodes has 4 MB
_HEX = 64  # characters of a nonce, a proof, an HMAC


class HandshakeError(Exception):
    """The other end is no launcher of this run.

    Attributes:
        how: "secret" for a launcher with another secret; "tls" if only one of the two ends uses TLS; else "stranger".
        reply: data to send before the connection is closed.
    """

    def __init__(self, how: str, reply: bytes = b"") -> None:
        super().__init__(how)
        self.how = how
        self.reply = reply


class Handshake:
    """One end of one connection, without its socket.

    Args:
        secret: the run's.
        caller: whether this end opened the connection.
        tls: whether the connection is to be encrypted.

    Attributes:
        greeting: the data to send first.
        proved: whether the other end has proved that it has the secret.
        awaits_tls: whether the connection has to be encrypted before anything more is sent.
    """

    def __init__(self, secret: str, *, caller: bool, tls: bool = False) -> None:
        self._secret = secret.encode()
        self._caller = caller
        self._magic = MAGIC_TLS if tls else MAGIC
        self._certificate = b""
        self.awaits_tls = tls and not caller
        self._nonce = secrets.token_hex(_HEX // 2).encode()
        self._nonces = b""
        self._rest = b""
        self._sent = 0
        self._received = 0
        self.greeting = b"" if caller else self._magic + b" " + self._nonce + b"\n"
        self.proved = False

    def receive(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Takes in data. Returns the messages in it, and the data to send back.

        Raises:
            HandshakeError: the connection must be closed.
        """
        # The rest of the earlier data was searched before, so only new data can hold the end of a line.
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._rest + lines[0]
            self._rest = rest
        else:
            self._rest += rest
        messages: list[bytes] = []
        reply = b""
        for line in lines:
            if self.proved:
                messages.append(self._opened(line))
            else:
                reply += self._answer(line)
        # Whoever has proved nothing yet must not make this process collect megabytes.
        longest = _LONGEST if self.proved else _LONGEST_IN_HANDSHAKE
        if len(self._rest) > longest:
            raise HandshakeError("stranger")
        return messages, reply

    def encrypted(self, certificate: bytes) -> bytes:
        """Continues the handshake on the encrypted connection. Returns the data to send.

        Args:
            certificate: the fingerprint of the certificate of the listener, as this end has seen it.
        """
        self.awaits_tls = False
        self._certificate = certificate
        if not self._caller:
            return b""  # the caller proves first
        return self._nonce + b" " + self._hmac(b"caller") + b"\n"

    def seal(self, message: bytes) -> bytes:
        """A message with its HMAC, as it is sent after the handshake; it must not hold a newline."""
        tag = self._tag(self._caller, self._sent, message)
        self._sent += 1
        return tag + b" " + message + b"\n"

    def _answer(self, line: bytes) -> bytes:
        """Returns the answer to a line of the handshake."""
        if not self._caller:
            nonce, _, proof = line.partition(b" ")
            if len(nonce) != _HEX or len(proof) != _HEX:
                raise HandshakeError("stranger")
            self._nonces = self._nonce + nonce
            if not hmac.compare_digest(proof, self._hmac(b"caller")):
                raise HandshakeError("secret", _REFUSED + b"\n")
            self.proved = True
            return self._hmac(b"listener") + b"\n"
        if not self._nonces:
            magic, _, nonce = line.partition(b" ")
            if magic not in (MAGIC, MAGIC_TLS) or len(nonce) != _HEX:
                raise HandshakeError("stranger")
            if magic != self._magic:
                raise HandshakeError("tls")
            self._nonces = nonce + self._nonce
            if self._magic == MAGIC_TLS:
                self.awaits_tls = True
                return b""
            return self._nonce + b" " + self._hmac(b"caller") + b"\n"
        if not hmac.compare_digest(line, self._hmac(b"listener")):
            raise HandshakeError("secret")
        self.proved = True
        return b""

    def _opened(self, line: bytes) -> bytes:
        """Returns the message of a line, after its HMAC was checked."""
        tag, _, message = line.partition(b" ")
        # The number of the message is part of the tag, so a message that was repeated or reordered has a wrong tag.
        expected = self._tag(not self._caller, self._received, message)
        if len(message) > _LONGEST or not hmac.compare_digest(tag, expected):
            raise HandshakeError("stranger")
        self._received += 1
        return message

    def _tag(self, of_caller: bool, number: int, message: bytes) -> bytes:
        # Each direction has its own key, so that nobody can send a message back to its sender.
        key = self._hmac(b"messages of the caller" if of_caller else b"messages of the listener")
        return hmac.digest(key, number.to_bytes(8) + message, "sha256").hex().encode()

    def _hmac(self, purpose: bytes) -> bytes:
        """Returns the HMAC of both nonces and the certificate, if any, with a different key for each purpose."""
        text = MAGIC + b" " + purpose + b" " + self._nonces + self._certificate
        return hmac.digest(self._secret, text, "sha256").hex().encode()
