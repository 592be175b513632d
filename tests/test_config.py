"""Recipes: what is accepted, what it becomes, and what is said of the rest."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from groupwise.config import GRPOConfig, Recipe, StageData
from groupwise.recipes import RecipeError, dump_recipe, parse_recipe, read_recipe

SMALL = """
name: small
model: builtin:tiny
task: {kind: arithmetic, digits: 1}
stages:
  - {name: cold, kind: sft, data: {count: 8}}
  - {name: rl, kind: grpo, model: cold, steps: 3}
  - {name: pick, kind: reject, model: rl}
  - {name: again, kind: sft, data: {stage: pick}}
  - {name: report, kind: evaluate, models: [base, again]}
"""


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_recipe_parses_and_survives_its_resolved_form(path):
    recipe = read_recipe(path)
    assert parse_recipe(dump_recipe(recipe)) == recipe


def test_a_preset_fills_in_what_is_not_given():
    assert GRPOConfig(algorithm="dapo").clip_bounds == (0.8, 1.28)
    assert GRPOConfig(algorithm="dapo", clip_range_high=0.5).clip_bounds == (0.8, 1.5)
    assert GRPOConfig(algorithm="dr_grpo").scale == "none"
    assert GRPOConfig().kl_coef == 0.04
    recipe = parse_recipe(SMALL, ["stages.rl.algorithm=dapo", "stages.rl.kl_coef=0.5"])
    assert (recipe.stages[1].weighting, recipe.stages[1].kl_coef) == ("token", 0.5)
    assert parse_recipe(dump_recipe(recipe)) == recipe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 1}, "must be >= 2, got 1"),
        ({"temperature": 0.0}, "must be > 0"),
        ({"kl_coef": -0.1}, "greater than or equal to 0"),
        ({"clip_range": float("nan")}, "finite"),
        ({"algorithm": "ppoo"}, "ppoo"),
        ({"clip": 0.2}, "clip"),
        ({"group_size": "8"}, "valid integer"),
    ],
)
def test_a_trainer_s_configuration_is_strict(fields, message):
    with pytest.raises(ValidationError, match=message):
        GRPOConfig(**fields)


def test_overrides_go_by_stage_name_or_number():
    recipe = parse_recipe(SMALL, ["seed=7", "stages.rl.lr=1e-5", "stages.0.epochs=2", "rewards={format: 1}"])
    assert (recipe.seed, recipe.stages[1].lr, recipe.stages[0].epochs) == (7, 1e-5, 2)
    assert recipe.rewards == {"format": 1.0}


def test_data_says_what_it_is_without_a_kind():
    recipe = parse_recipe(SMALL)
    assert recipe.stages[3].data == StageData(stage="pick")
    assert recipe.stages[0].data.count == 8


def test_lists_may_be_written_wherever_there_are_several():
    recipe = parse_recipe(
        SMALL,
        ["stages.rl.betas=[0.9, 0.95]", "stages.rl.lora={rank: 2, target_modules: [q_proj]}", "blocklist=[词]"],
    )
    assert recipe.stages[1].betas == (0.9, 0.95)
    assert recipe.stages[1].lora.target_modules == ("q_proj",)
    assert recipe.blocklist == ("词",)


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("digits: 1", "digitz: 1", "task.digitz: unknown key; did you mean 'digits'?"),
        ("steps: 3", "stepz: 3", "stages.1.stepz: unknown key; did you mean 'steps'?"),
        ("steps: 3", "lr: 1", "stages.1.steps: required, but not given"),
        ("name: small", "nmae: small", "nmae: unknown key; did you mean 'name'?"),
        ("{count: 8}", "{count: 8, cuont: 1}", "stages.0.data.cuont: unknown key; did you mean 'count'?"),
        ("steps: 3", "steps: 0", "stages.1.steps: input should be greater than or equal to 1, got 0"),
        ("steps: 3", "steps: yes", "stages.1.steps: input should be a valid integer, got True"),
        ("model: cold", "model: gold", "stages.rl.model: no stage is called 'gold'; did you mean 'cold'?"),
        ("model: cold", "model: again", "stages: rl -> again -> pick -> rl is a cycle: none of them can run first"),
        ("model: rl}", "model: pick}", "stages: pick -> pick is a cycle: none of them can run first"),
        ("stage: pick", "stage: rl", "stages.again.data.stage: stage 'rl' makes no data"),
        ("models: [base, again]", "models: [pick]", "stages.report.models.0: stage 'pick' makes no model"),
        ("name: again", "name: rl", "stages: two stages are called 'rl'; give each a name of its own"),
        ("name: again", "name: base", "stages: 'base' is the name of the recipe's own model"),
        ("model: builtin:tiny", "model: builtin:tiny\nrewards: {format: 0}", "rewards: at least one reward needs a"),
        (
            "model: builtin:tiny",
            "model: builtin:tiny\nrewards: {frmat: 1}",
            "rewards.frmat: unknown reward; did you mean",
        ),
        (
            "model: builtin:tiny",
            "model: builtin:tiny\nrewards: {format: -1, correctness: 1}",
            "rewards.format: weight must be >= 0 and finite, got -1.0; set it to 0 to log the part",
        ),
    ],
)
def test_mistakes_are_named_with_their_path(old, new, mistake):
    assert old in SMALL
    with pytest.raises(RecipeError) as error:
        parse_recipe(SMALL.replace(old, new, 1))
    assert any(m.startswith(mistake) for m in error.value.mistakes), error.value.mistakes


def test_all_mistakes_are_told_at_once():
    with pytest.raises(RecipeError) as error:
        parse_recipe(SMALL.replace("steps: 3", "steps: 0, group_size: 1").replace("digits: 1", "digits: 0"))
    assert len(error.value.mistakes) == 3


def test_a_stage_that_comes_later_is_said_to():
    moved = SMALL.replace("model: cold", "model: base").replace("kind: sft, data: {count: 8}", "kind: sft, model: rl")
    with pytest.raises(RecipeError, match=r"stages\.cold\.model: stage 'rl' comes later; move it before 'cold'"):
        parse_recipe(moved)


def test_correctness_needs_a_ground_truth_or_a_judge():
    task = "{kind: files, path: rows.jsonl, columns: {prompt: q}}"
    text = SMALL.replace("{kind: arithmetic, digits: 1}", task)
    with pytest.raises(RecipeError, match=r"rewards\.correctness: the task maps no answer column"):
        parse_recipe(text)
    assert parse_recipe(text, ["rewards={format: 1}"]).rewards == {"format": 1.0}


def test_the_schema_documents_every_field():
    properties = Recipe.model_json_schema()["$defs"]["GRPOStage"]["properties"]
    assert "Samples per prompt" in properties["group_size"]["description"]
    assert "frozen" not in properties


def test_the_recipe_in_the_readme_is_the_one_that_the_demo_runs():
    root = Path(__file__).parents[1]
    text = (root / "README.md").read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    assert parse_recipe(text) == read_recipe(root / "recipes/r1-tiny.yaml")
