"""Texts and pairs to items: special tokens, types, prompts, truncation, templates; what is refused, by name and index."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from openengine.core.score_template import (
    JOINED,
    ChatScoreTemplate,
    FormatTemplate,
    find_score_template,
    yes_no_ids,
)
from openengine.core.task_specs import EmbeddingSpec, ScoreSpec
from openengine.core.task_tokens import TaskTokenizer, has_token_types
from openengine.core.tokenizer import Tokenizer, load_tokenizer
from openengine.errors import InvalidArgument, UnsupportedFeature
from tests.checkpoints import write_tokenizer
from tests.embedders import SPECIAL_IDS, TEXTS, edit_json, write_encoder_tokenizer

CLS, SEP = SPECIAL_IDS["[CLS]"], SPECIAL_IDS["[SEP]"]
PAIR_TEMPLATE = (
    '{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content") | first '
    '| default("Find what answers it") -%}\n<|im_start|>system\nJudge.<|im_end|>\n<Instruct>: {{ instruction }}\n'
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    '<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>\n'
)


@pytest.fixture(scope="module", params=["bert", "roberta"])
def encoder_files(tmp_path_factory, request) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_encoder_tokenizer(directory, style=request.param)
    return directory


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("bert")
    write_encoder_tokenizer(directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def causal(tmp_path_factory) -> Tokenizer:
    """Byte-level BPE that puts BOS before each text."""
    directory = tmp_path_factory.mktemp("causal")
    write_tokenizer(directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Tokenizer:
    """The same, without special tokens of its own."""
    directory = tmp_path_factory.mktemp("bare")
    write_tokenizer(directory)
    edit_json(directory / "tokenizer.json", post_processor=None)
    return load_tokenizer(directory)


def tokens_of(tokenizer: Tokenizer, **arguments) -> TaskTokenizer:
    return TaskTokenizer(tokenizer, **{"max_length": 64, "vocab_size": 384, **arguments})


def ids(items) -> list[list[int]]:
    return [item.token_ids.tolist() for item in items]


# ---- single texts


def test_texts_have_the_tokens_that_transformers_gives_them(encoder_files):
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(encoder_files)
    items = tokens_of(load_tokenizer(encoder_files)).encode(TEXTS)
    assert ids(items) == reference(list(TEXTS))["input_ids"]
    assert all(item.token_ids.dtype == np.int32 and item.token_types is None for item in items)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_length", [3, 5, 12])
def test_truncation_keeps_special_tokens_and_cuts_like_transformers(encoder_files, max_length, side):
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(encoder_files, truncation_side=side)
    items = tokens_of(load_tokenizer(encoder_files), max_length=max_length).encode(TEXTS, truncate=side)
    assert ids(items) == reference(list(TEXTS), truncation=True, max_length=max_length)["input_ids"]


def test_tsk_19_a_text_that_is_too_long_is_an_error_that_names_it_and_the_lengths(bert):
    tokenizer = tokens_of(bert, max_length=5)
    with pytest.raises(
        InvalidArgument, match=r"inputs\[2\] has 6 tokens, more than the 5 .*truncate='right'"
    ) as raised:
        tokenizer.encode(["a", "a a a", "a a a a", "a a a a a"])
    assert raised.value.details == {"index": 2}
    assert ids(tokenizer.encode(["a a a"]))[0][0] == CLS


def test_tsk_19_an_empty_text_counts_by_its_special_tokens(bert, causal, bare):
    assert ids(tokens_of(bert).encode([""])) == [[CLS, SEP]]
    assert ids(tokens_of(causal).encode([""])) == [[causal.bos_token_id]]
    with pytest.raises(InvalidArgument, match=r"texts\[1\] gives no tokens") as raised:
        tokens_of(bare).encode(["a", ""], name="texts")
    assert raised.value.details == {"index": 1}


def test_token_ids_are_taken_as_they_are(bert):
    items = tokens_of(bert).encode([[7, 8], "a", np.array([9], dtype=np.uint32)], prompt="a")
    assert ids(items)[0] == [7, 8]
    assert ids(items)[2] == [9]
    assert ids(items)[1] == bert.encode("aa")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "has no token ids"),
        ([300], "token id 300, and the vocabulary's ids go from 0 to 299"),
        ([-1], "token id -1"),
        ([1.5], "must be a text or a sequence of token ids"),
        ([[1]], "must be a text"),
        (None, "must be a text"),
        (["a"], "must be a text"),
    ],
    ids=str,
)
def test_tsk_19_bad_token_ids_are_refused_by_index(bert, value, message):
    with pytest.raises(InvalidArgument, match=message) as raised:
        tokens_of(bert, vocab_size=300).encode(["a", value])
    assert raised.value.details == {"index": 1}


def test_a_lone_surrogate_is_refused_by_its_index_among_all_items(bert):
    with pytest.raises(InvalidArgument, match=r"inputs\[2\].*surrogate"):
        tokens_of(bert).encode([[1, 2], "a", "\ud800"])


def test_too_long_token_ids_are_cut_at_the_wanted_side(bert):
    tokenizer = tokens_of(bert, max_length=3)
    assert ids(tokenizer.encode([[5, 6, 7, 8]], truncate="left")) == [[6, 7, 8]]
    assert ids(tokenizer.encode([[5, 6, 7, 8]], truncate="right")) == [[5, 6, 7]]


def test_a_truncation_that_is_not_known_is_refused(bert):
    with pytest.raises(InvalidArgument, match="truncate is 'middle', expected one of 'error', 'left', 'right'"):
        tokens_of(bert).encode(["a"], truncate="middle")


def test_prompts_are_found_by_name_and_the_default_applies(bert):
    spec = EmbeddingSpec(("mean",), 8, prompts={"query": "the ", "none": ""}, default_prompt="query")
    tokenizer = tokens_of(bert, spec=spec)
    assert ids(tokenizer.encode(["fox"])) == [bert.encode("the fox")]
    assert ids(tokenizer.encode(["fox"], prompt_name="none")) == [bert.encode("fox")]
    assert ids(tokenizer.encode(["fox"], prompt="lazy ")) == [bert.encode("lazy fox")]
    with pytest.raises(InvalidArgument, match="no prompt is named 'passage'; the model has query, none"):
        tokenizer.encode(["fox"], prompt_name="passage")
    with pytest.raises(InvalidArgument, match="not both"):
        tokenizer.encode(["fox"], prompt_name="query", prompt="")


def test_a_prompt_that_pooling_leaves_out_is_counted_also_after_a_cut(bert):
    spec = EmbeddingSpec(("mean",), 8, include_prompt=False)
    counted = tokens_of(bert, spec=spec).encode(["fox", [5, 6]], prompt="the the the ")
    assert [item.num_skipped for item in counted] == [4, 0]  # [CLS] the the the
    (cut,) = tokens_of(bert, spec=spec, max_length=6).encode(["dog dog"], prompt="the the the ", truncate="left")
    assert cut.num_skipped == 3
    assert cut.token_ids.tolist() == [CLS, *bert.encode("the the dog dog", add_special_tokens=False), SEP]


def test_e2_the_tokenizers_own_rule_appends_eos_exactly_once(tmp_path):
    from tokenizers import processors

    write_tokenizer(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    eos = processors.TemplateProcessing(single="$A <|eos|>", pair="$A $B <|eos|>", special_tokens=[("<|eos|>", 1)])
    state["post_processor"] = json.loads(eos.__getstate__())
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    edit_json(tmp_path / "tokenizer_config.json", remove=("add_bos_token",), add_eos_token=True)
    import transformers

    tokenizer = tokens_of(load_tokenizer(tmp_path), max_length=6)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["hello world", "", "a" * 40]
    items = tokenizer.encode(texts, truncate="right")
    assert ids(items) == reference(texts, truncation=True, max_length=6)["input_ids"]
    assert all(row[-1] == 1 and row.count(1) == 1 for row in ids(items))


# ---- pairs for a head


@pytest.mark.parametrize("max_length", [None, 7, 8, 13, 20])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs_have_the_tokens_and_types_that_transformers_gives_them(encoder_files, side, max_length):
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(encoder_files, truncation_side=side)
    tokenizer = tokens_of(load_tokenizer(encoder_files), max_length=max_length or 200, num_token_types=2)
    for query in ("the fox", "one two three four five six", ""):
        items = tokenizer.encode_pairs(query, TEXTS, truncate=side)
        expected = reference(
            [query] * len(TEXTS), list(TEXTS), truncation=max_length is not None, max_length=max_length
        )
        assert ids(items) == expected["input_ids"]
        types = [np.zeros_like(item.token_ids) if item.token_types is None else item.token_types for item in items]
        assert [row.tolist() for row in types] == expected["token_type_ids"]


def test_whether_tokens_have_types_is_the_tokenizers_word(tmp_path):
    assert has_token_types(tmp_path)
    for settings, expected in (
        ({"tokenizer_class": "BertTokenizer"}, True),
        ({"tokenizer_class": "TokenizersBackend"}, False),
        ({"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]}, True),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, False),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert has_token_types(tmp_path) is expected


def test_a_model_with_one_type_of_token_gets_none(bert):
    (item,) = tokens_of(bert).encode_pairs("a", ["a"])
    assert item.token_types is None


def test_token_ids_of_a_pair_stand_inside_the_same_special_tokens(bert):
    tokenizer = tokens_of(bert, num_token_types=2)
    query, document = (bert.encode(text, add_special_tokens=False) for text in ("the fox", "lazy dog"))
    expected = tokenizer.encode_pairs("the fox", ["lazy dog"])
    for pair in ((query, [document]), ("the fox", [document]), (query, ["lazy dog"])):
        items = tokenizer.encode_pairs(*pair)
        assert ids(items) == ids(expected)
        assert items[0].token_types.tolist() == expected[0].token_types.tolist()


def test_tsk_19_a_pair_that_is_too_long_names_the_candidate(bert):
    with pytest.raises(InvalidArgument, match=r"documents\[1\] has 8 tokens, more than the 7") as raised:
        tokens_of(bert, max_length=7).encode_pairs("a", ["a a a", "a a a a"], name="documents")
    assert raised.value.details == {"index": 1}


def test_a_limit_without_room_for_any_text_is_an_error(bert):
    with pytest.raises(InvalidArgument, match="no room within 3 tokens, of which 3 are special"):
        tokens_of(bert, max_length=3).encode_pairs("a", ["a"], truncate="right")


@pytest.mark.parametrize(("spec", "num_special"), [(EmbeddingSpec(("mean",), 32), 2), (ScoreSpec(), 3)], ids=str)
def test_a_limit_that_special_tokens_fill_is_refused_at_load(bert, spec, num_special):
    with pytest.raises(InvalidArgument, match=f"no room for any text, since {num_special} are special"):
        tokens_of(bert, max_length=num_special, spec=spec)
    assert tokens_of(bert, max_length=num_special + 1, spec=spec).max_length == num_special + 1


@pytest.mark.parametrize(
    "options",
    [{"prompt": 5}, {"prompt": b"a"}, {"prompt_name": ["a"]}, {"truncate": np.array(["left", "right"])}],
    ids=str,
)
def test_an_option_of_another_type_is_refused_by_name(bert, options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        tokens_of(bert).encode(["a"], **options)


@pytest.mark.parametrize("value", [[1, True], [[1], [2, 3]], b"abc", {1: 2}], ids=str)
def test_what_is_no_flat_sequence_of_ids_is_refused_by_index(bert, value):
    with pytest.raises(InvalidArgument, match=r"inputs\[1\] must be a text or a sequence of token ids"):
        tokens_of(bert).encode(["a", value])


@pytest.mark.parametrize("content", ["[]", '{"model_input_names": 5}'])
def test_a_damaged_tokenizer_config_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(InvalidArgument, match=r"tokenizer_config\.json"):
        has_token_types(tmp_path)


def test_scr_10_an_instruction_that_nothing_reads_is_refused(bert, causal):
    for tokenizer in (tokens_of(bert), tokens_of(causal, template=JOINED)):
        assert not tokenizer.takes_instruction
        with pytest.raises(InvalidArgument, match="no place for an instruction"):
            tokenizer.encode_pairs("a", ["b"], instruction="c")


# ---- templates


def test_without_a_template_a_causal_model_reads_the_document_right_after_the_query(causal):
    tokenizer = tokens_of(causal, template=JOINED)
    items = tokenizer.encode_pairs("the quick ", ["brown fox", "lazy dog", "世界"])
    assert ids(items) == [causal.encode("the quick " + text) for text in ("brown fox", "lazy dog", "世界")]
    assert ids(items)[0][0] == causal.bos_token_id


def test_token_ids_of_joined_texts_are_joined(causal):
    tokenizer = tokens_of(causal, template=JOINED)
    assert tokenizer.takes_pair_ids
    bos = causal.bos_token_id
    assert ids(tokenizer.encode_pairs([9, 10], [[11], [12, 13]])) == [[bos, 9, 10, 11], [bos, 9, 10, 12, 13]]


def test_e6_qwen3_reranker_prompts_are_those_of_its_reference_script(bare):
    template = find_score_template(bare, score_template="qwen3-reranker")
    tokenizer = tokens_of(bare, template=template, max_length=2000)
    # As the model's card assembles it, of parts that are tokenized one by one.
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = "Given a web search query, retrieve relevant passages that answer the query"
    for instruction in ("", "Prices only"):
        body = f"<Instruct>: {instruction or task}\n<Query>: price of cola\n<Document>: a cola is 2 euros"
        expected = [t for part in (prefix, body, suffix) for t in bare.encode(part, add_special_tokens=False)]
        items = tokenizer.encode_pairs("price of cola", ["a cola is 2 euros"], instruction=instruction)
        assert ids(items) == [expected]


def test_a_template_is_recognized_in_the_chat_template(bare):
    import dataclasses

    def with_template(text: str) -> Tokenizer:
        return dataclasses.replace(bare, chat_templates={"default": text})

    mark = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    assert find_score_template(bare) is None
    assert isinstance(find_score_template(with_template(PAIR_TEMPLATE)), ChatScoreTemplate)
    assert isinstance(find_score_template(with_template(f"{{# {mark} #}}")), FormatTemplate)
    # It writes any role, and is not meant for pairs.
    assert find_score_template(with_template("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")) is None


def test_a_template_of_the_models_files_writes_what_sentence_transformers_writes(tmp_path):
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    from openengine.core.sentence_transformers import read_sentence_transformers
    from tests.checkpoints import write_checkpoint

    base = write_checkpoint(tmp_path / "base", "qwen3")
    edit_json(base / "tokenizer_config.json", chat_template=PAIR_TEMPLATE)
    modules = [Transformer(str(base), transformer_task="text-generation"), LogitScore(260, 261)]
    reference = CrossEncoder(modules=modules, device="cpu", prompts={"web": "Find prices"}, default_prompt_name="web")
    reference.save(str(tmp_path / "model"), create_model_card=False)

    spec = read_sentence_transformers(tmp_path / "model", hidden_size=64, vocab_size=384)
    assert isinstance(spec, ScoreSpec)
    assert spec.label_ids == (260, 261)
    tokenizer = load_tokenizer(tmp_path / "model")
    template = find_score_template(tokenizer, spec=spec)
    ours = TaskTokenizer(tokenizer, max_length=256, vocab_size=384, spec=spec, template=template)
    documents = ["a cola is 2 euros", "cats", "", "日本 {query}"]
    assert ours.takes_instruction
    for prompt in (None, "Cheap ones"):
        expected = reference.preprocess(
            [("price of cola", document) for document in documents],
            prompt=prompt or reference.prompts[reference.default_prompt_name],
        )
        rows = [row[mask.bool()].tolist() for row, mask in zip(expected["input_ids"], expected["attention_mask"])]
        assert ids(ours.encode_pairs("price of cola", documents, instruction=prompt or "")) == rows


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_template_that_is_too_long_loses_tokens_of_the_candidate_only(bare, side):
    template = FormatTemplate("Q {query} D {document} ?")
    whole = tokens_of(bare, template=template, max_length=500).encode_pairs("fox", ["one two three é four five"])
    for max_length in range(10, len(whole[0].token_ids)):
        tokenizer = tokens_of(bare, template=template, max_length=max_length)
        try:
            (item,) = tokenizer.encode_pairs("fox", ["one two three é four five"], truncate=side)
        except InvalidArgument as exc:
            assert "leaves no room" in exc.message
            continue
        assert len(item.token_ids) <= max_length
        text = bare.decode(item.token_ids)
        assert text.startswith("Q fox D ")
        assert text.endswith(" ?")
        kept = text[len("Q fox D ") : -len(" ?")]
        content = "one two three é four five"
        assert content.startswith(kept) if side == "right" else content.endswith(kept)
    with pytest.raises(InvalidArgument, match="leaves no room"):
        tokens_of(bare, template=template, max_length=3).encode_pairs("fox", ["dog"], truncate=side)


def test_token_ids_fill_a_template(bare):
    template = FormatTemplate("Q {query} D {document} ?")
    tokenizer = tokens_of(bare, template=template)
    parts = [bare.encode(text, add_special_tokens=False) for text in ("Q ", " D ", " ?")]
    assert ids(tokenizer.encode_pairs([9], [[10, 11]])) == [[*parts[0], 9, *parts[1], 10, 11, *parts[2]]]
    short = tokens_of(bare, template=template, max_length=sum(map(len, parts)) + 2)
    assert ids(short.encode_pairs([9], [[10, 11]], truncate="right"))[0][-len(parts[2]) - 1] == 10


def test_a_template_that_changes_texts_takes_no_token_ids(bare):
    import dataclasses

    text = PAIR_TEMPLATE.replace("| first }}<|im_end|>", "| first | trim }}<|im_end|>")
    tokenizer = dataclasses.replace(bare, chat_templates={"default": text})
    tokens = tokens_of(tokenizer, template=find_score_template(tokenizer))
    assert not tokens.takes_pair_ids
    with pytest.raises(InvalidArgument, match="takes texts, not token ids"):
        tokens.encode_pairs([1], [[2]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qwen4-reranker", "neither a known one"),
        ("{query}", "needs each of"),
        ("{query}{document}{document}", "needs each of"),
        ("{query}{document}{x}", "field {x}"),
        ("{query}{document}{}", "field {}"),
        ("{query!r}{document}", "a format"),
        ("{query}{document:>9}", "a format"),
        ("{query}{document", "no format string"),
    ],
)
def test_a_malformed_score_template_is_refused(bare, text, message):
    with pytest.raises(InvalidArgument, match=message):
        find_score_template(bare, score_template=text)


def test_a_score_template_may_have_braces_and_texts_with_braces(bare):
    template = find_score_template(bare, score_template="{{x}} {query}|{document}|{instruction}")
    assert template.render("{query}", "{}", "i") == "{x} {query}|{}|i"
    assert template.takes_instruction


def test_a_chat_template_that_loses_the_pair_is_a_load_error(bare):
    import dataclasses

    tokenizer = dataclasses.replace(bare, chat_templates={"default": "{{ messages[0].content }}"})
    with pytest.raises(InvalidArgument, match="loses the messages of the roles 'query' and 'document'"):
        find_score_template(tokenizer, spec=ScoreSpec(label_ids=(1, 2), uses_chat_template=True))


def test_answers_of_several_tokens_are_no_labels(bare):
    assert yes_no_ids(bare) is None


def test_a_tokenizer_without_a_rule_for_pairs_is_refused(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    (tmp_path / "corpus.txt").write_text("the quick brown fox\n" * 20)
    spm.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=20, minloglevel=2
    )
    tokenizer = load_tokenizer(tmp_path)
    items = tokens_of(tokenizer, max_length=4).encode(["the quick brown fox"], truncate="right")
    assert ids(items)[0] == tokenizer.encode("the quick brown fox")[:4]
    with pytest.raises(UnsupportedFeature, match=r"tokenizer\.json"):
        tokens_of(tokenizer).encode_pairs("the", ["fox"])
