"""`zorselike plan --shares`: layers and rows in proportion to speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zorselike.cli.plan.inputs import load_cluster, load_inputs
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.planner.by_shares import SharesJob, plan_shares

if TYPE_CHECKING:
    from zorselike.cli.plan.command import PlanCommand


def print_shares_plan(command: PlanCommand) -> None:
    """Writes the plan and prints it."""
    cluster = load_cluster("plan", command)
    devices = {device for node in cluster.nodes for device in node.devices}
    inputs = load_inputs("plan", command, cluster, devices)
    clock = LayerTimeModel(inputs.profile, inputs.workload)
    given = {name: own for name, own in vars(command.proportional).items() if own is not None}
    del given["shares"]
    job = SharesJob(global_batch=command.global_batch, **given)
    plan = plan_shares(inputs.workload, cluster, clock, job)
    plan.save(command.search.output)
    print(plan.explain())
    for line in (*inputs.notes, *(f"assumed: {line}" for line in clock.assumptions)):
        print(line)
    print(f"wrote {command.search.output}; memory was not checked")
