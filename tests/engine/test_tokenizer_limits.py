"""No text of any length or shape ends the process, and ordinary texts get the ids that one call gives them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine.llamacpp.vocab import CALLER_CHARS, LlamaVocab, run_on_large_stack
from emberkeep.engine.text_splitter import MAX_MATCH, MAX_SPECIALS
from emberkeep.errors import EngineError, ModelBroken
from helpers.chance import examples
from helpers.tiny_vocab import COMMON, OTHER_TOKENIZERS, PRE_TOKENIZERS, REFUSED, SHAPES, load, read

pytestmark = pytest.mark.slow

LENGTHS = [int(chars) for chars in os.environ.get("EMBERKEEP_TOKENIZER_LENGTHS", "40000").split(",")]
"""In characters. All shapes are tried up to 200,000, the common ones with every length."""

FEW = (*COMMON, "kana", "words", "slashes and newlines", "specials")
VOCABULARIES = (*(f"gpt2:{pre}" for pre in PRE_TOKENIZERS), *OTHER_TOKENIZERS)

Load = Callable[[str], LlamaVocab]

LETTERS = st.sampled_from(
    [*"abIT017 \n\t.,!/'é好か・€", "the ", "  ", "\r\n", "'s", "a\u0301", "👩‍👧", "<|im_end|>"]
)
TEXTS = st.lists(LETTERS, max_size=60).map("".join)


@pytest.fixture(scope="module")
def vocab_of(tmp_path_factory: pytest.TempPathFactory) -> Load:
    known: dict[str, LlamaVocab] = {}

    def vocab_of(name: str) -> LlamaVocab:
        if name not in known:
            model, _, pre = name.partition(":")
            found = load(tmp_path_factory.mktemp("vocab"), model, pre or "default")
            if found is None:
                pytest.skip(f"this llama.cpp does not know {name}")
            known[name] = found
        return known[name]

    return vocab_of


def tokenize_elsewhere(folder: Path, chars: int, shapes: tuple[str, ...], *vocabularies: str) -> None:
    command = [
        sys.executable,
        "-m",
        "helpers.tiny_vocab",
        str(folder),
        str(chars),
        ",".join(shapes),
        *vocabularies,
    ]
    tests = Path(__file__).parent.parent
    path = os.pathsep.join([str(tests), *sys.path])
    child = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert child.returncode == 0, f"{child.returncode} after {child.stdout[-80:]!r}: {child.stderr[-2000:]}"


def test_forty_thousand_letters_do_not_end_the_process(tmp_path: Path) -> None:
    tokenize_elsewhere(tmp_path, 40_000, ("letters", "words"), "gpt2:exaone-moe")


@pytest.mark.parametrize(
    "names", [VOCABULARIES[at : at + 8] for at in range(0, len(VOCABULARIES), 8)], ids=" ".join
)
def test_no_long_text_ends_the_process(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Some vocabularies to a process: starting it takes as long as tokenizing."""
    for chars in LENGTHS:
        shapes = FEW if LENGTHS == [40_000] else SHAPES if chars <= 200_000 else COMMON
        tokenize_elsewhere(tmp_path, chars, shapes, *names)


@pytest.mark.parametrize("name", ["gpt2:tekken", "gpt2:gpt-2", "gpt2:bloom", "llama"])
@examples(20)
@given(text=TEXTS, times=st.integers(1, 40))
def test_an_ordinary_text_has_the_ids_of_one_call(vocab_of: Load, name: str, text: str, times: int) -> None:
    vocab = vocab_of(name)
    for parse_special in (True, False):
        ids = vocab.tokenize(text * times, parse_special=parse_special)
        assert ids == in_one_call(vocab, text * times, parse_special)


@pytest.mark.parametrize("name", ["gpt2:tekken", "gpt2:exaone-moe", "gpt2:gpt-2", "llama"])
def test_a_long_text_of_lines_or_sentences_has_the_ids_of_one_call(vocab_of: Load, name: str) -> None:
    vocab = vocab_of(name)
    for text in ("It's the 42nd line,  好!\n\n", "This is the one that. Or is it, then? "):
        long = text * (3 * MAX_MATCH // len(text))
        assert vocab.tokenize(long) == in_one_call(vocab, long)


@pytest.mark.parametrize("name", ["gpt2:llama-bpe", "llama"])
def test_many_special_tokens_have_the_ids_of_one_call(vocab_of: Load, name: str) -> None:
    vocab = vocab_of(name)
    text = "<|im_end|><s>\n the" * (3 * MAX_SPECIALS) + "a\n" * MAX_MATCH
    assert vocab.tokenize(text) == in_one_call(vocab, text)
    assert vocab.tokenize(text, parse_special=False) == in_one_call(vocab, text, parse_special=False)


@pytest.mark.parametrize("unit", ["a", " ", "7", "Q9+/", "<|im_end|", "👩‍👧"])
def test_a_long_run_keeps_its_bytes_and_the_ids_of_its_beginning(vocab_of: Load, unit: str) -> None:
    vocab = vocab_of("gpt2:gpt-4o")
    text = "so: " + unit * (2 * MAX_MATCH // len(unit)) + "<|im_end|>."
    ids = vocab.tokenize(text)
    assert b"".join(vocab.pieces[token] for token in ids) == text.encode()
    assert ids.count(vocab.specials["<|im_end|>"]) == 1
    grown = vocab.tokenize(text + " and more")
    assert grown[: len(ids) - 1] == ids[:-1]
    assert vocab.tokenize(text[: MAX_MATCH + MAX_MATCH // 2])[:1000] == ids[:1000]


@pytest.mark.parametrize("unit", ["é", "Z", "\n", "🎉", "Zé\n"])
def test_characters_without_a_token_have_the_ids_of_one_call(vocab_of: Load, unit: str) -> None:
    text = "the " + unit * (10_000 // len(unit)) + " the<|im_end|>" + unit * 2000
    assert vocab_of("llama").tokenize(text) == in_one_call(vocab_of("llama"), text)


def test_a_failure_on_the_large_stack_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        run_on_large_stack(lambda: 1 // 0)


def test_texts_beyond_the_callers_stack_are_tokenized_on_another_thread(vocab_of: Load) -> None:
    vocab = vocab_of("gpt2:tekken")
    text = "a" * (CALLER_CHARS + 1)
    assert vocab.tokenize(text) == in_one_call(vocab, text)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.mark.parametrize(
    "names",
    [
        [],
        BYTES[:-1],
        [f"<0X{byte:02X}>" for byte in range(256)],
        [f"<0x00>{byte}" for byte in range(256)],
        [name.lower() for name in BYTES],
        [*BYTES[:0x41], "xxx", *BYTES[0x42:]],
    ],
    ids=["none", "one too few", "capital X", "all for the first", "small digits", "one of another name"],
)
def test_a_vocabulary_that_cannot_tokenize_every_text_is_refused(tmp_path: Path, names: Sequence[str]) -> None:
    with pytest.raises(ModelBroken, match="no tokens for single bytes"):
        read(sentence_piece(tmp_path, names, ["a", "▁"]))


def test_a_byte_may_be_a_token_of_its_own_text(tmp_path: Path) -> None:
    vocab = read(sentence_piece(tmp_path, [*BYTES[:0x41], *BYTES[0x42:]], ["A"]))
    assert vocab is not None
    assert vocab.tokenize("A好")[-4:-3] == [vocab.pieces.index(b"A")]


def test_bytes_that_only_begin_tokens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "helpers.tiny_vocab._text_pieces",
        lambda *_: (["<unk>", "<s>", "</s>", "\\x0a", "abc"], [TokenType.NORMAL] * 5),
    )
    with pytest.raises(ModelBroken, match="no tokens for single bytes"):
        load(tmp_path, "rwkv")


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "none.gguf", "llama")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(100)
    with pytest.raises(ModelBroken, match="no vocabulary"):
        read(written(writer))


@pytest.mark.parametrize("name", REFUSED)
def test_a_vocabulary_that_does_not_survive_every_text_is_refused(vocab_of: Load, name: str) -> None:
    with pytest.raises(ModelBroken, match="choose a model that continues texts"):
        vocab_of(name)


def test_blanks_without_a_token_are_cut_like_other_characters(tmp_path: Path, vocab_of: Load) -> None:
    poor = read(sentence_piece(tmp_path, BYTES, ["a"]))
    assert poor is not None
    text = "a" * 10_000 + " " * 3000
    assert len(poor._unknown_splitter.pieces(text)) == 3
    assert poor.tokenize(text) == in_one_call(poor, text)
    assert vocab_of("llama")._unknown_splitter.pieces(text) == [text]


def test_a_text_beyond_what_the_library_can_count_is_refused(
    vocab_of: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberkeep.engine.llamacpp.vocab._MAX_CHARS", 1000)
    with pytest.raises(EngineError, match="1001 characters is too long"):
        vocab_of("llama").tokenize("a" * 1001)


def sentence_piece(folder: Path, bytes_: Sequence[str], words: Sequence[str]) -> Path:
    specials = ("<unk>", "<s>", "</s>")
    writer = GGUFWriter(folder / "poor.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*specials, *bytes_, *words])
    writer.add_token_scores([0.0] * (len(specials) + len(bytes_) + len(words)))
    kinds = [TokenType.CONTROL] * len(specials) + [TokenType.BYTE] * len(bytes_)
    writer.add_token_types(kinds + [TokenType.NORMAL] * len(words))
    return written(writer)


def written(writer: GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Path(writer.path)


def in_one_call(vocab: LlamaVocab, text: str, parse_special: bool = True) -> list[int]:
    return run_on_large_stack(lambda: vocab._tokenize_piece(text, parse_special))
