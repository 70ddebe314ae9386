"""Fields whose wire form is not the form of their values: enums, wrapped lists, hashes, token records.

Token records are the one place where speed counts: they are filled in place, attribute by attribute, and prompts and
candidates that lie in arrays (sequences with `token_ids`, score arrays and `token_text`) are never made into objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

import openengine
from openengine import LogProb, TokenInfo, TokenOutput
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc.structs import fill_struct, read_struct

__all__ = [
    "CODECS",
    "READERS",
    "Fill",
    "Malformed",
    "Read",
    "as_list",
    "enum_codec",
    "read_output",
    "read_token",
    "write_tokens",
]

Read = Callable[[Any], Any]  # what a field holds -> what the attribute holds
Fill = Callable[[Message, Any], None]  # fills an empty message from the attribute


class Malformed(Exception):
    """Something that has no counterpart, by its path from the message at hand."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} {problem}".lstrip())
        self.path = path
        self.problem = problem

    def under(self, parent: str) -> Malformed:
        separator = "." if self.path and not self.path.startswith("[") else ""
        return Malformed(f"{parent}{separator}{self.path}", self.problem)


def enum_codec(descriptor: EnumDescriptor) -> tuple[Read, Callable[[Any], int]]:
    """Number to member and back. UNSPECIFIED and unknown numbers have none."""
    kind = getattr(openengine, descriptor.name)
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    members = {value.number: kind[value.name.removeprefix(prefix)] for value in descriptor.values if value.number}
    numbers = {member: number for number, member in members.items()}
    choices = ", ".join(f"{number} ({member.name})" for number, member in members.items())

    def read(number: int) -> Any:
        if number not in members:
            what = "UNSPECIFIED" if number == 0 else f"{number}, which {descriptor.name} does not have"
            raise Malformed("", f"is {what}; use one of {choices}")
        return members[number]

    def number(member: Any) -> int:
        if member not in numbers:
            raise Malformed("", f"must be one of {', '.join(members.values())}, not {member!r:.80}")
        return numbers[member]

    return read, number


def _read_ids(message: Message) -> np.ndarray:
    return np.array(message.ids, dtype=np.uint32)


def _read_id_tuple(message: Message) -> tuple[int, ...]:
    return tuple(message.ids)


def _fill_ids(message: Message, token_ids: Sequence[int]) -> None:
    message.ids.extend(as_list(token_ids))


def as_list(values: Any) -> Any:
    """Python's numbers, which protobuf takes faster than an array's."""
    return values.tolist() if hasattr(values, "tolist") else values


def _read_hash(message: pb.KvBlockHash) -> bytes:
    if message.encoding != "bytes":
        raise Malformed("encoding", f"is {message.encoding!r}; only 'bytes' is understood here")
    return message.value


def _fill_hash(message: pb.KvBlockHash, value: bytes) -> None:
    message.value = value
    message.encoding = "bytes"


def _read_key_tuple(message: pb.OpaqueKeyTuple) -> tuple[str, ...]:
    return tuple(message.values)


def _fill_key_tuple(message: pb.OpaqueKeyTuple, values: Sequence[str]) -> None:
    message.values.extend(values)


def read_token(message: pb.TokenInfo) -> TokenInfo:
    return TokenInfo(
        message.token_id,
        message.token,
        message.logprob if message.HasField("logprob") else None,
        message.rank if message.HasField("rank") else None,
        tuple([_read_candidate(candidate) for candidate in message.candidates]),
    )


def _read_candidate(message: pb.LogProb) -> LogProb:
    rank = message.rank if message.HasField("rank") else None
    return LogProb(message.token_id, message.logprob, message.token, rank)


def read_output(message: pb.TokenOutput) -> TokenOutput:
    if not message.HasField("output_index"):
        raise Malformed("output_index", "is missing")
    return TokenOutput(message.output_index, tuple([read_token(token) for token in message.tokens]), message.text)


def write_tokens(target: Any, tokens: Sequence[TokenInfo]) -> None:
    """Append `tokens` to the repeated field `target`."""
    if hasattr(tokens, "token_text"):
        _write_prompt(target, tokens)
        return
    add = target.add
    for token in tokens:
        message = add()
        message.token_id = token.token_id
        message.token = token.token
        if token.logprob is not None:
            message.logprob = token.logprob
        if token.rank is not None:
            message.rank = token.rank
        if len(token.candidates):
            _write_candidates(message.candidates, token.candidates)


def _write_prompt(target: Any, prompt: Any) -> None:
    """Append a prompt whose scores lie in arrays; they cover its last positions."""
    ids, scores, text = as_list(prompt.token_ids), prompt.scores, prompt.token_text
    add = target.add
    num_unscored = len(ids) - len(scores.logprobs)
    for token_id in ids[:num_unscored]:
        message = add()
        message.token_id = token_id
        message.token = text(token_id)
    scored = zip(ids[num_unscored:], scores.logprobs.tolist(), scores.ranks.tolist(), strict=True)
    for row, (token_id, logprob, rank) in enumerate(scored):
        message = add()
        message.token_id = token_id
        message.token = text(token_id)
        message.logprob = logprob
        message.rank = rank
        if scores.candidate_ids is not None:
            arrays = (scores.candidate_ids[row], scores.candidate_logprobs[row], scores.candidate_ranks[row])
            _fill_candidates(message.candidates, _rows(*arrays, text))


def _write_candidates(target: Any, candidates: Sequence[LogProb]) -> None:
    if hasattr(candidates, "token_text"):
        rows = _rows(candidates.token_ids, candidates.logprobs, candidates.ranks, candidates.token_text)
    else:
        rows = ((c.token_id, c.logprob, c.token, c.rank) for c in candidates)
    _fill_candidates(target, rows)


def _rows(
    token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, text: Callable[[int], str]
) -> Iterable[tuple]:
    ids = token_ids.tolist()
    return zip(ids, logprobs.tolist(), map(text, ids), ranks.tolist(), strict=True)


def _fill_candidates(target: Any, rows: Iterable[tuple]) -> None:
    add = target.add
    for token_id, logprob, token, rank in rows:
        message = add()
        message.token_id = token_id
        message.logprob = logprob
        message.token = token
        if rank is not None:
            message.rank = rank


def _nothing(message: Message, value: Any) -> None:
    """A message without fields: that it is there says everything."""


# By message: what reads it, and what fills it.
CODECS: dict[str, tuple[Read, Fill]] = {
    "AllRequests": (lambda message: True, _nothing),
    "KvBlockHash": (_read_hash, _fill_hash),
    "OpaqueKeyTuple": (_read_key_tuple, _fill_key_tuple),
    "Struct": (read_struct, fill_struct),
    "TokenIds": (_read_ids, _fill_ids),
    "TokenSequence": (_read_ids, _fill_ids),
}

# By field, where its message or its kind of list is otherwise read in another way.
READERS: dict[str, Read] = {
    "CandidateTokenSelection.token_ids": _read_id_tuple,
    "DenseFloatTensor.values": partial(np.array, dtype=np.float32),
    "SparseFloatTensor.indices": partial(np.array, dtype=np.uint64),
    "SparseFloatTensor.values": partial(np.array, dtype=np.float32),
}
