"""What CONTRIBUTING.md demands of the source, as far as a program can say."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "emberkeep"
TREES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}

MOST_LINES = 450
MOST_LINES_OF_A_FUNCTION = 60
MOST_PARAMETERS = 7

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    """All but kernels, which are no Python, and commands, whose parameters are flags."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if "jit" not in decorators and ".command(" not in decorators:
                yield node


def parameters(function: Function) -> list[str]:
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}"


def test_no_file_is_longer_than_one_story() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in TREES}
    assert [f"{path.relative_to(SOURCE)}: {lines}" for path, lines in lengths.items() if lines > MOST_LINES] == []


def test_a_function_fits_on_a_screen() -> None:
    long = [
        f"{place(path, function)} {function.name}"
        for path, tree in TREES.items()
        for function in functions(tree)
        if function.end_lineno - function.lineno + 1 > MOST_LINES_OF_A_FUNCTION  # type: ignore[operator]
    ]
    assert long == []


def test_a_function_takes_few_parameters() -> None:
    greedy = [
        f"{place(path, function)} {function.name}: {len(parameters(function))}"
        for path, tree in TREES.items()
        for function in functions(tree)
        if len(parameters(function)) > MOST_PARAMETERS
    ]
    assert greedy == []


def test_one_public_class_has_one_name() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(place(path, node))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_docstring_has_a_subject() -> None:
    """Also that of an attribute or a constant, which stands below it."""
    without = [
        place(path, node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if str(node.value.value).lstrip().startswith("Of ")
    ]
    assert without == []


def imported(path: Path, tree: ast.Module) -> set[Path]:
    """The files of the package that one imports, wherever it does, for type checkers only included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    files = (SOURCE.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names)
    return {file for file in files if file in TREES and file != path}


def test_imports_make_no_circle() -> None:
    needs = {path: imported(path, tree) for path, tree in TREES.items()}
    inside: dict[Path, set[Path]] = {}
    while inside.keys() != needs.keys():
        inside, needed = needs, set().union(*needs.values())
        left = {path: others & inside.keys() for path, others in inside.items() if path in needed}
        needs = {path: others for path, others in left.items() if others}
    assert sorted(str(path.relative_to(SOURCE)) for path in needs) == []


@pytest.mark.parametrize("rule", ["450", "60", "7"])
def test_contributing_says_the_same_numbers(rule: str) -> None:
    assert rule in (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
