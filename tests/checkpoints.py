"""Tiny random checkpoints of every family, each with a small tokenizer, written to a directory in well under a second.

Norm weights and biases are random too, so that no term of the computation is hidden by its initial value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "BOS",
    "ENCODERS",
    "EOS",
    "FAMILIES",
    "IM_END",
    "IM_START",
    "VOCAB_SIZE",
    "edit_config",
    "edit_tensors",
    "write_checkpoint",
    "write_model",
    "write_tokenizer",
]

VOCAB_SIZE = 384
# Special tokens have the first ids.
BOS, EOS, PAD, IM_START, IM_END = range(5)
_SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
_GEMMA = {
    **_COMMON,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}

# Family -> (config class of transformers, its arguments).
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON),
    "qwen2": ("Qwen2Config", {**_COMMON, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_COMMON, "head_dim": 32}),
    "mistral": ("MistralConfig", {**_COMMON, "head_dim": 24, "sliding_window": 8}),
    "ministral": ("MinistralConfig", {**_COMMON, "head_dim": 24, "sliding_window": 8}),
    "gemma2": ("Gemma2Config", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", {**_GEMMA, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "initializer_range": 0.1,
        },
    ),
}

FAMILIES = tuple(_CONFIGS)

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.1,
}

# Encoder family -> (what its classes in transformers are called, arguments of its config class).
_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _ENCODER),
    "roberta": ("Roberta", {**_ENCODER, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {**_ENCODER, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "mpnet": ("MPNet", _ENCODER),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": VOCAB_SIZE,
            "dim": 64,
            "hidden_dim": 96,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 130,
            "pad_token_id": PAD,
            "initializer_range": 0.1,
        },
    ),
    "modernbert": (
        "ModernBert",
        {**_ENCODER, "num_hidden_layers": 4, "local_attention": 8, "cls_token_id": BOS, "sep_token_id": EOS},
    ),
}

ENCODERS = tuple(_ENCODERS)

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a random model of `family` as transformers would, and return `directory`.

    `overrides` are arguments of the family's config class. A small `max_shard_size` ("40KB") makes shards with an
    index. Needs transformers.
    """
    write_model(directory, family, seed=seed, dtype=dtype, max_shard_size=max_shard_size, **overrides)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_model(
    directory: Path,
    family: str,
    head: str = "ForCausalLM",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Any:
    """Write a random model of a decoder or encoder family with any `head` ("Model", "ForSequenceClassification", …).

    Returns transformers' model, in float32 and ready to be asked.
    """
    import transformers

    if family in _ENCODERS:
        stem, arguments = _ENCODERS[family]
        config_class = f"{stem}Config"
    else:
        config_class, arguments = _CONFIGS[family]
        stem = config_class.removesuffix("Config")
    config = getattr(transformers, config_class)(**{**arguments, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if head == "ForCausalLM":
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            model = getattr(transformers, f"{stem}{head}")._from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    return model.float().eval()


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Replace the tensors of an unsharded checkpoint with those that `change` makes of them."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    save_file({name: value.clone().contiguous() for name, value in change(load_file(path)).items()}, path)


def edit_config(directory: Path, *, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of the checkpoint's config.json."""
    path = directory / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps({**config, **changes}))


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer with special tokens and a chat template; it adds BOS. Needs tokenizers."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(_tokenizer_json())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIALS[BOS],
        "eos_token": _SPECIALS[EOS],
        "pad_token": _SPECIALS[PAD],
        "add_bos_token": True,
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@cache
def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = "the quick brown fox jumps over the lazy dog; one two three four five. Hello world, how are you today?\n"
    tokenizer.train_from_iterator([corpus, corpus.upper(), corpus.title()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return tokenizer.to_str()
