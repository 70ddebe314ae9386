"""What each `format` of a schema allows, by the standard that defines it."""

from __future__ import annotations

import pytest

from openengine.core.guides.formats import FORMATS, format_language
from openengine.core.guides.language import matches

FORMAT_CASES = {
    "date": (["2024-02-29", "1999-12-31", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-13-01", "2024-1-01", "2024-04-31"]),
    "time": (["23:59:60Z", "12:00:00.123+05:30", "00:00:00z"], ["24:00:00Z", "12:00:00", "12:00:60Z", "12:00:00+24:00"]),
    "date-time": (["2024-02-29T12:00:00Z", "1985-04-12t23:20:50.52-01:00"], ["2024-02-29 12:00:00Z", "2022-01-01T12:00:00"]),
    "duration": (["P3Y6M4DT12H30M5S", "PT36H", "P4W", "P1Y", "P2M"], ["P", "PT", "P1D2H", "P1Y2W", "1Y", "P1S"]),
    "email": (["a@b.c", "a.b+c@example.com", '"a b"@example.com', "x@[127.0.0.1]"], ["a", "a@", "@b", ".a@b.c", "a..b@c.d"]),
    "hostname": (["example.com", "a", "xn--4gbwdl"], ["-a.com", "a-.com", "a..b", "a_b", "a" * 64, ""]),
    "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (["::", "::1", "1:2:3:4:5:6:7:8", "1::8", "::ffff:1.2.3.4", "1:2:3:4:5:6::8"], [":", "1:2", "1::2::3", "12345::", "::1.2.3"]),
    "uri": (["http://a.b/c?d#e", "urn:x:y", "ftp://[::1]:80/", "mailto:a@b"], ["a b:c", "//a.b", "http://a b", "invalid", "http://a/ü"]),
    "uuid": (["2EB8AA08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638"]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_holds_what_its_standard_says(name):
    language = format_language(name)
    valid, invalid = FORMAT_CASES[name]
    assert [text for text in valid if not matches(language, text)] == []
    assert [text for text in invalid if matches(language, text)] == []
