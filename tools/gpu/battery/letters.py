"""The letters of the battery and their parts, in the order in which they run. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .part import Part


@dataclass(frozen=True)
class Letter:
    """One sitting."""

    question: str
    seconds: float
    parts: tuple[Part, ...]


LETTERS = {
    "A": Letter(
        "is it right",
        540.0,
        (
            Part(
                "machine",
                "versions, device, and memory before and after touching it",
                "machine:run_machine",
                90,
            ),
            Part(
                "smoke", "three steps, resident and all offloaded; where a step waits", "smoke:run_smoke", 70
            ),
            Part("scenes", "one device equals the CPU, whatever the plan", "scenes:run_scenes", 180),
            Part(
                "delays",
                "bits under random delays on every stream, and NaN in what grows",
                "delays:run_delays",
                150,
            ),
            Part("queues", "which streams stand behind receives that wait", "delays:run_queues", 20),
            Part("pinning", "how fast host memory is pinned", "machine:run_pinning", 60),
            Part("links", "copies each way, and forks beside pinned memory", "machine:run_links", 40),
            Part(
                "tests",
                "the tests that need a GPU, six beside each other",
                "scenes:run_tests",
                240,
                ("torch", "numpy", "pytest", "hypothesis"),
            ),
        ),
    ),
    "B": Letter(
        "is it fast and small",
        540.0,
        (
            Part(
                "offload", "offloading beside resident, FSDP2 and CPUOffloadPolicy", "speed:run_offload", 300
            ),
            Part("exposure", "which copies computing hides", "speed:run_exposure", 50),
            Part("peer", "a 7B model beside MegaTrain's figure", "speed:run_peer", 170),
            Part("switches", "what each thing that can be switched brings", "speed:run_switches", 150),
        ),
    ),
    "C": Letter(
        "is it foretold",
        480.0,
        (
            Part("profile", "layers, updates, copies and the program", "foretold:run_profile", 180),
            Part("resident", "one ministage, nothing recomputed", "foretold:run_case", 75),
            Part("offloaded_4", "everything offloaded in four ministages", "foretold:run_case", 75),
            Part("recomputed", "four ministages, layers recomputed", "foretold:run_case", 75),
            Part("offloaded_8", "everything offloaded in eight ministages", "foretold:run_case", 75),
            Part("shared", "three ranks on one card over Gloo", "foretold:run_shared", 60),
        ),
    ),
    "multi": Letter(
        "do several cards work together",
        540.0,
        (
            Part(
                "edges", "groups in line and groups of replicas equal one process", "several:run_edges", 180
            ),
            Part("sleeps", "many steps while hosts sleep at random", "several:run_sleeps", 180),
            Part("capped", "memory capped until the allocator retries", "several:run_capped", 120),
        ),
    ),
}
