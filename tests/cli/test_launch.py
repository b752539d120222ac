"""What starts a plan: one component a kind of node, and every process finds the rank that the plan means.

Files are read by the programs that they are for where these are installed; the parts that are ours run with
stand-ins for `srun` and the like everywhere.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorselike.cli import main
from zorselike.cli.launch.device_names import PRODUCTS, name_for_ray, name_product
from zorselike.cli.launch.job import Job, Program, make_label
from zorselike.cli.launch.launchers import write_launch
from zorselike.cli.model_choice import Dtype, parse_model
from zorselike.cost.catalogue import CATALOGUE, match_device_name
from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Device, Group, Microbatch, Ministage, Plan

MODEL = ("--model.name", "llama", "--model.flavor", "debug")
MODULES = ("tok_embeddings", *(f"layers.{i}" for i in range(6)), "norm", "output")


def make_plan(*nodes: tuple[str, dict[int, str]]) -> Plan:
    """A group for each node, of name and device type by local rank."""
    devices: list[Device] = []
    for node, types in nodes:
        devices += [Device(len(devices) + i, node, rank, types[rank]) for i, rank in enumerate(types)]
    groups = []
    for node, _ in nodes:
        ranks = tuple(device.rank for device in devices if device.node == node)
        groups.append(Group(ranks, tuple(Microbatch(rank, i, i + 1) for i, rank in enumerate(ranks))))
    most = max(len(group.ranks) for group in groups)
    whole = [
        Group(
            g.ranks, (*g.microbatches, *(Microbatch(g.ranks[0], i, i + 1) for i in range(len(g.ranks), most)))
        )
        for g in groups
    ]
    cuts = [i * len(MODULES) // len(whole) for i in range(len(whole) + 1)]
    ministages = tuple(Ministage(i, MODULES[cuts[i] : cuts[i + 1]]) for i in range(len(whole)))
    return Plan(most, tuple(whole), ministages, tuple(devices), 128, "llama debug").validate()


MIXED = make_plan(
    ("a-0", dict.fromkeys(range(4), "A100-40")),
    ("a-1", dict.fromkeys(range(4), "A100-40")),
    ("v", {1: "V100-16", 3: "V100-16"}),
)
CPUS = make_plan(("node-a", {0: "CPU", 1: "CPU"}), ("node-b", {0: "CPU"}))
DESK = make_plan(("desk", {0: "RTX3090", 1: "RTX3070"}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_job(plan: Plan, *, path: str = "plan.toml", **more: Any) -> Job:
    plan.save(path)
    return Job(plan=plan, path=path, program=Program(model=MODEL), **more)


def write(plan: Plan, launcher: Any, **more: Any) -> str:
    """The file that is written for a plan."""
    (told,) = write_launch(make_job(plan, **more), launcher)
    name, _, command = told.removeprefix("wrote ").partition(": ")
    assert command.endswith(f" {name}")
    return Path(name).read_text()


# -- kinds of nodes ----------------------------------------------------------------------------


@given(st.data())
def test_each_device_is_in_one_kind_and_kinds_differ(data: st.DataObject) -> None:
    ranks = st.dictionaries(st.integers(0, 3), st.sampled_from(["T4", "V100-16", "CPU"]), min_size=1)
    nodes = [(f"n{i}", data.draw(ranks)) for i in range(data.draw(st.integers(1, 4)))]
    zones = [data.draw(st.sampled_from(["x", "y"])) for _ in nodes]
    cluster = Cluster(
        nodes=tuple(
            Node(name=name, devices=("T4",) * 4, zone=zone, fabric=Link(1e9))
            for (name, _), zone in zip(nodes, zones, strict=True)
        ),
        default_link=Link(1e9),
    )
    job = Job(plan=make_plan(*nodes), path="p.toml", program=Program(), cluster=cluster)
    found = [
        (n, r, t)
        for kind in job.kinds
        for n in kind.nodes
        for r, t in zip(kind.local_ranks, kind.types, strict=True)
    ]
    assert sorted(found) == sorted((d.node, d.local_rank, d.type) for d in job.plan.devices)
    assert len({(kind.local_ranks, kind.types, kind.zone) for kind in job.kinds}) == len(job.kinds)
    assert all(make_label(kind.name) == kind.name for kind in job.kinds)


def test_a_plan_without_devices_is_refused() -> None:
    plan = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, ("a",)),))
    with pytest.raises(ConfigError, match=r"p\.toml has no \[\[devices\]\].*plan with `zorselike plan`"):
        Job(plan=plan, path="p.toml", program=Program())


def test_names_of_drivers_are_those_that_the_catalogue_knows() -> None:
    for device, spec in CATALOGUE.items():
        if spec.memory_bytes is None or device.startswith("MI"):
            continue
        product = name_product(device).replace("-", " ")
        assert match_device_name(product, spec.memory_bytes) == device, product
        assert name_for_ray(device).isalnum()
    assert PRODUCTS.keys() <= CATALOGUE.keys()
    with pytest.raises(ConfigError, match="MI300X is no NVIDIA GPU"):
        name_product("MI300X")


# -- the program -------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "jobset", "skypilot", "ray"])
def test_what_runs_is_a_configuration_with_the_plan(folder: Path, launcher: Any) -> None:
    from zorselike.train.config.file import parse_command_line

    job = make_job(CPUS)
    told = "\n".join(write_launch(job, launcher))
    text = (
        told if launcher == "torchrun" else Path(told.removeprefix("wrote ").partition(": ")[0]).read_text()
    )
    if launcher == "ray":
        scope: dict[str, Any] = {}
        exec(text[: text.index("import os")], scope)  # What is above the imports are constants.
        words = scope["PROGRAM"][2:]
    else:
        line = next(line for line in text.splitlines() if "-m zorselike.train " in line)
        words = shlex.split(line.partition("-m zorselike.train ")[2].removesuffix('"$@"'))
    config = parse_command_line(words).config
    assert (config.model.name, config.model.flavor, config.training.seq_len) == ("llama", "debug", 128)
    assert config.hetero.device == "cpu" and config.hetero.clip == "ministage"
    assert config.hetero.plan.endswith("plan.toml")


def test_a_recipe_says_everything_but_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CPUS.save("my.plan.toml")
    (folder / "r.toml").write_text('[model]\nname = "llama"\nflavor = "debug"\n')
    assert main(("launch", "my.plan.toml", "--to", "slurm", "--config", "r.toml")) == 0
    assert capsys.readouterr().out == "wrote my.sbatch: sbatch my.sbatch\n"
    assert (
        '-m zorselike.train --config r.toml --hetero.plan my.plan.toml "$@"' in Path("my.sbatch").read_text()
    )
    assert main(("launch", "my.plan.toml", "--to", "slurm", "--config", "none.toml")) == 2
    assert "none.toml: there is no such file" in capsys.readouterr().err
    assert main(("launch", "my.plan.toml", "--output", "x")) == 2
    assert "leave out --output" in capsys.readouterr().err
    for option in (("--dtype", "float16"), ("--defer-updates",)):
        assert main(("launch", "my.plan.toml", "--config", "r.toml", *option)) == 2
        assert f"--config says everything but the plan; say {option[0]} there" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [*get_args(Dtype), "auto"])
def test_a_plan_is_started_in_the_dtype_that_it_was_made_for(
    folder: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    """It was started in what the cards decided, without a word."""
    known = dtype in get_args(Dtype)
    fingerprint = "0123456789ab"
    if known:
        fingerprint = parse_model("llama debug").measure(sequence_length=128, dtype=dtype).fingerprint
    replace(CPUS, workload_fingerprint=fingerprint).save("my.plan.toml")
    assert main(("launch", "my.plan.toml")) == 0
    told = capsys.readouterr().out
    assert f" --training.mixed_precision_param {dtype} " in told.replace("\n", " ")
    assert ("--hetero.clip ministage" in told) == (dtype != "float16")
    assert main(("launch", "my.plan.toml", "--dtype", "auto")) == 0
    assert " --training.mixed_precision_param auto " in capsys.readouterr().out


@pytest.mark.parametrize("read", ["my.plan.toml", "r.toml"])
def test_what_is_read_is_not_written(folder: Path, capsys: pytest.CaptureFixture[str], read: str) -> None:
    CPUS.save("my.plan.toml")
    (folder / "r.toml").write_text('[model]\nname = "llama"\nflavor = "debug"\n')
    before = Path(read).read_text()
    assert main(("launch", "my.plan.toml", "--to", "slurm", "--config", "r.toml", "-o", read)) == 2
    assert f"--output is {read}, which is read too; name another file" in capsys.readouterr().err
    assert Path(read).read_text() == before


def test_what_is_read_is_not_written_under_the_plan_s_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CPUS.save("my.plan.toml")
    Path("my.sbatch").write_text("a cluster")
    assert main(("launch", "my.plan.toml", "--to", "slurm", "--cluster", "my.sbatch")) == 2
    assert "--output is my.sbatch, which is read too; name another file" in capsys.readouterr().err
    assert Path("my.sbatch").read_text() == "a cluster"


# -- Slurm -------------------------------------------------------------------------------------

SHIMS = {
    "scontrol": 'echo "$3" | tr , "\\n"',
    # What srun does: the command on each host of each component, once a task.
    "srun": 'while [[ $1 == --* ]]; do shift; done; for host in $HOSTS; do SLURMD_NODENAME=$host "$@"; done',
    "python": 'echo "$SLURMD_NODENAME $ZORSELIKE_NODE ${ZORSELIKE_LOCAL_RANKS:-} $MASTER_ADDR $MASTER_PORT"',
}


def test_each_slurm_host_is_a_node_of_the_plan_of_its_kind(folder: Path) -> None:
    write(MIXED, "slurm")
    (folder / "bin").mkdir()
    for name, body in SHIMS.items():
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "h7,h9",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "h2",
        "HOSTS": "h2 h9 h7",
    }
    ran = subprocess.run(["bash", "plan.sbatch"], env=variables, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        "h2 v 1,3 h7 24567",
        "h9 a-1 0,1,2,3 h7 24567",
        "h7 a-0 0,1,2,3 h7 24567",
    ]


def test_slurm_components_ask_for_what_the_plan_uses(folder: Path) -> None:
    text = write(MIXED, "slurm")
    components = text.split("#SBATCH hetjob")
    assert len(components) == 2
    assert "--nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --gres=gpu:a100:4" in components[0]
    assert "--nodes=1 --ntasks-per-node=2 --cpus-per-task=8 --gres=gpu:v100:2" in components[1]
    assert "srun --het-group=0-1 --kill-on-bad-exit=1" in text
    alone = write(DESK, "slurm")
    assert "hetjob" not in alone and "het-group" not in alone
    assert "--gres=gpu:rtx3090:1,gpu:rtx3070:1" in alone
    both = make_plan(("a", {0: "A100-40"}), ("b", {0: "A100-80"}))
    assert "gpu:a100_40:1" in write(both, "slurm") and "gpu:a100_80:1" in write(both, "slurm")


NODES = "NodeName={name} NodeAddr=127.0.0.1 CPUs=64 RealMemory=4000 Gres=gpu:{gpu}:4 State=IDLE"
CONTROLLER = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}
SlurmctldPidFile={folder}/pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
PartitionName=main Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A controller of its own for `sbatch`, of three nodes with four A100 and one with four V100."""
    if not all(map(shutil.which, ("slurmctld", "sbatch", "sinfo"))):
        pytest.skip("Slurm is not installed (Debian: slurmctld, slurm-client)")
    (folder / "slurm").mkdir()
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    host, user = socket.gethostname().split(".")[0], getpass.getuser()
    lines = [CONTROLLER.format(host=host, port=port, user=user, folder=folder / "slurm")]
    lines += [NODES.format(name=name, gpu=gpu) for name, gpu in (("a[0-2]", "a100"), ("v0", "v100"))]
    (folder / "slurm/slurm.conf").write_text("\n".join(lines))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm/slurm.conf"))
    controller = subprocess.Popen(["slurmctld", "-D"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            answer = subprocess.run(["sinfo", "-h"], capture_output=True, text=True, timeout=60)
            if "idle" in answer.stdout:
                break
            if controller.poll() is not None:
                pytest.skip("slurmctld does not start here without other services")
            time.sleep(0.1)
        yield
    finally:
        controller.terminate()
        controller.wait(timeout=60)


def test_slurm_takes_the_job_where_it_has_such_nodes(slurm: None) -> None:
    def submit(plan: Plan) -> subprocess.CompletedProcess[str]:
        write(plan, "slurm")
        return subprocess.run(
            ["sbatch", "--test-only", "plan.sbatch"], capture_output=True, text=True, timeout=60, check=False
        )

    taken = submit(MIXED)
    assert taken.returncode == 0 and "using 80 processors on a[0-1],v0" in taken.stderr, taken.stderr
    assert submit(CPUS).returncode == 0
    refused = submit(DESK)
    assert refused.returncode and "Requested node configuration is not available" in refused.stderr


# -- Kubernetes --------------------------------------------------------------------------------

TEXT, NUMBER, FLAG = str, int, bool
ANY_OF_TEXT: dict[str, Any] = {"*": TEXT}
POD: dict[str, Any] = {
    "restartPolicy": TEXT,
    "terminationGracePeriodSeconds": NUMBER,
    "nodeSelector": ANY_OF_TEXT,
    "containers": [
        {
            "name": TEXT,
            "image": TEXT,
            "command": [TEXT],
            "args": [TEXT],
            "resources": {"limits": {"*": NUMBER}},
            "volumeMounts": [{"name": TEXT, "mountPath": TEXT}],
        }
    ],
    "volumes": [{"name": TEXT, "configMap": {"name": TEXT}, "emptyDir": {"medium": TEXT}}],
}
JOBSET: dict[str, Any] = {
    "apiVersion": TEXT,
    "kind": TEXT,
    "metadata": {"name": TEXT},
    "spec": {
        "network": {"enableDNSHostnames": FLAG},
        "replicatedJobs": [
            {
                "name": TEXT,
                "replicas": NUMBER,
                "template": {
                    "spec": {
                        "completionMode": TEXT,
                        "completions": NUMBER,
                        "parallelism": NUMBER,
                        "backoffLimit": NUMBER,
                        "template": {"spec": POD},
                    }
                },
            }
        ],
    },
}
"""Of what JobSet's published schema has (config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml, v1alpha2):
the fields that are written, and their types."""


def check_fields(value: Any, schema: Any, where: str = "") -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        for key, inner in value.items():
            assert key in schema or "*" in schema, f"{where}.{key}"
            check_fields(inner, schema.get(key, schema.get("*")), f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for inner in value:
            check_fields(inner, schema[0], f"{where}[]")
    else:
        assert type(value) is schema, f"{where} is {value!r}"


def test_a_jobset_has_a_replicated_job_for_each_kind(folder: Path) -> None:
    yaml = pytest.importorskip("yaml")
    plan, jobset = yaml.safe_load_all(write(MIXED, "jobset"))
    Path("again.toml").write_text(plan["data"]["plan.toml"])
    assert Plan.load("again.toml") == Plan.load("plan.toml")
    check_fields(jobset, JOBSET)
    first, second = jobset["spec"]["replicatedJobs"]
    for job, pods, gpus in ((first, 2, 4), (second, 1, 2)):
        spec = job["template"]["spec"]
        assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (pods, pods, "Indexed")
        (container,) = spec["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": gpus}
        assert f"--nnodes 3 --nproc-per-node {gpus}" in container["args"][0]
        assert f"--rdzv-endpoint plan-{first['name']}-0-0.plan:29500" in container["args"][0]
        assert subprocess.run(["bash", "-n", "-c", container["args"][0]]).returncode == 0
        pod = f"plan-{job['name']}-0-{pods - 1}"
        assert len(pod) <= 63, "a pod's name is a label"
    assert "nodes=(a-0 a-1)" in first["template"]["spec"]["template"]["spec"]["containers"][0]["args"][0]


def test_a_jobset_says_how_what_a_run_saves_outlives_its_pods(folder: Path) -> None:
    yaml = pytest.importorskip("yaml")
    text = write(MIXED, "jobset")
    assert "# What a run saves is gone with its pods" in text and "--job.dump_folder /outputs" in text
    _, jobset = yaml.safe_load_all(text.replace("# - {name: outputs", "- {name: outputs"))
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]["template"]["spec"]
        assert spec["volumes"][-1] == {"name": "outputs", "persistentVolumeClaim": {"claimName": "CLAIM"}}
        assert spec["containers"][0]["volumeMounts"][-1] == {"name": "outputs", "mountPath": "/outputs"}


def check_published(value: Any, schema: Any, where: str = "") -> None:
    """By a schema as Kubernetes publishes it, which refuses fields that it does not know."""
    kind = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if schema.get("x-kubernetes-int-or-string"):
        assert isinstance(value, int | str), where
        return
    assert type(value) is kind[schema["type"]], where
    if isinstance(value, dict):
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        assert value.keys() >= {*schema.get("required", ())}, where
        for key, inner in value.items():
            assert key in fields or others is not None or not fields, f"{where}.{key}"
            if key in fields or others is not None:
                check_published(inner, fields.get(key, others), f"{where}.{key}")
    elif isinstance(value, list):
        for inner in value:
            check_published(inner, schema["items"], f"{where}[]")
    elif isinstance(value, str):
        assert value in schema.get("enum", [value]) and re.search(schema.get("pattern", ""), value), where


@pytest.mark.skipif("ZORSELIKE_JOBSET_CRD" not in os.environ, reason="no JobSet CRD to check by")
@pytest.mark.parametrize("plan", [MIXED, CPUS])
def test_a_jobset_is_valid_by_its_published_schema(folder: Path, plan: Plan) -> None:
    """github.com/kubernetes-sigs/jobset, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml."""
    yaml = pytest.importorskip("yaml")
    published = yaml.safe_load(Path(os.environ["ZORSELIKE_JOBSET_CRD"]).read_text())
    _, jobset = yaml.safe_load_all(write(plan, "jobset"))
    group, _, version = jobset["apiVersion"].partition("/")
    assert (group, jobset["kind"]) == (published["spec"]["group"], published["spec"]["names"]["kind"])
    (schema,) = [own["schema"] for own in published["spec"]["versions"] if own["name"] == version]
    check_published(jobset, schema["openAPIV3Schema"])
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completion"] = 1
    with pytest.raises(AssertionError, match="completion"):
        check_published(jobset, schema["openAPIV3Schema"])


# -- SkyPilot ----------------------------------------------------------------------------------


def test_skypilot_gets_a_group_of_tasks_or_one(folder: Path) -> None:
    yaml = pytest.importorskip("yaml")
    header, first, second = yaml.safe_load_all(write(MIXED, "skypilot"))
    assert header == {"name": "plan", "execution": "parallel"}
    assert (first["num_nodes"], first["resources"]) == (2, {"accelerators": "A100:4"})
    assert (second["num_nodes"], second["resources"]) == (1, {"accelerators": "V100:2"})
    assert "export ZORSELIKE_LOCAL_RANKS=1,3" in second["run"] and "LOCAL_RANKS" not in first["run"]
    for task in (first, second):
        assert "--rdzv-endpoint n0-0.$SKYPILOT_JOBGROUP_NAME:29500" in task["run"]
        assert subprocess.run(["bash", "-n", "-c", task["run"]]).returncode == 0
    (alone,) = yaml.safe_load_all(write(make_plan(("a", {0: "T4"}), ("b", {0: "T4"})), "skypilot"))
    assert alone["num_nodes"] == 2 and '$(head -n1 <<<"$SKYPILOT_NODE_IPS"):29500' in alone["run"]


def test_skypilot_reads_what_is_written(folder: Path) -> None:
    pytest.importorskip("sky", reason="SkyPilot is not installed (pip install skypilot)")
    from sky.utils import dag_utils

    write(MIXED, "skypilot")
    dag = dag_utils.load_job_group_from_yaml("plan.sky.yaml")
    assert dag.is_job_group() and [task.num_nodes for task in dag.tasks] == [2, 1]
    (resources,) = dag.tasks[0].resources
    assert resources.accelerators == {"A100": 4}


# -- Ray ---------------------------------------------------------------------------------------


def test_a_ray_driver_names_each_node(folder: Path) -> None:
    text = write(MIXED, "ray")
    scope: dict[str, Any] = {}
    exec(text[: text.index("import os")], scope)
    assert [node[0] for node in scope["NODES"]] == ["a-0", "a-1", "v"]
    assert scope["NODES"][2][1:] == ({"CPU": 2, "GPU": 2, "accelerator_type:V100": 0.001}, 2, "1,3")
    compile(text, "plan.ray.py", "exec")


# -- what cannot be started --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "launcher", "reason"),
    [
        (
            DESK,
            "jobset",
            "Kubernetes asks for GPUs of one type on a node, and node desk has RTX3090 and RTX3070",
        ),
        (DESK, "skypilot", "start by torchrun or slurm"),
        (make_plan(("a", {0: "A100-40"}), ("b", {0: "A100-80"})), "ray", "which it calls 'A100'"),
        (
            make_plan(("a", {0: "RTX3090"}), ("b", {0: "RTX4090"})),
            "ray",
            "does not tell RTX3090 from RTX4090",
        ),
    ],
)
def test_what_a_launcher_cannot_tell_apart_is_refused(
    folder: Path, plan: Plan, launcher: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match="launch: ") as error:
        write(plan, launcher)
    assert reason in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("launcher", ["slurm", "jobset", "skypilot", "ray"])
def test_devices_without_a_type_are_for_torchrun_alone(folder: Path, launcher: Any) -> None:
    plan = make_plan(("a", {0: "T4"}), ("b", {0: "", 1: ""}))
    with pytest.raises(ConfigError, match=r"\[\[devices\]\] of plan.toml has none for ranks 1 and 2; add it"):
        write(plan, launcher)
    assert write_launch(make_job(plan), "torchrun")[0].startswith("ZORSELIKE_NODE=a torchrun")


def test_skypilot_does_not_span_regions_or_bring_files_from_elsewhere(folder: Path) -> None:
    nodes = (
        Node(name="node-a", devices=("CPU",) * 2, region="r", fabric=Link(1e9)),
        Node(name="node-b", devices=("CPU",), region="s"),
    )
    with pytest.raises(ConfigError, match="the plan spans regions r and s; plan for one"):
        write(CPUS, "skypilot", cluster=Cluster(nodes=nodes, default_link=Link(1e9)))
    # Only the plan's nodes count, not all of the cluster.
    spare = (replace(nodes[0], name="spare", region="t"), replace(nodes[1], region="r"), nodes[0])
    assert write(CPUS, "skypilot", cluster=Cluster(nodes=spare, default_link=Link(1e9)))
    with pytest.raises(ConfigError, match="is not named as a file in it"):
        write(CPUS, "ray", path=str(folder / "plan.toml"))
