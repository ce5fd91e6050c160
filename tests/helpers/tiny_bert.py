"""Tiny encoders with random weights, each as a Hugging Face folder and as a GGUF file with the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from helpers.gguf_builders import charsmap

WIDTH = 32
CONTEXT = 64
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (*SPECIALS, *"abcdefghijklmnopqrstuvwxyz0123456789,.!?", "the", "cat", "sat", "on", "mat", "##s", "##ting")
CLS, SEP = 2, 3

MEAN, CLS_POOLING, LAST, RANK = 1, 2, 3, 4
"""llama.cpp's numbers of poolings."""

_POOLING_MODES = {MEAN: "pooling_mode_mean_tokens", CLS_POOLING: "pooling_mode_cls_token"}
_NAMES = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "pooler.dense": "cls",
    "classifier": "cls.output",
}


def bert_folder(path: Path, *, pooling: int = MEAN, seed: int = 0, labels: int = 1) -> Path:
    """With `RANK` a cross-encoder, else an embedding model as sentence-transformers keeps it."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=CONTEXT,
        initializer_range=0.5,
        num_labels=labels,
    )
    model: PreTrainedModel
    if pooling == RANK:
        model = BertForSequenceClassification(config)
    else:
        model = BertModel(config, add_pooling_layer=False)
        _write_modules(path, pooling)
    model.save_pretrained(path)
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(), model_input_names=inputs, **_special_names()
    )
    tokenizer.save_pretrained(path)
    return path


def bert_gguf(path: Path, folder: Path, *, pooling: int = MEAN) -> Path:
    """The model in `folder` as a GGUF file, also a real one."""
    classifies = pooling == RANK
    model = (BertForSequenceClassification if classifies else BertModel).from_pretrained(folder)
    vocab = _words(folder)
    config = model.config
    writer = GGUFWriter(path, "bert")
    _write_shape(writer, config, pooling)
    if classifies:
        writer.add_array("bert.classifier.output_labels", ["relevance"])
    _write_vocabulary(writer, vocab)
    for name, weights in _tensors(model.state_dict(), with_head=classifies):
        writer.add_tensor(name, weights)
    _finish(writer)
    return path


def _write_shape(writer: GGUFWriter, config: BertConfig, pooling: int) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_uint32("bert.pooling_type", pooling)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(state: Mapping[str, torch.Tensor], *, with_head: bool) -> list[tuple[str, np.ndarray]]:
    found = []
    for name, weights in state.items():
        renamed = _renamed(name.removeprefix("bert."))
        if renamed is None or (renamed.startswith("cls") and not with_head):
            continue
        values = weights.float().numpy()
        # llama.cpp puts every token into the first row; it takes them only with the dimension of types kept.
        found.append((renamed, values))
    return found


def _renamed(name: str) -> str | None:
    if name.startswith("encoder.layer."):
        layer, _, rest = name.removeprefix("encoder.layer.").partition(".")
        inner = _renamed(rest)
        return f"blk.{layer}.{inner}" if inner else None
    if name in _NAMES:
        return _NAMES[name]
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else None


def _write_modules(path: Path, pooling: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for number, (place, kind) in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    modes = {mode: number == pooling for number, mode in _POOLING_MODES.items()}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH, **modes}))


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return tokenizer


def _special_names() -> dict[str, str]:
    return {f"{name[1:-1].lower()}_token": name for name in SPECIALS}


def _words(folder: Path) -> list[str]:
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(vocab, key=vocab.__getitem__)


def _write_vocabulary(writer: GGUFWriter, words: list[str]) -> None:
    """A word of its own begins with a mark, as in the files that llama.cpp's converter writes."""
    pieces = []
    for word in words:
        if word in SPECIALS or (word.startswith("[") and word.endswith("]")):
            pieces.append(word)
        else:
            pieces.append(word[2:] if word.startswith("##") else f"▁{word}")
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_types([TokenType.CONTROL if word in SPECIALS else TokenType.NORMAL for word in words])
    writer.add_token_type_count(2)
    writer.add_uint32("tokenizer.ggml.cls_token_id", words.index("[CLS]"))
    writer.add_bos_token_id(words.index("[CLS]"))
    writer.add_sep_token_id(words.index("[SEP]"))
    writer.add_unk_token_id(words.index("[UNK]"))
    writer.add_pad_token_id(words.index("[PAD]"))


# ── unigram vocabularies ──

_UNIGRAM = (
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "▁",
    *"abcdefghijklmnopqrstuvwxyz",
    "▁the",
    "▁cat",
    "▁sat",
    "at",
    "▁a",
)


def unigram_gguf(path: Path, *, table: bytes | None = None, seed: int = 0) -> Path:
    """XLM-RoBERTa's kind of vocabulary on a tiny encoder."""
    words = list(_UNIGRAM)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=WIDTH,
        max_position_embeddings=CONTEXT,
    )
    torch.manual_seed(seed)
    writer = GGUFWriter(path, "bert")
    _write_shape(writer, config, MEAN)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * 4 + [-3.0 + 0.1 * len(word) for word in words[4:]])
    kinds = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.NORMAL] * (len(words) - 4)
    writer.add_token_types(kinds)
    writer.add_token_type_count(2)
    writer.add_add_space_prefix(True)
    for name, token in (("bos", 0), ("padding", 1), ("eos", 2), ("unknown", 3), ("seperator", 2)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_array("tokenizer.ggml.precompiled_charsmap", table or charsmap())
    for name, weights in _tensors(BertModel(config, add_pooling_layer=False).state_dict(), with_head=False):
        writer.add_tensor(name, weights)
    _finish(writer)
    return path
