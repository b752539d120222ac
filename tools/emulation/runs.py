"""The runs of `tools/check_emulated.py`: at least thirty that have little in common."""

from __future__ import annotations

from dataclasses import replace

from .model import COMPUTE_WIDTH
from .scenarios import Scenario, Stress

A, B, V, T = "A100-80", "A100-40", "V100-32", "T4"

COMPUTE_REPEATS = {A: 4, V: 8, T: 12}
"""How often computing layers multiply on each type."""

FOUR = Scenario(
    name="4 ranks, 2 groups",
    nodes=((A, A), (T, T)),
    groups=((0, 1), (2, 3)),
    layers=(8, 4),
    num_rows=16,
    num_microbatches=8,
)
SIX = Scenario(
    name="6 ranks, 3 groups",
    nodes=((A, A), (V, V), (T, T)),
    groups=((0, 1), (2, 3), (4, 5)),
    layers=(6, 3, 3),
    num_rows=18,
    num_microbatches=6,
)
EIGHT = Scenario(
    name="8 ranks, 2 groups",
    nodes=((A, A), (B, B), (T, T, T, T)),
    groups=((0, 1, 2, 3), (4, 5, 6, 7)),
    layers=(9, 3),
    num_rows=32,
    num_microbatches=8,
)
SIXTEEN = Scenario(
    name="16 ranks, 4 groups",
    nodes=((A, A, A, A), (B, B, B, B), (V, V, V, V), (T, T, T, T)),
    groups=((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)),
    layers=(4, 4, 3, 3),
    num_rows=32,
    num_microbatches=8,
)
ALONE = Scenario(
    name="4 ranks, 1 group",
    nodes=((A,), (B,), (V,), (T,)),
    groups=((0, 1, 2, 3),),
    layers=(6,),
    num_rows=20,
    num_microbatches=8,
)
PAIR = Scenario(
    name="2 computing ranks",
    nodes=((A,), (T,)),
    groups=((0,), (1,)),
    layers=(6, 2),
    num_rows=24,
    num_microbatches=6,
    computes=True,
    limit="none",
    layer_parameters=COMPUTE_WIDTH**2,
    row_elements=64 * COMPUTE_WIDTH,
    speeds={device: 1 / repeats for device, repeats in COMPUTE_REPEATS.items()},
)


def sleeping_runs() -> tuple[Scenario, ...]:
    """Links limited by token buckets that are slept in the transport."""
    rings: tuple[Stress, ...] = ("collectives", "ring")
    return (
        replace(FOUR, name="4 ranks, 2 ministages", ministages=2, nic_mb_per_s=6.0, stresses=("dependency",)),
        replace(FOUR, name="4 ranks, ZeRO 3", zero=3, num_microbatches=4, nic_mb_per_s=20.0),
        replace(
            FOUR,
            name="4 ranks, offload all",
            ministages=2,
            offload=("params", "optimizer", "activations"),
            recompute="layer",
            nic_mb_per_s=8.0,
        ),
        replace(
            SIX,
            name="6 ranks, slow cards",
            ministages=2,
            nic_mb_per_s=1.5,
            row_elements=8_192,
            stresses=("dependency",),
        ),
        replace(
            ALONE,
            name="4 ranks, 1 group over 4 nodes, ZeRO 2",
            ministages=2,
            nic_mb_per_s=1.2,
            stresses=rings,
        ),
        replace(
            ALONE,
            name="4 ranks, 1 group over 2 nodes, ZeRO 3",
            nodes=((A, A), (T, T)),
            layers=(4,),
            zero=3,
            num_microbatches=4,
            nic_mb_per_s=2.0,
            stresses=rings,
        ),
        replace(
            ALONE,
            name="6 ranks, 1 group, ZeRO 0",
            nodes=((A, A, A), (V, V, V)),
            groups=((0, 1, 2, 3, 4, 5),),
            layers=(5,),
            zero=0,
            num_rows=36,
            num_microbatches=12,
            nic_mb_per_s=1.5,
            stresses=rings,
        ),
        replace(
            EIGHT,
            name="8 ranks, 2 groups across nodes, one card each",
            nodes=((A, A, A, A), (T, T, T, T)),
            groups=((0, 1, 4, 5), (2, 3, 6, 7)),
            layers=(5, 5),
            num_rows=24,
            nic_mb_per_s=1.2,
            row_elements=2_048,
            stresses=("contention", "collectives"),
        ),
        replace(EIGHT, name="8 ranks, 3 ministages", ministages=3, nic_mb_per_s=3.0, row_elements=8_192),
        replace(
            EIGHT,
            name="8 ranks, slow region",
            layers=(6, 2),
            num_rows=24,
            shared_mb_per_s=0.8,
            nic_mb_per_s=6.0,
            latency_s=0.01,
            row_elements=8_192,
            stresses=("contention",),
        ),
        Scenario(
            name="12 ranks, 3 groups, ZeRO 2, 1 and 3",
            nodes=((A, A, A, A), (V, V, V, V), (T, T, T, T)),
            groups=((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)),
            layers=(6, 4, 3),
            ministages=2,
            num_rows=36,
            num_microbatches=12,
            zero=(2, 1, 3),
            nic_mb_per_s=4.0,
        ),
        replace(SIXTEEN, nic_mb_per_s=4.0),
    )


def kernel_runs() -> tuple[Scenario, ...]:
    """Links limited by the kernel; where that is not possible, by the token buckets."""
    four = replace(FOUR, name="4 ranks, tbf", limit="kernel", nic_mb_per_s=4.0)
    six = replace(SIX, name="6 ranks, tbf", limit="kernel", nic_mb_per_s=2.5)
    one = replace(
        ALONE,
        name="4 ranks, 1 group, tbf",
        limit="kernel",
        layers=(5,),
        nic_mb_per_s=2.0,
        stresses=("collectives",),
    )
    eight = replace(
        EIGHT,
        name="8 ranks, 2 ministages, tbf",
        limit="kernel",
        nodes=((A, A, A, A), (T, T, T, T)),
        layers=(8, 4),
        ministages=2,
        nic_mb_per_s=3.0,
        row_elements=8_192,
    )
    return (
        four,
        replace(four, name="4 ranks, 2 ministages, tbf", ministages=2, row_elements=8_192),
        replace(
            four,
            name="4 ranks, 4 ministages, tbf",
            nodes=((A, A), (B, B)),
            layers=(8, 6),
            ministages=4,
            num_microbatches=4,
            nic_mb_per_s=6.0,
        ),
        replace(four, name="4 ranks, ZeRO 0 and 1, tbf", zero=(0, 1)),
        replace(
            four,
            name="4 ranks, offload, tbf",
            ministages=2,
            offload=("params", "activations"),
            recompute="layer",
        ),
        one,
        replace(one, name="4 ranks, 1 group, ZeRO 3, tbf", zero=3, layers=(3,), num_microbatches=4),
        six,
        replace(
            six, name="6 ranks, 2 ministages, tbf", ministages=2, row_elements=8_192, stresses=("dependency",)
        ),
        eight,
    )


def computing_runs() -> tuple[Scenario, ...]:
    """One rank a core, layers that multiply matrices."""
    one = replace(PAIR, groups=((0, 1),), layers=(6,))
    return (
        PAIR,
        replace(PAIR, name="2 computing ranks, 2 ministages", ministages=2),
        replace(PAIR, name="2 computing ranks, 3 ministages", ministages=3, layers=(6, 3)),
        replace(PAIR, name="2 computing ranks, 12 microbatches", num_microbatches=12),
        replace(PAIR, name="2 computing ranks, recompute", recompute="layer"),
        replace(PAIR, name="2 computing ranks, V100 and T4", nodes=((V,), (T,)), layers=(5, 3)),
        replace(one, name="1 computing group, ZeRO 0", zero=0),
        replace(one, name="1 computing group, ZeRO 1", zero=1),
        replace(one, name="1 computing group, ZeRO 2, 2 ministages", ministages=2),
        replace(one, name="1 computing group, ZeRO 3", zero=3),
    )


def all_runs() -> tuple[Scenario, ...]:
    """All runs in the order in which they are shown."""
    return sleeping_runs() + kernel_runs() + computing_runs()
