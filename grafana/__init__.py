"""Dashboards and Grafana's copy of the alerts, as code; not part of the wheel, which has their output."""

__all__: list[str] = []
