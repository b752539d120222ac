"""The plans in `recipes/` that the planner made run as their recipes say, and a new one is no better."""

from __future__ import annotations

import pytest

from recipes.make_plans import MADE, RECIPES, Recipe, make_plan, renew, run
from zorselike.plan.plan import Plan
from zorselike.train.config.file import load_config

NAMES = pytest.mark.parametrize("recipe", MADE, ids=lambda recipe: recipe.name)


@NAMES
def test_a_shipped_plan_is_for_its_recipe_and_fits(recipe: Recipe) -> None:
    plan, config = Plan.load(recipe.path).validate(), load_config(RECIPES / f"{recipe.name}.toml")
    assert (config.model.name, config.model.flavor) == (recipe.family, recipe.flavor)
    assert config.training.seq_len == plan.sequence_length == recipe.sequence_length
    assert plan.global_batch == recipe.global_batch and bool(plan.devices) == recipe.by_hostname
    assert config.training.max_norm and config.hetero.clip == "global", "updates are deferred"
    assert f"python recipes/make_plans.py {recipe.name}`" in recipe.path.read_text().splitlines()[0]
    case = recipe.simulate(plan)
    assert plan.cluster_fingerprint == case.cluster.fingerprint
    assert not any(case.is_overfull(rank) for rank in range(plan.num_ranks))
    assert case.simulation.iteration_s == pytest.approx(plan.estimates.iteration_s, rel=0.01), "make it again"


@NAMES
def test_a_new_plan_is_hardly_better(recipe: Recipe) -> None:
    old, new = (recipe.simulate(plan) for plan in (Plan.load(recipe.path), make_plan(recipe, "1s")))
    assert new.simulation.iteration_s > 0.97 * old.simulation.iteration_s, "python recipes/make_plans.py"


def test_the_command_says_what_changed(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe, new = MADE[0], Plan.load(MADE[0].path)
    monkeypatch.setattr("recipes.make_plans.make_plan", lambda *_: new)
    folder = tmp_path_factory.mktemp("recipes")
    monkeypatch.setattr(Recipe, "path", property(lambda self: folder / f"{self.name}.plan.toml"))
    assert renew(recipe, "1s", writes=False) and not list(folder.iterdir())
    assert renew(recipe, "1s", writes=True) and Plan.load(recipe.path) == new
    assert not renew(recipe, "1s", writes=True)
    missing, written, kept = capsys.readouterr().out.splitlines()
    step = f"{new.estimates.iteration_s:.4g} s"
    assert missing == written and "there is no such file" in missing
    assert missing.endswith(f" -> {step} a step, plan {new.fingerprint}")
    assert kept == f"two_gpus.plan.toml: kept, {step} a step"
    with pytest.raises(SystemExit):
        run(["three_gpus"])
    assert "there are two_gpus, workstations" in capsys.readouterr().err
