"""Training that goes on in the same processes when some of them die, leave or come, in one straight line.

    .venv/bin/zorselike run --ranks 4 -- .venv/bin/python recipes/train_elastic.py

Four CPU processes train a small Llama as `recipes/debug_cpu.plan.toml` divides it. Kill one of them with
`kill -9 PID`: the others go on at the same step, with what a neighbour holds of its state, and another takes
its place. `zorselike run` prints the lines by which more join, and by which the job is looked at.
"""

import os
import sysconfig
from functools import partial
from pathlib import Path

import torch

from zorselike import ElasticPipeline, Plan
from zorselike.elastic.meeting.environment import from_environment
from zorselike.models import build_model

STEPS, SEQ_LEN, LR = 300, 128, 3e-3


# 1. The model, made anew for every change of who has what; on the meta device that costs nothing.
def make_model():
    with torch.device("meta"):
        return build_model("llama", "debug")


# 2. The data: a row's content is a function of its number in the order, so that whoever computes a row, in
#    whatever generation, reads the same.
sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
stream = torch.frombuffer(bytearray(b"\0".join(file.read_bytes() for file in sources)), dtype=torch.uint8)
num_rows = (len(stream) - 1) // SEQ_LEN


def read_row(number):
    place = int(torch.randint(num_rows, (), generator=torch.Generator().manual_seed(number))) * SEQ_LEN
    return stream[place : place + SEQ_LEN + 1].long()


def read_rows(first, rows):
    """Tokens `[rows, SEQ_LEN + 1]`; None for no rows."""
    return torch.stack([read_row(first + row) for row in rows]) if rows else None


# 3. The pipeline. Every process of the job makes one, those too that come later.
pipe = ElasticPipeline(
    make_model,
    Plan.load(Path(__file__).with_name("debug_cpu.plan.toml")),
    meeting=partial(from_environment, device_type="cpu", memory_bytes=2**32),
    optimizer=partial(torch.optim.AdamW, lr=LR, betas=(0.9, 0.95)),
    device="cpu",
    max_norm=1.0,
)
warmup = pipe.lr_schedulers(
    lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
)

# 4. The loop asks for the rows at each step: after a loss they are others, and the step may be the same one.
generation = None
while pipe.wait() and pipe.num_steps < STEPS:
    if pipe.generation != generation:
        generation = pipe.generation
        print(f"process {os.getpid()} is rank {pipe.rank} of {pipe.plan.num_ranks}", flush=True)
    inputs, targets = (read_rows(pipe.rows_seen, rows) for rows in (pipe.input_rows, pipe.target_rows))
    result = pipe.step(
        None if inputs is None else inputs[:, :-1],
        None if targets is None else targets[:, 1:],
    )
    if result.is_done:
        warmup.step()
        if pipe.num_steps % 10 == 0 and pipe.rank == 0:
            print(f"step {pipe.num_steps:4}  loss {result.loss:7.4f}", flush=True)

pipe.close()
