from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from emberkeep.chat.prompt_tokens import PromptTokenizer
from emberkeep.engine.hf.model_loader import HfSource, load_model
from emberkeep.engine.hf.vocab import HfVocab, repair_gguf_tokenizer
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.text_splitter import MAX_MATCH
from emberkeep.errors import ModelBroken
from emberkeep.models.gguf import read_header
from helpers import tiny_gguf, tiny_hf

pytestmark = pytest.mark.slow

WORDS = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdeé1", "ab", "▁ab", "日"]
LETTERS = st.sampled_from([*"ab 1é日.,\n\t\r<>|s/", "<s>", "<|im_end|>", "é", "🎉", "  ", "'s"])
TEXTS = st.lists(LETTERS, max_size=40).map("".join)


def bytes_of(vocab: HfVocab, text: str, **how: bool) -> bytes:
    return b"".join(vocab.pieces[i] for i in vocab.tokenize(text, **how))


def byte_level(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    made = tiny_hf.tokenizer()
    made.normalizer = normalizer
    return made


def with_blanks(*, prepend: str = "", scheme: str = "", special: AddedToken | None = None) -> Tokenizer:
    """SentencePiece's kind: blanks are letters, and what has no token is written in byte tokens."""
    merges = [("a", "b"), ("▁", "ab")]
    made = Tokenizer(
        models.BPE({word: i for i, word in enumerate(WORDS)}, merges, byte_fallback=True, fuse_unk=True)
    )
    if scheme:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    else:
        blanks = normalizers.Replace(" ", "▁")
        made.normalizer = normalizers.Sequence([normalizers.Prepend(prepend), blanks]) if prepend else blanks
    made.add_special_tokens([special or AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return made


def unigram() -> Tokenizer:
    words = [("<unk>", 0.0), *((word, -float(i)) for i, word in enumerate(WORDS, 1))]
    made = Tokenizer(models.Unigram(words, 0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return made


KINDS = {
    "byte level": HfVocab(byte_level(), tiny_hf.VOCAB),
    "composed": HfVocab(byte_level(normalizers.NFC()), tiny_hf.VOCAB),
    "blanks": HfVocab(with_blanks(), len(WORDS)),
    "unigram": HfVocab(unigram(), len(WORDS) + 1),
}
WITH_BLANK = HfVocab(with_blanks(prepend="▁"), len(WORDS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parse_special", [True, False])
@given(text=TEXTS)
def test_the_pieces_of_a_text_are_its_bytes(kind: str, parse_special: bool, text: str) -> None:
    assert bytes_of(KINDS[kind], text, parse_special=parse_special) == text.encode()
    whole = text.replace("<s>", "")  # a blank before text is the only thing that may be added
    assert bytes_of(WITH_BLANK, whole, parse_special=False) == (b" " + whole.encode() if whole else b"")


def test_control_tokens_are_text_where_they_are_not_parsed_and_others_are_whole() -> None:
    made = byte_level()
    made.add_tokens([AddedToken("<think>", normalized=False)])
    vocab = HfVocab(made, made.get_vocab_size())
    control, thinking = vocab.specials["<|im_end|>"], vocab.specials["<think>"]
    assert vocab.tokenize("<think><|im_end|>") == [thinking, control]
    as_text = vocab.tokenize("<think><|im_end|>", parse_special=False)
    assert as_text[0] == thinking and control not in as_text
    assert b"".join(vocab.pieces[token] for token in as_text) == b"<think><|im_end|>"
    assert vocab.controls == {256, 257, 258}


def test_the_vocabulary_is_as_wide_as_the_models_logits() -> None:
    wide = HfVocab(byte_level(), tiny_hf.VOCAB + 5)
    assert (wide.size, len(wide.pieces)) == (tiny_hf.VOCAB + 5, tiny_hf.VOCAB + 5)
    assert set(wide.pieces[tiny_hf.VOCAB :]) == {b""}
    narrow = HfVocab(byte_level(), tiny_hf.VOCAB - 1, eos=258)
    assert "<|im_end|>" not in narrow.specials
    assert 258 not in narrow.eog | narrow.controls


def test_an_answer_ends_at_what_the_files_name_and_at_the_usual_endings() -> None:
    vocab = HfVocab(byte_level(), tiny_hf.VOCAB, eos=7, ends=[9])
    assert vocab.eog == {7, 9, vocab.specials["<|im_end|>"], vocab.specials["<|endoftext|>"]}


def test_whether_bos_is_added_is_what_the_tokenizer_does() -> None:
    made = with_blanks(prepend="▁")
    assert not HfVocab(made, len(WORDS), bos=0).adds_bos
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    vocab = HfVocab(made, len(WORDS), bos=0)
    assert vocab.adds_bos
    assert 0 not in vocab.tokenize("a")


def test_nothing_is_cut_or_padded_and_half_a_surrogate_pair_is_replaced() -> None:
    made = byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=8)
    vocab = HfVocab(made, tiny_hf.VOCAB)
    assert bytes_of(vocab, "a longer text") == b"a longer text"
    assert bytes_of(vocab, "a\ud83cb") == "a\N{REPLACEMENT CHARACTER}b".encode()


def split_by(*patterns: str) -> HfVocab:
    made = byte_level()
    by_pattern = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence([*by_pattern, made.pre_tokenizer])
    return HfVocab(made, tiny_hf.VOCAB)


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    started, ticks = threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        started.set()
        while not is_done.wait(0.001):
            ticks += 1

    is_done = threading.Event()
    ticking = threading.Thread(target=tick)
    ticking.start()
    started.wait()
    KINDS["byte level"].tokenize("some text, " * 50_000)
    is_done.set()
    ticking.join()
    assert ticks > 5


@pytest.mark.parametrize("pattern", [r"\s+$", r"\d{1,3}(?=(?:\d{3})*\b)", r"(?=(\d{3})+(?!\d))"])
def test_long_runs_take_no_longer_than_their_length(pattern: str) -> None:
    """Without an end after some of it, a million of them would take hours."""
    vocab = split_by(pattern)
    for unit in (" ", "7"):
        text = "a" + unit * 100_000 + "é<|im_end|>"
        ids = vocab.tokenize(text)
        assert b"".join(vocab.pieces[token] for token in ids) == text.encode()
        assert ids[-1] == vocab.specials["<|im_end|>"]


def test_no_match_of_a_pattern_is_longer_than_it_may_be() -> None:
    """One that is given up after ten million steps ends in a panic, which is no Exception."""
    vocab = split_by(r"\p{Lu}*\p{Ll}+|\p{Lu}+|\s+|[^\s\p{L}]+")
    assert max(map(len, vocab._splitter.pieces("A" * 100_000))) == MAX_MATCH
    assert vocab.tokenize("A" * 100_000) == vocab.tokenize("A") * 100_000


def test_a_tokenizer_that_loses_blanks_is_refused() -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    with pytest.raises(ModelBroken, match=r"WordPiece.*does not keep every byte"):
        HfVocab(words, 3)


@pytest.mark.parametrize(
    ("tokenizer", "splits"),
    [
        (byte_level(), True),
        (with_blanks(prepend="▁"), True),
        (with_blanks(scheme="always"), True),
        (with_blanks(scheme="first"), False),
        (with_blanks(special=AddedToken("<s>", normalized=False, rstrip=True)), False),
    ],
    ids=["byte level", "blank before text", "blank always", "blank at the start", "eats blanks"],
)
@given(text=TEXTS)
def test_fragments_are_tokenised_alone_only_where_that_changes_nothing(
    tokenizer: Tokenizer, splits: bool, text: str
) -> None:
    vocab = HfVocab(tokenizer, tokenizer.get_vocab_size())
    assert vocab.splits_at_specials == splits
    assert PromptTokenizer(vocab).encode(text) == vocab.tokenize(text)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gpt-2", ["a", " b", "'s", " 12345", "\n\n", "\n", "c"]),
        ("smollm", ["a", " b", "'s", " ", "1", "2", "3", "4", "5", "\n\n", "\n", "c"]),
        ("qwen2", ["a", " b", "'s", " ", "1", "2", "3", "4", "5", "\n\n\n", "c"]),
        ("llama3", ["a", " b", "'s", " ", "123", "45", "\n\n\n", "c"]),
    ],
)
def test_a_gguf_file_says_how_text_is_split_first_or_it_is_mentioned(
    name: str, parts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = byte_level()
    repair_gguf_tokenizer(made, {"model": "gpt2", "pre": name})
    text = "a b's 12345\n\n\nc"
    assert [text[begin:end] for _, (begin, end) in made.pre_tokenizer.pre_tokenize_str(text)] == parts
    assert not caplog.text
    repair_gguf_tokenizer(byte_level(), {"model": "gpt2", "pre": "novel"})
    assert "'novel'" in caplog.text


def hf_vocab(path: Path) -> HfVocab:
    prefix, metadata = "tokenizer.ggml.", read_header(path).metadata
    facts = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    source = HfSource(path.parent, path.name, facts)
    return load_model(source, device="cpu", dtype="auto", attention="eager").vocab


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[HfVocab, LlamaModel]:
    path = tiny_gguf.dense(tmp_path_factory.mktemp("vocab") / "tiny.gguf")
    return hf_vocab(path), LlamaModel(path)


@given(text=TEXTS, parse_special=st.booleans())
def test_a_gguf_file_gives_the_tokens_and_the_vocabulary_that_llamacpp_gives(
    both: tuple[HfVocab, LlamaModel], text: str, parse_special: bool
) -> None:
    ours, theirs = both[0], both[1].vocab
    for trait in ("size", "pieces", "specials", "controls", "eog", "bos", "eos", "adds_bos", "splits_at_specials"):
        assert getattr(ours, trait) == getattr(theirs, trait), trait
    assert ours.tokenize(text, parse_special=parse_special) == theirs.tokenize(text, parse_special=parse_special)


def test_the_default_model_has_the_tokens_that_llamacpp_gives_it(smollm2: Path) -> None:
    ours, theirs = hf_vocab(smollm2), LlamaModel(smollm2).vocab
    assert ours.pieces == theirs.pieces
    assert ours.specials == theirs.specials
    for file in (Path(__file__).parents[2] / "src").rglob("*.py"):
        text = f"<|im_start|>user\n{file.read_text(encoding='utf-8')} 3.14159 日本語 🎉<|im_end|>\n"
        assert ours.tokenize(text) == theirs.tokenize(text), file
        assert ours.tokenize(text, parse_special=False) == theirs.tokenize(text, parse_special=False), file
