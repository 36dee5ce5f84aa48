"""A relay's certificate: made when its process starts, known to the others by its fingerprint, which they read on the run's control stream.

Who asks a peer therefore speaks with the process that announced itself and with nobody in between, without any authority: the broker, which
both have authenticated to, vouches. The key is never anywhere but in this process, except for a moment in a file that only its owner can read.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
import tempfile
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Identity", "make_identity"]

DAYS = 3650
"""Nobody looks at it: a fingerprint is of one process's life."""


class Identity(NamedTuple):
    """`fingerprint` is the SHA-256 of the certificate, in hex."""

    context: ssl.SSLContext
    fingerprint: str


def make_identity(name: str) -> Identity:
    """A key and a certificate of its own for `name`; takes about a millisecond."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=DAYS))
    certificate = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with tempfile.TemporaryDirectory(prefix="driftline-relay-") as folder:  # ssl loads keys from files alone
        path = Path(folder) / "key.pem"
        path.touch(mode=0o600)
        path.write_bytes(certificate.public_bytes(pem) + private)
        context.load_cert_chain(path)
    return Identity(context, hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest())
