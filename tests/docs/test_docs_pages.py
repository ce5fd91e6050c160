"""README, CONTRIBUTING and docs/ name only what exists, and stay readable."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/emberkeep"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PARTS = {path.name for path in PACKAGE.iterdir() if path.is_dir()} | {"src", "tests", "benchmarks", "docs"}

_NAMED_FILE = re.compile(r"[A-Za-z_][\w./-]*\.py\b|[a-z_]+(?:/[a-z_]+)*/(?=`)")
_DOTTED = re.compile(r"emberkeep(?:\.[A-Za-z_]\w*)+")
_CODE_SPAN = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_MODULES = {"emberkeep.toml", "emberkeep.json", "emberkeep.tools", "emberkeep.backends"}
"""Files of a user, and groups of entry points."""
_NOT_OURS = {"FILE.py", "convert_lora_to_gguf.py"}
"""Files of users and of llama.cpp."""
_DEFINITION = re.compile(r"^( *)(?:async )?(def |class |(?=\w+(?::| =)))(\w+)", re.MULTILINE)
_WORDS = {"to_thread", "toml", "tmp", "quarantine", "previous_response_id"}
"""Of Python, of a store's folder, and of an API that is not served yet."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """Without what stands between fences, whose lines are kept as empty ones."""
    text = page.read_text(encoding="utf-8")
    return _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)


def spans(page: Path) -> list[str]:
    return _CODE_SPAN.findall(prose(page))


def exists(name: str) -> bool:
    return any((base / name).exists() for base in (ROOT, PACKAGE, PACKAGE.parent))


@every_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = [name for span in spans(page) for name in _NAMED_FILE.findall(span)]
    ours = [name for name in named if name.endswith(".py") or name.split("/")[0] in PARTS]
    assert [name for name in ours if name not in _NOT_OURS and not exists(name)] == []


@every_page
def test_every_part_of_the_package_that_is_named_exists(page: Path) -> None:
    """Such as `chat/output`, without an ending."""
    named = [span.strip("`") for span in spans(page)]
    folders = "|".join(sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()))
    modules = [name for name in named if re.fullmatch(rf"(?:{folders})/[a-z_/]+", name)]
    assert [name for name in modules if not exists(name) and not exists(f"{name}.py")] == []


@every_page
def test_every_module_that_is_named_can_be_imported(page: Path) -> None:
    snippets = "\n".join(
        code for kind, code in _FENCE.findall(page.read_text(encoding="utf-8")) if kind == "python"
    )
    imported = re.findall(r"^\s*from (emberkeep[\w.]*) import", snippets, re.MULTILINE)
    named = [name for span in spans(page) for name in re.findall(rf"`{_DOTTED.pattern}`", span)]
    for name in {*imported, *(name.strip("`") for name in named)} - _NOT_MODULES:
        assert is_there(name), name


def is_there(name: str) -> bool:
    """A module, something in one, or a field of an answer's `emberkeep`."""
    parent, _, last = name.rpartition(".")
    if parent == "emberkeep" and f'"{last}"' in (PACKAGE / "api/answer.py").read_text(encoding="utf-8"):
        return True
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return bool(parent) and hasattr(importlib.import_module(parent), last)
    return True


def test_every_name_in_the_architecture_is_defined() -> None:
    """Functions, classes, and methods with their class, however they are called there."""
    members, names = definitions()
    shown = [span.strip("`").partition("(")[0] for span in spans(ROOT / "docs/architecture.md")]
    for name in [name for name in shown if re.fullmatch(r"[A-Za-z_]\w*(\.[a-z_]+)?", name)]:
        owner, _, member = name.rpartition(".")
        known = members.get(owner, names) if owner[:1].isupper() else names
        assert member in known or member in PARTS or member in _WORDS, name


def definitions() -> tuple[dict[str, set[str]], set[str]]:
    """The names in each class, and all that are defined anywhere."""
    members: dict[str, set[str]] = {}
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        inside: set[str] = set()
        for indent, kind, name in _DEFINITION.findall(path.read_text(encoding="utf-8")):
            names.add(name)
            if not indent:
                inside = members.setdefault(name, set()) if kind == "class " else set()
            inside.add(name)
    return members, names


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_lines_are_short(page: Path) -> None:
    """Tables and code excepted."""
    lines = prose(page).splitlines()
    assert [line for line in lines if len(line) >= 120 and not line.startswith("|")] == []


@every_page
def test_python_parses(page: Path) -> None:
    for kind, code in _FENCE.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            ast.parse(textwrap.dedent(code))


@pytest.mark.parametrize("room", sorted((ROOT / "docs/decisions").glob("*.md")), ids=lambda room: room.stem)
def test_a_decision_has_five_lines_beside_its_table(room: Path) -> None:
    decisions = re.split(r"^## ", room.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    lines = {title: text.splitlines() for title, _, text in (decision.partition("\n") for decision in decisions)}
    counts = {title: sum(not line.startswith("|") for line in text if line) for title, text in lines.items()}
    assert {title: count for title, count in counts.items() if count > 5} == {}


def test_every_page_is_linked_from_another_one() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in _LINK.findall(prose(page))
    }
    assert [str(page.relative_to(ROOT)) for page in PAGES[1:] if page.resolve() not in linked] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 800


def test_the_readme_begins_with_the_two_commands() -> None:
    first = _FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0][1]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make run", "make test"]


def test_every_figure_of_the_readme_is_in_the_benchmarks() -> None:
    benchmarks = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    table = [
        line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    figures = [cell.strip() for line in table[1:] for cell in line.split("|")[2:-1]]
    measured = [re.search(r"\d[\d.,]*(?: ms|%|×)", figure) for figure in figures]
    assert measured
    assert [match[0] for match in measured if match and match[0] not in benchmarks] == []


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(named) <= targets, page.name


@pytest.mark.parametrize("image", sorted((ROOT / "docs/images").glob("*.svg")), ids=lambda image: image.name)
def test_images_can_be_read_by_light_and_by_dark(image: Path) -> None:
    text = image.read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "currentColor" in text or ".chart text { fill" in text
    assert "prefers-color-scheme: dark" in text
