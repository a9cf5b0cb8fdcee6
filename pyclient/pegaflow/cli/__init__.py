"""The command ``pegaflow``: an operator's view of a node. It needs no vLLM."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pegaflow
from pegaflow.cli import doctor, routes, top, weights_id


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pegaflow",
        description="PegaFlow: the KV cache of inference engines, kept outside of them.",
        epilog="The server is a program of its own: pegaflow-server --help",
    )
    made.add_argument("--version", action="version", version=f"pegaflow {pegaflow.__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_arguments(
        commands.add_parser(
            "doctor",
            help="list the problems of this machine, each with its fix",
            description=doctor.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    top.add_arguments(
        commands.add_parser(
            "top",
            help="show hit rates, traffic and latencies of a server, live",
            description=top.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    routes.add_arguments(
        commands.add_parser(
            "routes",
            help="show why a router sent its last requests where it sent them",
            description=routes.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    weights_id.add_arguments(
        commands.add_parser(
            "weights-id",
            help="print the id of a model's weights, and keep it for engines that start later",
            description=weights_id.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Wrong usage exits with 2, as in argparse."""
    options = parser().parse_args(argv)
    runs = {
        "doctor": doctor.run,
        "routes": routes.run,
        "top": top.run,
        "weights-id": weights_id.run,
    }
    return runs[options.command](options)
