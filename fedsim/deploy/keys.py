"""Keys of a deployment: its own authority, the SuperLink's certificate, a key for each SuperNode.

Private keys are readable by their owner only; nothing here is ever part of a run directory.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedsim.core.errors import RunError

HOSTS = ("localhost", "superlink", "127.0.0.1")
DAYS = 365


@dataclass(frozen=True)
class Keys:
    """Where the keys of a deployment are."""

    root: Path

    @property
    def authority(self) -> Path:
        return self.root / "ca.pem"

    @property
    def certificate(self) -> Path:
        return self.root / "server.pem"

    @property
    def server_key(self) -> Path:
        return self.root / "server.key"

    def node(self, number: int) -> Path:
        return self.root / f"node-{number}"

    def node_public(self, number: int) -> Path:
        return self.root / f"node-{number}.pub"


def make_keys(root: Path, nodes: int, hosts: tuple[str, ...] = HOSTS) -> Keys:
    """Make what is missing; keys that are there are kept."""
    keys = Keys(root)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not keys.authority.is_file():
        _make_certificates(keys, hosts)
    for number in range(nodes):
        if not keys.node(number).is_file():
            key = ec.generate_private_key(ec.SECP384R1())
            _write(keys.node(number), _private(key, serialization.PrivateFormat.OpenSSH))
            public = key.public_key().public_bytes(
                serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            )
            _write(keys.node_public(number), public + b"\n", mode=0o644)
    return keys


def check_keys(keys: Keys, nodes: int) -> None:
    """Refuse keys that are missing, run out, or do not belong together, before anything starts."""
    wanted = [keys.authority, keys.certificate, keys.server_key]
    wanted += [path for n in range(nodes) for path in (keys.node(n), keys.node_public(n))]
    for path in wanted:
        if not path.is_file():
            raise RunError(f"'{path}' is missing; make it with `fedsim keys {keys.root}`.")
    authority, server = _certificate(keys.authority), _certificate(keys.certificate)
    try:
        server.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        raise RunError(
            f"the certificate '{keys.certificate}' was not signed by '{keys.authority}'; give the "
            f"SuperLink's own, or make both again in an empty folder."
        ) from None
    now = datetime.datetime.now(datetime.UTC)
    for path, certificate in ((keys.authority, authority), (keys.certificate, server)):
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise RunError(
                f"the certificate '{path}' is valid until {certificate.not_valid_after_utc:%F} "
                f"only; make another."
            )
    try:
        key = serialization.load_pem_private_key(keys.server_key.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise RunError(f"'{keys.server_key}' holds no private key.") from error
    if key.public_key() != server.public_key():
        raise RunError(f"'{keys.server_key}' is not the key of '{keys.certificate}'.")


def _make_certificates(keys: Keys, hosts: tuple[str, ...]) -> None:
    now = datetime.datetime.now(datetime.UTC)
    signer, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = _name("fedsim authority")

    def begun(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
                critical=False,
            )
        )

    authority = (
        begun(issuer, signer)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(signer, hashes.SHA384())
    )
    certificate = (
        begun(_name(hosts[0]), server)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .sign(signer, hashes.SHA384())
    )
    # The authority's own key is not kept: nobody can sign a second server with it.
    _write(keys.server_key, _private(server, serialization.PrivateFormat.PKCS8))
    _write(keys.certificate, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    _write(keys.authority, authority.public_bytes(serialization.Encoding.PEM), mode=0o644)


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise RunError(f"'{path}' holds no certificate.") from error


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(words: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
