"""Tiny models with random weights that llama.cpp really loads, one for each way of keeping state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

LAYERS = 2
WIDTH = 64
HEADS = 4
KV_HEADS = 2
HEAD = WIDTH // HEADS
INNER = 128
STATE = 16
CONV = 4
TIME_RANK = 8
WINDOW = 16
LATENT = 32
INDEX = 64
EXPERTS = 8
RANK = 4
EXPERTS_USED = 2

_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz▁,.!"]
_PIECES += ["<|im_start|>", "<|im_end|>"]  # of ChatML, which is used for models without a template
VOCAB = len(_PIECES)
ENDINGS = (2, VOCAB - 1)
"""Tokens that end an answer."""

_KINDS = [
    TokenType.UNKNOWN,
    TokenType.CONTROL,
    TokenType.CONTROL,
    *[TokenType.BYTE] * 256,
    *[TokenType.NORMAL] * (VOCAB - 261),
    *[TokenType.CONTROL] * 2,
]

Shapes = dict[str, tuple[int, ...]]
Metadata = Mapping[str, int | float | list[int]]


def dense(path: Path, *, seed: int = 0, template: str | None = None, tensors_per_part: int = 0) -> Path:
    """`tensors_per_part`: split it, and return the path of the first part; 0: one file."""
    return _write(
        path,
        "llama",
        _attention_metadata(),
        _attention_shapes(),
        seed,
        template,
        tensors_per_part=tensors_per_part,
    )


def wide(path: Path, *, seed: int = 0) -> Path:
    """One head of 64 numbers, as those of most models are: they can be quantised, and moved all the same."""
    metadata = {
        **_attention_metadata(),
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "rope.dimension_count": WIDTH,
    }
    keys_and_values = {
        f"blk.{layer}.attn_{part}.weight": (WIDTH, WIDTH) for layer in range(LAYERS) for part in ("k", "v")
    }
    return _write(path, "llama", metadata, _attention_shapes() | keys_and_values, seed)


def lora(
    path: Path,
    *,
    seed: int = 0,
    architecture: str = "llama",
    kind: str = "lora",
    alpha: float = 8.0,
    targets: tuple[str, ...] = ("attn_q", "attn_v"),
    inner: int = WIDTH,
    invoked_by: tuple[int, ...] = (),
) -> Path:
    """An adapter for `dense`, which changes the `targets` of every layer; `inner`: what goes into them."""
    writer = GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", alpha)
    if invoked_by:
        writer.add_array("adapter.alora.invocation_tokens", list(invoked_by))
    random = np.random.default_rng(seed)
    shapes = _attention_shapes()
    for layer, target in itertools.product(range(LAYERS), targets):
        name = f"blk.{layer}.{target}.weight"
        for part, shape in (("lora_a", (RANK, inner)), ("lora_b", (shapes[name][0], RANK))):
            writer.add_tensor(f"{name}.{part}", (0.3 * random.standard_normal(shape)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scaled_keys(path: Path, *, seed: int = 0) -> Path:
    """Phi 3's way to long contexts: what is rotated becomes larger too."""
    metadata = {**_attention_metadata(), "rope.scaling.attn_factor": 1.19}
    return _write(path, "llama", metadata, _attention_shapes(), seed)


def sliding_window(path: Path, *, seed: int = 0) -> Path:
    """Gemma 2's shape: every second layer sees only the last `WINDOW` tokens."""
    metadata = {
        **_attention_metadata(),
        "attention.sliding_window": WINDOW,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    norms = {
        f"blk.{layer}.{part}.weight": (WIDTH,)
        for layer in range(LAYERS)
        for part in ("post_attention_norm", "post_ffw_norm")
    }
    return _write(path, "gemma2", metadata, _attention_shapes() | norms, seed)


def moe(path: Path, *, seed: int = 0, template: str | None = None) -> Path:
    """Mixtral's shape, with a router that is easy to predict: see `chosen_experts`."""
    metadata = {
        **_attention_metadata(),
        "expert_count": EXPERTS,
        "expert_used_count": EXPERTS_USED,
    }
    shapes = _attention_shapes()
    for layer in range(LAYERS):
        shapes = _without(shapes, layer, "ffn_gate", "ffn_up", "ffn_down")
        shapes |= {
            f"blk.{layer}.ffn_gate_inp.weight": (EXPERTS, WIDTH),
            f"blk.{layer}.ffn_gate_exps.weight": (EXPERTS, INNER, WIDTH),
            f"blk.{layer}.ffn_up_exps.weight": (EXPERTS, INNER, WIDTH),
            f"blk.{layer}.ffn_down_exps.weight": (EXPERTS, WIDTH, INNER),
        }
    return _write(path, "llama", metadata, shapes, seed, template, _route_by_token)


def chosen_experts(token: int, layer: int) -> list[int]:
    """Where `moe` sends a token, whatever stands before it."""
    return [(token + layer + place) % EXPERTS for place in range(EXPERTS_USED)]


def _route_by_token(name: str, weights: np.ndarray) -> None:
    """The first numbers of every hidden state say which token it belongs to; nothing is ever added to them."""
    if name == "token_embd.weight":
        weights[:, :EXPERTS] = 0
        for token, place in itertools.product(range(VOCAB), range(EXPERTS_USED)):
            weights[token, (token + place) % EXPERTS] = 2.0 - place / EXPERTS_USED
    elif "attn_output" in name or "ffn_down_exps" in name:
        weights[..., :EXPERTS, :] = 0
    elif "ffn_gate_inp" in name:
        layer = int(name.split(".")[1])
        weights[:] = np.roll(np.eye(EXPERTS, WIDTH), layer, axis=0)


def recurrent(path: Path, *, seed: int = 0) -> Path:
    """Mamba's shape: a state instead of keys and values."""
    metadata = {
        "block_count": LAYERS,
        "context_length": 1024,
        "embedding_length": WIDTH,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **_mamba_metadata(),
    }
    shapes: Shapes = {
        "token_embd.weight": (VOCAB, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (VOCAB, WIDTH),
    }
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.attn_norm.weight": (WIDTH,), **_mamba_shapes(layer)}
    return _write(path, "mamba", metadata, shapes, seed)


def hybrid(path: Path, *, seed: int = 0) -> Path:
    """Jamba's shape: Mamba's layers and attention layers take turns."""
    metadata = {
        **_attention_metadata(),
        **_mamba_metadata(),
        "attention.head_count_kv": _every_second_layer(KV_HEADS),
    }
    shapes = _attention_shapes()
    for layer in range(0, LAYERS, 2):
        shapes = _without(shapes, layer, "attn_q", "attn_k", "attn_v", "attn_output")
        shapes |= _mamba_shapes(layer)
        shapes |= {
            f"blk.{layer}.ssm_dt_norm.weight": (TIME_RANK,),
            f"blk.{layer}.ssm_b_norm.weight": (STATE,),
            f"blk.{layer}.ssm_c_norm.weight": (STATE,),
        }
    return _write(path, "jamba", metadata, shapes, seed)


def hybrid_window(path: Path, *, seed: int = 0) -> Path:
    """LFM 2's shape: convolutions over a few tokens, and attention layers that see only the last `WINDOW`."""
    metadata = {
        **_attention_metadata(),
        "attention.head_count_kv": _every_second_layer(KV_HEADS),
        "attention.sliding_window": WINDOW,
        "shortconv.l_cache": CONV,
    }
    shapes = _attention_shapes()
    shapes["token_embd_norm.weight"] = shapes.pop("output_norm.weight")
    for layer in range(LAYERS):
        if layer % 2:
            shapes |= {f"blk.{layer}.attn_{part}_norm.weight": (HEAD,) for part in "qk"}
        else:
            shapes = _without(shapes, layer, "attn_q", "attn_k", "attn_v", "attn_output")
            shapes |= {
                f"blk.{layer}.shortconv.conv.weight": (WIDTH, CONV),
                f"blk.{layer}.shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
                f"blk.{layer}.shortconv.out_proj.weight": (WIDTH, WIDTH),
            }
    return _write(path, "lfm2", metadata, shapes, seed)


def latent(path: Path, *, seed: int = 0) -> Path:
    """DeepSeek 2's shape: one latent row per token stands for the keys and values of all heads."""
    return _write(path, "deepseek2", _latent_metadata(), _latent_shapes(), seed)


def indexed(path: Path, *, seed: int = 0) -> Path:
    """DeepSeek 3.2's shape: a second cache, over which each layer chooses the `WINDOW` tokens that it looks at."""
    metadata = {
        **_latent_metadata(),
        "expert_gating_func": 1,
        "attention.indexer.head_count": HEADS,
        "attention.indexer.key_length": INDEX,
        "attention.indexer.top_k": WINDOW,
    }
    shapes = _latent_shapes()
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.indexer.k_norm.weight": (INDEX,),
            f"blk.{layer}.indexer.k_norm.bias": (INDEX,),
            f"blk.{layer}.indexer.proj.weight": (HEADS, WIDTH),
            f"blk.{layer}.indexer.attn_k.weight": (INDEX, WIDTH),
            f"blk.{layer}.indexer.attn_q_b.weight": (HEADS * INDEX, LATENT),
        }
    return _write(path, "deepseek32", metadata, shapes, seed)


def _latent_metadata() -> Metadata:
    return {
        **_attention_metadata(),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": LATENT,
        "attention.kv_lora_rank": LATENT,
        "attention.key_length": LATENT + HEAD,
        "attention.value_length": LATENT,
        "attention.key_length_mla": 2 * HEAD,
        "attention.value_length_mla": HEAD,
        "leading_dense_block_count": LAYERS,
        "expert_feed_forward_length": INNER,
        "expert_shared_count": 0,
    }


def _latent_shapes() -> Shapes:
    shapes = _attention_shapes()
    for layer in range(LAYERS):
        shapes = _without(shapes, layer, "attn_q", "attn_k", "attn_v")
        shapes |= {
            f"blk.{layer}.attn_q_a_norm.weight": (LATENT,),
            f"blk.{layer}.attn_kv_a_norm.weight": (LATENT,),
            f"blk.{layer}.attn_q_a.weight": (LATENT, WIDTH),
            f"blk.{layer}.attn_q_b.weight": (HEADS * 2 * HEAD, LATENT),
            f"blk.{layer}.attn_kv_a_mqa.weight": (LATENT + HEAD, WIDTH),
            f"blk.{layer}.attn_k_b.weight": (HEADS, LATENT, HEAD),
            f"blk.{layer}.attn_v_b.weight": (HEADS, HEAD, LATENT),
        }
    return shapes


def several_positions(path: Path, *, seed: int = 0) -> Path:
    """Qwen 2 VL's shape: a token has a place in time, height and width."""
    metadata = {**_attention_metadata(), "rope.dimension_sections": [HEAD // 4, HEAD // 8, HEAD // 8, 0]}
    biases = {
        f"blk.{layer}.attn_{part}.bias": (width,)
        for layer in range(LAYERS)
        for part, width in (("q", WIDTH), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD))
    }
    return _write(path, "qwen2vl", metadata, _attention_shapes() | biases, seed)


def _every_second_layer(heads: int) -> list[int]:
    return [heads * (layer % 2) for layer in range(LAYERS)]


def _without(shapes: Shapes, layer: int, *parts: str) -> Shapes:
    left_out = {f"blk.{layer}.{part}.weight" for part in parts}
    return {name: shape for name, shape in shapes.items() if name not in left_out}


def _mamba_metadata() -> Metadata:
    return {
        "ssm.conv_kernel": CONV,
        "ssm.inner_size": INNER,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": TIME_RANK,
    }


def _mamba_shapes(layer: int) -> Shapes:
    return {
        f"blk.{layer}.ssm_in.weight": (2 * INNER, WIDTH),
        f"blk.{layer}.ssm_conv1d.weight": (INNER, CONV),
        f"blk.{layer}.ssm_conv1d.bias": (INNER,),
        f"blk.{layer}.ssm_x.weight": (TIME_RANK + 2 * STATE, INNER),
        f"blk.{layer}.ssm_dt.weight": (INNER, TIME_RANK),
        f"blk.{layer}.ssm_dt.bias": (INNER,),
        f"blk.{layer}.ssm_a": (INNER, STATE),
        f"blk.{layer}.ssm_d": (INNER,),
        f"blk.{layer}.ssm_out.weight": (WIDTH, INNER),
    }


def _attention_metadata() -> Metadata:
    return {
        "block_count": LAYERS,
        "context_length": 1024,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
    }


def _attention_shapes() -> Shapes:
    shapes: Shapes = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (WIDTH,),
            f"blk.{layer}.ffn_norm.weight": (WIDTH,),
            f"blk.{layer}.attn_q.weight": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD, WIDTH),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD, WIDTH),
            f"blk.{layer}.attn_output.weight": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_gate.weight": (INNER, WIDTH),
            f"blk.{layer}.ffn_up.weight": (INNER, WIDTH),
            f"blk.{layer}.ffn_down.weight": (WIDTH, INNER),
        }
    return shapes


def _write(
    path: Path,
    architecture: str,
    metadata: Metadata,
    shapes: Shapes,
    seed: int,
    template: str | None = None,
    change: Callable[[str, np.ndarray], None] = lambda name, weights: None,
    tensors_per_part: int = 0,
) -> Path:
    """`change` may alter the random weights of a tensor in place."""
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    for key, value in metadata.items():
        add = {float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(_PIECES)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types(_KINDS)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        weights = _weights(name, shape, random)
        change(name, weights)
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not tensors_per_part else writer.format_shard_names(path)[0]


def _weights(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if "norm" in name:
        return np.ones(shape, np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(random.standard_normal(shape, dtype=np.float32))
    # Wide enough that every token of the context changes the logits noticeably.
    scale = 1.0 if len(shape) == 1 else 2.0 / np.sqrt(shape[-1])
    return (scale * random.standard_normal(shape)).astype(np.float32)
