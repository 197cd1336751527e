"""The demo: a small Qwen3-MoE learns Python's standard library on a few ranks, in full view.

`launch` starts the ranks, `worker` is what each of them runs, on the model, the text and the training
step of the modules of those names.
"""

__all__: list[str] = []
