"""Who exports: the resource of a run in a process, with an instance id that no other process has."""

from __future__ import annotations

import os
import socket
import uuid

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

__all__ = ["make_resource"]

_SERVICE_NAME = "moe-telemetry"


def make_resource(run: str, service_name: str | None) -> Resource:
    """Return the resource of this process.

    What `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` state goes before our own choice, and a
    `service_name` that is not None before both.
    """
    host = socket.gethostname()
    own = {
        "service.name": _SERVICE_NAME,
        "service.instance.id": f"{run}:{host}:{os.getpid()}:{uuid.uuid4().hex[:8]}",
        "host.name": host,
        "run": run,
    }
    stated = OTELResourceDetector().detect().attributes
    attributes = {name: value for name, value in own.items() if name not in stated}
    if service_name is not None:
        attributes["service.name"] = service_name
    try:
        return Resource.create(attributes)
    except RuntimeError:
        # it asks detectors in threads, which a program that is ending has no more
        return Resource(attributes).merge(OTELResourceDetector().detect())
