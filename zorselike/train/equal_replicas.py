"""The plan of a recipe that gives a degree of tensor parallelism alone: like replicas, equal rows."""

from __future__ import annotations

from collections.abc import Sequence

from zorselike.errors import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan, Recompute
from zorselike.text.wording import count
from zorselike.train.config.config import Config


def make_equal_plan(config: Config, modules: Sequence[str], num_ranks: int) -> Plan:
    """One group with ZeRO 2 of as many replicas as there are ranks for, which all compute equally many rows,
    one at a time.

    Args:
        config: a recipe that says how many rows a step has.
        modules: of the model, as a plan lists them.
        num_ranks: processes that run, those of one node in a row.

    Raises:
        ConfigError: Ranks or rows do not divide.
    """
    degree, rows = config.parallelism.tensor_parallel_degree, config.training.global_batch_size
    where = f"[parallelism] tensor_parallel_degree = {degree}"
    if num_ranks % degree:
        raise ConfigError(
            f"{where}: {count(num_ranks, 'process')} cannot be divided into replicas of {degree}: start a "
            f"multiple of {degree}, or name a plan, in which degrees may differ ([hetero] plan)"
        )
    num_replicas = num_ranks // degree
    if rows % num_replicas:
        raise ConfigError(
            f"{where}: {count(num_replicas, 'replica')} cannot share {count(rows, 'row')} equally: set "
            f"[training] global_batch_size to a multiple of {num_replicas}, or name a plan ([hetero] plan)"
        )
    replicas = [tuple(range(first, first + degree)) for first in range(0, num_ranks, degree)]
    share = rows // num_replicas
    microbatches = [
        Microbatch(replica[0], number * share + row, number * share + row + 1)
        for row in range(share)
        for number, replica in enumerate(replicas)
    ]
    recompute: Recompute = "layer" if config.activation_checkpoint.mode == "full" else "none"
    group = Group(tuple(replicas), tuple(microbatches), recompute=recompute)
    length = config.training.seq_len
    return Plan(rows, (group,), (Ministage(0, tuple(modules)),), sequence_length=length).validate()
