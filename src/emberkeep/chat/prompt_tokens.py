"""Text to token ids: what users and tools say stays text, and a long history is not tokenized again on every turn.

A seam is a place in a text where the tokenizer begins anew: no token goes over it. It is an offset beside the
text, so that every character that a user writes reaches the model, and none of them can be taken for a seam. Only
a template, which may cut and join what it is given as it likes, has to be given seams as characters. They are
characters that stand nowhere in its input, chosen anew for each rendering, and they are gone when its text leaves
here.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import accumulate, chain, pairwise

from emberkeep.chat.messages import parse_arguments
from emberkeep.chat.template import NO_ARGS, ChatTemplate
from emberkeep.errors import InvalidField
from emberkeep.text import alternatives, common_end
from emberkeep.token_arrays import TokenArray, token_array
from emberkeep.types.models import Vocab
from emberkeep.types.request import Json, Message, Tool
from emberkeep.values import dataclass

_REMEMBERED_CHARS = 8 << 20
_LONG_CHARS = 1 << 15
_WORD = "a"


@dataclass(frozen=True, slots=True)
class SeamedText:
    text: str
    seams: tuple[int, ...] = ()
    """Offsets in characters, in order."""

    @classmethod
    def of_parts(cls, parts: Sequence[str]) -> SeamedText:
        """With a seam between each two."""
        return cls("".join(parts), tuple(accumulate(map(len, parts[:-1]))))

    @classmethod
    def joined(cls, texts: Sequence[SeamedText]) -> SeamedText:
        """One after the other, with no more seams than they have."""
        starts = accumulate((len(one.text) for one in texts), initial=0)
        seams = tuple(start + seam for start, one in zip(starts, texts, strict=False) for seam in one.seams)
        return cls("".join(one.text for one in texts), seams)

    @property
    def parts(self) -> list[str]:
        """What stands between the seams."""
        return [self.text[start:end] for start, end in pairwise((0, *self.seams, len(self.text)))]

    @property
    def tail(self) -> str:
        """What stands after the last seam."""
        return self.text[self.seams[-1] :] if self.seams else self.text

    def starts_with(self, word: str) -> bool:
        """Also without a seam in it."""
        return self.text.startswith(word) and not any(0 < seam < len(word) for seam in self.seams)

    def up_to(self, end: int) -> SeamedText:
        return SeamedText(self.text[:end], tuple(seam for seam in self.seams if seam < end))

    def common_suffix(self, other: SeamedText) -> int:
        """How many characters both end with, with the same seams in and before them."""
        common = common_end(self.text, other.text)
        mine, theirs = (
            {len(one.text) - seam for seam in one.seams if 0 < len(one.text) - seam <= common}
            for one in (self, other)
        )
        return min((from_end - 1 for from_end in mine ^ theirs), default=common)


# ── tokens ──


Replay = Callable[[Sequence[int], bytes, int, Set[int]], tuple[tuple[int, ...], int]]
"""(ids before, a text between two seams, a start, borders) to the ids that were really sampled for the text from
that start, and where it ends, one of the borders; ((), start) if nothing is known. Of a long text it may end
sooner, between two words where the tokenizer may begin anew.

The ids before are the list being built: read it, do not keep it. The text may begin with the template's own
words (ChatML: `assistant`, a line break, `Hello`), which the answer has to cover as well.
"""


@dataclass(slots=True)
class TokenizedText:
    """A text as tokens."""

    ids: list[int]
    ends: list[tuple[int, int]]
    """Places, in characters of the text and in tokens, where one ends and the other does too."""
    is_given: bool = False
    """The ids came from a client, or are the end of something: the tokenizer may make others of the text."""

    def add(self, ids: Sequence[int], at: int, *, is_whole: bool = True) -> None:
        """Tokens for the text up to `at`, or (not `is_whole`) beyond it."""
        self.ids += ids
        if is_whole:
            self.ends.append((at, len(self.ids)))

    def as_array(self) -> TokenArray:
        return token_array(self.ids)

    def offset_of(self, position: int, text_of: Callable[[Sequence[int]], str]) -> int:
        """About where in the text the token at `position` begins."""
        at, start = max((end for end in self.ends if end[1] <= position), key=lambda end: end[1], default=(0, 0))
        return at + len(text_of(self.ids[start:position]))

    def position_at(self, text: str, offset: int, pieces: Sequence[bytes]) -> int:
        """How many tokens lie wholly within the first `offset` characters of `text`, whose tokens these are."""
        at, position = max((end for end in self.ends if end[0] <= offset), default=(0, 0))
        room = len(text[at:offset].encode("utf-8", "surrogatepass"))
        for token in self.ids[position:] if room else ():
            room -= len(pieces[token])
            if room < 0:
                break
            position += 1
        return position


class PromptTokenizer:
    """Safe to use from several threads."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._border = alternatives(vocab.specials if vocab.splits_at_specials else ())
        self._known = _Fragments(_REMEMBERED_CHARS)
        # Some vocabularies put a blank before every stretch of text.
        first = vocab.tokenize("a")[:1]
        self._longest_piece = max(map(len, vocab.pieces), default=1) or 1
        self._blank = b" " if first and vocab.pieces[first[0]].startswith(b" ") else b""

    def forget_texts(self) -> None:
        self._known.clear()

    def fewest(self, text: str) -> int:
        """`text` has no fewer tokens. Takes milliseconds for a million characters."""
        specials = 0
        if self._border is not None and len(text) > _LONG_CHARS:
            specials = sum(1 for _ in self._border.finditer(text))
        return max(len(text) // self._longest_piece, specials)

    def encode(self, text: str, *, replay: Replay | None = None, before: Sequence[int] = ()) -> list[int]:
        """`before` and the token ids of `text`; `replay` is asked at every stretch between special tokens.

        Blocks; mutates nothing but the memory of fragments.
        """
        return self.tokenize(SeamedText(text), replay=replay, before=before).ids

    def tokenize(
        self, written: SeamedText, *, replay: Replay | None = None, before: Sequence[int] = ()
    ) -> TokenizedText:
        """As `encode`, with where each stretch of the text ends."""
        tokenized = TokenizedText(list(before), [(0, len(before))])
        at = 0
        for part in written.parts:
            self._add(part, at, tokenized, replay)
            at += len(part)
        return tokenized

    def _add(self, part: str, at: int, tokenized: TokenizedText, replay: Replay | None) -> None:
        """The tokens of what stands at `at` between two seams. Nothing that is replayed goes beyond its end."""
        fragments = list(self._fragments(part))
        encoded = [self._bytes_of(*fragment) for fragment in fragments]
        ends = list(accumulate(map(len, encoded)))
        data, borders = b"".join(encoded), frozenset(ends)
        covered = 0
        for (fragment, special), begin, end in zip(fragments, [0, *ends], ends, strict=False):
            at += len(fragment)
            if begin < covered:  # it has its tokens already; they end there or beyond
                tokenized.add((), at, is_whole=end == covered)
                continue
            if special is not None:
                tokenized.add((special,), at)
                continue
            replayed, covered = replay(tokenized.ids, data, begin, borders) if replay else ((), begin)
            if begin < covered < end:
                replayed, covered = (*replayed, *self._following(data[covered:end])), end
            tokenized.add(replayed or self._ids_of(fragment), at, is_whole=covered <= end)

    def _following(self, data: bytes) -> list[int]:
        """The tokens of what follows a word, with the blank that it begins with."""
        lead = self._vocab.tokenize(_WORD)
        return self._vocab.tokenize(_WORD + data.decode("utf-8", "surrogatepass"))[len(lead) :]

    def _bytes_of(self, fragment: str, special: int | None) -> bytes:
        """The bytes that its tokens stand for."""
        data = fragment.encode("utf-8", "surrogatepass")
        return data if special is not None else self._blank + data

    def _fragments(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Text fragments (with None) and special tokens (with their id), in order."""
        start = 0
        for match in self._border.finditer(text) if self._border is not None else ():
            if match.start() > start:
                yield text[start : match.start()], None
            yield match[0], self._vocab.specials.get(match[0])
            start = match.end()
        if start < len(text):
            yield text[start:], None

    def _ids_of(self, fragment: str) -> tuple[int, ...]:
        known = self._known.get(fragment)
        if known is None:
            known = tuple(self._vocab.tokenize(fragment))
            self._known.put(fragment, known)
        return known


class _Fragments:
    """The most recently used tokenisations, bounded by the characters they stand for."""

    def __init__(self, max_chars: int) -> None:
        self._room = max_chars
        self._max_chars = max_chars
        self._ids: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, fragment: str) -> tuple[int, ...] | None:
        with self._lock:
            ids = self._ids.get(fragment)
            if ids is not None:
                self._ids.move_to_end(fragment)
            return ids

    def clear(self) -> None:
        with self._lock:
            self._ids.clear()
            self._room = self._max_chars

    def put(self, fragment: str, ids: tuple[int, ...]) -> None:
        with self._lock:
            if fragment in self._ids or len(fragment) > self._max_chars:
                return
            self._ids[fragment] = ids
            self._room -= len(fragment)
            while self._room < 0:
                oldest, _ = self._ids.popitem(last=False)
                self._room += len(oldest)


# ── a template whose control tokens are its own to write ──


_QUOTED = ("user", "tool")
"""Who speaks for others. The system's words are the owner's, and an assistant's are the model's own tokens."""

_NONCHARACTERS = range(0xFDD0, 0xFDF0)
"""Unicode keeps them for programs' own use. Texts hardly ever have one, and none have them all by chance."""
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0x110000))

_REPLACED = re.compile(r"""replace\(\s*['"]([^'"]{1,64})['"]\s*,\s*['"]([^'"]{0,64})['"]""")
"""What a template takes out of texts, or writes shorter: `content.replace('/think', '')`."""

_MOST_REPLACED = 16

_ESCAPES = re.compile(r"u[0-9a-f]{4}(?:\\u[0-9a-f]{4})*")
"""Without the first backslash: another text may end with it."""


class SeamedTemplate:
    """A template for one vocabulary, whose control tokens are the template's to write. Safe to use from several
    threads.

    A file that holds `<|im_end|>` and a forged system message after it would otherwise end the message that quotes
    it. Each such text gets a seam.
    """

    def __init__(self, template: ChatTemplate, vocab: Vocab) -> None:
        self._template = template
        self._controls = alternatives(text for text, token in vocab.specials.items() if token in vocab.controls)
        self._source = template.source.lower()
        pairs = dict.fromkeys(_REPLACED.findall(template.source))
        # The source is foreign: it must not decide how much is built here.
        self._replaced = [(old, new) for old, new in pairs if len(new) <= len(old)][:_MOST_REPLACED]
        self._borders = alternatives(old for old, _ in self._replaced)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        args: Mapping[str, Json] = NO_ARGS,
    ) -> SeamedText:
        """Renders as `ChatTemplate.render` does. Raises InvalidField where no character is left for seams."""
        seam = ""
        texts = chain(_quoted_texts(messages), map(_texts, tools))
        if any(self._has_control(edited) for text in texts for edited in (text, *self._edited(text))):
            seam = next(self._marks(messages, tools, args))
            messages, tools = self._with_marks(messages, tools, seam)
        text = self._template.render(messages, tools, add_generation_prompt=add_generation_prompt, args=args)
        return _without_marks(text, seam) if seam else SeamedText(text)

    def render_beginning(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, args: Mapping[str, Json] = NO_ARGS
    ) -> SeamedText | None:
        """Up to the end of the last message's text, without what the template writes after it. None where the
        template leaves it out."""
        marks = self._marks(messages, tools, args)
        seam, end = next(marks), next(marks)
        *others, last = messages
        others, tools = self._with_marks(others, tools, seam)
        marked = [*others, replace(last, content=last.content + end)]
        text = self._template.render(marked, tools, add_generation_prompt=False, args=args)
        beginning, is_written, _ = _unescaped(text, end).rpartition(end)
        return _without_marks(beginning, seam) if is_written else None

    def quote(self, text: str) -> SeamedText:
        """As a user may say it: with seams in what looks like a control token."""
        seams, start = [], 0
        while match := self._controls and self._controls.search(text, start):
            start = match.start() + 1  # the next one may begin inside of this one
            seams.append(start)
        return SeamedText(text, tuple(seams))

    def _has_control(self, text: str) -> bool:
        return self._controls is not None and self._controls.search(text) is not None

    def _edited(self, text: str) -> Iterator[str]:
        """What the template's replacements make of it, each alone and one after the other."""
        edited = text
        for old, new in self._replaced:
            if old in text:
                yield text.replace(old, new)
            if old in edited:
                edited = edited.replace(old, new)
                yield edited

    def _with_marks(
        self, messages: Sequence[Message], tools: Sequence[Tool], seam: str
    ) -> tuple[list[Message], list[Tool]]:
        def marked(text: str) -> str:
            return self._marked(text, seam)

        return [_change_message(one, marked) for one in messages], [_change_tool(tool, marked) for tool in tools]

    def _marked(self, text: str, seam: str) -> str:
        quoted = self.quote(text)
        marked = seam.join(quoted.parts)
        if self._borders is None or not any(map(self._has_control, self._edited(marked))):
            return marked
        # What stands on the two sides of a text that will be replaced is not joined.
        cuts = (cut for match in self._borders.finditer(text) for cut in match.span())
        return seam.join(SeamedText(text, tuple(sorted({*quoted.seams, *cuts}))).parts)

    def _marks(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        args: Mapping[str, Json],
    ) -> Iterator[str]:
        """Characters that are nowhere in what the template reads, and that it does not write by itself: one after
        the other, always the same ones. Raises InvalidField where there are no more."""
        definitions = [[tool.name, tool.description, tool.parameters] for tool in tools]
        texts = [json.dumps([definitions, dict(args)], ensure_ascii=False, default=str)]
        for message in messages:
            texts += (message.content, message.reasoning, message.tool_call_id or "", message.name or "")
            for call in message.tool_calls:
                texts += (call.id, call.name, call.arguments, _parsed(call.arguments))
        for mark in _unused("\n".join(texts)):
            if mark not in self._source and f"{ord(mark):x}" not in self._source:
                yield mark
        raise InvalidField("messages", "they have every character of private use: leave one of them out.")


def _quoted_texts(messages: Sequence[Message]) -> Iterator[str]:
    """Texts in messages that others may have written."""
    for message in messages:
        if message.role in _QUOTED:
            yield from (message.content, message.name or "", message.tool_call_id or "")


def _change_message(message: Message, change: Callable[[str], str]) -> Message:
    if message.role not in _QUOTED:
        return message
    name, call = (value and change(value) for value in (message.name, message.tool_call_id))
    return replace(message, content=change(message.content), name=name, tool_call_id=call)


def _texts(tool: Tool) -> str:
    """One per line. Definitions of tools come from other servers too."""
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    _change_tool(tool, note)
    return "\n".join(texts)


def _change_tool(tool: Tool, change: Callable[[str], str]) -> Tool:
    """All but its name, which is made of letters."""
    return Tool(tool.name, change(tool.description), _change_all(tool.parameters, change))


def _change_all(value: Json, change: Callable[[str], str]) -> Json:
    """Every text in it, not as JSON writes it: quotation marks are escaped there."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _change_all(item, change) for key, item in value.items()}
    return [_change_all(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _parsed(arguments: str) -> str:
    """What escapes in them stand for: templates may read that."""
    return json.dumps(parse_arguments(arguments), ensure_ascii=False) if "\\u" in arguments else ""


def _unused(text: str) -> Iterator[str]:
    """Characters that do not stand in `text`, as they are or as JSON writes them in ASCII, as a template may."""
    for mark in map(chr, _NONCHARACTERS):
        if mark not in text and _escape(mark)[1:] not in text:
            yield mark
    used = set(text)
    for run in _ESCAPES.findall(text):
        used.update(json.loads(f'"\\{run}"'))
    yield from (mark for mark in map(chr, chain(*_PRIVATE)) if mark not in used)


def _escape(mark: str) -> str:
    return json.dumps(mark)[1:-1]


def _unescaped(text: str, mark: str) -> str:
    return text.replace(_escape(mark), mark)


def _without_marks(text: str, seam: str) -> SeamedText:
    return SeamedText.of_parts(_unescaped(text, seam).split(seam))
