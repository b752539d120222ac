"""Makes the plans of the recipes again, by the planner, and says what changed:

    python recipes/make_plans.py               # all that the planner makes
    python recipes/make_plans.py two_gpus      # one
    python recipes/make_plans.py --check       # writes nothing; ends with 1 where a better plan was found

A plan is replaced where the new one is more than 0.5 % faster, or the old one no longer runs. The other plans
of this folder are written by hand, to show what can be said.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from shlex import join

from zorselike.cli import main
from zorselike.cli.assumed_profile import assume_profile
from zorselike.cli.model_choice import choose_dtype, choose_model
from zorselike.errors import USER_ERRORS
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.simulator.inputs import SimulationInputs
from zorselike.simulator.simulated_plan import SimulatedPlan
from zorselike.text.files import write_text

RECIPES = Path(__file__).parent
FASTER = 0.005
"""How much faster a plan must be to replace the one that is there."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe whose plan the planner makes."""

    name: str
    cluster: str
    family: str
    flavor: str
    sequence_length: int
    global_batch: int
    by_hostname: bool = True
    """Whether the plan names the cluster's nodes; else ranks are the processes of one machine in order."""

    @property
    def path(self) -> Path:
        return RECIPES / f"{self.name}.plan.toml"

    def list_options(self) -> list[str]:
        """Of `zorselike plan`; the recipes clip by the norm of all gradients."""
        words = ["--cluster", f"recipes/clusters/{self.cluster}.toml", "--family", self.family]
        words += ["--flavor", self.flavor, "--seq-len", str(self.sequence_length)]
        return [*words, "--global-batch", str(self.global_batch), "--defer-updates"]

    def simulate(self, plan: Plan) -> SimulatedPlan:
        """A step of a plan on the recipe's cluster, by data sheets."""
        cluster = Cluster.load(RECIPES / "clusters" / f"{self.cluster}.toml")
        dtype = choose_dtype({device for node in cluster.nodes for device in node.devices})
        model = choose_model(self.family, self.flavor, ())
        workload = model.measure(sequence_length=self.sequence_length, dtype=dtype)
        inputs = SimulationInputs(
            workload=workload, cluster=cluster, profile=assume_profile(workload), defer_updates=True
        )
        return inputs.simulate(plan)


MADE = (
    Recipe(
        name="two_gpus",
        cluster="two_gpus",
        family="gpt",
        flavor="350m",
        sequence_length=1024,
        global_batch=32,
        by_hostname=False,
    ),
    Recipe(
        name="workstations",
        cluster="workstations",
        family="llama",
        flavor="1b",
        sequence_length=2048,
        global_batch=32,
    ),
)
"""The recipes whose plans are made here."""


def make_plan(recipe: Recipe, budget: str) -> Plan:
    """What `zorselike plan` finds."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()) as shown:
        path = Path(folder) / "plan.toml"
        options = recipe.list_options()
        options[1] = str(RECIPES.parent / options[1])
        if main(("plan", *options, "--budget", budget, "--output", str(path))):
            raise SystemExit(f"{recipe.name}: zorselike plan {join(recipe.list_options())} failed")
        plan = Plan.load(path)
    assert shown.getvalue()
    return plan if recipe.by_hostname else replace(plan, devices=())


def renew(recipe: Recipe, budget: str, *, writes: bool) -> bool:
    """Whether the plan in the folder was not as good as a new one; says in a line what changed."""
    new = make_plan(recipe, budget)
    new_s = recipe.simulate(new).simulation.iteration_s
    try:
        old = Plan.load(recipe.path)
        case = recipe.simulate(old)
        runs = not any(case.is_overfull(rank) for rank in range(old.num_ranks))
        was = f"{case.simulation.iteration_s:.4g} s" if runs else "out of memory"
        is_better = not runs or new_s < (1 - FASTER) * case.simulation.iteration_s
    except USER_ERRORS as error:
        was, is_better = str(error), True
    change = f"{was} -> {new_s:.4g} s a step, plan {new.fingerprint}" if is_better else f"kept, {was} a step"
    print(f"{recipe.path.name}: {change}", flush=True)
    if is_better and writes:
        write_text(recipe.path, f"{write_heading(recipe)}{new.to_text()}")
    return is_better


def write_heading(recipe: Recipe) -> str:
    """How the plan was made, as comments."""
    return (
        f"# For recipes/{recipe.name}.toml, by `python recipes/make_plans.py {recipe.name}`, which runs\n"
        f"#   zorselike plan {join(recipe.list_options())}\n"
    )


def run(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [recipe.name for recipe in MADE]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all unless given")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--budget", default="30s", help="time for each search")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in names]:
        parser.error(f"no recipe {unknown[0]} whose plan is made here; there are {', '.join(names)}")
    chosen = [recipe for recipe in MADE if not options.names or recipe.name in options.names]
    renewed = [renew(recipe, options.budget, writes=not options.check) for recipe in chosen]
    return int(options.check and any(renewed))


if __name__ == "__main__":
    sys.exit(run())
