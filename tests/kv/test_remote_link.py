from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from emberkeep.errors import ConfigError
from emberkeep.kv.disk.chunkfile import Damaged
from emberkeep.kv.remote.link import (
    Allowance,
    BoundedSocket,
    Breaker,
    KeySeal,
    RemoteLink,
    RemoteSettings,
    Seal,
    Unreachable,
)
from helpers.valkey_server import ValkeyServer, faulty_proxy, running_valkey


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with running_valkey(tmp_path_factory.mktemp("valkey"), "--requirepass", "swordfish") as running:
        yield running


# ── sealing ──


def test_what_was_sealed_opens_whole_with_the_key_and_under_its_name_only() -> None:
    seal = KeySeal("secret")
    sealed = seal.close(b"name", [b"some ", memoryview(b"bytes")])
    assert KeySeal("secret").open(b"name", sealed) == b"some bytes"
    assert b"some" not in sealed
    assert seal.close(b"name", [b"some bytes"]) != sealed
    spoiled = [(seal, b"name", value) for value in (sealed[:-1], sealed[:12], b"", sealed + b"x", sealed[1:])]
    for other, name, value in (*spoiled, (KeySeal("other"), b"name", sealed), (seal, b"other", sealed)):
        with pytest.raises(Damaged):
            other.open(name, value)


def test_names_cannot_be_guessed_without_the_key() -> None:
    digests = {seal.digest(b"tokens", 16) for seal in (Seal(), KeySeal("a"), KeySeal("b"))}
    assert len(digests) == 3


# ── the breaker ──


def test_failures_open_it_once_and_a_probe_closes_it() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(10):
        breaker.trip("gone")
    assert breaker.is_open and not breaker.wants_probe and breaker.opened == 1
    clock.now += 1.01
    assert breaker.wants_probe
    breaker.mend()
    assert not breaker.is_open


def test_it_waits_longer_each_time_until_all_went_well_for_as_long() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    pauses = []
    for _ in range(7):
        breaker.trip("gone")
        begin = clock.now
        while not breaker.wants_probe:
            clock.now += 0.25
        pauses.append(clock.now - begin)
    assert pauses == [1, 2, 4, 8, 15, 15, 15]
    breaker.mend()
    clock.now += 60
    breaker.trip("gone again")
    clock.now += 1
    assert breaker.wants_probe


def test_damage_opens_it_only_if_nothing_is_whole() -> None:
    breaker = Breaker(Clock())
    for _ in range(5):
        breaker.received("bad")
        breaker.received("bad")
        breaker.received(None)
    assert not breaker.is_open
    for _ in range(3):
        breaker.received("bad")
    assert breaker.is_open


# ── the line ──


def test_it_logs_in_and_a_wrong_password_is_told(server: ValkeyServer) -> None:
    link = RemoteLink(server.settings(password="swordfish"))
    link.ping()
    assert link.about()["server_name"] == "valkey"
    link.close()
    for password in ("wrong", None):
        link = RemoteLink(server.settings(password=password))
        with pytest.raises(Unreachable, match=r"(?i)auth|password"):
            link.ping()
        assert link.breaker.is_open
        link.close()


def test_while_it_is_open_nothing_is_asked(server: ValkeyServer) -> None:
    link = RemoteLink(server.settings(password="swordfish"))
    link.breaker.trip("gone")
    before = link.counters.requests
    with pytest.raises(Unreachable):
        link.run(lambda pipe: pipe.get("never written"))
    assert link.counters.requests == before
    link.ping()
    assert link.run(lambda pipe: pipe.get("never written")) == [None]
    link.close()


def test_what_a_server_does_not_want_is_not_taken_for_its_death(server: ValkeyServer) -> None:
    link = RemoteLink(server.settings(password="swordfish"))
    link.run(lambda pipe: pipe.set("x", "a"))
    with pytest.raises(Unreachable):
        link.run(lambda pipe: pipe.hvals("x"))
    assert not link.breaker.is_open
    link.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"*1000000000\r\n",
        b"*-7\r\n",
        b"%2000000000\r\n",
        b"*2147483647\r\n" * 8,
        b"*1\r\n" * 200_000,
        b"$9000000000\r\nabc",
        b":99999999999999999999999\r\n",
        b"$-1\r\n" * 10,
    ],
    ids=lambda answer: answer[:12],
)
def test_a_server_that_announces_what_cannot_be_is_left_alone(answer: bytes) -> None:
    with answering(answer) as port:
        link = RemoteLink(RemoteSettings(f"valkey://127.0.0.1:{port}", deadline_s=0.2))
        with pytest.raises(Unreachable):
            link.run(lambda pipe: [pipe.get("a"), pipe.strlen("b")])
        assert link.breaker.is_open
        link.close()


def test_a_value_without_an_end_is_not_read_to_it() -> None:
    with answering(b"$9000000000\r\n", b"x" * (1 << 20), pause_s=0) as port:
        link = RemoteLink(RemoteSettings(f"valkey://127.0.0.1:{port}", deadline_s=30))
        with pytest.raises(Unreachable, match="more than it was asked for"):
            link.run(lambda pipe: pipe.get("a"), size=1 << 20)
        assert link.breaker.is_open
        link.close()


def test_an_answer_that_comes_byte_by_byte_is_not_waited_for() -> None:
    with answering(b"$9000\r\n", b"x", pause_s=0.05) as port:
        link = RemoteLink(RemoteSettings(f"valkey://127.0.0.1:{port}", deadline_s=0.3))
        with pytest.raises(Unreachable, match=r"(?i)time|long"):
            link.run(lambda pipe: pipe.get("a"))
        link.close()


def test_a_line_on_which_much_takes_longer_than_the_deadline_is_written_to() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    ours.settimeout(0.3)
    allowance, value, came = Allowance(), os.urandom(4 << 20), bytearray()

    def read_slowly() -> None:
        while len(came) < len(value):
            came.extend(theirs.recv(64 << 10))
            time.sleep(0.01)

    reading = threading.Thread(target=read_slowly, daemon=True)
    reading.start()
    allowance.begin(0.3, sent=len(value), received=0)
    BoundedSocket(ours, allowance).sendall(value)  # the timeout of a bare one is for all of it
    reading.join()
    assert came == value
    ours.close()
    theirs.close()


def test_tls_wants_a_certificate_that_it_knows(server: ValkeyServer, tmp_path: Path) -> None:
    context, authority = certificate_for_loopback(tmp_path)
    with faulty_proxy(server.port, tls=context) as secure:
        url = f"rediss://:swordfish@127.0.0.1:{secure.port}"
        known = RemoteLink(RemoteSettings(f"{url}?ssl_ca_certs={authority}", deadline_s=5))
        known.ping()
        known.close()
        unknown = RemoteLink(RemoteSettings(url, deadline_s=5))
        with pytest.raises(Unreachable, match=r"(?i)certificate"):
            unknown.ping()
        unknown.close()


def certificate_for_loopback(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """For a server, and the file by which clients know it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    signed = made.add_extension(address, critical=False).sign(key, hashes.SHA256())
    file, secret = folder / "certificate.pem", folder / "key.pem"
    file.write_bytes(signed.public_bytes(Encoding.PEM))
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, secret)
    return context, file


def test_an_address_that_is_none_is_said_so() -> None:
    with pytest.raises(ConfigError, match="remote"):
        RemoteLink(RemoteSettings("http://somewhere"))


def test_without_a_remote_nothing_of_it_is_imported() -> None:
    asked = "[name for name in ('valkey', 'ray', 'cryptography') if name in sys.modules]"
    code = f"import sys, emberkeep.runtime, emberkeep.cli.main; print({asked})"
    env = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert printed.stdout.strip() == "[]"


@contextmanager
def answering(answer: bytes, then: bytes = b"", pause_s: float = 0.0) -> Iterator[int]:
    """The port of a server that says the same to everything; `then`: for ever after it."""

    class Same(StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while self.connection.recv(65_536):
                    self.connection.sendall(answer)
                    while then:
                        self.connection.sendall(then)
                        time.sleep(pause_s)

    with ThreadingTCPServer(("127.0.0.1", 0), Same) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()
