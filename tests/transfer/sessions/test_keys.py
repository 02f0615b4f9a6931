"""Doors with keys: holders of the same pair talk, nobody else does, and nothing can be read on the way."""

import socket
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from kv_testing.messages import SAMPLES
from kv_testing.worlds import FAST, make_side, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.config import ConfigError
from kv_transfer.keys import Keys, load_keys, make_keys
from kv_transfer.protocol import codec

HASTY = replace(FAST, request_deadline_s=1.5)


@pytest.fixture
def pairs(tmp_path):
    """Two key files."""
    files = [tmp_path / name for name in ("ours.key", "other.key")]
    for file in files:
        make_keys(file)
    return [str(file) for file in files]


def both(p_key, d_key):
    hub = LoopbackHub()
    with ExitStack() as undo:
        made = []
        for name, key in (("p", p_key), ("d", d_key)):
            made.append(make_side(hub, name, state_of(), replace(HASTY, curve_key=key)))
            undo.callback(made[-1].close)
        undo.pop_all()
    return sides(*made)


def test_holders_of_one_pair_hand_over(pairs):
    with both(pairs[0], pairs[0]) as (p, d):
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


@pytest.mark.parametrize(("p_key", "d_key"), [(0, 1), (0, None), (None, 0)])
def test_others_are_not_answered_and_their_loads_end(pairs, p_key, d_key):
    keys = [None if key is None else pairs[key] for key in (p_key, d_key)]
    with both(*keys) as (p, d):
        d.order(p, p.offer())
        received = d.outcome(others=[p])
        assert not received.ok
        assert p.count("messages_in") == 0
        p.withdraw()
        d.check_clean()


def test_a_caller_that_knows_the_public_key_alone_is_not_answered(pairs):
    """It can encrypt, but it cannot prove to have the pair."""
    with both(pairs[0], pairs[0]) as (p, _):
        context = zmq.Context()
        caller = context.socket(zmq.DEALER)
        try:
            caller.curve_publickey, caller.curve_secretkey = zmq.curve_keypair()
            caller.curve_serverkey = load_keys(Path(pairs[0])).public
            host, port = p.door.address
            caller.connect(f"tcp://{host}:{port}")
            caller.send(codec.encode(SAMPLES[0]), zmq.NOBLOCK)
            assert not caller.poll(500)
            assert p.door.status().counters.get("messages_in", 0) == 0
        finally:
            context.destroy(linger=0)


@pytest.mark.parametrize("has_key", [False, True])
def test_what_travels_cannot_be_read(pairs, has_key):
    """A tap on the connection; without keys, the control, it reads every word."""
    with both(*[pairs[0] if has_key else None] * 2) as (p, d):
        transfer = p.offer()
        seen, port = tap(p.door.address)
        order = d.make_order("127.0.0.1", port, transfer)
        d.ranks[0].receive(order)
        assert d.outcome(others=[p]).ok
        assert (b"incarnation" in b"".join(seen)) != has_key
        p.withdraw()


def tap(target):
    """What goes through, and the port to call instead."""
    seen, listener = [], socket.create_server(("127.0.0.1", 0))

    def pump(source, sink):
        while chunk := source.recv(65536):
            seen.append(chunk)
            sink.sendall(chunk)

    def serve():
        while True:
            caller, _ = listener.accept()
            callee = socket.create_connection(target)
            for pair in ((caller, callee), (callee, caller)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return seen, listener.getsockname()[1]


def test_a_key_file_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "key"
    make_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others may use the key file: .* mode=640, wanted=600"):
        load_keys(path)


def test_what_is_no_key_file_is_refused(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(path)
    path.touch(mode=0o600)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(path)
    path.write_text('metadata\ncurve\n    public-key = "' + "a" * 40 + '"\n')
    with pytest.raises(ConfigError, match="has no secret key"):
        load_keys(path)


def test_a_key_file_is_never_overwritten(tmp_path):
    path = tmp_path / "new" / "key"
    make_keys(path)
    first = path.read_bytes()
    with pytest.raises(ConfigError, match="there is a key file already"):
        make_keys(path)
    assert path.read_bytes() == first


def test_keys_are_not_printed(pairs):
    keys = load_keys(Path(pairs[0]))
    assert keys.secret.decode() not in repr(keys)
    assert keys != Keys(keys.public, b"")
