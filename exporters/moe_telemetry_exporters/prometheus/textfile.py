"""PrometheusTextfileExporter: the last snapshot in a file that node_exporter's textfile collector shows.

    mt.watch(model, PrometheusTextfileExporter(directory="/var/lib/prometheus/node-exporter"))

For nodes whose only open port is node_exporter's. One process a node writes, with its node's share of the counters.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from moe_telemetry.errors import ConfigError, ExporterError
from moe_telemetry.snapshot import Scope, Snapshot
from moe_telemetry_exporters.prometheus.text import TextRenderer
from moe_telemetry_exporters.settings import check_types

__all__ = ["PrometheusTextfileExporter"]


@dataclass(kw_only=True, eq=False)
class PrometheusTextfileExporter:
    """Writes every snapshot in place of the one before; a reader sees the one or the other, never a part.

    The file stays when the run ends, and says `moe_telemetry_run_finished 1`; after a crash it stays as it was. The
    alert rules go by the time of the last step, so that neither alerts for long. The next run replaces it.
    """

    scope: ClassVar[Scope] = "node"

    directory: str | os.PathLike[str] = "/var/lib/prometheus/node-exporter"
    """What node_exporter's `--collector.textfile.directory` names; it must be there. The default is Debian's."""
    filename: str = "moe-telemetry.prom"
    """Name of the file, ending in `.prom`; runs that share a node at the same time need one each."""
    remove_at_close: bool = False
    """Take the file away when the run ends, and with it the last numbers of a run shorter than a scrape."""

    _renderer: TextRenderer = field(init=False, repr=False, default_factory=TextRenderer)
    _has_written: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        check_types(self)
        if Path(self.filename).name != self.filename or not self.filename.endswith(".prom"):
            raise ConfigError(f"filename={self.filename!r}: expected a name without folders that ends in .prom")

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.directory, self.filename)

    def start(self) -> None:
        """Look whether the directory can be written to.

        Raises:
            ExporterError: it is not there, or is not ours to write in.
        """
        if not Path(self.directory).is_dir() or not os.access(self.directory, os.W_OK | os.X_OK):
            raise ExporterError(
                f"directory={os.fspath(self.directory)!r}: expected a folder that this user may write in, the one that "
                "node_exporter's --collector.textfile.directory names. Set MOE_TELEMETRY_TEXTFILE_DIRECTORY"
            )

    def export(self, snapshot: Snapshot) -> None:
        """Replace the file."""
        text = self._renderer.render(snapshot, openmetrics=False)
        # in the same folder, for a rename within one file system is atomic, under a name that the collector ignores
        draft = self.path.with_name(f".{self.filename}.{os.getpid()}.tmp")
        try:
            draft.write_bytes(text)
            draft.chmod(0o644)  # whatever the umask: node_exporter runs as another user
            draft.replace(self.path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._has_written = True

    def close(self) -> None:
        """Leave the file, or take it away where that was asked."""
        if self._has_written and self.remove_at_close:
            self.path.unlink(missing_ok=True)
        self._has_written = False
