"""Structured output: which tokens may come next, so that the answer fits a schema or is a tool call."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from itertools import count

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import gbnf_to_lark

from emberkeep.chat.dialects.table import Reasoning
from emberkeep.chat.messages import sorted_keys
from emberkeep.chat.output import hidden_tokens
from emberkeep.chat.traits import TAGGED_JSON, CallWriting
from emberkeep.errors import InvalidField
from emberkeep.latest import Latest
from emberkeep.text import exceeds_depth
from emberkeep.types.models import Vocab
from emberkeep.types.request import (
    AnswerFormat,
    ChoiceFormat,
    GrammarFormat,
    Json,
    JsonFormat,
    RegexFormat,
    Request,
    Tool,
)

Mask = npt.NDArray[np.uint32]
"""One bit per token, lowest bit first; set means allowed."""

MOST_CALLS = 16
"""In one answer that must consist of calls: a small model would write them until its limit."""
_COMPILE_SECONDS = 5.0
_REMEMBERED = 32
# One line, as `json.dumps` writes it: free whitespace invites small models to write nothing else.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_STRICT = {**_ONE_LINE, "coerce_one_of": True}
# Tools check their arguments themselves, so a keyword that cannot be enforced is no reason to refuse.
_LENIENT = {**_STRICT, "lenient": True}


class Grammars:
    """Compiles constraints for one vocabulary, and remembers the latest. Safe to use from several threads."""

    def __init__(self, vocab: Vocab, writing: CallWriting = TAGGED_JSON) -> None:
        """`writing`: how the model writes calls."""
        self._vocab = vocab
        self._writing = writing
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled = Latest[tuple[str, str], Constraint](_REMEMBERED)
        self._lock = threading.Lock()

    def constraint_for(self, request: Request) -> Constraint | None:
        """What the answer must look like; None when anything goes.

        Blocks: a second or so the first time, then for as long as the schema takes to compile, which is
        limited. Raises InvalidField when the schema or the tool choice cannot be used.
        """
        if request.tool_choice.mode in ("required", "named"):
            return self._compile(_calls_grammar(request, self._vocab, self._writing), "tools")
        if request.format is None:
            return None
        if request.callable_tools:
            grammar = _either_grammar(request, request.format, self._vocab, self._writing)
        else:
            grammar = _grammars(_format_grammar(request.format))
        return self._compile(grammar, request.format.param)

    def _compile(self, grammar: str, param: str) -> Constraint:
        # One at a time: a hostile schema may take seconds, and must not take all cores.
        with self._lock:
            known = self._compiled.use((param, grammar))
            if known is None:
                known = Constraint(self._vocab, self._lltokenizer(), self._matcher(grammar, param), param)
                self._compiled[param, grammar] = known
            return known

    def _matcher(self, grammar: str, param: str) -> llguidance.LLMatcher:
        """Runs the compiler in a thread that is left to itself when it takes too long (its memory and steps
        are limited, so it does end)."""
        tokenizer = self._lltokenizer()
        limits = llguidance.LLParserLimits(verbose_errors=False)
        done: list[llguidance.LLMatcher] = []

        def compile() -> None:
            done.append(llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits))

        worker = threading.Thread(target=compile, name="grammar", daemon=True)
        worker.start()
        worker.join(_COMPILE_SECONDS)
        if not done:
            raise InvalidField(param, "takes too long to compile: make it smaller.")
        if done[0].is_error():
            reason = done[0].get_error().partition("\n")[0][:200].rstrip(".")
            raise InvalidField(param, _unusable(reason))
        return done[0]

    def _lltokenizer(self) -> llguidance.LLTokenizer:
        self._tokenizer = self._tokenizer or _lltokenizer(self._vocab)
        return self._tokenizer


class Constraint:
    """A compiled grammar. Immutable; safe to use from several threads."""

    def __init__(
        self, vocab: Vocab, tokenizer: llguidance.LLTokenizer, compiled: llguidance.LLMatcher, param: str
    ) -> None:
        self._vocab = vocab
        self._tokenizer = tokenizer
        self._compiled = compiled
        self._param = param

    def matcher(self, reasoning: Reasoning | None = None) -> Matcher:
        """At the beginning of an answer; behind `reasoning`, when the prompt has opened such a block."""
        return Matcher(self._vocab, self._tokenizer, self._compiled.deep_copy(), self._param, reasoning)


class Matcher:
    """Follows one answer, token by token. Not thread-safe."""

    def __init__(
        self,
        vocab: Vocab,
        tokenizer: llguidance.LLTokenizer,
        state: llguidance.LLMatcher,
        param: str,
        reasoning: Reasoning | None,
    ) -> None:
        self._pieces = vocab.pieces
        self._tokenizer = tokenizer
        self._param = param
        self._state = state
        self._bits = np.zeros((vocab.size + 31) // 32, dtype=np.uint32)
        self._free_until = reasoning.end.encode() if reasoning else b""
        self._tail = b""

    @property
    def finished(self) -> bool:
        """The answer is complete: only end-of-generation tokens are left."""
        return not self._free_until and bool(self._state.is_stopped())

    def mask(self) -> Mask | None:
        """What may come next; None for anything. A view that is valid until the next call.

        Raises InvalidField when the grammar turns out to need more work per token than is allowed.
        """
        if self._free_until:
            return None
        self._state.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        return self._bits

    def advance(self, token: int) -> None:
        """`token` was sampled; it must be one that the mask allowed."""
        if self._free_until:
            self._read_freely(token)
            return
        self._state.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """The tokens that the tokenizer would make of what must come next, whatever may come after it."""
        if self._free_until or not (text := self._state.compute_ff_bytes()):
            return []
        return list(self._tokenizer.tokenize_bytes(text))

    def count_allowed(self, tokens: list[int]) -> int:
        """How many of these may follow, one after the other."""
        return len(tokens) if self._free_until else int(self._state.validate_tokens(tokens))

    def _read_freely(self, token: int) -> None:
        self._tail += self._pieces[token]
        if self._free_until in self._tail:
            self._free_until = b""
        self._tail = self._tail[-len(self._free_until) :]

    def _check(self) -> None:
        if self._state.is_error():
            raise InvalidField(self._param, "is too complex to follow: make it simpler.")


# ── grammars ─────────────────────────────────────────────────────────────────────────────────────


def _grammars(*grammars: Mapping[str, Json]) -> str:
    """The first is where an answer begins; it calls the others by name."""
    return json.dumps({"grammars": grammars})


def _format_grammar(wanted: AnswerFormat) -> dict[str, Json]:
    """Raises InvalidField."""
    match wanted:
        case JsonFormat():
            schema = wanted.schema if wanted.schema is not None else {"type": "object"}
            return {"json_schema": {**_without_other_keys(_checked(schema, wanted.param)), "x-guidance": _STRICT}}
        case RegexFormat():
            pattern = _short(wanted.pattern, wanted.param)
            return {"lark_grammar": f"start: /{llguidance.regex_to_lark(pattern)}/"}
        case ChoiceFormat():
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.texts)
            return {"lark_grammar": f"start: {_short(choices, wanted.param)}"}
        case GrammarFormat():
            try:
                return {"lark_grammar": _to_lark(_short(wanted.grammar, wanted.param))}
            except ValueError as error:
                raise InvalidField(wanted.param, _unusable(str(error))) from None


def _short(text: str, param: str) -> str:
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidField(param, f"is longer than {MAX_SCHEMA_CHARS} characters: shorten it.")
    return text


def _unusable(reason: str) -> str:
    return f"cannot be used ({reason}): change or remove that part."


def _either_grammar(request: Request, wanted: AnswerFormat, vocab: Vocab, writing: CallWriting) -> str:
    """An answer that fits, or calls."""
    rules = ["start: @answer | calls", *_calls_rules(request, vocab, writing)]
    return _grammars({"lark_grammar": "\n".join(rules)}, {"name": "answer", **_format_grammar(wanted)})


def _calls_grammar(request: Request, vocab: Vocab, writing: CallWriting) -> str:
    rules = ["start: calls", *_calls_rules(request, vocab, writing)]
    return str(llguidance.LLMatcher.grammar_from_lark("\n".join(rules)))


def _calls_rules(request: Request, vocab: Vocab, writing: CallWriting) -> list[str]:
    """`calls`: one, or several where allowed, as the model writes them."""
    tools = _callable_tools(request)
    before, between, after = (_literal(text, vocab) for text in (writing.before, writing.between, writing.after))
    is_one = request.tool_choice.mode == "named" or not request.parallel_tool_calls or writing.separator is None
    more = "" if is_one else f"({_literal(writing.separator or '', vocab)} call){{0,{MOST_CALLS - 1}}}"
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    rules = [f"calls: {before} call {more} {after}", f"call: {names}"]
    for i, tool in enumerate(tools):
        # Written between quotes in most ways of writing, so it is escaped as a JSON string is.
        name = json.dumps(json.dumps(tool.name)[1:-1])
        rules.append(f"call_{i}: {name} {between} arguments_{i}")
        rules.append(f"arguments_{i}: %json {json.dumps(_arguments_schema(tool))}")
    return rules


def _literal(text: str, vocab: Vocab) -> str:
    """With special tokens as such: as plain text they would be something the model has never seen.

    It ends before a token that ends the answer.
    """
    terms: list[str] = []
    for part in re.split(r"(<[^<>\s]+>|\[[A-Z/_]+\])", text):
        token = vocab.specials.get(part)
        if token in vocab.eog:
            break
        if part:
            terms.append(json.dumps(part) if token is None else f"<[{token}]>")
    return " ".join(terms)


def _callable_tools(request: Request) -> tuple[Tool, ...]:
    tools = request.callable_tools
    if not tools:
        name = request.tool_choice.name
        missing = f"there is no tool named {name!r}" if name else "a call is required but there are no tools"
        raise InvalidField("tool_choice", f"{missing}: add it to tools.")
    return tools


def _arguments_schema(tool: Tool) -> dict[str, Json]:
    """What declares nothing takes nothing."""
    schema: Mapping[str, Json] = _checked(tool.parameters, "tools")
    if _DECLARING.isdisjoint(schema):
        schema = {**schema, "properties": {}, "additionalProperties": False}
    schema = sorted_keys(_without_other_keys(schema))
    return {"type": "object", **schema, "x-guidance": _LENIENT}


# ── JSON schemas ─────────────────────────────────────────────────────────────────────────────────

MAX_SCHEMA_CHARS = 256 << 10
MAX_SCHEMA_DEPTH = 64

_COMBINED = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "unevaluatedProperties"))
"""Beside one of these an object may have keys that another schema declares."""
_DECLARING = _COMBINED | {"properties", "patternProperties", "additionalProperties", "enum", "const"}
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LISTED = frozenset(("anyOf", "oneOf", "prefixItems"))
_SINGLE = frozenset(("items", "additionalProperties"))


def _checked(schema: Mapping[str, Json], param: str) -> Mapping[str, Json]:
    """Raises InvalidField for what is too large."""
    if exceeds_depth(schema, MAX_SCHEMA_DEPTH):
        raise InvalidField(param, f"the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels: flatten it.")
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        raise InvalidField(param, f"the schema is longer than {MAX_SCHEMA_CHARS} characters: shorten it.")
    return schema


def _without_other_keys(schema: Mapping[str, Json]) -> dict[str, Json]:
    """The same, without keys that no schema declares, unless it says that there may be others.

    Small models make such keys up. Where schemas are combined it is left as it is: what one of them does not
    declare another one may.
    """
    return _closed(schema) if "allOf" not in json.dumps(schema) else dict(schema)


def _closed(schema: Mapping[str, Json]) -> dict[str, Json]:
    result = {key: _within(key, value, schema) for key, value in schema.items()}
    declared = schema.get("properties")
    if not isinstance(declared, dict) or "additionalProperties" in schema or not _COMBINED.isdisjoint(schema):
        return result
    required = schema.get("required", ())
    is_whole = isinstance(required, list | tuple) and all(name in declared for name in required)
    return {**result, "additionalProperties": False} if is_whole else result


def _within(key: str, value: Json, schema: Mapping[str, Json]) -> Json:
    if key in _NAMED and isinstance(value, dict):
        return {name: _each(one) for name, one in value.items()}
    if key in _LISTED and isinstance(value, list) and (key == "prefixItems" or "properties" not in schema):
        return [_each(one) for one in value]
    return _each(value) if key in _SINGLE else value


def _each(value: Json) -> Json:
    return _closed(value) if isinstance(value, dict) else value


# ── GBNF, llama.cpp's notation of grammars, as Lark's, which the compiler reads ──────────────────

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


def _to_lark(grammar: str) -> str:
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


# ── the vocabulary, as llguidance wants it ───────────────────────────────────────────────────────


_BEFORE = "\x02"
"""Stands in front of what is tokenised, because some vocabularies put a blank before the first word of a text."""


class _Wrapped:
    """The attributes that `LLTokenizer` reads from a Python tokenizer."""

    def __init__(self, vocab: Vocab) -> None:
        hidden = hidden_tokens(vocab)
        # 0xff is never valid UTF-8: it keeps the texts of control tokens out of the grammar's reach.
        self.tokens = [b"\xff" + piece if i in hidden else piece for i, piece in enumerate(vocab.pieces)]
        self.eos_token_id = vocab.eos if vocab.eos is not None else min(vocab.eog)
        self.bos_token_id = vocab.bos
        self.special_token_ids: list[int] = []
        self._vocab = vocab
        self._before = len(vocab.tokenize(_BEFORE, parse_special=False))

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text if isinstance(text, str) else text.decode()
        return self._vocab.tokenize(_BEFORE + decoded, parse_special=False)[self._before :]


def _lltokenizer(vocab: Vocab) -> llguidance.LLTokenizer:
    """Takes about a second for a large vocabulary."""
    wrapped = llguidance.TokenizerWrapper(_Wrapped(vocab))
    return llguidance.LLTokenizer(wrapped, n_vocab=vocab.size, eos_token=sorted(vocab.eog))
