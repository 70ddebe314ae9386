"""Tokens and PEM texts that gRPC would die of, or fall silent about, are refused by name."""

from __future__ import annotations

import subprocess
import warnings

import pytest

from openengine import InvalidArgument
from openengine.rpc import Client
from openengine.rpc.credentials import bearer_metadata, channel_credentials, warn_of_plain_token


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Two certificates, each with its key."""
    directory = tmp_path_factory.mktemp("certificates")
    found = []
    for name in ("one", "other"):
        cert, key = directory / f"{name}.pem", directory / f"{name}.key"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
        found.append((cert.read_bytes(), key.read_bytes()))
    return found


def credentials(*, tls=False, ca=None, cert=None, key=None):
    return channel_credentials(tls=tls, ca=ca, cert=cert, key=key)


def test_a_certificate_needs_its_key_and_a_key_its_certificate(pairs):
    cert, key = pairs[0]
    for given, missing in (({"tls_cert": cert}, "tls_key"), ({"tls_key": key}, "tls_cert")):
        with pytest.raises(InvalidArgument, match=f"given without {missing}.*both or none"):
            Client("127.0.0.1:1", timeout_s=1, **given)


def test_what_is_no_pem_is_refused_before_grpc_sees_it(pairs):
    (cert, key), (_, other_key) = pairs
    for wrong in (
        {"cert": b"junk", "key": key},
        {"cert": cert, "key": b"junk"},
        {"cert": b"-----BEGIN CERTIFICATE-----", "key": key},
        {"cert": cert, "key": other_key},
        {"cert": b"", "key": b""},
    ):
        with pytest.raises(InvalidArgument, match="no certificate and its key"):
            credentials(**wrong)
    for wrong in (b"junk", b"", key):
        with pytest.raises(InvalidArgument, match="tls_ca holds no certificate"):
            credentials(ca=wrong)
    for name in ("ca", "cert", "key"):
        with pytest.raises(InvalidArgument, match=rf"tls_{name} is the bytes of a PEM file.*not a str"):
            credentials(**{name: "ca.pem"})


def test_pem_that_fits_together_is_taken(pairs):
    (cert, key), (other, _) = pairs
    assert credentials() is None
    for right in (
        {"tls": True},
        {"cert": cert, "key": key},
        {"ca": cert + other},
        {"ca": "# für uns\n".encode("latin-1") + cert, "cert": cert + other, "key": key},
    ):
        assert credentials(**right) is not None


@pytest.mark.parametrize("token", ["secret", "secret\n", " secret\r\n"])
def test_blanks_around_a_token_are_no_part_of_it(token):
    assert bearer_metadata(token) == (("authorization", "Bearer secret"),)
    assert bearer_metadata(None) == ()


@pytest.mark.parametrize("token", ["", " \n", "two\nlines", "sécret", "a\0b", "\x7f", b"secret", 5])
def test_a_token_that_no_header_can_carry_is_refused_without_showing_it(token):
    with pytest.raises(InvalidArgument, match="token") as caught:
        Client("127.0.0.1:1", token=token)
    assert "cret" not in caught.value.message


def test_a_token_with_the_line_break_of_its_file_reaches_the_server(server):
    with Client(server.target, token="any\n") as client:
        assert client.health().state == "ready"


@pytest.mark.parametrize("target", ["gpu-7:50051", "10.0.0.1:50051", "dns:///gpu-7:50051", "[2001:db8::1]:50051"])
def test_a_token_in_plain_text_through_a_network_is_warned_of(target):
    with pytest.warns(UserWarning, match="in plain text.*tls=True"):
        warn_of_plain_token(target)


@pytest.mark.parametrize("target", ["localhost:1", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "unix:/run/x", "localhost"])
def test_a_token_that_stays_on_this_machine_is_not(target):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_plain_token(target)
