from __future__ import annotations

import random
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plans, random_plan, with_replicas

from zorselike.plan import Device, Estimates, Group, Microbatch, Plan, PlanError

BY_HAND = """\
version = 1
global_batch = 9                      # rows per optimizer step
[[groups]]                            # in pipeline order; PP across groups, DP inside
ranks = [0, 1, 2]
zero = 2                              # 0..3, default 2
microbatches = [[0, 0, 2], [1, 4, 6], [2, 8, 9], [0, 2, 4], [1, 6, 8]]
grad_reduce = "once"
offload = []
recompute = "none"
[[groups]]
ranks = [3]
shares = [[3, 9, 5]]
[[ministages]]
group = 0
modules = ["tok_embeddings", "layers.0"]
[[ministages]]
group = 1
modules = ["layers.1", "norm", "output"]
"""

texts = st.text(max_size=12)
labels = st.text(max_size=8).filter(str.isprintable)
maybe_seconds = st.none() | st.floats(0, 1e9) | st.integers(0, 10)


@st.composite
def full_plans(draw: st.DrawFn) -> Plan:
    """Plans with everything that a planner fills in, and with replicas and offload."""
    plan = draw(plans(max_groups=3))
    nodes = draw(st.lists(labels.filter(bool), min_size=1, max_size=3, unique=True))
    order = draw(st.permutations(range(plan.num_ranks)))
    devices = [Device(rank, nodes[rank % len(nodes)], rank, draw(labels)) for rank in order]
    bytes_ = st.integers(0, 2**63 - 1)
    groups = [
        replace(group, offload=tuple(draw(st.permutations(("params", "optimizer", "activations")))[:n]))
        for group, n in zip(plan.groups, draw(st.lists(st.integers(0, 3), min_size=3)), strict=False)
    ]
    plan = replace(plan, groups=tuple(groups), sequence_length=draw(st.none() | st.integers(1, 2**20)))
    if draw(st.booleans()):
        plan = with_replicas(plan, random.Random(draw(st.integers(0, 99))))
        devices = [replace(device, node=nodes[0], type=devices[0].type) for device in devices]
    return replace(
        plan,
        devices=tuple(devices) if draw(st.booleans()) else (),
        model=draw(st.none() | texts),
        cluster_fingerprint=draw(st.none() | texts),
        workload_fingerprint=draw(st.none() | texts),
        estimates=Estimates(
            iteration_s=draw(maybe_seconds),
            peak_memory_bytes=tuple(draw(bytes_) for _ in order) if draw(st.booleans()) else (),
            cost_per_iteration=draw(maybe_seconds),
            share_of_ideal=draw(maybe_seconds),
            limited_by=tuple(draw(st.lists(texts, max_size=2))),
        ),
    )


@given(plans())
def test_what_is_written_reads_back_equal(plan):
    assert Plan.parse(plan.format()) == plan


@given(full_plans())
def test_what_a_planner_writes_reads_back_equal(plan):
    text = plan.format()
    assert Plan.parse(text) == plan
    assert Plan.parse(text).fingerprint == plan.fingerprint


def test_bounds_on_microbatches_in_flight_are_kept():
    text = BY_HAND.replace("shares =", "max_in_flight = 2\nshares =")
    plan = Plan.parse(text)
    assert [group.max_in_flight for group in plan.groups] == [None, 2]
    assert Plan.parse(plan.format()) == plan
    assert plan.format().count("max_in_flight") == 1
    assert "max_in_flight" not in Plan.parse(BY_HAND).format()
    other = Plan.parse(text.replace("max_in_flight = 2", "max_in_flight = 3"))
    assert len({plan.fingerprint, other.fingerprint, Plan.parse(BY_HAND).fingerprint}) == 3


def test_waiting_for_reductions_is_kept_and_tells_plans_apart_where_it_makes_a_difference():
    text = BY_HAND.replace("offload = []", "overlap_grad_reduce = false")
    plan, beside = Plan.parse(text), Plan.parse(BY_HAND)
    assert [group.overlap_grad_reduce for group in plan.groups] == [False, True]
    assert Plan.parse(plan.format()) == plan
    assert plan.format().count("overlap_grad_reduce") == 1
    assert "overlap_grad_reduce" not in beside.format()  # As plans were written before.
    assert plan.fingerprint != beside.fingerprint
    for same in ("zero = 2", "zero = 3"):  # A rank alone waits for nobody, ZeRO 3 reduces in its backwards.
        one = text.replace("zero = 2", same).replace("false", "true")
        other = one.replace("overlap_grad_reduce = true", "overlap_grad_reduce = false")
        is_same = Plan.parse(one).fingerprint == Plan.parse(other).fingerprint
        assert is_same == (same == "zero = 3")
    alone = BY_HAND.replace("shares =", "overlap_grad_reduce = false\nshares =")
    assert Plan.parse(alone).fingerprint == beside.fingerprint
    with pytest.raises(PlanError, match=r"overlap_grad_reduce is 1; it must be true or false"):
        Plan.parse(text.replace("= false", "= 1"))


def test_a_plan_by_hand_is_read_with_its_shares(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(BY_HAND)
    plan = Plan.load(path)
    assert plan.groups[0].microbatches_by_rank[0] == (Microbatch(0, 0, 2), Microbatch(0, 2, 4))
    assert plan.groups[1] == Group(ranks=(3,), microbatches=(Microbatch(3, 0, 5), Microbatch(3, 5, 9)))
    assert plan.ministages[1].modules == ("layers.1", "norm", "output")
    plan.save(path)
    assert Plan.load(str(path)) == plan


def test_a_plan_lists_ranges_of_layers_as_tables_show_them():
    text = BY_HAND.replace('"layers.1", "norm"', '"layers.1 .. layers.12", "norm"')
    plan = Plan.parse(text)
    names = tuple(f"layers.{i}" for i in range(1, 13))
    assert plan.ministages[1].modules == (*names, "norm", "output")
    assert "layers.1 .. layers.12, norm, output" in plan.explain()
    assert Plan.parse(plan.to_text()) == plan
    for wrong in (
        "layers.2 .. layers.1",
        "layers.1 .. blocks.2",
        "layers.1 .. norm",
        "layers.1 .. layers.2 .. 3",
    ):
        with pytest.raises(
            PlanError, match=rf"ministages\[1\]\.modules has '{wrong}'; a range goes up within"
        ):
            Plan.parse(text.replace("layers.1 .. layers.12", wrong))


def test_a_windows_editor_may_have_been_at_it(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xef\xbb\xbf" + BY_HAND.replace("\n", "\r\n").encode())
    assert Plan.load(path) == Plan.parse(BY_HAND)


def test_written_plans_are_readable():
    plan = Plan(
        global_batch=2000,
        groups=(Group(ranks=(0,), microbatches=tuple(Microbatch(0, i, i + 1) for i in range(2000))),),
        ministages=random_plan(random.Random(0), max_groups=1).ministages,
    )
    lines = plan.format().splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 500


def test_saving_replaces_the_file_whole_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("old")
    plan = random_plan(random.Random(0))
    plan.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.toml"]
    before = path.read_bytes()
    with pytest.raises(PlanError, match="global_batch is 0"):
        replace(plan, global_batch=0).save(path)
    assert path.read_bytes() == before


def test_a_failed_write_is_told_and_leaves_nothing(tmp_path):
    plan = random_plan(random.Random(0))
    with pytest.raises(PlanError, match=r"is a directory; give the name of a file in it"):
        plan.save(tmp_path)
    with pytest.raises(PlanError, match=r"missing.plan\.toml: cannot be written: No such file or directory"):
        plan.save(tmp_path / "missing" / "plan.toml")
    assert list(tmp_path.iterdir()) == []


def test_saving_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "real.toml").write_text("old")
    (tmp_path / "link.toml").symlink_to("real.toml")
    plan = random_plan(random.Random(0))
    plan.save(tmp_path / "link.toml")
    assert (tmp_path / "link.toml").is_symlink()
    assert Plan.load(tmp_path / "real.toml") == plan


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file; check the path of the plan"),
        ("directory", "is a directory; give the plan file in it"),
        (b"[[groups]\n", r"is not TOML: .*line 1"),
        (b"a = " + b"[" * 100_000, "is not TOML: "),
        (b"\x80\x04binary", "is not a text file"),
        (b"", r"version is missing; begin with version = 1"),
        (
            b"[training]\nsteps = 3\n",
            r"is a recipe, where a plan is needed; .* or the one that its \[hetero\] plan",
        ),
        (b'version = 1\n[[nodes]]\nname = "a"\n', "is a cluster, where a plan is needed; give a plan file$"),
    ],
)
def test_unreadable_files_are_told_in_one_line(tmp_path, content, message):
    path = tmp_path / "plan.toml"
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=message) as error:
        Plan.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # Keys that do not exist, at every level.
        (
            "global_batch = 9",
            "global_bach = 9",
            "global_bach is not a key; did you mean 'global_batch'?",
        ),
        (
            "version = 1",
            "version = 1\nfoo = 1",
            "foo is not a key; valid keys are global_batch, groups",
        ),
        ("zero = 2 ", "zeroo = 2 ", "groups[0].zeroo is not a key; did you mean 'zero'?"),
        ("shares", "share", "groups[1].share is not a key; did you mean 'shares'?"),
        ("group = 1", "groups = 1", "ministages[1].groups is not a key; did you mean 'group'?"),
        ("[[ministages]]", "[[ministage]]", "ministage is not a key; did you mean 'ministages'?"),
        (
            "[[groups]] ",
            "[estimates]\niteration = 1.0\n[[groups]] ",
            "estimates.iteration is not a key; did you mean 'iteration_s'?",
        ),
        (
            "[[groups]] ",
            "[[devices]]\nrank = 0\nhost = 'a'\nlocal_rank = 0\n[[groups]] ",
            "devices[0].host is not a key; valid keys are rank, node, local_rank, type",
        ),
        # Keys that are missing.
        ("version = 1\n", "", "version is missing; begin with version = 1"),
        ("global_batch = 9", "", "global_batch is missing; add it"),
        ("ranks = [3]\n", "", "groups[1].ranks is missing; add it"),
        ("shares = [[3, 9, 5]]", "", "groups[1].shares is missing; give shares = [[rank, rows, "),
        ('modules = ["tok_embeddings", "layers.0"]', "", "ministages[0].modules is missing"),
        # Values of another type.
        ("version = 1", "version = 2", "version is 2; this zorselike reads version 1: upgrade zorselike"),
        ("version = 1", "version = '1'", "version is '1'; it must be an integer"),
        ("global_batch = 9", "global_batch = 9.0", "global_batch is 9.0; it must be an integer"),
        ("global_batch = 9", "global_batch = 0", "global_batch is 0; give 1 or more"),
        ("zero = 2 ", "zero = true ", "groups[0].zero is True; it must be an integer"),
        ("ranks = [3]", "ranks = 3", "groups[1].ranks is 3; it must be a list of integers"),
        ("ranks = [3]", "ranks = ['3']", "groups[1].ranks[0] is '3'; it must be an integer"),
        ("ranks = [3]", "ranks = [['3']]", "groups[1].ranks[0][0] is '3'; it must be an integer"),
        ("offload = []", "offload = 'params'", "groups[0].offload is 'params'; it must be a list of strings"),
        ('"once"', "1", "groups[0].grad_reduce is 1; it must be a string"),
        ("[1, 4, 6]", "[1, 4]", "groups[0].microbatches[1] is [1, 4]; it must be [rank, start, stop]"),
        ("[1, 4, 6]", "[1, 4, 6.5]", "groups[0].microbatches[1][2] is 6.5; it must be an integer"),
        (
            "[[3, 9, 5]]",
            "[3, 9, 5]",
            "groups[1].shares[0] is 3; it must be [rank, rows, rows_per_microbatch]",
        ),
        ("[[3, 9, 5]]", "9", "groups[1].shares is 9; it must be a list of [rank, rows"),
        ('["tok_embeddings", "layers.0"]', '"norm"', "ministages[0].modules is 'norm'; it must be a list of"),
        (
            "[[groups]] ",
            "devices = 1\n[[groups]] ",
            "devices is 1; it must be a list of tables, in TOML each under a",
        ),
        ("[[groups]] ", "estimates = 1\n[[groups]] ", "estimates is 1; it must be a table"),
        (
            "[[groups]] ",
            "[estimates]\niteration_s = '1'\n[[groups]] ",
            "estimates.iteration_s is '1'; it must be a number",
        ),
        # What the readers of single values cannot see.
        ("[[3, 9, 5]]", "[[3, 8, 5]]", "groups[1].shares: the rows of rank 3 add up to 8, global_batch is 9"),
        (
            "shares",
            "microbatches = [[3, 0, 9]]\nshares",
            "groups[1].shares and groups[1].microbatches are both given",
        ),
        (
            "[[3, 9, 5]]",
            "[[4, 9, 5]]",
            "groups[1].shares[0] is for rank 4, which is not in groups[1].ranks; add",
        ),
        ("[[0, 0, 2], ", "[", "group 0: no rank computes rows 0 to 1"),
        (
            '"none"',
            '"layers"',
            "groups[0].recompute is 'layers'; give one of 'none', 'layer'; did you mean 'layer'?",
        ),
        (BY_HAND, "version = 1\nglobal_batch = 1\ngroups = []\nministages = []", "groups is empty"),
        (
            BY_HAND,
            "version = 1\nglobal_batch = 1\n[groups]\nranks = [0]",
            "groups is {'ranks': [0]}; it must be a",
        ),
    ],
)
def test_wrong_files_are_refused_naming_file_key_and_mend(tmp_path, old, new, message):
    assert old in BY_HAND
    path = tmp_path / "plan.toml"
    path.write_text(BY_HAND.replace(old, new, 1))
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_every_key_is_type_checked():
    """Whatever key is given a value of no sensible type, the error names it."""
    plan = replace(
        random_plan(random.Random(2), max_groups=1, max_ranks_per_group=1),
        devices=(Device(0, "node", 0, "cpu"),),
        sequence_length=8,
        model="m",
        cluster_fingerprint="c",
        workload_fingerprint="w",
        estimates=Estimates(1.0, 1.0, peak_memory_bytes=(1,)),
    )
    text = plan.format()
    keys = [
        line.split(" = ")[0] for line in text.splitlines() if " = " in line and not line.startswith("    ")
    ]
    assert len(keys) > 18
    one_line = [line for line in text.splitlines() if " = " in line and not line.endswith("[")]
    for line in one_line:
        key = line.split(" = ")[0]
        with pytest.raises(PlanError, match=rf"(^|\.){key} is .*1979.*; it must be "):
            Plan.parse(text.replace(line, f"{key} = 1979-05-27", 1))


@given(plans(max_groups=3), st.randoms(use_true_random=False))
def test_fingerprint_changes_with_what_is_computed_where_only(plan, rng):
    devices = [Device(rank, "node", rank, "cpu") for rank in range(plan.num_ranks)]
    plan = replace(plan, devices=tuple(devices))
    assert len(plan.fingerprint) == 12
    assert int(plan.fingerprint, 16) >= 0
    rng.shuffle(devices)
    same = [
        replace(plan, devices=tuple(devices)),
        replace(plan, estimates=Estimates(iteration_s=1.0)),
        replace(plan, cluster_fingerprint="a", workload_fingerprint="b"),
        Plan.parse(plan.format()),
    ]
    first = plan.groups[0]
    flipped = tuple({*first.offload} ^ {"params"})
    other = [
        replace(plan, global_batch=plan.global_batch + 1),
        replace(plan, devices=()),
        replace(plan, sequence_length=8),
        replace(plan, model="m"),
        replace(plan, ministages=plan.ministages[1:]),
        replace(plan, groups=(replace(first, zero=first.zero ^ 1, grad_reduce="once"), *plan.groups[1:])),
        replace(plan, groups=(replace(first, offload=flipped), *plan.groups[1:])),
        replace(plan, groups=(replace(first, microbatches=first.microbatches[1:]), *plan.groups[1:])),
    ]
    assert {p.fingerprint for p in same} == {plan.fingerprint}
    assert len({plan.fingerprint, *(p.fingerprint for p in other)}) == len(other) + 1


def test_fingerprint_is_the_same_in_every_process():
    assert Plan.parse(BY_HAND).fingerprint == "5b862b466486"


def test_planning_needs_no_torch():
    code = "import sys, zorselike.plan; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_text_is_plain_toml():
    table = tomllib.loads(Plan.parse(BY_HAND).format())
    assert list(table) == ["version", "global_batch", "groups", "ministages"]
    assert table["groups"][1]["microbatches"] == [[3, 0, 5], [3, 5, 9]]
