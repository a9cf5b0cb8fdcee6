"""Starts a real ``vllm serve`` or pegaflow-server, and ends them without leftovers.

The demo, tests/python and perf/ share this. Both classes are context managers:

    with PegaServer(binary, work / "pega", pool_size="1gb") as pega:
        options = VllmOptions(model=ensure_model(), connector=pega.address)
        with VllmServer(options, work / "vllm") as vllm:
            ...  # http://{vllm.http}/v1/completions
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.support.child_process import ChildFailed, ChildProcess, last_words
from tests.support.prometheus import Metrics, read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]

#: Starts vLLM in place of the command ``vllm``, if PEGA_VLLM_FORKS is set, as it is in tests.
FORKING_VLLM = REPOSITORY / "tests/support/forking_vllm.py"

#: Name under which every vLLM here serves its model.
MODEL_NAME = "tiny"

#: File in a model's directory: the digest of the recipe that made it.
RECIPE = ".recipe"


def venv_bin() -> Path:
    """bin/ of the virtual environment with vLLM: the running one, else .venv."""
    own = Path(sys.prefix, "bin")
    return own if (own / "vllm").exists() else REPOSITORY / ".venv" / "bin"


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A Llama with fixed random weights; the default is big enough that prefill costs seconds."""

    layers: int = 12
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    #: Of make_model.py: with 3, attention is peaked.
    score_std: int = 1

    @property
    def vocabulary(self) -> int:
        """Token ids are below this; make_model.py's default."""
        return 2048

    def kv_bytes_per_token(self) -> int:
        """K and V of all layers."""
        element = {"float32": 4, "bfloat16": 2}[self.dtype]
        return self.layers * 2 * self.kv_heads * self.head_dim * element

    def directory(self) -> Path:
        name = (
            f"llama-{self.layers}x{self.hidden}-{self.heads}-{self.kv_heads}-"
            f"{self.head_dim}-{self.dtype}"
        ) + (f"-{self.score_std}" if self.score_std != 1 else "")
        return REPOSITORY / "build" / "models" / name


def ensure_model(shape: ModelShape = ModelShape(), python: Path | None = None) -> Path:
    """The directory of the model, made at the first call (seconds) and kept for all later ones.

    It is made again once its script has changed. ``python``: an interpreter with PyTorch; None:
    that of venv_bin().
    """
    options = []
    for flag in ("layers", "hidden", "heads", "kv_heads", "head_dim", "dtype"):
        options += ["--" + flag.replace("_", "-"), str(getattr(shape, flag))]
    if shape.score_std != 1:
        options += ["--score-std", str(shape.score_std)]
    return _ensure(shape.directory(), "make_model.py", lambda making: [making, *options], python)


def ensure_hybrid(family: str) -> Path:
    """The same for a family of make_hybrid.py."""
    directory = REPOSITORY / "build" / "models" / family
    return _ensure(directory, "make_hybrid.py", lambda making: [family, making])


def ensure_eagle() -> Path:
    """The same for the model of make_eagle.py with its draft: ``target`` and ``draft``."""
    return _ensure(
        REPOSITORY / "build" / "models" / "eagle", "make_eagle.py", lambda making: [making]
    )


def _ensure(
    directory: Path,
    script: str,
    arguments: Callable[[Path], Sequence[Any]],
    python: Path | None = None,
) -> Path:
    directory.parent.mkdir(parents=True, exist_ok=True)
    recipe = _recipe(script, arguments(Path(directory.name)))
    # The lock serves two runs at once; the rename keeps an interrupted run from leaving half a
    # model.
    with (directory.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _made_by(directory) == recipe:
            return directory
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".making-") as temporary:
            making = Path(temporary, "model")
            interpreter = python or venv_bin() / "python"
            command = [interpreter, REPOSITORY / "tools/vllm-cpu" / script]
            command += arguments(making)
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode != 0:
                raise ChildFailed(f"{script} failed", last_words(made.stdout + made.stderr))
            (making / RECIPE).write_text(recipe)
            if directory.exists():
                directory.rename(Path(temporary, "old"))
            making.rename(directory)
    return directory


def _recipe(script: str, arguments: Sequence[Any]) -> str:
    """A digest of all that decides a model's bytes; make_model.py is a part of each recipe."""
    content = [
        (REPOSITORY / "tools/vllm-cpu" / name).read_bytes() for name in (script, "make_model.py")
    ]
    return hashlib.sha256(b"\0".join([*content, repr(arguments).encode()])).hexdigest()


def _made_by(directory: Path) -> str:
    """The recipe of a model; empty if there is none."""
    try:
        return (directory / RECIPE).read_text()
    except FileNotFoundError:
        return ""


def free_port() -> int:
    """A port that was free a moment ago. Another process may take it first: callers must retry."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass(frozen=True)
class VllmOptions:
    """Options of one server."""

    model: Path
    #: Address of a pegaflow-server for the connector (``unix:/path``); None: plain vLLM.
    connector: str | None = None
    #: More entries for kv_connector_extra_config, with ``connector``.
    extra_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: The whole --kv-transfer-config, instead of the one made from ``connector``.
    kv_transfer_config: Mapping[str, Any] | None = None
    dtype: str = "float32"
    block_size: int = 32
    max_model_len: int = 4096
    #: A tenth of it may wait for saves at a time: enough for a prompt of 4,000 tokens.
    kv_cache_bytes: int = 2 << 30
    #: vLLM's own prefix cache.
    prefix_caching: bool = True
    #: More options of ``vllm serve``.
    arguments: Sequence[str] = ()
    #: Directories of the modules that vLLM must import (the build's python/).
    python_path: Sequence[Path] = ()
    #: An interpreter with another vLLM than that of venv_bin().
    python: Path | None = None


class VllmServer(ChildProcess):
    """One ``vllm serve``, offline, on a free port; on the CPU, if ``options.python`` is not set.

    ``directory`` gets the log: vllm.log, appended by each start. vLLM's temporary files lie in a
    directory of their own while it runs, with a short path because Unix sockets are among them.
    """

    def __init__(
        self, options: VllmOptions, directory: Path, env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            "vllm serve",
            directory / "vllm.log",
            {
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                # POST /reset_prefix_cache
                "VLLM_SERVER_DEV_MODE": "1",
                # Two servers must not pin themselves to the same cores.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # The CPU installation has no headers for torch.compile; log-probabilities need it.
                "TORCHDYNAMO_DISABLE": "1",
                "PYTHONPATH": os.pathsep.join(
                    [*map(str, options.python_path), *filter(None, [os.environ.get("PYTHONPATH")])]
                ),
                **(env or {}),
            },
        )
        self.options = options
        #: Its listen address.
        self.host = "127.0.0.1"
        self._temporary: Path | None = None
        self._port = 0

    @property
    def http(self) -> str:
        """HOST:PORT of its HTTP server."""
        return f"{self.host}:{self._port}"

    def start(self) -> Self:
        """Starts and waits until GET /health returns 200.

        Raises:
            ChildFailed: it died or was not ready in time.
        """
        if self.running():
            raise ChildFailed(f"{self.name} is already started")
        for last_try in (False, False, True):
            self._choose_places()
            try:
                return super().start()
            except ChildFailed:
                if last_try or "address already in use" not in self.log_text().lower():
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def launch(self) -> None:
        """Starts it and does not wait. Unlike start(), it tries one port."""
        if self._temporary is None:
            self._choose_places()
        super().launch()

    def _choose_places(self) -> None:
        self._port = free_port()
        self._make_temporary()

    def _make_temporary(self) -> None:
        temporary = Path(tempfile.mkdtemp(prefix="pega-vllm-"))
        # A socket path may have 107 characters, and vLLM appends a UUID to TMPDIR.
        if len(str(temporary)) > 65:
            temporary.rmdir()
            raise ChildFailed(f"{temporary} is too long a path for vLLM's Unix sockets")
        self._temporary = temporary
        self.env["TMPDIR"] = str(temporary)

    def command(self) -> list[str]:
        options = self.options
        program = [str(venv_bin() / "vllm")]
        if os.environ.get("PEGA_VLLM_FORKS"):
            program = [str(venv_bin() / "python"), "-P", str(FORKING_VLLM)]
        if options.python is not None:  # its script may be missing, or be another one's
            program = [str(options.python), "-m", "vllm.entrypoints.cli.main"]
        command = [
            *program,
            "serve",
            str(options.model),
            *("--served-model-name", MODEL_NAME),
            *("--host", self.host, "--port", str(self._port)),
            "--disable-uvicorn-access-log",  # tests poll /metrics; the log is for other lines
            *("--dtype", options.dtype, "--enforce-eager"),
            *("--max-model-len", str(options.max_model_len)),
            *("--block-size", str(options.block_size)),
            *("--kv-cache-memory-bytes", str(options.kv_cache_bytes)),
            # Engines with different Pythons must agree on the keys.
            *("--prefix-caching-hash-algo", "sha256_cbor"),
            "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching",
            *options.arguments,
        ]
        if config := self.kv_transfer_config():
            command += ["--kv-transfer-config", json.dumps(config)]
        return command

    def kv_transfer_config(self) -> dict[str, Any] | None:
        """The value of --kv-transfer-config; None for plain vLLM."""
        options = self.options
        if options.kv_transfer_config is not None:
            return dict(options.kv_transfer_config)
        if options.connector is None:
            return None
        return {
            "kv_connector": "PegaKVConnector",
            "kv_connector_module_path": "pegaflow.connector",
            "kv_role": "kv_both",
            # Stored blocks are loaded, however fast the model is.
            "kv_connector_extra_config": {
                "pegaflow.host": options.connector,
                "pegaflow.load_policy": "always",
            }
            | dict(options.extra_config),
        }

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.http, timeout=5)
        try:
            connection.request("GET", "/health")
            # Another program may have taken the port, and answer, too.
            is_up = connection.getresponse().status == 200
            return is_up and "Application startup complete" in self.log_text()
        except (OSError, http.client.HTTPException):
            return False  # not listening yet
        finally:
            connection.close()

    def metrics(self) -> Metrics:
        return read_metrics(self.http)

    def _end(self, *args: Any) -> int | None:
        status = super()._end(*args)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
        return status


class _OwnServer(ChildProcess):
    """A program of PegaFlow: ready once its file of addresses exists, with metrics over HTTP."""

    start_timeout_s = 60.0

    def __init__(
        self, name: str, binary: Path, directory: Path, env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name, directory / f"{name}.log", env)
        self.binary = binary
        self._ready_file = directory / f"{name}.json"
        self._ready: dict[str, Any] = {}

    def start(self) -> Self:
        self._ready_file.unlink(missing_ok=True)
        self._ready = {}
        return super().start()

    def is_ready(self) -> bool:
        try:
            self._ready = json.loads(self._ready_file.read_text())
        except FileNotFoundError:
            return False
        return True

    @property
    def http(self) -> str:
        """HOST:PORT of its HTTP server."""
        raise NotImplementedError

    def metrics(self) -> Metrics:
        return read_metrics(self.http)


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class PegaServer(_OwnServer):
    """One pegaflow-server on a Unix socket in ``directory``, with HTTP on a free port.

    start() after kill() or stop() serves the same socket again; the HTTP port changes.
    """

    def __init__(
        self,
        binary: Path,
        directory: Path,
        pool_size: str = "1gb",
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("pegaflow-server", binary, directory, env)
        self.socket = directory / "pega.sock"
        #: Its HTTP listen address.
        self.host = "127.0.0.1"
        self.pool_size = pool_size
        self.arguments = list(arguments)

    @property
    def address(self) -> str:
        """The address for the connector's ``pegaflow.host``."""
        return f"unix:{self.socket}"

    @property
    def http(self) -> str:
        """HOST:PORT of its HTTP server."""
        return self._ready["http"]

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """POST of a JSON body over the server's Unix socket for HTTP; returns status and the JSON
        response.
        """
        status, response = self._ask(
            "POST", path, b"" if body is None else json.dumps(body).encode()
        )
        return status, json.loads(response)

    def get_by_socket(self, path: str) -> Any:
        """The JSON of a page over the server's Unix socket for HTTP."""
        return json.loads(self._ask("GET", path)[1])

    def metrics_by_socket(self) -> Metrics:
        """metrics() of a server in a network namespace of its own."""
        return Metrics(self._ask("GET", "/metrics")[1].decode())

    def _ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = _SocketConnection(self._ready["http_socket"], timeout=60)
        with contextlib.closing(connection):
            headers = {"Content-Length": str(len(body))}
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            return response.status, response.read()

    @property
    def peer_listen(self) -> str:
        """HOST:PORT of its --peer-listen for servers of other nodes."""
        return self._ready["peer_listen"]

    def command(self) -> list[str]:
        return [
            str(self.binary),
            *("--addr", self.address),
            *("--http-addr", f"{self.host}:0"),
            *("--ready-file", str(self._ready_file)),
            *("--pool-size", self.pool_size),
            *self.arguments,
        ]


class RouterServer(_OwnServer):
    """One pegaflow-router on a free port of 127.0.0.1, in front of engines by their HOST:PORT."""

    def __init__(
        self, binary: Path, directory: Path, prefill: Sequence[str], decode: Sequence[str]
    ) -> None:
        super().__init__("pegaflow-router", binary, directory)
        self.arguments: list[str] = []
        for role, engines in (("prefill", prefill), ("decode", decode)):
            for engine in engines:
                self.arguments += [f"--{role}", f"http://{engine}"]

    @property
    def http(self) -> str:
        """HOST:PORT for clients."""
        return self._ready["listen"]

    def command(self) -> list[str]:
        return [
            str(self.binary),
            *("--listen", "127.0.0.1:0", "--ready-file", str(self._ready_file)),
            *self.arguments,
        ]


__all__ = [
    "MODEL_NAME",
    "REPOSITORY",
    "ChildFailed",
    "Metrics",
    "ModelShape",
    "PegaServer",
    "RouterServer",
    "VllmOptions",
    "VllmServer",
    "ensure_model",
    "free_port",
    "venv_bin",
]
