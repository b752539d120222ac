"""Questions to a running job from outside: its status, a node's leaving, a nanny's word about a death."""

from __future__ import annotations

import json
import secrets
import socket

from zorselike.elastic.contract import Json
from zorselike.elastic.meeting.links import is_proof, prove
from zorselike.errors import ClusterError

_LIMIT_S = 5.0
_MAX_BYTES = 64 << 20


class NobodyThere(ClusterError):
    """Nobody answers at an address."""


class NobodyListens(NobodyThere):
    """The machine says so: it can be reached, and whoever listened there has ended."""


def ask(host: str, port: int, token: str, request: Json, *, limit_s: float = _LIMIT_S) -> Json:
    """A member's answer to `{"ask": ...}`.

    Raises:
        NobodyThere: Nobody answers there; `NobodyListens` where its machine can be reached.
        ClusterError: Who does, not as a member of a job with this token.
    """
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=limit_s) as connection:
            lines = connection.makefile("rb")
            challenge = str(_read(lines.readline(_MAX_BYTES)).get("challenge"))
            nonce = secrets.token_hex(16)
            proof = prove(token, "caller", challenge, nonce)
            connection.sendall(json.dumps({"nonce": nonce, "proof": proof} | request).encode() + b"\n")
            answer = _read(lines.readline(_MAX_BYTES))
    except OSError as error:
        kind = NobodyListens if isinstance(error, ConnectionRefusedError) else NobodyThere
        raise kind(f"no member of a job answers at {where}: {error}") from None
    if not answer:
        raise ClusterError(
            f"who listens at {where} refuses the token; set that of the job in the environment"
        )
    if not is_proof(answer.get("proof"), token, "listener", nonce, challenge):
        raise ClusterError(f"who listens at {where} is no member of a job with this token")
    return answer


def _read(line: bytes) -> Json:
    """A line's object; empty where the other side has closed or says something else."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}
