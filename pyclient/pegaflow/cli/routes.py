"""Shows why a router sent its last requests where it sent them: candidates, costs, outcome.

Reads /routes of a pegaflow-router whose policy is kv-aware. Times are in milliseconds. The row of
the chosen engine has a star. Exits with 1 if the router does not answer, or refuses.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pegaflow.cli.secret import BadSecret, http_token, read_secret

_TERMS = ("queue_s", "fetch_s", "prefill_s", "delay_s", "decode_s", "space_s", "room_s", "cost_s")
_TIMEOUT_S = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router",
        default="http://127.0.0.1:8080",
        metavar="URL",
        help="the router's address (default: %(default)s)",
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="the router's --peer-secret-file",
    )
    parser.add_argument(
        "--last", type=int, default=10, metavar="N", help="decisions to show (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the router's answer unchanged")


def run(options: argparse.Namespace) -> int:
    try:
        text = _get(options.router, read_secret(options.secret_file))
        routes = json.loads(text)["routes"]
    except (BadSecret, OSError, http.client.HTTPException, ValueError, KeyError) as error:
        print(f"pegaflow routes: {options.router}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(text, end="")
        return 0
    for route in routes[: options.last]:
        print("\n".join(describe(route)))
    if not routes:
        print("the router has placed no request yet")
    return 0


def _get(router: str, secret: bytes) -> str:
    """The page.

    Raises:
        OSError, http.client.HTTPException: the router does not answer.
        ValueError: it refuses, or the address is wrong.
    """
    address = urllib.parse.urlsplit(router if "//" in router else f"//{router}")
    if not address.hostname:
        raise ValueError("the address is not http://HOST:PORT")
    connection = http.client.HTTPConnection(
        address.hostname, address.port or 80, timeout=_TIMEOUT_S
    )
    try:
        token = http_token(secret, "GET", "/routes")
        connection.request("GET", "/routes", headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        try:
            why = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            why = text[:200]
        raise ValueError(f"status {response.status}: {why}")
    return text


def describe(route: Mapping[str, Any]) -> Iterator[str]:
    """The lines about one decision."""
    outcome = route["outcome"]
    first = outcome["first_token_s"]
    cached = outcome["cached_tokens"]
    yield (
        f"#{route['number']}  {route['age_s']:.1f} s ago  {route['role']}  {route['model']}  "
        f"{route['prompt_tokens']} tokens, {route['known_blocks']} blocks known  "
        f"by {route['policy']}, {route['near_equals']} near-equals of {route['candidates']}"
    )
    yield (
        f"    predicted {route['predicted_cached_tokens']} cached tokens, reported "
        f"{'-' if cached is None else cached}; first token after "
        f"{'-' if first is None else f'{first * 1e3:.1f} ms'}"
    )
    header = "".join(f"{name.removesuffix('_s'):>9}" for name in _TERMS)
    yield f"      {'engine':32} {'events':>9} {'gpu':>6} {'local':>6} {'reach':>6}{header}"
    for term in route["terms"]:
        star = "*" if term["chosen"] else " "
        name = f"{term['engine'].removeprefix('http://')}/{term['rank']}"
        times = "".join(f"{term[key] * 1e3:9.1f}" for key in _TERMS)
        yield (
            f"    {star} {name:32} {term['trust']:>9} {term['gpu_blocks']:6} "
            f"{term['local_blocks']:6} {term['reach_blocks']:6}{times}"
        )
