#!/usr/bin/env python3
"""Writes the JSON schema of a Kubernetes DaemonSet, for the test of deploy/kubernetes.

usage: kubernetes_schema.py DEFINITIONS VERSION OUT

DEFINITIONS is the file _definitions.json of one Kubernetes release from the PyPI package
kubernetes-validate, which is too large for a dependency of the tests (22 MB). OUT gets the
definitions that a DaemonSet reaches, one in each line, without their texts. Unlike the API server,
the schema rejects unknown fields, since a misspelled one would have no effect.
"""

import json
import pathlib
import sys

ROOT = "io.k8s.api.apps.v1.DaemonSet"
#: Written by Kubernetes only.
NOT_OURS = {"status"}


def without_texts(schema: object) -> object:
    """The schema without descriptions and extensions."""
    if isinstance(schema, list):
        return [without_texts(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: without_texts(value)
        for name, value in schema.items()
        if not name.startswith("x-") and not (name == "description" and isinstance(value, str))
    }


def strict(schema: dict) -> dict:
    """The schema of an object rejects members that it does not name."""
    if "properties" not in schema:
        return schema
    named = {name: each for name, each in schema["properties"].items() if name not in NOT_OURS}
    return {**schema, "properties": named, "additionalProperties": False}


def names_in(schema: object) -> set[str]:
    """The definitions to which a schema refers."""
    if isinstance(schema, list):
        return set().union(*map(names_in, schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
    return own.union(*map(names_in, schema.values()))


def reached(definitions: dict[str, dict]) -> dict[str, dict]:
    found: dict[str, dict] = {}
    pending = {ROOT}
    while pending:
        name = pending.pop()
        found[name] = strict(without_texts(definitions[name]))
        pending |= names_in(found[name]) - found.keys()
    return found


def main() -> int:
    if len(sys.argv) != 4:
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    definitions = json.loads(pathlib.Path(sys.argv[1]).read_text())["$defs"]
    lines = [
        f"{json.dumps(name)}: {json.dumps(schema, sort_keys=True)}"
        for name, schema in sorted(reached(definitions).items())
    ]
    head = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": f"Kubernetes {sys.argv[2]}, written by tools/deploy/kubernetes_schema.py. "
        "Apache-2.0, the Kubernetes authors.",
        "$ref": f"#/$defs/{ROOT}",
    }
    text = json.dumps(head)[:-1] + ', "$defs": {\n' + ",\n".join(lines) + "\n}}\n"
    pathlib.Path(sys.argv[3]).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
