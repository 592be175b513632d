"""The pages on the presets say what the presets are: their parts, their papers, stages that would run."""

import re
from pathlib import Path

import pytest
import yaml

from groupwise.algorithms.presets import PRESETS
from groupwise.config import GRPOStage
from groupwise.recipes import parse_recipe

FOLDER = Path(__file__).parents[1] / "docs" / "algorithms"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
SECTIONS = ("**Paper**", "**Formula**", "**Parts**", "**Options worth knowing**", "**Elsewhere**")
ARXIV_ID = re.compile(r"\d{4}\.\d{5}")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RECIPE = "name: page\nmodel: builtin:tiny\ntask: {kind: arithmetic}\nstages:\n"


def section(name: str, title: str) -> str:
    """What stands between a title and the next."""
    after = PAGES[name].split(title, 1)[1]
    return min((after.split(other, 1)[0] for other in SECTIONS), key=len)


def yaml_blocks(text: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The headings of a page as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_preset_has_a_page_and_every_page_a_preset() -> None:
    assert PAGES.keys() - {"notation"} == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_page_has_its_sections_in_order_and_stays_short(name: str) -> None:
    text = PAGES[name]
    assert text.startswith("# ")
    places = [text.find(title) for title in SECTIONS]
    assert -1 not in places and places == sorted(places)
    assert all(text.count(title) == 1 for title in SECTIONS)
    assert 25 <= len(text.splitlines()) <= 65
    assert "$$" in section(name, "**Formula**") and text.count("$$") % 2 == 0
    assert "notation.md" in section(name, "**Formula**")


@pytest.mark.parametrize("name", PRESETS)
def test_a_page_gives_exactly_the_parts_of_its_preset(name: str) -> None:
    (block,) = yaml_blocks(section(name, "**Parts**"))
    assert yaml.safe_load(block) == PRESETS[name].parts


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if ARXIV_ID.fullmatch(preset.paper)])
def test_a_page_names_its_paper(name: str) -> None:
    assert f"https://arxiv.org/abs/{PRESETS[name].paper}" in section(name, "**Paper**")


@pytest.mark.parametrize("name", PRESETS)
def test_the_stages_of_a_page_would_run(name: str) -> None:
    stages = [block for block in yaml_blocks(PAGES[name]) if "kind:" in block]
    assert stages
    for stage in stages:
        (parsed,) = parse_recipe(RECIPE + stage, source=name).stages
        assert isinstance(parsed, GRPOStage) and parsed.algorithm == name


@pytest.mark.parametrize("name", PRESETS)
def test_the_options_of_a_page_exist(name: str) -> None:
    items = re.findall(r"^- (.+?):", section(name, "**Options worth knowing**"), flags=re.MULTILINE)
    options = [option for item in items for option in re.findall(r"`(\w+)`", item)]
    assert options and set(options) <= GRPOStage.model_fields.keys()


@pytest.mark.parametrize("name", PAGES)
def test_the_links_of_a_page_lead_somewhere(name: str) -> None:
    for link in LINK.findall(PAGES[name]):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (FOLDER / file).resolve() if file else FOLDER / f"{name}.md"
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link
