"""`TaskTokenizer`: texts, pairs of texts and token ids to the items that a model embeds, classifies or scores.

    text                 [CLS] prompt text [SEP]        the tokenizer says which special tokens stand around,
    pair, by a head      [CLS] query [SEP] doc [SEP]    and between, and which type each token has
    pair, by a template  one text                       score_template.py writes it

Owns: prompts by name, special tokens around token ids, length limits and truncation. Does not own: the vocabulary
(tokenizer.py), templates (score_template.py). Whatever is wrong with one item is an InvalidArgument that names it, with its
index in `details`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from openengine.core.admission import as_token_ids
from openengine.core.hf_tokenizer import HuggingFaceVocabulary
from openengine.core.score_template import ScoreTemplate
from openengine.core.task_specs import EmbeddingSpec, ScoreSpec
from openengine.core.task_work import TaskItem
from openengine.core.tokenizer import Tokenizer
from openengine.core.tokenizer_files import read_json_object
from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["TRUNCATIONS", "TaskText", "TaskTokenizer", "has_token_types"]

TRUNCATIONS = ("error", "left", "right")

TaskText: TypeAlias = "str | Sequence[int] | np.ndarray"
"""A text, or its token ids."""


class TaskTokenizer:
    """Makes items. Immutable and safe to use from many threads.

    max_length: the tokens of an item at most.  vocab_size: the model's.  num_token_types: of the model's table; with one,
    items have no types.  template: writes pairs as one text; None where a pair is what the tokenizer makes of two texts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        vocab_size: int,
        spec: EmbeddingSpec | ScoreSpec | None = None,
        template: ScoreTemplate | None = None,
        num_token_types: int = 1,
    ) -> None:
        self.max_length = max_length
        self.template = template
        self.tokenizer = _lower_cased(tokenizer) if spec is not None and spec.lower_case else tokenizer
        self._vocab_size = vocab_size
        self._spec = spec
        self._num_token_types = num_token_types
        self._single = _single_frame(self.tokenizer)
        self._pair = _pair_frame(self.tokenizer) if template is None else None
        takes_pairs = isinstance(spec, ScoreSpec) and self._pair is not None
        num_special = (self._pair if takes_pairs else self._single).num_special
        if num_special >= max_length:
            raise InvalidArgument(
                f"the length limit of {max_length} tokens has no room for any text, since {num_special} are special; raise the "
                "checkpoint's max_seq_length (or model_max_length), or max_model_len"
            )

    @property
    def prompts(self) -> Mapping[str, str]:
        """The prompts that the model comes with, by name."""
        return {} if self._spec is None else self._spec.prompts

    @property
    def takes_pair_ids(self) -> bool:
        """Whether the query and the candidates of a pair may be token ids."""
        return self._pair is not None if self.template is None else self.template.pieces() is not None

    @property
    def takes_instruction(self) -> bool:
        return self.template is not None and self.template.takes_instruction

    def encode(
        self,
        inputs: Sequence[TaskText],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: str = "error",
        name: str = "inputs",
    ) -> list[TaskItem]:
        """One item per input, in order. Token ids are taken as they are, with no prompt and no special tokens added.

        prompt: put before each text.  prompt_name: that of one that the model comes with.  With neither, the model's
        default.  truncate: what becomes of an item of more than `max_length` tokens: it is an error, or loses tokens of its
        text on that side.

        Raises: InvalidArgument for an unknown prompt or truncation, and for an item that is too long, gives no token or
        has an id outside the vocabulary; it is called `name[index]`.
        """
        _check_truncation(truncate)
        prompt = self._prompt(prompt, prompt_name)
        encoded = self._encode_texts([prompt + item if isinstance(item, str) else None for item in inputs], name)
        num_prompt = self._num_skipped(prompt)
        items = []
        for index, (value, token_ids) in enumerate(zip(inputs, encoded)):
            where = _Where(f"{name}[{index}]", index)
            frame, skipped = (self._single, num_prompt) if isinstance(value, str) else (_BARE, 0)
            if token_ids is None:
                token_ids = self._checked_ids(value, where)
            num_tokens = len(token_ids)
            if num_tokens > self.max_length:
                (text,) = self._fit(frame, [frame.text_of(token_ids)], truncate, where)
                token_ids = frame.join([text])
                if truncate == "left" and skipped:
                    skipped = max(len(frame.specials[0]), skipped - (num_tokens - len(token_ids)))
            if not len(token_ids):
                raise where.error("gives no tokens; give a text that is not empty")
            items.append(TaskItem(token_ids, self._types(frame, [len(token_ids) - frame.num_special]), skipped))
        return items

    def encode_pairs(
        self,
        query: TaskText,
        candidates: Sequence[TaskText],
        *,
        instruction: str = "",
        truncate: str = "error",
        name: str = "candidates",
        query_name: str = "query",
    ) -> list[TaskItem]:
        """One item per candidate, in order: the pair of it and the query. Of token ids, special tokens stand around.

        instruction: for the template, "" for its own.  truncate: as in `encode`; of a head's pair the longer text loses
        tokens first, of a template's the candidate.

        Raises: InvalidArgument as `encode` does, and for an instruction that nothing reads.
        """
        _check_truncation(truncate)
        if instruction and not self.takes_instruction:
            raise InvalidArgument("this model's pairs have no place for an instruction; leave it out")
        query_ids = None if isinstance(query, str) else self._checked_ids(query, _Where(query_name, None))
        if self.template is None:
            return self._head_pairs(query if query_ids is None else query_ids, candidates, truncate, (query_name, name))
        if query_ids is None and all(isinstance(candidate, str) for candidate in candidates):
            return self._template_texts(query, candidates, instruction, truncate, name)
        return self._template_ids(query if query_ids is None else query_ids, candidates, instruction, truncate, name)

    # ---- pairs

    def _head_pairs(
        self, query: str | np.ndarray, candidates: Sequence[TaskText], truncate: str, names: tuple[str, str]
    ) -> list[TaskItem]:
        frame, (query_name, name) = self._pair, names
        if frame is None:
            raise UnsupportedFeature("this tokenizer does not say how two texts are joined; add a tokenizer.json")
        if isinstance(query, str):
            (query,) = self._encode_texts([self._prompt(None, None) + query], query_name, special=False)
        encoded = self._encode_texts([c if isinstance(c, str) else None for c in candidates], name, special=False)
        items = []
        for index, (candidate, token_ids) in enumerate(zip(candidates, encoded)):
            where = _Where(f"{name}[{index}]", index)
            texts = [query, self._checked_ids(candidate, where) if token_ids is None else token_ids]
            if sum(map(len, texts)) + frame.num_special > self.max_length:
                texts = self._fit(frame, texts, truncate, where)
            token_ids = frame.join(texts)
            if not len(token_ids):
                raise where.error("gives no tokens with its query; give texts that are not empty")
            items.append(TaskItem(token_ids, self._types(frame, [len(text) for text in texts])))
        return items

    def _template_texts(
        self, query: str, candidates: Sequence[str], instruction: str, truncate: str, name: str
    ) -> list[TaskItem]:
        def encode(documents: Sequence[str]) -> list[np.ndarray]:
            texts = [self.template.render(query, document, instruction) for document in documents]
            encoded = self._encode_texts(texts, name, special=False)
            return [np.concatenate([self._before(text), ids]) for text, ids in zip(texts, encoded)]

        items = []
        for index, token_ids in enumerate(encode(candidates)):
            where = _Where(f"{name}[{index}]", index)
            if len(token_ids) > self.max_length:
                self._check_may_cut(len(token_ids), truncate, where)
                excess = len(token_ids) - self.max_length
                token_ids = self._shortened(candidates[index], excess, truncate, lambda text: encode([text])[0], where)
            if not len(token_ids):
                raise where.error("gives no tokens with its query; give texts that are not empty")
            items.append(TaskItem(token_ids))
        return items

    def _shortened(
        self, text: str, excess: int, truncate: str, encode: Callable[[str], np.ndarray], where: _Where
    ) -> np.ndarray:
        """`encode` of the text without so many tokens at one side that it fits."""
        _, offsets = self.tokenizer.encode_with_offsets(text, add_special_tokens=False)
        content, kept = text.encode(), len(offsets) - excess
        while kept >= 0:
            if truncate == "right":
                rest = content[: offsets[kept - 1][1] if kept else 0]
            else:
                rest = content[offsets[-kept][0] if kept else len(content) :]
            token_ids = encode(rest.decode(errors="ignore"))
            if len(token_ids) <= self.max_length:
                return token_ids
            kept -= len(token_ids) - self.max_length
        raise where.error(f"has a query that leaves no room for it within {self.max_length} tokens; shorten the query")

    def _template_ids(
        self,
        query: str | np.ndarray,
        candidates: Sequence[TaskText],
        instruction: str,
        truncate: str,
        name: str,
    ) -> list[TaskItem]:
        pieces = self.template.pieces(instruction)
        if pieces is None:
            raise InvalidArgument(
                "this model's template changes the texts it is given, so it takes texts, not token ids"
            )
        before, between, after = self._encode_texts(list(pieces), "template", special=False)
        if isinstance(query, str):
            (query,) = self._encode_texts([query], "query", special=False)
        head = np.concatenate([self._before(pieces[0]), before, query, between])
        encoded = self._encode_texts([c if isinstance(c, str) else None for c in candidates], name, special=False)
        frame = _Frame((head, after), (np.zeros_like(head), np.zeros_like(after)), (0,))
        items = []
        for index, (candidate, token_ids) in enumerate(zip(candidates, encoded)):
            where = _Where(f"{name}[{index}]", index)
            texts = [self._checked_ids(candidate, where) if token_ids is None else token_ids]
            if len(texts[0]) + frame.num_special > self.max_length:
                texts = self._fit(frame, texts, truncate, where)
            items.append(TaskItem(frame.join(texts)))
        return items

    def _before(self, text: str) -> np.ndarray:
        """Special tokens that a template's text still needs at its start."""
        is_complete = self.template.is_complete or self.tokenizer.starts_with_bos(text)
        return _NONE if is_complete else self._single.specials[0]

    # ---- what all share

    def _prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        if prompt is not None and prompt_name is not None:
            raise InvalidArgument("give prompt or prompt_name, not both")
        for kind, value in (("prompt", prompt), ("prompt_name", prompt_name)):
            if value is not None and not isinstance(value, str):
                raise InvalidArgument(f"{kind} must be a text, not {value!r:.80}")
        if prompt is not None:
            return prompt
        name = prompt_name if prompt_name is not None or self._spec is None else self._spec.default_prompt
        if name is None:
            return ""
        if name not in self.prompts:
            raise InvalidArgument(f"no prompt is named {name!r:.80}; the model has {', '.join(self.prompts) or 'none'}")
        return self.prompts[name]

    def _num_skipped(self, prompt: str) -> int:
        if not prompt or not isinstance(self._spec, EmbeddingSpec) or self._spec.include_prompt:
            return 0
        (token_ids,) = self._encode_texts([prompt], "prompt", special=False)
        return len(self._single.specials[0]) + len(token_ids)

    def _encode_texts(self, texts: Sequence[str | None], name: str, *, special: bool = True) -> list[np.ndarray | None]:
        """i32 ids of each text, None for None."""
        given = [text for text in texts if text is not None]
        try:
            encoded = iter(self.tokenizer.encode_batch(given, add_special_tokens=special))
        except InvalidArgument:
            for index, text in enumerate(texts):  # its message counts the texts alone
                try:
                    self.tokenizer.encode("" if text is None else text)
                except InvalidArgument as exc:
                    raise InvalidArgument(f"{name}[{index}]: {exc.message}", details={"index": index}) from exc
            raise
        return [None if text is None else np.array(next(encoded), dtype=np.int32) for text in texts]

    def _checked_ids(self, value: Sequence[int] | np.ndarray, where: _Where) -> np.ndarray:
        try:
            array = as_token_ids(value)
        except InvalidArgument as exc:
            raise where.error(f"must be a text or a sequence of token ids, not {value!r:.80}") from exc
        if not array.size:
            raise where.error("has no token ids; give at least one")
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise where.error(f"has token id {wrong}, and the vocabulary's ids go from 0 to {self._vocab_size - 1}")
        return array.astype(np.int32)

    def _types(self, frame: _Frame, lens: Sequence[int]) -> np.ndarray | None:
        return frame.types(lens) if self._num_token_types > 1 and frame.has_types else None

    def _fit(self, frame: _Frame, texts: list[np.ndarray], truncate: str, where: _Where) -> list[np.ndarray]:
        self._check_may_cut(sum(map(len, texts)) + frame.num_special, truncate, where)
        room = self.max_length - frame.num_special
        if room < 1:
            raise where.error(f"has no room within {self.max_length} tokens, of which {frame.num_special} are special")
        counts = _longest_first([len(text) for text in texts], room)
        return [text[:n] if truncate == "right" else text[len(text) - n :] for text, n in zip(texts, counts)]

    def _check_may_cut(self, num_tokens: int, truncate: str, where: _Where) -> None:
        if truncate == "error":
            raise where.error(
                f"has {num_tokens} tokens, more than the {self.max_length} that the model takes; shorten it, or cut it with "
                "truncate='right' or 'left'"
            )


def has_token_types(directory: Path) -> bool:
    """Whether the tokenizer of a Hugging Face directory types the tokens of pairs, for models that have such types.

    tokenizer_config.json may say so. Where it does not, transformers before version 5 did, and wrote other class names.
    """
    path = directory / "tokenizer_config.json"
    config = read_json_object(path, required=False)
    names = config.get("model_input_names")
    if names is not None:
        if not isinstance(names, list):
            raise InvalidArgument(f"{path}: model_input_names is {names!r:.80}, expected a list of names")
        return "token_type_ids" in names
    return config.get("tokenizer_class") != "TokenizersBackend"


def _longest_first(lens: Sequence[int], room: int) -> list[int]:
    """How many tokens of one or two texts stay, as the `tokenizers` package shares `room` out: the longer one is cut first."""
    if len(lens) == 1:
        return [min(lens[0], room)]
    short, long = sorted(lens)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short, long = room // 2, room // 2 + room % 2
    kept = (short, long) if lens[0] <= lens[1] else (long, short)
    return [min(n, limit) for n, limit in zip(lens, kept)]


def _check_truncation(truncate: str) -> None:
    if not isinstance(truncate, str) or truncate not in TRUNCATIONS:
        raise InvalidArgument(f"truncate is {truncate!r:.80}, expected one of {', '.join(map(repr, TRUNCATIONS))}")


@dataclass(frozen=True, slots=True)
class _Where:
    """The item that a message is about."""

    name: str
    index: int | None

    def error(self, why: str) -> InvalidArgument:
        details = {} if self.index is None else {"index": self.index}
        return InvalidArgument(f"{self.name} {why}", details=details)


# ---- special tokens ------------------------------------------------------------------------------

_NONE = np.empty(0, dtype=np.int32)
# Texts that give tokens in one vocabulary or another.
_SAMPLES = ("a", "1", ".", "的")


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """Special tokens before, between and after the texts of one input, all i32, and the type of every token."""

    specials: tuple[np.ndarray, ...]
    special_types: tuple[np.ndarray, ...]
    text_types: tuple[int, ...]

    @property
    def num_special(self) -> int:
        return sum(map(len, self.specials))

    @property
    def has_types(self) -> bool:
        return any(self.text_types) or any(types.any() for types in self.special_types)

    def text_of(self, token_ids: np.ndarray) -> np.ndarray:
        """The tokens of the one text that `token_ids` have inside the special ones."""
        before, after = map(len, self.specials)
        return token_ids[before : len(token_ids) - after]

    def join(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        first, *others = self.specials
        return np.concatenate([first, *(part for pair in zip(texts, others) for part in pair)])

    def types(self, lens: Sequence[int]) -> np.ndarray:
        first, *others = self.special_types
        texts = [np.full(n, kind, dtype=np.int32) for n, kind in zip(lens, self.text_types)]
        return np.concatenate([first, *(part for pair in zip(texts, others) for part in pair)])


_BARE = _Frame((_NONE, _NONE), (_NONE, _NONE), (0,))


def _single_frame(tokenizer: Tokenizer) -> _Frame:
    if (frame := _backend_frame(tokenizer, 1)) is not None:
        return frame
    for sample in _SAMPLES:
        bare, full = tokenizer.encode(sample, add_special_tokens=False), tokenizer.encode(sample)
        for start in range(len(full) - len(bare) + 1) if bare else ():
            if full[start : start + len(bare)] == bare:
                ends = [np.array(part, dtype=np.int32) for part in (full[:start], full[start + len(bare) :])]
                return _Frame(tuple(ends), tuple(map(np.zeros_like, ends)), (0,))
    return _BARE


def _pair_frame(tokenizer: Tokenizer) -> _Frame | None:
    return _backend_frame(tokenizer, 2)


def _backend_frame(tokenizer: Tokenizer, num_texts: int) -> _Frame | None:
    """What the tokenizer puts around, found on a sample; None where the vocabulary does not say."""
    if not isinstance(tokenizer.vocabulary, HuggingFaceVocabulary):
        return None
    for sample in _SAMPLES:
        encoded = tokenizer.vocabulary.encode_pair(sample, sample if num_texts == 2 else None)
        specials: list[list[tuple[int, int]]] = [[] for _ in range(num_texts + 1)]
        text_types: dict[int, int] = {}
        for token_id, kind, origin in zip(*encoded):
            if origin is None:
                specials[len(text_types)].append((token_id, kind))
            else:
                text_types[origin] = kind
        if len(text_types) == num_texts:
            arrays = [np.array(part, dtype=np.int32).reshape(-1, 2) for part in specials]
            ids, types = tuple(part[:, 0] for part in arrays), tuple(part[:, 1] for part in arrays)
            return _Frame(ids, types, tuple(text_types[index] for index in range(num_texts)))
    return None


def _lower_cased(tokenizer: Tokenizer) -> Tokenizer:
    vocabulary = tokenizer.vocabulary
    if not isinstance(vocabulary, HuggingFaceVocabulary):
        raise UnsupportedFeature("do_lower_case needs a tokenizer.json, and this model has a SentencePiece file")
    return dataclasses.replace(tokenizer, vocabulary=vocabulary.lower_cased())
