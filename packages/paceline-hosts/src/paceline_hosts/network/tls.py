"""TLS between launchers (`--tls`).

With `--tls yes` each launcher makes a self-signed certificate for its own lifetime. The secret of the run shows that it belongs
to the other launcher: both proofs of the handshake (`handshake.py`) include the certificate that the caller has received, and
a man in the middle would have to send another one. (This is the channel binding "tls-server-end-point" of RFC 5929, as in
SCRAM.)

With `--tls CERT,KEY[,CA]` the certificates are the user's; with a CA, both ends must show one that it has signed.
"""

from __future__ import annotations

import hashlib
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import LaunchError
from paceline.base.temporary import temporary_folder

_MAKE_S = 30.0
_DAYS = 3650  # long, because the clocks of hosts may differ, and the age of this certificate does not matter


@dataclass(frozen=True)
class Tls:
    """The TLS contexts of a launcher.

    Attributes:
        listener, caller: the contexts for the two ends of a connection.
        fingerprint: the SHA-256 of the certificate of this launcher.
    """

    listener: ssl.SSLContext
    caller: ssl.SSLContext
    fingerprint: bytes

    @classmethod
    def of(cls, setting: str) -> Tls | None:
        """Returns the contexts for a value of `--tls`; None for "no".

        Raises:
            LaunchError: `launch-tls`, where a file cannot be read, or no certificate can be made.
        """
        if setting == "no":
            return None
        with _files(setting) as (certificate, key, *authority):
            return cls._from(certificate, key, str(authority[0]) if authority else "", setting)

    @classmethod
    def _from(cls, certificate: Path, key: Path, authority: str, setting: str) -> Tls:
        listener = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        caller = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Launchers connect to addresses, but a certificate names hosts. The secret of the run shows who the other end is.
        caller.check_hostname = False
        caller.verify_mode = ssl.CERT_NONE
        try:
            der = ssl.PEM_cert_to_DER_cert(_first_certificate(certificate.read_text(encoding="ascii")))
            for context in (listener, caller):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.load_cert_chain(certificate, key)
                if authority:
                    context.load_verify_locations(authority)
                    context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            raise LaunchError(
                "launch-tls",
                "the certificate, the key or the CA cannot be used.",
                why=f"--tls {setting}: {str(reason).lower().replace('_', ' ')}",
                fix="give PEM files that this user may read, or `--tls yes`, for which no files are needed",
            ) from None
        return cls(listener, caller, hashlib.sha256(der).digest())


@contextmanager
def _files(setting: str) -> Iterator[Sequence[Path]]:
    """The files of certificate, key and, if given, CA. For "yes" they are made, and removed after the context.

    Raises:
        LaunchError: `launch-tls`, where no certificate can be made.
    """
    if setting != "yes":
        yield [Path(path) for path in setting.split(",")]
        return
    with tempfile.TemporaryDirectory(prefix="paceline-tls-", dir=temporary_folder()) as folder:
        certificate = Path(folder, "certificate")
        key = Path(folder, "key")
        _make(certificate, key)
        yield [certificate, key]


def contents_for_run(setting: str) -> list[str]:
    """Returns the texts of certificate, key and CA, for launchers that get their files from the command that starts the run.

    `--tls yes` then means one pair for the whole run. The certificate is self-signed, so it is its own CA.

    Raises:
        LaunchError: `launch-tls`, where a file cannot be used, or no certificate can be made.
    """
    if setting != "yes":
        Tls.of(setting)
    with _files(setting) as paths:
        contents = [path.read_text(encoding="ascii") for path in paths]
    return [*contents, contents[0]] if setting == "yes" else contents


def fingerprint_of(sock: ssl.SSLSocket) -> bytes:
    """Returns the SHA-256 of the certificate of the other end."""
    return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()


def _first_certificate(text: str) -> str:
    """Returns the first certificate of a chain, which is that of this host."""
    end = "-----END CERTIFICATE-----"
    begin = text.find("-----BEGIN CERTIFICATE-----")
    if begin < 0 or end not in text:
        raise ValueError("it holds no PEM certificate")
    return text[begin : text.index(end, begin) + len(end)]


def _make(certificate: Path, key: Path) -> None:
    """Makes a certificate with `openssl`, because the standard library cannot make one.

    Raises:
        LaunchError: `launch-tls`.
    """
    program = shutil.which("openssl")
    problem = "there is no program `openssl` on PATH"
    if program is not None:
        words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-batch"]
        names = ["-subj", "/CN=paceline", "-days", str(_DAYS), "-keyout", str(key), "-out", str(certificate)]
        try:
            completed = subprocess.run([program, *words, *names], capture_output=True, text=True, timeout=_MAKE_S)
            problem = ""
            if completed.returncode != 0:
                last_line = completed.stderr.strip().splitlines()[-1:]
                problem = f"openssl: {last_line or completed.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = f"openssl: {error}"
    if problem:
        raise LaunchError(
            "launch-tls",
            "no certificate can be made for this launcher.",
            why=f"--tls yes: {problem}",
            fix="install openssl on all nodes, or give files: --tls CERT,KEY,CA",
        )
