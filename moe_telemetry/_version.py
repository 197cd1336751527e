"""The version of this package, as its metadata states it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
