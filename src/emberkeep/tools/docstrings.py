"""What a docstring says: in all, and about each parameter. Google's, NumPy's and Sphinx's spellings."""

from __future__ import annotations

import re

_TAKES = r"Args|Arguments|Parameters|Params"
_OTHERS = r"Returns?|Raises|Yields?|Examples?|Notes?|Warns|Warnings?|See Also|References|Attributes"
_TITLE = re.compile(rf"^({_TAKES}|{_OTHERS})(?::\s*$|[ ]*\n-{{3,}}[ ]*$)", re.MULTILINE | re.IGNORECASE)
_IS_TAKES = re.compile(_TAKES, re.IGNORECASE)
_GOOGLE = re.compile(r"^\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:(?!:)\s*(.*)$")
_NUMPY = re.compile(r"^(\w+)(?:\s*:\s.*)?()$")
_SPHINX = re.compile(r"^:(\w+)(?:\s+([^:]+))?:\s*", re.MULTILINE)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """`text` is without indentation, as `inspect.getdoc` gives it."""
    text, about = _without_sphinx(text)
    # Text, then a title and what stands below it, as often as there are titles.
    head, *sections = _TITLE.split(text)
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if _IS_TAKES.fullmatch(title):
            about |= _entries(body.strip("\n"))
    return _in_one_line(head), about


def _entries(body: str) -> dict[str, str]:
    lines = body.splitlines()
    # NumPy's names stand at the margin; Google's are indented, and what is below them more so.
    pattern = _NUMPY if lines and not lines[0][:1].isspace() else _GOOGLE
    margin = _indent(lines[0]) if lines else 0
    found: dict[str, list[str]] = {}
    said: list[str] = []
    for line in lines:
        entry = pattern.match(line) if _indent(line) <= margin else None
        if entry is not None:
            said = found.setdefault(entry[1], [entry[2]])
        else:
            said.append(line)
    return {name: text for name, said in found.items() if (text := _in_one_line("\n".join(said)))}


def _without_sphinx(text: str) -> tuple[str, dict[str, str]]:
    head, *fields = _SPHINX.split(text)
    triples = zip(fields[::3], fields[1::3], fields[2::3], strict=True)
    about = {
        names.split()[-1]: _in_one_line(said)
        for kind, names, said in triples
        if kind in ("param", "parameter", "arg", "argument") and names
    }
    return (head, about) if fields else (text, {})


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _in_one_line(text: str) -> str:
    """Line breaks are tokens that tell a model nothing."""
    return " ".join(text.split())
