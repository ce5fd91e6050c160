"""Structured output: which tokens may come next, so that the answer fits a schema or is a tool call."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping

import llguidance
import numpy as np
import numpy.typing as npt

from emberkeep.chat.answer_schema import MAX_SCHEMA_CHARS, arguments_schema, checked, closed
from emberkeep.chat.dialects.table import Reasoning
from emberkeep.chat.gbnf import to_lark
from emberkeep.chat.messages import sorted_keys
from emberkeep.chat.output import hidden_tokens
from emberkeep.chat.traits import TAGGED_JSON, CallWriting
from emberkeep.errors import InvalidField
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
        self._compiled: OrderedDict[tuple[str, str], Constraint] = OrderedDict()
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
            known = self._compiled.get((param, grammar))
            if known is None:
                known = Constraint(self._vocab, self._lltokenizer(), self._matcher(grammar, param), param)
                self._compiled[param, grammar] = known
                if len(self._compiled) > _REMEMBERED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end((param, grammar))
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
            return {"json_schema": {**closed(checked(schema, wanted.param)), "x-guidance": _STRICT}}
        case RegexFormat():
            pattern = _short(wanted.pattern, wanted.param)
            return {"lark_grammar": f"start: /{llguidance.regex_to_lark(pattern)}/"}
        case ChoiceFormat():
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.texts)
            return {"lark_grammar": f"start: {_short(choices, wanted.param)}"}
        case GrammarFormat():
            try:
                return {"lark_grammar": to_lark(_short(wanted.grammar, wanted.param))}
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
    schema = sorted_keys(arguments_schema(checked(tool.parameters, "tools")))
    return {"type": "object", **schema, "x-guidance": _LENIENT}


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
