"""Tokens made with the secret that servers and routers share (docs/router_api.md)."""

from __future__ import annotations

import hashlib
import stat
import string
import time
from pathlib import Path

_TEXT = frozenset(string.printable.encode()) - frozenset(b"\x0b\x0c")


class BadSecret(ValueError):
    """The file has no usable secret; the text says why."""


def read_secret(path: Path) -> bytes:
    """The first secret of a --peer-secret-file.

    Raises:
        BadSecret: it cannot be read, every user may read it, or it has no 16 bytes.
    """
    try:
        if path.stat().st_mode & stat.S_IRWXO:
            raise BadSecret(f"{path}: every user may read it; chmod o= {path}")
        whole = path.read_bytes().rstrip(b" \t\r\n")
    except OSError as error:
        raise BadSecret(f"{path}: {error.strerror}") from error
    if set(whole) <= _TEXT:
        # A blank line separates two secrets.
        parts: list[list[bytes]] = [[]]
        for line in whole.split(b"\n"):
            if line.strip(b" \t\r"):
                parts[-1].append(line)
            elif parts[-1]:
                parts.append([])
        whole = b"\n".join(parts[0]).rstrip(b" \t\r\n")
    if not 16 <= len(whole) <= 4096:
        raise BadSecret(f"{path}: the secret has {len(whole)} bytes, 16 to 4096 are allowed")
    return whole


def http_token(
    secret: bytes, method: str, target: str, body: bytes = b"", now_s: int | None = None
) -> str:
    """The token of one request, for ``Authorization: Bearer``.

    Args:
        target: Path and query.
        now_s: Seconds since 1970 (default: now).
    """
    moment = int(time.time()) if now_s is None else now_s
    key = hashlib.blake2b(_text(secret), digest_size=32).digest()
    digest = hashlib.blake2b(key=key, digest_size=32)
    digest.update(_text(b"pegaflow http 1"))
    digest.update(moment.to_bytes(8, "little"))
    for part in (method.encode(), target.encode(), body):
        digest.update(_text(part))
    return f"pf1.{moment}.{digest.hexdigest()}"


def _text(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text
