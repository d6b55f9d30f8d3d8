"""Keys of a deployment: its own authority, the SuperLink's certificate, a key for each SuperNode.

Private keys are readable by their owner only; nothing here is ever part of a run directory. Each
file is written whole or not at all, and what a kill between two of them leaves is completed when
keys are made again.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedsim.core.errors import RunError
from fedsim.core.files import UNFINISHED, write_atomically

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
    for left in root.glob(f".*{UNFINISHED}"):
        left.unlink()
    if not keys.authority.is_file():
        _make_certificates(keys, hosts)
    for number in range(nodes):
        _make_pair(keys.node(number), keys.node_public(number))
    return keys


def _make_pair(private: Path, public: Path) -> None:
    """A node's key and its public half, or the half that is missing."""
    if private.is_file() and public.is_file():
        return
    if public.is_file():
        raise RunError(
            f"'{public}' is there without its private half '{private}'; put that back, or delete "
            f"the public one, and another pair is made."
        )
    if private.is_file():
        key = _node_key(private)
    else:
        key = ec.generate_private_key(ec.SECP384R1())
        write_atomically(private, _private(key, serialization.PrivateFormat.OpenSSH), 0o600)
    half = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    write_atomically(public, half + b"\n")


def check_keys(keys: Keys, nodes: int) -> None:
    """Refuse keys that are missing, run out, open to others, or do not belong together, before
    anything starts."""
    wanted = [keys.authority, keys.certificate, keys.server_key]
    wanted += [path for n in range(nodes) for path in (keys.node(n), keys.node_public(n))]
    for path in wanted:
        if not path.is_file():
            raise RunError(f"'{path}' is missing; {_remedy(keys, path)}.")
    check_server(keys.authority, keys.certificate, keys.server_key)
    for number in range(nodes):
        private, public = keys.node(number), keys.node_public(number)
        if _node_key(private).public_key() != _public_key(public):
            raise RunError(
                f"'{public}' is not the public half of '{private}'; delete it, and `fedsim keys "
                f"{keys.root}` makes the right one."
            )


def _remedy(keys: Keys, path: Path) -> str:
    if path in (keys.certificate, keys.server_key) and keys.authority.is_file():
        return "nobody can sign it anew: make all keys again in an empty folder"
    return f"make it with `fedsim keys {keys.root}`"


def check_server(authority: Path, certificate: Path, key: Path) -> None:
    """Refuse what a server is to show unless it is whole, in force, and signed by the authority."""
    signer, server = _certificate(authority), _certificate(certificate)
    try:
        server.verify_directly_issued_by(signer)
    except (InvalidSignature, ValueError, TypeError):
        raise RunError(
            f"the certificate '{certificate}' was not signed by '{authority}'; give the "
            f"SuperLink's own, or make both again in an empty folder."
        ) from None
    now = datetime.datetime.now(datetime.UTC)
    for path, one in ((authority, signer), (certificate, server)):
        if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
            raise RunError(
                f"the certificate '{path}' is valid until {one.not_valid_after_utc:%F} only; make "
                f"another."
            )
    _refuse_open(key)
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise RunError(f"'{key}' holds no private key.") from error
    if private.public_key() != server.public_key():
        raise RunError(f"'{key}' is not the key of '{certificate}'.")


def _refuse_open(path: Path) -> None:
    """A private key that others can read is everybody's."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise RunError(
            f"the private key '{path}' is open to others (mode {mode:04o}); make another, or, if "
            f"nobody else can have read it, `chmod 600` it."
        )


def _node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    _refuse_open(path)
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise RunError(f"'{path}' holds no private key.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise RunError(f"'{path}' is no key that Flower takes: an elliptic curve of NIST's.")
    return key


def _public_key(path: Path) -> object:
    try:
        return serialization.load_ssh_public_key(path.read_bytes())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise RunError(f"'{path}' holds no public key.") from error


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
    # Last its certificate, by which `make_keys` knows that all three are there.
    write_atomically(keys.server_key, _private(server, serialization.PrivateFormat.PKCS8), 0o600)
    write_atomically(keys.certificate, certificate.public_bytes(serialization.Encoding.PEM))
    write_atomically(keys.authority, authority.public_bytes(serialization.Encoding.PEM))


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
