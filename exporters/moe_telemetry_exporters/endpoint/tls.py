"""TLS for the endpoint: its certificate, and the authority whose clients alone may ask."""

from __future__ import annotations

import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from moe_telemetry.errors import ConfigError, ExporterError

__all__ = ["Certificates", "Tls"]

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """The files that TLS needs, in PEM."""

    certfile: PathLike
    keyfile: PathLike | None
    client_cafile: PathLike | None

    @classmethod
    def of(
        cls, certfile: PathLike | None, keyfile: PathLike | None, client_cafile: PathLike | None
    ) -> Certificates | None:
        """Return what three settings of an exporter make; None where none is set.

        Raises:
            ConfigError: there is a key or an authority, and no certificate.
        """
        if certfile is not None:
            return cls(certfile=certfile, keyfile=keyfile, client_cafile=client_cafile)
        for name, value in (("keyfile", keyfile), ("client_cafile", client_cafile)):
            if value is not None:
                raise ConfigError(f"{name}={value!r} needs certfile: the certificate that the endpoint shows")
        return None

    def stamps(self) -> tuple[tuple[int, int], ...]:
        """Return what changes when a file is replaced."""
        stats = [Path(path).stat() for path in (self.certfile, self.keyfile, self.client_cafile) if path is not None]
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)

    def context(self) -> ssl.SSLContext:
        """Read the files.

        Raises:
            ExporterError: one cannot be read, is no PEM, needs a passphrase, or the key is another certificate's.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password=_no_passphrase)
        except OSError as error:  # an SSLError is one too
            raise ExporterError(
                f"certfile={self.certfile!r}, keyfile={self.keyfile!r}: {_reason(error)}. "
                "Expected files in PEM, the key without a passphrase, in a file of its own or in certfile"
            ) from error
        if self.client_cafile is not None:
            try:
                context.load_verify_locations(self.client_cafile)
            except OSError as error:
                raise ExporterError(
                    f"client_cafile={self.client_cafile!r}: {_reason(error)}. Expected certificates in PEM"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class Tls:
    """Secures connections with the certificates that are there when they begin."""

    def __init__(self, certificates: Certificates) -> None:
        """Read the certificates; raises ExporterError where that fails."""
        self._certificates = certificates
        self._context = certificates.context()
        self._stamps = certificates.stamps()

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return the connection for a handshake, which is the caller's; the one given is then empty."""
        self._look_again()
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def _look_again(self) -> None:
        # certificates that live for days are replaced in place while a training runs for weeks; the old one stays
        # until both of a pair are there
        try:
            if (stamps := self._certificates.stamps()) != self._stamps:
                self._context, self._stamps = self._certificates.context(), stamps
        except (OSError, ExporterError):
            return


def _no_passphrase() -> NoReturn:
    # without this OpenSSL would ask for one at the terminal, and training would wait for the answer
    raise ssl.SSLError("the key has a passphrase")


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)
