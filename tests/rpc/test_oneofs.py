"""A choice of the contract holds one member: a second is refused by name, wherever in a request it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

import openengine as oe
from openengine.rpc import Client
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc.convert import from_proto, to_proto
from tests.rpc.test_convert import MESSAGES, PLAIN, Maker

NUM_ROUNDS = 30


def choices(name: str) -> Iterator[list[str]]:
    """The members of each oneof of message `name` whose members are attributes of its value."""
    attributes = {field.name for field in dataclasses.fields(getattr(oe, name))}
    for oneof in MESSAGES[name].DESCRIPTOR.oneofs:
        members = [field.name for field in oneof.fields if field.name in attributes]
        if len(members) > 1:
            yield members


CHOICES = [(name, members) for name in PLAIN for members in choices(name)]
REQUESTS = [name for name in PLAIN if name.endswith("Request")]
PAIRS = [
    (name, one, other)
    for name, members in CHOICES
    for index, one in enumerate(members)
    for other in members[index + 1 :]
]


def member(name: str, field_name: str) -> Any:
    """What the attribute holds when that member is set."""
    maker, message = Maker(f"{name}.{field_name}"), MESSAGES[name]()
    maker.fill(message, MESSAGES[name].DESCRIPTOR.fields_by_name[field_name], 0, always=True)
    full = maker.message(name)
    full.MergeFrom(message)
    return getattr(from_proto(full), field_name)


def test_the_contract_has_choices_to_check():
    assert {"AbortRequest", "ComputeCacheKeysRequest", "GuidedDecoding", "TaskInput"} <= {name for name, _ in CHOICES}


@pytest.mark.parametrize(("name", "one", "other"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_two_members_of_a_oneof_are_refused_by_both_names(name, one, other):
    value = from_proto(Maker(name).message(name))
    members = next(members for of, members in CHOICES if of == name and one in members)
    default = {field.name: field.default for field in dataclasses.fields(value)}
    value = dataclasses.replace(value, **{member: default[member] for member in members})
    alone = [dataclasses.replace(value, **{field: member(name, field)}) for field in (one, other)]
    for valid in alone:
        to_proto(valid)
    both = dataclasses.replace(value, **{one: member(name, one), other: member(name, other)})
    with pytest.raises(
        (oe.InvalidArgument, oe.InternalError), match=rf"{other} is given beside {one}; give exactly one"
    ):
        to_proto(both)


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every dataclass inside `value`, with a function that gives `value` with another in its place."""
    yield value, lambda new: new
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if dataclasses.is_dataclass(content):
            for part, put in parts(content):
                yield part, lambda new, put=put, name=field.name: dataclasses.replace(value, **{name: put(new)})
        elif isinstance(content, tuple):
            for index, item in enumerate(content):
                if dataclasses.is_dataclass(item):
                    for part, put in parts(item):
                        yield (
                            part,
                            lambda new, put=put, name=field.name, index=index, content=content: dataclasses.replace(
                                value, **{name: (*content[:index], put(new), *content[index + 1 :])}
                            ),
                        )


@pytest.mark.parametrize("name", REQUESTS)
def test_a_second_member_anywhere_in_a_request_is_an_invalid_argument(name):
    for number in range(NUM_ROUNDS):
        value = from_proto(Maker(f"{name} {number}").message(name))
        for part, put in parts(value):
            kind = type(part).__name__
            for members in (members for of, members in CHOICES if of == kind):
                filled = {field: member(kind, field) for field in members[:2]}
                with pytest.raises(oe.InvalidArgument, match=f"{members[1]} is given beside {members[0]}") as caught:
                    to_proto(put(dataclasses.replace(part, **filled)))
                assert caught.value.details["field"].endswith(members[1])


def test_the_client_sends_nothing_that_names_two(server):
    guide = oe.GuidedDecoding(regex="[0-9]", choice=oe.ChoiceConstraint(("yes", "no")))
    both = oe.TaskInput(item_id="a", text="q", token_ids=[5, 6])
    with Client(server.target) as client:
        handle = client.submit("s", max_tokens=1500, temperature=0)
        calls = [
            lambda: client.abort("nobody", all_requests=True),
            lambda: client.abort("nobody", kv_session=oe.KvSessionRef(session_id="s")),
            lambda: client.cache_keys(text="a", tokens=[1]),
            lambda: client.generate("c", guided=guide),
            lambda: client.embed(oe.EmbedRequest(inputs=(both,))),
        ]
        for call in calls:
            with pytest.raises(oe.InvalidArgument, match="is given beside|exactly one"):
                call()
        assert server.stub.GetLoad(pb.GetLoadRequest()).running_requests == 1, "the others were left alone"
        handle.cancel()
