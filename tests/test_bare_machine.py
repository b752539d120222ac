"""A machine with torch, numpy and safetensors alone trains, offloads, measures and simulates."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parent.parent
PRESENT = ("torch", "numpy", "safetensors")

PROGRAM = """
import json, sys
from pathlib import Path

missing = frozenset(json.loads(sys.argv[1]))


class Present:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else self.finder.find_spec(name, path, target)

    def find_distributions(self, *given, **named):
        find = getattr(self.finder, "find_distributions", None)
        return find(*given, **named) if find else ()


sys.meta_path[:] = map(Present, sys.meta_path)
import torch
from datetime import timedelta
from functools import partial

from zorselike import Group, HeteroPipeline, Microbatch, Ministage, Plan
from zorselike.cost.curves import fit_curve
from zorselike.models import build_model, get_config
from zorselike.models.workload import make_workload
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import OFFLOAD_KINDS
from zorselike.profiler.layers.probes import find_probes
from zorselike.profiler.session import measure
from zorselike.profiler.tasks import Job
from zorselike.profiler.workload.module_workload import measure_workload
from zorselike.runtime.loss import token_cross_entropy
from zorselike.runtime.processes.processes import join_processes
from zorselike.simulator.inputs import SimulationInputs

torch.set_num_threads(1)
folder, small = Path(sys.argv[2]), {"num_layers": 2, "vocab_size": 64, "max_seq_len": 32}


def build():
    with torch.device("meta"):
        return build_model("llama", "debug", **small)


config = get_config("llama", "debug", **small)
workload = make_workload(config, sequence_length=8, dtype="float32", model="llama debug")
assert measure_workload(build(), torch.zeros(2, 8, dtype=torch.int64), dtype="float32").layers
rows = torch.randint(64, (4, 8))
names = [name for name, _ in workload.layers]
group = Group((0,), (Microbatch(0, 0, 2), Microbatch(0, 2, 4)), offload=OFFLOAD_KINDS)
plan = Plan(4, (group,), (Ministage(0, tuple(names[:2])), Ministage(0, tuple(names[2:]))))
plan.save(folder / "plan.toml")
assert Plan.load(folder / "plan.toml").fingerprint == plan.fingerprint

losses = []
with join_processes(torch.device("cpu"), timeout=timedelta(seconds=60)) as processes:
    for given in (plan, folder / "plan.toml"):
        adamw = partial(torch.optim.AdamW, lr=1e-3)
        with HeteroPipeline(build(), given, optimizer=adamw, max_norm=1.0) as pipe:
            results = pipe.step(rows, rows), pipe.step(rows, rows), pipe.evaluate(rows, rows)
            losses.append([result.loss for result in results])
            assert pipe.memory_report().host_peak_bytes and str(pipe.memory_report()) and pipe.describe()
            assert set(pipe.full_state_dict()) == set(build().state_dict())
    job = Job(
        workload=workload,
        build=build,
        num_tokens=64,
        probes=find_probes(build, workload),
        recompute=("none",),
        loss_fn=token_cross_entropy,
        most_rows=2,
        repeats=1,
        stages=(2,),
        parts=frozenset({"layers", "update", "host_link"}),
        largest_message_bytes=2**16,
        again=False,
    )
    profile = measure(
        job, processes, path=folder / "profile.json", cluster_path=folder / "cluster.toml", memory_bytes=None
    )
assert fit_curve(range(1, 17), [0.1 * x**1.5 for x in range(1, 17)]).method == "pieces"  # Cubics are SciPy's.
inputs = SimulationInputs(workload=workload, cluster=Cluster.load(folder / "cluster.toml"), profile=profile)
simulated = inputs.simulate(plan, record=True)

said = []
try:
    import zorselike.cli
except SystemExit as error:
    said.append(str(error))
from zorselike.train.__main__ import main
said.append(main())
print(json.dumps({"losses": losses, "step_s": simulated.simulation.iteration_s, "said": said}))
"""


def packages_of(distribution: str, found: set[str]) -> set[str]:
    """A distribution and all that it requires, by canonical name."""
    name = canonicalize_name(distribution)
    if name not in found:
        found.add(name)
        for line in metadata.requires(distribution) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                packages_of(requirement.name, found)
    return found


def list_missing() -> list[str]:
    """Modules of every installed package that neither torch nor this project brings."""
    present = {"zorselike"}
    for distribution in PRESENT:
        packages_of(distribution, present)
    owners = metadata.packages_distributions()
    return [name for name, own in owners.items() if present.isdisjoint(map(canonicalize_name, own))]


def test_torch_numpy_and_safetensors_are_enough(tmp_path: Path) -> None:
    missing = list_missing()
    assert {"tyro", "tqdm", "torchdata", "tensorboard", "scipy", "pytest"} <= {*missing}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(missing), str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (first, second, _), other = found["losses"]
    assert other[:2] == [first, second] and second < first
    assert found["step_s"] > 0
    assert found["said"] == [
        "error: the command line needs the package tyro, which is not installed: pip install tyro",
        2,
    ]
    assert "error: the training program needs the package tyro, which is not installed" in done.stderr
