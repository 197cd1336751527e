"""A user name and a password for HTTP: checked, read, compared, and never shown."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path

from moe_telemetry.errors import ConfigError, ExporterError

__all__ = ["Credentials"]


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A user name and where its password comes from: from a setting or, read anew each time, from a file."""

    username: str
    password: str | None = field(default=None, repr=False)
    password_file: str | os.PathLike[str] | None = None

    @classmethod
    def of(
        cls, username: str | None, password: str | None, password_file: str | os.PathLike[str] | None
    ) -> Credentials | None:
        """Return the credentials that three settings of an exporter make; None where none is set.

        Raises:
            ConfigError: one is missing, one too many, or a text cannot be sent.
        """
        if username is None and password is None and password_file is None:
            return None
        if username is None:
            raise ConfigError("password and password_file need username: set all that belongs together, or nothing")
        if not isinstance(username, str) or not username or ":" in username:
            raise ConfigError(f"username={username!r}: expected a text without a colon")
        if (password is None) == (password_file is None):
            raise ConfigError(f"username={username!r} needs exactly one of password and password_file")
        if password is not None and (not isinstance(password, str) or not password):
            raise ConfigError(f"password of username={username!r}: expected a text that is not empty")
        return cls(username=username, password=password, password_file=password_file)

    def header(self) -> str:
        """Return the value of an Authorization header.

        Raises:
            ExporterError: the file of the password cannot be read, or is empty.
        """
        return f"Basic {base64.b64encode(self._pair()).decode()}"

    def match(self, header: str) -> bool:
        """Tell whether an Authorization header has these credentials, in a time that tells nothing about them."""
        scheme, _, encoded = header.partition(" ")
        try:
            given = base64.b64decode(encoded.strip(), validate=True)
            expected = self._pair()
        except (binascii.Error, ValueError, ExporterError):
            return False
        return scheme.lower() == "basic" and hmac.compare_digest(given, expected)

    def _pair(self) -> bytes:
        return f"{self.username}:{self.password or self._read()}".encode("utf-8", "surrogateescape")

    def _read(self) -> str:
        try:
            # a last line end is the editor's
            password = Path(self.password_file or "").read_bytes().decode("utf-8", "surrogateescape").rstrip("\r\n")
        except OSError as error:
            raise ExporterError(f"password_file={self.password_file!r} cannot be read: {error.strerror}") from error
        if not password:
            raise ExporterError(f"password_file={self.password_file!r} is empty: write the password there")
        return password
