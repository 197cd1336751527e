"""Route traces: their files, how they are written and read."""

__all__: list[str] = []
