"""`moe-telemetry wandb-workspace`: a workspace in Weights & Biases that shows the first look."""

from __future__ import annotations

import argparse
from typing import Any

from moe_telemetry.charts import FIRST_LOOK, tag
from moe_telemetry.errors import ConfigError, ExporterError

__all__ = ["add_parser", "run"]

_STEP_KEY = "moe/step"
_SCALARS = (
    ("Replay agreement", "replay_agreement"),
    ("Highest zero overlap", "highest_replay_zero_overlap"),
    ("Highest MaxVio", "highest_max_violation"),
    ("Dead experts", "dead_experts"),
    ("Lowest load entropy", "lowest_load_entropy"),
)
_HINT = "log in by `wandb login` or WANDB_API_KEY, or see the workspace by --dry-run"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "wandb-workspace",
        help="make a workspace in Weights & Biases",
        description="Make a workspace in a project of Weights & Biases: load, scores, replay and telemetry by layer, "
        "the load of all experts as a picture, and the worst numbers of each run. Needs a login.",
        epilog="Example: moe-telemetry wandb-workspace --entity my-team --project pretraining",
    )
    parser.add_argument("--entity", help="the user or team of the project")
    parser.add_argument("--project", help="the project, which the runs are in")
    parser.add_argument("--name", default="MoE routers", help="name of the workspace (MoE routers)")
    parser.add_argument("--dry-run", action="store_true", help="print the workspace as JSON, and send nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the workspace, or make it and print its address."""
    if not arguments.dry_run and not (arguments.entity and arguments.project):
        raise ConfigError("--entity and --project are missing: name a project to make the workspace in, or --dry-run")
    workspace = _workspace(arguments.entity or "", arguments.project or "", arguments.name)
    if arguments.dry_run:
        print(workspace._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2))  # noqa: SLF001  # it has no other
        return 0
    import wandb

    try:
        workspace.save()
    except wandb.errors.Error as error:
        raise ExporterError(f"W&B does not take the workspace: {' '.join(str(error).split())} ({_HINT})") from error
    print(workspace.url)
    return 0


def _workspace(entity: str, project: str, name: str) -> Any:  # noqa: ANN401  # a Workspace
    try:
        import wandb_workspaces.reports.v2 as panels
        from wandb_workspaces import workspaces
    except ModuleNotFoundError as error:
        raise ExporterError(f"needs the package {error.name!r}: pip install 'moe-telemetry[wandb]'") from error

    sections = [workspaces.Section(name="Runs", is_open=True, panels=_scalar_charts(panels))]
    for section in FIRST_LOOK:
        plots = [
            panels.LinePlot(title=chart.title, x=_STEP_KEY, metric_regex=chart.pattern) for chart in section.charts
        ]
        if section.title == "Load":
            plots.append(_picture(panels))
        sections.append(workspaces.Section(name=section.title, is_open=True, panels=plots))
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)


def _scalar_charts(panels: Any) -> list[Any]:  # noqa: ANN401  # a module
    return [panels.ScalarChart(title=title, metric=f"moe/summary/{key}") for title, key in _SCALARS]


def _picture(panels: Any) -> Any:  # noqa: ANN401  # a module
    title = "Load of all experts over the mean of their layer"
    return panels.MediaBrowser(title=title, media_keys=[tag("moe_expert_relative_load")], num_columns=1)
