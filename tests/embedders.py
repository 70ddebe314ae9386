"""Tiny random embedders and cross-encoders as sentence-transformers saves them, and the tokenizers of encoders."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "HIDDEN_SIZE",
    "SPECIAL_IDS",
    "TEXTS",
    "edit_json",
    "write_bert",
    "write_embedder",
    "write_encoder_tokenizer",
]

# Ids of the special tokens, the first of every vocabulary written here.
SPECIAL_IDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
HIDDEN_SIZE = 32

TEXTS = (
    "the quick brown fox",
    "jumps over the lazy dog, one two three four five; hello world!",
    "a",
    "",
    "  \t ",
    "Hello HELLO hello",
    "Grüße aus Köln: ÄÖÜß, naïve café",
    "日本語のテキストと中文",
    "emoji 👩‍👩‍👧‍👦 and 🏳️‍🌈, zero\u200bwidth, RTL \u202eabc\u202c",
    "Ω≈ç√∫˜µ≤≥÷ \u0000 \ufffd \U0010ffff",
    "مرحبا بالعالم שלום",
    "e\u0301 vs é, İstanbul ΣΑΣ",
    " ".join(["word"] * 40),
)


def write_encoder_tokenizer(directory: Path, *, style: str = "bert", lower_case: bool = True, **config: Any) -> None:
    """A WordPiece tokenizer; `style` says what stands around a pair: "bert" types both texts, "roberta" doubles [SEP]."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(_tokenizer_json(style, lower_case))
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL_IDS}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, **names}
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    settings.update(config)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@cache
def _tokenizer_json(style: str, lower_case: bool) -> str:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(SPECIAL_IDS), show_progress=False)
    tokenizer.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if style == "bert" else "[CLS] $A [SEP] [SEP] $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[(name, SPECIAL_IDS[name]) for name in ("[CLS]", "[SEP]")]
    )
    return tokenizer.to_str()


def write_bert(directory: Path, *, architecture: str = "BertModel", seed: int = 0, **overrides: Any) -> Path:
    """A random BERT with its tokenizer, as transformers saves it."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=300,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
        **overrides,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config)
    model.save_pretrained(directory)
    write_encoder_tokenizer(directory)
    return directory


def write_embedder(
    directory: Path,
    *,
    pooling: str | tuple[str, ...] = "mean",
    dense: tuple[tuple[int, str], ...] = (),
    normalize: bool = False,
    include_prompt: bool = True,
    **arguments: Any,
) -> Path:
    """A random BERT embedder as the installed sentence-transformers saves it. dense: sizes and activations of torch.nn."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    base = write_bert(directory.with_name(directory.name + "-base"))
    modules = [Transformer(str(base)), Pooling(HIDDEN_SIZE, pooling, include_prompt=include_prompt)]
    size = modules[1].get_embedding_dimension()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for width, activation in dense:
            modules.append(Dense(size, width, activation_function=getattr(torch.nn, activation)()))
            size = width
    if normalize:
        modules.append(Normalize())
    SentenceTransformer(modules=modules, device="cpu", **arguments).save(str(directory), create_model_card=False)
    return directory


def edit_json(path: Path, *, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of a JSON object; it may be absent."""
    values = json.loads(path.read_text()) if path.exists() else {}
    values = {key: value for key, value in values.items() if key not in remove}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**values, **changes}))
