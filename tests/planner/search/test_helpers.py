"""Processes that simulate beforehand."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = """
    import sys
    sys.path[:0] = [{root!r}, {support!r}]
    import random
    from searched_problems import draw_problem, make_decoder
    from zorselike.plan.cluster.cluster import Cluster, Link, Node
    from zorselike.planner.search.search import search_plans

    nodes = [Node(name=kind, devices=(kind,), fabric=Link(5e10)) for kind in ("A10G", "T4")]
    cluster = Cluster(nodes=tuple(nodes), default_link=Link(3e9, 2e-5))
    problem = draw_problem(random.Random(0), cluster=cluster, global_batch=2, workload=make_decoder(1))
    for workers in (1, 3):
        answer = search_plans(problem, budget_s=600, workers=workers)
        assert answer.ending == "finished"
        case = answer.best.case
        print(
            [own.case.plan.fingerprint for own in answer.plans],
            [own.iteration_s for own in answer.improvements],
            answer.progress.num_simulated,
            case.peak_bytes,
        )
"""


def run_without_torch(script: str) -> list[str]:
    """Lines that it prints, in a process of its own: with torch loaded nothing is forked."""
    code = textwrap.dedent(script).format(root=str(ROOT), support=str(ROOT / "tests/support"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_answer_is_the_same_each_time_however_many_help():
    first, second = run_without_torch(SCRIPT)
    assert first == second


def test_helpers_answer_what_they_were_asked_and_end():
    script = """
        import sys
        sys.path[:0] = [{root!r}]
        import time
        from zorselike.planner.search.helpers import Helpers

        def square(number):
            time.sleep(0.05 * number)
            return number * number

        helpers = Helpers(2, square)
        assert len(helpers) == 2
        assert helpers.offer(1) and helpers.offer(2) and not helpers.offer(3) and helpers.offer(1)
        assert helpers.take(2, lambda: None) == 4 and helpers.take(7, lambda: None) is None
        assert helpers.offer(3) and helpers.take(3, lambda: None) == 9 and helpers.take(1, lambda: None) == 1
        helpers.offer(1000)
        helpers.close()
        print(len(helpers))
    """
    assert run_without_torch(script) == ["0"]


def test_where_torch_is_loaded_nothing_is_forked():
    pytest.importorskip("torch")
    from zorselike.planner.search.helpers import Helpers

    assert len(Helpers(2, abs)) == 0
