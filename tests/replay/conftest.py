"""Helpers of the replay tests are imported by name."""

import sys
from pathlib import Path

# the tests are no package (importlib mode), so a helper beside them is found by path
sys.path.insert(0, str(Path(__file__).parent))
