"""Output streams over a tokenizer whose token ids are whatever the test says."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field

from openengine.core.output import OutputStream
from openengine.types import (
    StopCondition,
    StopMatch,
    StoppingOptions,
    TokenInfo,
)


@dataclass
class TableTokenizer:
    """Token i is `table[i]`: a str, or bytes where a character is split; those in `special` show no text."""

    table: list[str | bytes]
    special: frozenset[int] = frozenset()

    def token_text(self, token_id: int) -> str:
        token = self.table[token_id]
        return token if isinstance(token, str) else token.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        token = self.table[token_id]
        return token.encode() if isinstance(token, str) else token

    def detokenizer(self, prompt_ids: list[int]) -> TableDetokenizer:
        detokenizer = TableDetokenizer(self)
        for token_id in prompt_ids:
            detokenizer.push(token_id)
        return detokenizer

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(self.token_bytes(i) for i in token_ids if i not in self.special).decode("utf-8", "replace")


@dataclass
class TableDetokenizer:
    tokenizer: TableTokenizer
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    @property
    def pending(self) -> bool:
        return bool(self.decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        return "" if token_id in self.tokenizer.special else self.decoder.decode(self.tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self.decoder.decode(b"", True)


class Stream:
    """An output fed with the tokens of a table in order, as the loop does: push, take, and finish at the end."""

    def __init__(self, *table, stops=(), special=(), prompt=(), include=None, min_tokens=None):
        self.tokenizer = TableTokenizer([*table, *prompt], frozenset(special))
        conditions = tuple(StopCondition(stop_text=text) for text in stops)
        stopping = StoppingOptions(conditions=conditions, include_stop_in_output=include, min_tokens=min_tokens)
        prompt_ids = list(range(len(table), len(table) + len(prompt)))
        detokenizer = self.tokenizer.detokenizer(prompt_ids)
        self.output = OutputStream(detokenizer, output_index=0, stopping=stopping)
        self.num_tokens = len(table)
        self.match: StopMatch | None = None
        self.deltas: list[tuple[list[int], str] | None] = []

    def info(self, token_id, *scores):
        return TokenInfo(token_id, self.tokenizer.token_text(token_id), *scores)

    def run(self):
        """Returns (ids, text) of every take, None where there was nothing, the finish's last."""
        for token_id in range(self.num_tokens):
            self.match = self.output.push(self.info(token_id), token_id + 1)
            if self.match is not None:
                break
            self.take()
        return self.finish()

    def take(self):
        self.deltas.append(_delta(self.output.take()))

    def finish(self):
        self.deltas.append(_delta(self.output.finish()))
        return self.deltas

    @property
    def ids(self):
        return [i for delta in self.deltas if delta for i in delta[0]]

    @property
    def text(self):
        return "".join(delta[1] for delta in self.deltas if delta)


def _delta(event):
    return None if event is None else ([token.token_id for token in event.tokens], event.text)


def stopped(text):
    return StopMatch(stop_text=text)
