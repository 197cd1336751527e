"""What an export costs the training thread, and a scrape the endpoint, at 61 layers.

python benchmarks/export.py

Medians over rounds in one run. The training thread hands the snapshot over; all else happens in the
exporters' own threads. The CPU time of a scrape is that of the whole process while it answers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator

from moe_telemetry.catalog import METRICS, metric_of
from moe_telemetry.delivery import Delivery
from moe_telemetry.plugins import resolve_exporter
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus.text import TextRenderer

EXPORTERS = ("prometheus", "textfile", "otel", "wandb", "tensorboard", "jsonl")


def hand_over_ms(*, per_expert: bool, rounds: int) -> float:
    """Return the training thread's milliseconds for one export to all sinks; nobody listens to `otel`."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOE_TELEMETRY_PROMETHEUS_PORT"] = "0"
        os.environ["MOE_TELEMETRY_TENSORBOARD_LOGDIR"] = folder
        os.environ["MOE_TELEMETRY_TEXTFILE_DIRECTORY"] = folder
        os.environ["MOE_TELEMETRY_WANDB_DIR"] = folder
        os.environ["MOE_TELEMETRY_WANDB_MODE"] = "offline"
        os.environ["MOE_TELEMETRY_JSONL_PATH"] = f"{folder}/log.jsonl"
        delivery = Delivery([resolve_exporter(name) for name in EXPORTERS])
        times = []
        for step in range(1, rounds + 1):
            snapshot = make_snapshot(step=step, num_layers=61, num_experts=256, per_expert=per_expert)
            started = time.perf_counter()
            delivery.put(snapshot)
            times.append((time.perf_counter() - started) * 1e3)
            time.sleep(0.05)
        delivery.close(30)
    return statistics.median(times)


def scrape(*, per_expert: bool, rounds: int) -> str:
    """Return CPU time, bytes and series of one scrape, and the part of the time that is spent on making its text."""
    os.environ["MOE_TELEMETRY_PROMETHEUS_PORT"] = "0"
    _, exporter = resolve_exporter("prometheus")
    exporter.start()  # type: ignore[attr-defined]
    snapshot = make_snapshot(num_layers=61, num_experts=256, per_expert=per_expert)
    exporter.export(snapshot)
    plain, text = _scrapes(exporter.url, rounds)  # type: ignore[attr-defined]
    gzipped, packed = _scrapes(exporter.url, rounds, gzip=True)  # type: ignore[attr-defined]
    exporter.close()
    renderer = TextRenderer()
    rendering = [_cpu_ms(lambda: renderer.render(snapshot, openmetrics=True), time.thread_time) for _ in range(rounds)]
    num_series = sum(not line.startswith(b"#") for line in text.splitlines())
    return (
        f"scrape {plain:.1f} ms of CPU, {len(text):,} bytes; with gzip {gzipped:.1f} ms, {len(packed):,} bytes; "
        f"of it rendering {statistics.median(rendering):.1f} ms (the first time {rendering[0]:.1f} ms); "
        f"{num_series:,} series"
    )


def _scrapes(url: str, rounds: int, *, gzip: bool = False) -> tuple[float, bytes]:
    headers = {"Accept": "application/openmetrics-text", **({"Accept-Encoding": "gzip"} if gzip else {})}
    times, body = [], b""
    for _ in range(rounds):
        started = time.process_time()
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:  # noqa: S310  # our own
            body = response.read()
        times.append((time.process_time() - started) * 1e3)
    return statistics.median(times), body


def _cpu_ms(work: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    work()
    return (clock() - started) * 1e3


def series_by_metric() -> Iterator[str]:
    """Yield a line for each metric: its series a layer, or in all where it is not about layers."""
    settings = {"num_layers": 61, "num_experts": 256, "top_k": 8}
    default = Counter(metric_of(sample.name).name for sample in make_snapshot(**settings).samples("node"))  # type: ignore[arg-type]
    full = make_snapshot(**settings, replayed=True, per_expert=True, expert_parallel_ranks=8)  # type: ignore[arg-type]
    everything = Counter(metric_of(sample.name).name for sample in full.samples("node"))
    for name, count in everything.items():
        of_layer = "layer" in METRICS[name].labels
        a_layer = f"{count / 61:g} a layer" if of_layer else f"{count} in all"
        yield f"  {name}: {a_layer}{'' if name in default else ' (where asked for)'}"
    of_layers = sum(count for name, count in default.items() if "layer" in METRICS[name].labels)
    yield f"  by default {of_layers / 61:g} a layer and {sum(default.values()) - of_layers} in all, for each stage"


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    for name, per_expert in (("default set", False), ("with per-expert series", True)):
        handed = hand_over_ms(per_expert=per_expert, rounds=rounds)
        print(f"61 layers x 256 experts, {name}: training thread {handed:.3f} ms an export")
        print(f"  {scrape(per_expert=per_expert, rounds=rounds)}")
    print("Series of one endpoint, one stage:", *series_by_metric(), sep="\n")


if __name__ == "__main__":
    main()
