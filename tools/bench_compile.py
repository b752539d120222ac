"""What `torch.compile` of each layer gains: compiled against eager, in one run on the device at hand.

    python tools/bench_compile.py                      # a small Llama, on a GPU or on the CPU
    python tools/bench_compile.py --offload --recompute
    python tools/bench_compile.py --json figures.json

Two pipelines of one rank train the same model on the same rows, in turn, a few steps each, so that
whatever else the machine does falls on both. Shown are medians, and the time that compiling took.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zorselike import HeteroPipeline
from zorselike.models import build_model, get_config, module_names
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan


@dataclass(frozen=True)
class Job:
    """What is trained, and how often."""

    device: str
    dim: int
    num_layers: int
    num_heads: int
    ffn_hidden: int
    sequence: int
    microbatch_rows: int
    dtype: str
    vocab_size: int = 512
    num_microbatches: int = 4
    num_ministages: int = 2
    offload: bool = False
    recompute: bool = False
    num_rounds: int = 5
    num_steps: int = 3
    """Of each pipeline a round."""

    def plan(self) -> Plan:
        """One rank, its layers spread evenly over the ministages."""
        names = module_names(get_config("llama", "debug", **self.sizes()))
        cuts = [i * len(names) // self.num_ministages for i in range(self.num_ministages + 1)]
        rows = self.microbatch_rows
        group = Group(
            ranks=(0,),
            microbatches=tuple(Microbatch(0, i * rows, (i + 1) * rows) for i in range(self.num_microbatches)),
            offload=OFFLOAD_KINDS if self.offload else (),
            recompute="layer" if self.recompute else "none",
        )
        ministages = [Ministage(0, tuple(names[a:b])) for a, b in pairwise(cuts)]
        return Plan(rows * self.num_microbatches, (group,), tuple(ministages))

    def sizes(self) -> dict[str, int]:
        """Overrides of the `debug` flavor."""
        return {
            "dim": self.dim,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_heads,
            "ffn_hidden": self.ffn_hidden,
            "vocab_size": self.vocab_size,
            "max_seq_len": self.sequence,
        }

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets `[rows, sequence]`."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, self.microbatch_rows * self.num_microbatches, self.sequence)
        inputs, targets = torch.randint(self.vocab_size, shape, generator=generator)
        return inputs, targets


CPU = Job(
    "cpu",
    dim=256,
    num_layers=4,
    num_heads=4,
    ffn_hidden=768,
    sequence=128,
    microbatch_rows=2,
    dtype="float32",
)
CUDA = Job(
    "cuda",
    dim=2048,
    num_layers=8,
    num_heads=16,
    ffn_hidden=5632,
    sequence=2048,
    microbatch_rows=4,
    dtype="bfloat16",
)


class Runner:
    """One pipeline, and how long its steps took."""

    def __init__(self, job: Job, *, compiles: bool) -> None:
        with torch.device("meta"):
            model = build_model("llama", "debug", **job.sizes())
        dtype = getattr(torch, job.dtype)
        self._pipe = HeteroPipeline(
            model,
            job.plan(),
            optimizer=partial(torch.optim.AdamW, lr=1e-4, fused=True),
            device=torch.device(job.device),
            param_dtype=None if dtype is torch.float32 else dtype,
            compile=compiles,
        )
        self._batch = job.batch()
        self.first_step_s = self.run(1)[0]
        self.step_s: list[float] = []
        self.loss = 0.0

    def run(self, num_steps: int) -> list[float]:
        """Seconds of each of some steps, one after the other's end."""
        seconds = []
        for _ in range(num_steps):
            began = time.perf_counter()
            self.loss = self._pipe.step_global(*self._batch).loss
            if self._pipe.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds

    def close(self) -> None:
        self._pipe.close()


def measure(job: Job) -> dict[str, Any]:
    """Trains both ways in turn; the figures."""
    eager, compiled = Runner(job, compiles=False), Runner(job, compiles=True)
    for runner in (eager, compiled):
        runner.run(1)
    for number in range(job.num_rounds):
        order = (eager, compiled) if number % 2 else (compiled, eager)
        for runner in order:
            runner.step_s += runner.run(job.num_steps)
    medians = [statistics.median(runner.step_s) for runner in (eager, compiled)]
    figures = {
        "eager_step_s": medians[0],
        "compiled_step_s": medians[1],
        "compiled_over_eager": medians[1] / medians[0],
        "compiling_s": compiled.first_step_s - eager.first_step_s,
        "loss_difference": abs(compiled.loss - eager.loss) / abs(eager.loss),
        "quartiles_s": {"eager": _quartiles(eager.step_s), "compiled": _quartiles(compiled.step_s)},
    }
    eager.close()
    compiled.close()
    return figures


def _quartiles(values: list[float]) -> list[float]:
    first, _, third = statistics.quantiles(values, n=4)
    return [first, third]


def describe(job: Job, figures: dict[str, Any]) -> str:
    """The figures, for people."""
    ratio = figures["compiled_over_eager"]
    offloaded = "everything" if job.offload else "nothing"
    recomputed = "layer" if job.recompute else "none"
    lines = [
        f"Llama of {job.num_layers} layers, {job.dim} wide, in {job.dtype}, "
        f"on {find_device_name(job.device)}; torch {torch.__version__}, {torch.get_num_threads()} threads",
        f"a step: {job.num_microbatches} microbatches of {job.microbatch_rows} x {job.sequence} tokens, "
        f"{job.num_ministages} ministages, {offloaded} offloaded, recompute {recomputed}",
        f"medians of {job.num_rounds * job.num_steps} steps each, in turn (and quartiles):",
    ]
    for name in ("eager", "compiled"):
        low, high = figures["quartiles_s"][name]
        median = figures[f"{name}_step_s"]
        lines.append(f"  {name:9} {1e3 * median:9.1f} ms   ({1e3 * low:.1f} to {1e3 * high:.1f})")
    lines += [
        f"  ratio     {ratio:9.3f}      (eager takes {1 / ratio:.2f} times as long)",
        f"compiling took {figures['compiling_s']:.1f} s; losses differ by {figures['loss_difference']:.1e}",
    ]
    return "\n".join(lines)


def find_device_name(device: str) -> str:
    """The GPU, or the kind of processor."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"


def main() -> int:
    """Measures, prints, and writes if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--offload", action="store_true", help="offload parameters, optimizer and activations"
    )
    parser.add_argument("--recompute", action="store_true", help="compute layers again in the backward")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, help="how often each takes its turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    job = replace(
        CUDA if arguments.device == "cuda" else CPU, offload=arguments.offload, recompute=arguments.recompute
    )
    job = replace(job, dtype=arguments.dtype or job.dtype, num_rounds=arguments.rounds or job.num_rounds)
    backend = "cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    figures = measure(job)
    dist.destroy_process_group()
    print(describe(job, figures))
    if arguments.json:
        machine = {"device": find_device_name(job.device), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"job": asdict(job), **machine, **figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
