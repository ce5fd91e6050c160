"""A program of its own: checks a document against a schema, or finds what a path leads to.

Run by its path, with one JSON object on stdin and one on stdout. Only a process can be stopped: a regular
expression of a schema or a path can take forever, and everything else would wait for it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from itertools import islice
from typing import Any

_ERRORS = 10
_MATCHES = 1000
_CHARS = 4 << 20
_MESSAGE_CHARS = 300
_MEMORY = 1 << 30
_CPU_S = 10


def validate(document: Any, schema: Any) -> dict[str, Any]:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the schema is wrong at {error.json_path}: {_short(error.message)}") from error
    # With a registry of our own, nothing is fetched for a `$ref` to somewhere else.
    checker = kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)
    faults = [
        {"path": error.json_path, "message": _short(error.message)}
        for error in islice(checker.iter_errors(document), _ERRORS)
    ]
    return {"valid": not faults, "errors": faults} if faults else {"valid": True}


def query(document: Any, path: str) -> list[Any]:
    from jsonpath import finditer

    found: list[Any] = []
    chars = 0
    for match in finditer(path, document):
        found.append(match.obj)
        chars += len(json.dumps(match.obj))
        if len(found) > _MATCHES or chars > _CHARS:
            raise ValueError(f"more than {_MATCHES} values or {_CHARS} characters fit: give another path")
    return found


def _short(message: str) -> str:
    message = message.strip().partition("\n")[0]
    return message if len(message) <= _MESSAGE_CHARS else f"{message[:_MESSAGE_CHARS]}…"


def _limit() -> None:
    """Also when no parent is left that would stop it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def _work(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        document = json.loads(asked["text"])
        if "schema" in asked:
            return {"value": validate(document, asked["schema"])}
        return {"value": query(document, asked["path"])}
    except (RecursionError, MemoryError):
        return {"error": "it is nested too deep, or too large"}
    except Exception as error:
        return {"error": _short(str(error)) or type(error).__name__}


if __name__ == "__main__":
    _limit()
    json.dump(_work(json.load(sys.stdin)), sys.stdout)
