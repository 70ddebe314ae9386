"""What a client shows and trusts: a bearer token as metadata, PEM texts as gRPC credentials.

gRPC checks neither before they are used: a token that is no header value raises an error of its insides, a certificate
without its key ends the process. So everything that can be judged here is judged here.
"""

from __future__ import annotations

import ssl
import tempfile
import warnings
from pathlib import Path

import grpc

from openengine import InvalidArgument

__all__ = ["bearer_metadata", "channel_credentials", "warn_of_plain_token"]

_LOCAL_NAMES = {"localhost", "::1", "[::1]"}


def channel_credentials(
    *, tls: bool, ca: bytes | None, cert: bytes | None, key: bytes | None
) -> grpc.ChannelCredentials | None:
    """None is plain text. Raises InvalidArgument for what is no PEM, a certificate without its own key, and the reverse."""
    for name, pem in (("tls_ca", ca), ("tls_cert", cert), ("tls_key", key)):
        if pem is not None and not isinstance(pem, bytes):
            raise InvalidArgument(
                f"{name} is the bytes of a PEM file, as Path(…).read_bytes() gives them, not a {type(pem).__name__}"
            )
    if (cert is None) != (key is None):
        given, other = ("tls_cert", "tls_key") if key is None else ("tls_key", "tls_cert")
        raise InvalidArgument(
            f"{given} is given without {other}; a client shows a certificate and its key: both or none"
        )
    if ca is not None:
        _check_authorities(ca)
    if cert is not None and key is not None:
        _check_pair(cert, key)
    if not tls and ca is None and cert is None:
        return None
    return grpc.ssl_channel_credentials(ca, key, cert)


def bearer_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What is sent with every call; blanks around `token`, such as the line break of a file, are no part of it.

    Raises InvalidArgument for what no header can carry.
    """
    if token is None:
        return ()
    if not isinstance(token, str):
        raise InvalidArgument(f"token is a text, not {type(token).__name__}; decode it first")
    token = token.strip()
    if not (token and token.isascii() and token.isprintable()):
        # The token itself stays out of the message, and so out of logs.
        what = (
            "is empty" if not token else "has characters that a header cannot carry: only printable ASCII can be sent"
        )
        raise InvalidArgument(f"the token {what}; give the text of the server's --token-file, or leave it out")
    return (("authorization", f"Bearer {token}"),)


def warn_of_plain_token(target: str) -> None:
    """Warn that a token travels to `target` for everyone on the way to read; nobody is on the way to this machine."""
    host = target.rpartition(":")[0] if target.count(":") == 1 or "]" in target else target
    if not (host in _LOCAL_NAMES or host.startswith("127.") or target.startswith(("unix:", "unix-abstract:"))):
        warnings.warn(
            f"the token goes to {target} in plain text, which everyone on the way can read and use; serve TLS there and "
            "give tls_ca= or tls=True",
            stacklevel=3,
        )


def _check_authorities(pem: bytes) -> None:
    try:
        # Comments around the certificates may be in any encoding; the certificates are ASCII.
        _context().load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as exc:
        raise InvalidArgument(f"tls_ca holds no certificate in PEM: {exc}; give the bytes of a file of them") from exc


def _check_pair(cert: bytes, key: bytes) -> None:
    # Python reads a pair from files alone; these are this user's, and gone when it is read.
    with tempfile.TemporaryDirectory(prefix="openengine-tls-") as directory:
        cert_path, key_path = Path(directory, "cert.pem"), Path(directory, "key.pem")
        cert_path.write_bytes(cert)
        key_path.write_bytes(key)
        try:
            _context().load_cert_chain(cert_path, key_path, password="")  # which asks nobody for one
        except (ssl.SSLError, ValueError) as exc:
            raise InvalidArgument(
                f"tls_cert and tls_key are no certificate and its key: {exc}; give PEM, the key unencrypted, that belong "
                "together"
            ) from exc


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("ALL:@SECLEVEL=0")  # whether a key is long enough is the server's to say
    return context
