"""GBNF, llama.cpp's notation of grammars, to Lark's, which the compiler reads."""

from __future__ import annotations

import re
from itertools import count

from llguidance.gbnf_to_lark import gbnf_to_lark

_PARTS = re.compile(
    r"""(?P<literal>"(?:\\.|[^"\\])*")
      | (?P<class>\[(?:\\.|[^\]\\])*\])
      | (?P<comment>\#[^\r\n]*)
      | (?P<token>!?<[^<>\s]+>)
      | (?P<times>\{[^{}]*\})
      | (?P<any>\.)
      | (?P<name>[A-Za-z0-9_-]+)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:))", re.MULTILINE)
_ROOT = "root"


def to_lark(grammar: str) -> str:
    """A grammar in either notation. Raises ValueError with the reason, in half a sentence."""
    if _LARK.search(grammar):
        return grammar
    plain = _with_plain_names(grammar)
    try:
        return str(gbnf_to_lark(plain))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # the converter raises Exception itself
        raise ValueError(str(error)) from None


def _with_plain_names(grammar: str) -> str:
    """The same with rules called by number: GBNF allows names that Lark does not, or that Lark takes for equal."""
    numbers = count(1)
    names = {_ROOT: _ROOT}

    def rewrite(part: re.Match[str]) -> str:
        text = part[0]
        match part.lastgroup:
            case "literal" | "class":
                return _ESCAPE.sub(_escape, text)
            case "comment":
                return ""
            case "any":
                return r'([^\n] | "\n")'
            case "token":
                raise ValueError(f"it names the token {text}, and only texts can be asked for")
            case "name" if text not in names:
                names[text] = f"rule-{next(numbers)}"
        return names[text] if part.lastgroup == "name" else text

    rewritten = _PARTS.sub(rewrite, grammar)
    defined = set(re.findall(r"([\w-]+)\s*::=", rewritten))
    missing = [name for name, plain in names.items() if plain not in defined]
    if missing:
        raise ValueError(f"it has no rule {missing[0]!r}")
    return rewritten


def _escape(match: re.Match[str]) -> str:
    """An escape as the converter and Lark understand it."""
    code = match[1] or match[2] or match[3]
    if code is None:
        return match[0] if match[4] in 'nrt"\\[]' else f"\\x{ord(match[4]):02x}"
    value = int(code, 16)
    if value > 0x10FFFF or 0xD800 <= value < 0xE000:
        raise ValueError(f"{match[0]} is no character")
    return f"\\x{value:02x}" if value < 0x80 else chr(value)
