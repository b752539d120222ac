"""Training by hand: everything that `python -m zorselike.train` does for you, in one straight line.

    torchrun --nproc-per-node 4 recipes/train_by_hand.py

Four CPU processes train a small Llama as `recipes/debug_cpu.plan.toml` divides it. For your own
model, loss or data, copy this file and change what you need.
"""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

from zorselike import HeteroPipeline, Plan
from zorselike.models import build_model

STEPS, SEQ_LEN, LR = 100, 128, 3e-3

# 1. The processes that torchrun started. For GPUs: "cpu:gloo,cuda:nccl", and torch.cuda.set_device.
dist.init_process_group("gloo")

# 2. The plan: which rank computes which rows of which layers.
plan = Plan.load(Path(__file__).with_name("debug_cpu.plan.toml"))

# 3. The model, on the meta device: no rank ever holds more of it than its own layers.
with torch.device("meta"):
    model = build_model("llama", "debug")


# 4. The optimizer. Called for every ministage with its [(name, parameter)].
def make_optimizer(named_parameters):
    matrices = [(name, p) for name, p in named_parameters if p.ndim >= 2]
    vectors = [(name, p) for name, p in named_parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, betas=(0.9, 0.95))


# 5. The pipeline: model + plan = one training step with the numbers of a single process.
pipe = HeteroPipeline(model, plan, optimizer=make_optimizer, device="cpu", max_norm=1.0)
warmup = pipe.lr_schedulers(
    lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
)
if dist.get_rank() == 0:
    print(pipe.describe(), flush=True)

# 6. The data: one long stream of bytes, the same on every rank.
sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
stream = torch.frombuffer(bytearray(b"\0".join(file.read_bytes() for file in sources)), dtype=torch.uint8)
num_rows = (len(stream) - 1) // SEQ_LEN


def read_rows(step, rows):
    """Tokens `[rows, SEQ_LEN + 1]` of some rows of a step's global batch; None for no rows."""
    if not rows:
        return None
    generator = torch.Generator().manual_seed(step)  # All ranks draw the same order.
    order = torch.randint(num_rows, (plan.global_batch,), generator=generator)
    return torch.stack([stream[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].long() for i in order[rows].tolist()])


# 7. The loop. A rank needs the inputs of the rows that it feeds into the first ministage, and the
#    targets of those whose loss it computes in the last; many ranks need only one of them, or none.
for step in range(STEPS):
    inputs, targets = read_rows(step, pipe.input_rows), read_rows(step, pipe.target_rows)
    result = pipe.step(
        None if inputs is None else inputs[:, :-1],
        None if targets is None else targets[:, 1:],
    )
    warmup.step()
    if step % 10 == 0 or step == STEPS - 1:
        loss, grad_norm = result.loss, result.grad_norm  # The same on every rank.
        if dist.get_rank() == 0:
            print(f"step {step:4}  loss {loss:7.4f}  grad_norm {grad_norm:7.4f}", flush=True)

# 8. The weights, on rank 0, under the names that the model has; torch.save, safetensors, anything.
weights = pipe.full_state_dict()
if dist.get_rank() == 0:
    print(f"{len(weights)} tensors, {sum(tensor.numel() for tensor in weights.values()):,} parameters")

pipe.close()
dist.destroy_process_group()
