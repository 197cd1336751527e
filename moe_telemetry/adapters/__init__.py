"""One duck-typed file a framework: each finds the routers of a model and says how to read them."""

__all__: list[str] = []
