"""Tokenizers of every kind, trained here on a few sentences, as files of a directory and as GGUF metadata."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def f(x):\n    return x * 2\n\n\tif x > 10:  pass\n",
    "Grüße aus Köln, naïve café! Привет мир, 你好世界, 日本語, 한국어 😀👍🏽",
    "the then there they them this that those these 0123456789 2024 12 345",
] * 4
TEXTS = [
    "",
    " ",
    "the",
    " the then",
    "the  quick   brown",
    "\n\n\tdef f(x):\n        return x",
    "Grüße 你好 😀👨‍👩‍👧 Привет",
    "12 345 2024-01-02",
    "x" * 50,
    "zß€𝒳�",
    "they're",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("é!", normalized=False)])
    return backend


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_suffix() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_level() -> tokenizers.Tokenizer:
    words = sorted({word for text in CORPUS for word in text.split()})
    backend = tokenizers.Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *words])}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL)
    return backend


def write_tokenizer(directory, backend, **config):
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def byte_gguf(backend, pre="gpt-2", **keys):
    model = json.loads(backend.to_str())["model"]
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    added = backend.get_added_tokens_decoder()
    types = [1 if i not in added else 3 if added[i].special else 4 for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentencepiece_gguf(processor, **keys):
    ids = range(processor.get_piece_size())
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


KINDS = (
    "byte_level",
    "unigram",
    "wordpiece",
    "word_suffix",
    "word_level",
    "sentencepiece",
    "gguf_bytes",
    "gguf_scores",
)
REVERSIBLE = ("byte_level", "sentencepiece", "gguf_bytes", "gguf_scores")


def streamed(tokenizer, ids, prompt=()):
    detokenizer = tokenizer.detokenizer(prompt)
    return "".join([detokenizer.push(i) for i in ids]) + detokenizer.flush()
