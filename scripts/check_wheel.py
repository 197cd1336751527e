"""Build the wheel, install it into an environment of its own, and check there what a user gets.

The environment holds the wheel alone; its dependencies are lent by the environment that runs this
script, so that nothing of their size is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
# a PYTHONPATH would put other sources before the wheel
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def main() -> int:
    """Run all checks; return the exit code of the first that fails, or 0."""
    with tempfile.TemporaryDirectory(prefix="moe-telemetry-wheel-") as folder:
        there = Path(folder)
        try:
            python = _install(_build(there / "dist"), there / "env")
            _run([python, ROOT / "scripts" / "wheel_smoke.py"], there)
            _run([python.with_name("moe-telemetry"), "--help"], there)
            _check_types(python, there)
        except subprocess.CalledProcessError as error:
            print(f"{error.stdout}failed ({error.returncode}): {' '.join(map(str, error.cmd))}", file=sys.stderr)
            return 1
    return 0


def _build(folder: Path) -> Path:
    """Return the wheel, built from the source distribution, as an installer without a wheel would."""
    _run([sys.executable, "-m", "build", "--outdir", folder, ROOT], ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _install(wheel: Path, environment: Path) -> Path:
    """Return the interpreter of a new environment that holds the wheel and borrows its dependencies."""
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "-qq"]
    _run([*pip, "install", "--no-deps", wheel], environment)
    # a line of a .pth file extends the path without running the .pth files of that folder: the
    # editable install there stays unseen
    packages = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    Path(packages, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def _check_types(python: Path, folder: Path) -> None:
    """Type-check a consumer of the installed package, away from the sources."""
    consumer = folder / "consumer.py"
    consumer.write_bytes((ROOT / "tests" / "typing" / "consumer.py").read_bytes())
    options = ["--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'consumer'}"]
    _run([sys.executable, "-m", "mypy", *options, f"--python-executable={python}", consumer], folder)


def _run(command: list[str | Path], folder: Path) -> None:
    """Run a command; what it prints is shown only where it fails."""
    subprocess.run(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        check=True,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


if __name__ == "__main__":
    sys.exit(main())
