"""llama.cpp's C API, as far as it is used here, bound to a shared library with ctypes.

Functions are declared once in a table. What can differ between releases is the layout of the two structs of
parameters, so a library is asked for its defaults first, and one whose defaults are not where they should be is
refused: it would otherwise run with nonsense for parameters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_bool,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from emberkeep.errors import EngineError

Handle = int
"""The address of something that belongs to the library."""
VERSIONS = ("0.5.", "0.6.")
"""Releases of llama.cpp whose structs are known here."""
TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER_DEFINED, TOKEN_BYTE, TOKEN_LSTRIP, TOKEN_RSTRIP = 1, 8, 16, 32, 128, 256
"""Bits of a token's attributes."""
VOCAB_NONE, VOCAB_SPM, VOCAB_BPE, VOCAB_WPM, VOCAB_UGM, VOCAB_RWKV = 0, 1, 2, 3, 4, 5
FLASH_ATTENTION_OFF, FLASH_ATTENTION_ON = 0, 1
TYPES: Mapping[str, int] = {"f16": 1, "q8_0": 8, "q4_0": 2}
"""ggml's numbers for the types that live KV may have."""
LogCallback = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
NodeCallback = CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
ProgressCallback = CFUNCTYPE(c_bool, c_float, c_void_p)
_PADDING = ("padding", c_uint8 * 64)
"""Zeros behind a struct that is passed by value: what a later release appends to it is off then."""


class BufferOverride(ctypes.Structure):
    """Tensors whose names match `pattern` go into buffers of the type `buffer`."""

    _fields_ = (("pattern", c_char_p), ("buffer", c_void_p))


class ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", POINTER(BufferOverride)),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", POINTER(c_float)),
        ("progress_callback", ProgressCallback),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
        _PADDING,
    )


_CONTEXT_HEAD = (
    ("n_ctx", c_uint32),
    ("n_batch", c_uint32),
    ("n_ubatch", c_uint32),
    ("n_seq_max", c_uint32),
    ("n_rs_seq", c_uint32),
    ("n_outputs_max", c_uint32),
    ("n_outputs_max_per_seq", c_uint32),
    ("n_threads", c_int32),
    ("n_threads_batch", c_int32),
    ("ctx_type", c_int),
    ("rope_scaling_type", c_int),
    ("pooling_type", c_int),
    ("attention_type", c_int),
    ("flash_attn_type", c_int),
    ("rope_freq_base", c_float),
    ("rope_freq_scale", c_float),
    ("yarn_ext_factor", c_float),
    ("yarn_attn_factor", c_float),
    ("yarn_beta_fast", c_float),
    ("yarn_beta_slow", c_float),
    ("yarn_orig_ctx", c_uint32),
    ("defrag_thold", c_float),
    ("cb_eval", c_void_p),
    ("cb_eval_user_data", c_void_p),
    ("type_k", c_int),
    ("type_v", c_int),
    ("abort_callback", c_void_p),
    ("abort_callback_data", c_void_p),
)
_CONTEXT_TAIL = (
    ("embeddings", c_bool),
    ("offload_kqv", c_bool),
    ("no_perf", c_bool),
    ("op_offload", c_bool),
    ("swa_full", c_bool),
    ("kv_unified", c_bool),
    ("samplers", c_void_p),
    ("n_samplers", c_size_t),
    ("ctx_other", c_void_p),
    _PADDING,
)


class ContextParams05(ctypes.Structure):
    _fields_ = (*_CONTEXT_HEAD, *_CONTEXT_TAIL)


class ContextParams06(ctypes.Structure):
    _fields_ = (*_CONTEXT_HEAD, ("since_0_6", c_void_p), *_CONTEXT_TAIL)


class LlamaBatch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


class QuantizeParams(ctypes.Structure):
    _fields_ = (
        ("nthread", c_int32),
        ("ftype", c_int),
        ("output_tensor_type", c_int),
        ("token_embedding_type", c_int),
        ("allow_requantize", c_bool),
        ("quantize_output_tensor", c_bool),
        ("only_copy", c_bool),
        ("pure", c_bool),
        ("keep_split", c_bool),
        ("dry_run", c_bool),
        ("imatrix", c_void_p),
        ("kv_overrides", c_void_p),
        ("tt_overrides", c_void_p),
        ("prune_layers", c_void_p),
        ("max_buf_size", c_size_t),
        _PADDING,
    )


class ThreadPoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", c_bool * 512),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
        _PADDING,
    )


class DeviceProps(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("description", c_char_p),
        ("memory_free", c_size_t),
        ("memory_total", c_size_t),
        ("type", c_int),
        ("device_id", c_char_p),
        _PADDING,  # capabilities
    )


class Tensor(ctypes.Structure):
    """The part of a `ggml_tensor` up to its name."""

    _fields_ = (
        ("type", c_int),
        ("buffer", c_void_p),
        ("ne", c_int64 * 4),
        ("nb", c_size_t * 4),
        ("op", c_int),
        ("op_params", c_int32 * 16),
        ("flags", c_int32),
        ("src", c_void_p * 10),
        ("view_src", c_void_p),
        ("view_offs", c_size_t),
        ("data", c_void_p),
        ("name", c_char * 64),
    )


_BYTES = POINTER(c_uint8)
_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    # the library
    "llama_version": (c_char_p, ()),
    "llama_log_set": (None, (LogCallback, c_void_p)),
    "llama_backend_init": (None, ()),
    "llama_print_system_info": (c_char_p, ()),
    "llama_max_devices": (c_size_t, ()),
    # models
    "llama_model_default_params": (ModelParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_chat_template": (c_char_p, (c_void_p, c_char_p)),
    "llama_model_meta_val_str": (c_int32, (c_void_p, c_char_p, c_char_p, c_size_t)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_n_swa": (c_int32, (c_void_p,)),
    "llama_model_rope_type": (c_int, (c_void_p,)),
    "llama_model_rope_freq_scale_train": (c_float, (c_void_p,)),
    "llama_model_size": (c_uint64, (c_void_p,)),
    "llama_model_n_head": (c_int32, (c_void_p,)),
    "llama_model_n_embd_out": (c_int32, (c_void_p,)),
    "llama_model_n_cls_out": (c_uint32, (c_void_p,)),
    "llama_adapter_lora_init": (c_void_p, (c_void_p, c_char_p)),
    "llama_set_adapters_lora": (c_int32, (c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_float))),
    # vocabularies
    "llama_vocab_type": (c_int, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_get_text": (c_char_p, (c_void_p, c_int32)),
    "llama_vocab_get_attr": (c_int, (c_void_p, c_int32)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_vocab_bos": (c_int32, (c_void_p,)),
    "llama_vocab_eos": (c_int32, (c_void_p,)),
    "llama_vocab_sep": (c_int32, (c_void_p,)),
    "llama_vocab_get_add_bos": (c_bool, (c_void_p,)),
    "llama_vocab_get_add_eos": (c_bool, (c_void_p,)),
    "llama_vocab_get_add_sep": (c_bool, (c_void_p,)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "llama_token_to_piece": (c_int32, (c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool)),
    # contexts
    "llama_context_default_params": (ContextParams05, ()),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams05)),
    "llama_free": (None, (c_void_p,)),
    "llama_n_ctx_seq": (c_uint32, (c_void_p,)),
    "llama_n_ubatch": (c_uint32, (c_void_p,)),
    "llama_decode": (c_int32, (c_void_p, LlamaBatch)),
    "llama_get_logits_ith": (c_void_p, (c_void_p, c_int32)),
    "llama_get_embeddings_seq": (c_void_p, (c_void_p, c_int32)),
    "llama_attach_threadpool": (None, (c_void_p, c_void_p, c_void_p)),
    # state
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_add": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_can_shift": (c_bool, (c_void_p,)),
    "llama_state_get_data": (c_size_t, (c_void_p, _BYTES, c_size_t)),
    "llama_state_seq_get_size_ext": (c_size_t, (c_void_p, c_int32, c_uint32)),
    "llama_state_seq_get_data_ext": (c_size_t, (c_void_p, _BYTES, c_size_t, c_int32, c_uint32)),
    "llama_state_seq_set_data_ext": (c_size_t, (c_void_p, _BYTES, c_size_t, c_int32, c_uint32)),
    # devices and tensors
    "ggml_backend_load_all_from_path": (None, (c_char_p,)),
    "ggml_backend_dev_count": (c_size_t, ()),
    "ggml_backend_dev_get": (c_void_p, (c_size_t,)),
    "ggml_backend_dev_by_type": (c_void_p, (c_int,)),
    "ggml_backend_dev_backend_reg": (c_void_p, (c_void_p,)),
    "ggml_backend_reg_name": (c_char_p, (c_void_p,)),
    "ggml_backend_reg_get_proc_address": (c_void_p, (c_void_p, c_char_p)),
    "ggml_threadpool_params_default": (ThreadPoolParams, (c_int,)),
    "ggml_backend_dev_type": (c_int, (c_void_p,)),
    "ggml_backend_dev_get_props": (None, (c_void_p, POINTER(DeviceProps))),
    "ggml_backend_dev_host_buffer_type": (c_void_p, (c_void_p,)),
    "ggml_backend_buft_alloc_buffer": (c_void_p, (c_void_p, c_size_t)),
    "ggml_backend_buffer_get_base": (c_void_p, (c_void_p,)),
    "ggml_backend_buffer_free": (None, (c_void_p,)),
    "ggml_backend_cpu_buffer_type": (c_void_p, ()),
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
}
_OPTIONAL: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_model_quantize_default_params": (QuantizeParams, ()),
    "llama_model_quantize": (c_uint32, (c_char_p, c_char_p, POINTER(QuantizeParams))),
}
"""Left out of some builds."""


def bind(path: Path) -> Any:
    """The library at `path`, with every function declared. Raises EngineError where it is none that fits.

    Code of the library runs, so one that was built for another CPU may end the process.
    """
    try:
        library = ctypes.CDLL(str(path))
        extras = {name: types for name, types in _OPTIONAL.items() if hasattr(library, name)}
        for name, (result, arguments) in {**_FUNCTIONS, **extras}.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise EngineError(
            f"{path} is not a llama.cpp library that can be used here ({error}): "
            "set llama_library to another one, or to auto."
        ) from error
    version = library.llama_version().decode()
    layout = _context_layout(library)
    if not version.startswith(VERSIONS) or layout is None or not _has_model_layout(library):
        raise EngineError(
            f"{path} is llama.cpp {version}, and only releases {'x and '.join(VERSIONS)}x are known here: "
            "set llama_library to another one, or to auto."
        )
    library.llama_context_default_params.restype = layout
    library.llama_init_from_model.argtypes = (c_void_p, layout)
    return library


def defaults(function: Any, *arguments: int) -> Any:
    """What one of the functions for default parameters returns, with zeros behind it."""
    params = function(*arguments)
    ctypes.memset(ctypes.byref(params, type(params).padding.offset), 0, type(params).padding.size)
    return params


def _context_layout(library: Any) -> type[ctypes.Structure] | None:
    """The struct in which a context's defaults are where they belong."""
    function = library.llama_context_default_params
    for layout in (ContextParams05, ContextParams06):
        function.restype = layout
        given = function()
        numbers = (given.n_ctx, given.n_batch, given.n_ubatch, given.n_seq_max, given.type_k, given.type_v)
        switches = bytes(given)[layout.embeddings.offset :][:6]
        if numbers == (512, 2048, 512, 1, 1, 1) and switches == b"\0\1\1\1\1\0" and given.flash_attn_type == -1:
            return layout
    return None


def _has_model_layout(library: Any) -> bool:
    given = library.llama_model_default_params()
    switches = bytes(given)[ModelParams.vocab_only.offset :][:6]
    return given.n_gpu_layers == -1 and given.split_mode == 1 and switches[:3] == b"\0\0\1"
