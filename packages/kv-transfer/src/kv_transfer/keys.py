"""The key pair of a deployment: who has it may talk to our doors, and nobody else can listen in.

In:  the file of `kvferry keygen`, the same for all engines of a deployment.
Out: Keys, and sockets that use them (CurveZMQ).
Law: a file that others may read is refused. With keys, a door takes callers that prove to have the same pair, and a
     caller takes a door that does; without, no socket is encrypted. Keys never appear in a message or a log.
"""

import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from kv_transfer.config import ConfigError

NAME = "kvferry"


@dataclass(frozen=True, slots=True)
class Keys:
    """One pair, as CurveZMQ writes them."""

    public: bytes
    secret: bytes = field(repr=False)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a caller with this public key may come in (called by ZMQ's authenticator)."""
        del domain
        return key == self.public


def make_keys(path: Path) -> None:
    """Writes a new pair, readable by its owner only; ConfigError if there is such a file already."""
    if path.exists():
        raise ConfigError(f"there is a key file already: {path}")
    public, secret = zmq.curve_keypair()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    lines = ("#   kvferry: the key pair of a deployment; keep it secret", "metadata", "curve")
    pair = (f'    public-key = "{public.decode()}"', f'    secret-key = "{secret.decode()}"', "")
    path.write_text("\n".join((*lines, *pair)))


def load_keys(path: Path) -> Keys:
    """The pair in a file of `make_keys`; ConfigError tells what is wrong with it."""
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"others may use the key file: {path}, mode={mode & 0o777:o}, wanted=600")
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the key file cannot be read: {path}: {error}") from error
    if secret is None:
        raise ConfigError(f"the key file has no secret key: {path}")
    return Keys(public, secret)


def guard(context: "zmq.Context[zmq.Socket[bytes]]", keys: Keys) -> ThreadAuthenticator:
    """Has all doors of this context take holders of the pair only, until it is stopped."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(credentials_provider=keys)
    return authenticator


def lock(socket: "zmq.Socket[bytes]", keys: Keys) -> None:
    """Makes a socket speak with holders of the pair only; before it is bound or connected."""
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    if socket.type == zmq.ROUTER:
        socket.curve_server = True
    else:
        socket.curve_serverkey = keys.public
