"""Where the files of a trace lie: a path, or any URL whose package fsspec finds installed."""

from __future__ import annotations

import fsspec

from moe_telemetry.errors import TraceError

__all__ = ["files_in", "filesystem_of", "is_local"]


def filesystem_of(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the filesystem of a path or URL, and the path there.

    Raises:
        TraceError: no package is installed for it, or it cannot be reached.
    """
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except Exception as error:  # each store raises its own
        raise _unreachable(url, error) from error
    return filesystem, root.rstrip("/")


def files_in(filesystem: fsspec.AbstractFileSystem, root: str, url: str) -> dict[str, int | None]:
    """Return the files of a folder by name, with their bytes, None where its listing does not say.

    Raises:
        TraceError: there is no such folder, or it cannot be listed.
    """
    try:
        filesystem.invalidate_cache(root)  # a trace may have grown since this process listed it
        entries = filesystem.ls(root, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        raise TraceError(f"{url}: no such folder; expected the folder that monitor.trace() wrote to") from None
    except Exception as error:  # each store raises its own
        raise _unreachable(url, error) from error
    # a file is listed as itself
    if [entry["name"] for entry in entries] == [root]:
        raise TraceError(f"{url} is a file; expected the folder that monitor.trace() wrote to")
    return {entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry["size"] for entry in entries if entry["type"] == "file"}


def is_local(filesystem: fsspec.AbstractFileSystem) -> bool:
    """Tell whether paths of a filesystem are those of this machine."""
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def _unreachable(url: str, error: Exception) -> TraceError:
    return TraceError(f"{url}: {' '.join(str(error).split()) or type(error).__name__}")
