"""The values of `format` that are enforced; any other is an annotation.

Owns what each of them allows, as a regular expression; that schemas ask for one is schema_keywords.py's business.

Sources: RFC 3339 (date-time and its parts), RFC 1123 and 5321 (host names, mail), RFC 3986 (uri), RFC 4291 (ipv6),
RFC 9562 (uuid), ISO 8601 in the form of RFC 3339 appendix A (duration).
"""

from __future__ import annotations

import functools

from openengine.core.guides.language import ANY_CHAR, Language, intersect, repeat
from openengine.core.guides.regex import full_match

__all__ = ["FORMATS", "format_language"]

_THIRTY_ONE = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_THIRTY = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-(?:{_THIRTY_ONE}|{_THIRTY}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"

_OFFSET = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# A leap second ends a day in UTC; the local times that this makes elsewhere are left out.
_LEAP_SECOND = "23:59:60(?:\\.[0-9]+)?(?:[zZ]|[+-]00:00)"
_TIME = f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?{_OFFSET}|{_LEAP_SECOND})"

_DURATION_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)"

_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_HOSTNAME = f"{_LABEL}(?:\\.{_LABEL})*"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_OCTET}(?:\\.{_OCTET}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST_TWO = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "|".join(
    [
        f"(?:{_GROUP}:){{6}}{_LAST_TWO}",
        f"::(?:{_GROUP}:){{5}}{_LAST_TWO}",
        *(f"(?:(?:{_GROUP}:){{0,{n}}}{_GROUP})?::(?:{_GROUP}:){{{4 - n}}}{_LAST_TWO}" for n in range(5)),
        f"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
        f"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::",
    ]
)

_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = '"(?:[ !#-\\[\\]-~]|\\\\[ -~])*"'
_MAIL_LITERAL = f"\\[(?:{_IPV4}|IPv6:(?:{_IPV6}))\\]"
_EMAIL = f"(?:{_ATOM}(?:\\.{_ATOM})*|{_QUOTED})@(?:{_HOSTNAME}|{_MAIL_LITERAL})"

_UUID = "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"

_UNRESERVED = "0-9A-Za-z._~-"
_SUB_DELIMS = "!$&'()*+,;="
_ENCODED = "%[0-9A-Fa-f]{2}"
_PATH_CHAR = f"(?:[{_SUB_DELIMS}:@{_UNRESERVED}]|{_ENCODED})"
_USER = f"(?:[{_SUB_DELIMS}:{_UNRESERVED}]|{_ENCODED})*"
_NAME = f"(?:[{_SUB_DELIMS}{_UNRESERVED}]|{_ENCODED})*"
_FUTURE = f"v[0-9A-Fa-f]+\\.[{_SUB_DELIMS}:{_UNRESERVED}]+"
_HOST = f"(?:\\[(?:{_IPV6}|{_FUTURE})\\]|{_NAME})"
_AUTHORITY = f"(?:{_USER}@)?{_HOST}(?::[0-9]*)?"
_HIERARCHY = (
    f"(?://{_AUTHORITY}(?:/{_PATH_CHAR}*)*|/(?:{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*)?|{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*)?"
)
_URI = f"[A-Za-z][0-9A-Za-z+.-]*:{_HIERARCHY}(?:\\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"

_PATTERNS = {
    "date": _DATE,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "time": _TIME,
    "uri": _URI,
    "uuid": _UUID,
}

FORMATS = frozenset(_PATTERNS)
"""The formats that are assertions."""


@functools.cache
def format_language(name: str) -> Language | None:
    """The strings of a format; None for an annotation."""
    pattern = _PATTERNS.get(name)
    if pattern is None:
        return None
    language = full_match(pattern)
    if name == "hostname":
        return intersect(language, repeat(ANY_CHAR, 1, 253))
    return language
