"""vocab.txt, and vocab.json with merges.txt, give the ids that transformers reads from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openengine.core.tokenizer import load_tokenizer
from openengine.errors import InvalidArgument, UnsupportedFeature
from tests.checkpoints import write_tokenizer
from tests.embedders import TEXTS, write_encoder_tokenizer

transformers = pytest.importorskip("transformers")

# Added tokens are matched before anything is lower-cased.
SPECIALS = {"bert": "before [MASK] after [mask] x[SEP]y", "roberta": "before x</s>y  <pad>"}


def write_vocab_txt(directory: Path, renamed: dict[str, str] | None = None, **config) -> Path:
    write_encoder_tokenizer(directory / "full")
    vocabulary = json.loads((directory / "full" / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [(renamed or {}).get(token, token) for token in sorted(vocabulary, key=vocabulary.get)]
    (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), "utf-8")
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_merges(directory: Path, **config) -> Path:
    write_tokenizer(directory / "full")
    model = json.loads((directory / "full" / "tokenizer.json").read_text())["model"]
    names = ["<s>", "</s>", "<pad>", "<unk>", "<mask>"]
    vocabulary = {names[i] if i < len(names) else token: i for token, i in model["vocab"].items()}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    (directory / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{merge}\n" for merge in merges), "utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        {"tokenizer_class": "DistilBertTokenizer", "do_lower_case": True, "strip_accents": False},
        {"tokenizer_class": "ElectraTokenizerFast", "tokenize_chinese_chars": False},
    ],
    ids=str,
)
def test_wordpiece_files_give_the_ids_of_transformers(tmp_path, config):
    directory = write_vocab_txt(tmp_path, **config)
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer = load_tokenizer(directory)
    texts = [*TEXTS, SPECIALS["bert"]]
    assert tokenizer.encode_batch(texts) == reference(texts)["input_ids"]
    assert tokenizer.pad_token_id == reference.pad_token_id


def test_a_bert_directory_without_any_other_file_is_read_by_its_model_type(tmp_path):
    directory = write_vocab_txt(tmp_path)
    (directory / "config.json").write_text(json.dumps({"model_type": "bert"}))
    reference = transformers.BertTokenizer.from_pretrained(directory)
    assert load_tokenizer(directory).encode_batch(TEXTS) == reference(list(TEXTS))["input_ids"]


def test_mpnet_files_give_the_ids_of_transformers(tmp_path):
    renamed = {"[CLS]": "<s>", "[SEP]": "</s>", "[PAD]": "<pad>", "[MASK]": "<mask>"}
    directory = write_vocab_txt(tmp_path, renamed, tokenizer_class="MPNetTokenizer")
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    assert load_tokenizer(directory).encode_batch(TEXTS) == reference(list(TEXTS))["input_ids"]


def test_byte_level_files_give_the_ids_of_transformers(tmp_path):
    directory = write_merges(tmp_path, tokenizer_class="RobertaTokenizer")
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    texts = [*TEXTS, SPECIALS["roberta"]]
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode_batch(texts) == reference(texts)["input_ids"]
    assert tokenizer.decode(tokenizer.encode(TEXTS[6])) == TEXTS[6]


def test_the_mask_of_roberta_takes_the_space_before_it(tmp_path):
    # As in the tokenizer.json that is published with the model; what reads the two files today leaves the space alone.
    tokenizer = load_tokenizer(write_merges(tmp_path, tokenizer_class="RobertaTokenizer"))
    assert tokenizer.encode("a <mask>") == tokenizer.encode("a<mask>")


def test_files_of_a_class_that_is_not_known_are_refused_with_the_way_out(tmp_path):
    with pytest.raises(UnsupportedFeature, match=r"of a qwen2 tokenizer cannot be read; roberta can.*save_pretrained"):
        load_tokenizer(write_merges(tmp_path, tokenizer_class="Qwen2Tokenizer"))


def test_a_vocabulary_without_its_special_tokens_is_damaged(tmp_path):
    directory = write_vocab_txt(tmp_path, tokenizer_class="BertTokenizer")
    (directory / "vocab.txt").write_text("[UNK]\nword\n")
    with pytest.raises(InvalidArgument, match=r"lacks the special token '\[SEP\]'"):
        load_tokenizer(directory)
