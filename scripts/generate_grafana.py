"""Write the dashboards' JSON and Grafana's copy of the alerts from their code; with --check, only compare.

python -m scripts.generate_grafana
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["generated", "main"]

FOLDER = Path(__file__).resolve().parent.parent / "grafana"


def generated() -> dict[Path, str]:
    """Return every generated file and what belongs into it."""
    from grafana.alerting import provisioned_alerts  # noqa: PLC0415  # see main()
    from grafana.dashboards import rendered  # noqa: PLC0415

    dashboards = rendered()
    alerts = {FOLDER / "provisioning" / "alerting" / "moe-telemetry.yaml": provisioned_alerts(dashboards)}
    return alerts | {FOLDER / "dashboards" / "json" / name: text for name, text in dashboards.items()}


def main() -> int:
    """Write the files, or compare them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a file is out of date")
    is_check = parser.parse_args().check
    if sys.version_info < (3, 11):
        print("Grafana's files are left as they are: the builders of dashboards need Python 3.11", file=sys.stderr)
        return 0
    files = generated()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if is_check:
            print(f"{path.relative_to(FOLDER.parent)} is out of date: run `make format`", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
