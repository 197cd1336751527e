"""`python -m moe_telemetry.cli`: the command line without an installed script."""

import sys

from moe_telemetry.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
