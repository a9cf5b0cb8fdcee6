"""`./dev demo --pd --direct`: where its engines run, and with which vLLM. No server, no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from demo import device
from demo.__main__ import _parse
from demo.children import StartsChildren
from demo.device import Choice, NoGpu, choose, engine_environments, find_gpus, query_driver
from demo.pd_engines import Engines
from demo.pd_stage import PdStage
from demo.progress import Progress
from tests.support.memory_reads import why_forbidden
from tests.support.vllm_server import REPOSITORY, ModelShape, VllmOptions, VllmServer

TWO_GPUS = "0, GPU-1111-aaaa, 9.0\n1, GPU-2222-bbbb, 9.0\n"
OLD_GPU = "0, GPU-3333-cccc, 7.5\n"
DIRECT = ["--pd", "--direct"]


def lists(text: str) -> Callable[[], str]:
    return lambda: text


def no_driver() -> str:
    raise NoGpu("nvidia-smi is not in PATH")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an nvidia-smi before all others that lists these GPUs, or fails."""

    def install(lines: str, status: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '{lines}'\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


# ---- the GPUs


def test_lines_that_are_no_text_are_no_gpu(machine):
    machine("\\377\\n")
    with pytest.raises(NoGpu, match="lists no GPU"):
        find_gpus({})


def test_the_gpus_are_those_that_the_driver_lists():
    assert find_gpus({}, lists(TWO_GPUS)) == ["0", "1"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        (" 0 , 7", ["0"]),
        ("GPU-2222", ["GPU-2222"]),
        ("0,junk,1", ["0"]),  # CUDA ends at the first name that stands for none,
        ("0,0", ["0"]),  # or for one that it has.
    ],
)
def test_cuda_visible_devices_chooses_among_them(visible: str, expected: list[str]):
    assert find_gpus({"CUDA_VISIBLE_DEVICES": visible}, lists(TWO_GPUS)) == expected


@pytest.mark.parametrize("visible", ["", "-1", "5", "-1,0", "GPU-", "GPU-9999"])
def test_cuda_visible_devices_without_a_gpu_of_the_machine_is_no_gpu(visible: str):
    with pytest.raises(NoGpu, match=f"CUDA_VISIBLE_DEVICES is {visible!r}, which names no GPU"):
        find_gpus({"CUDA_VISIBLE_DEVICES": visible}, lists(TWO_GPUS))


def test_a_gpu_that_is_too_old_for_the_attention_is_not_used():
    with pytest.raises(NoGpu, match=r"compute capability 7\.5, and FlashAttention needs 8\.0"):
        find_gpus({}, lists(OLD_GPU))
    assert find_gpus({}, lists(OLD_GPU + "1, GPU-1111-aaaa, 9.0\n")) == ["1"]


def test_a_driver_that_fails_is_reported_with_its_last_line(machine: Callable[..., None]):
    machine("NVIDIA-SMI has failed\\nNo devices were found\\n", 6)
    with pytest.raises(NoGpu, match="^nvidia-smi failed: No devices were found$"):
        query_driver()


# ---- the choice


def test_auto_takes_the_gpus_if_there_are_any():
    assert choose("auto", {}, lists(TWO_GPUS)) == Choice(("0", "1"), "GPU 0 and GPU 1")
    assert choose("auto", {}, lists(TWO_GPUS)).device == "cuda"


def test_auto_without_gpus_takes_the_cpu_and_keeps_the_reason():
    assert choose("auto", {}, no_driver) == Choice((), "nvidia-smi is not in PATH")
    assert choose("auto", {}, no_driver).device == "cpu"
    assert choose("auto", {}, lists(OLD_GPU)).device == "cpu"


def test_cpu_does_not_look_for_gpus():
    assert choose("cpu", {}, no_driver).device == "cpu"
    assert choose("cpu", {}, lists(TWO_GPUS)).gpus == ()


def test_cuda_without_a_gpu_is_an_error_that_names_the_way_out():
    with pytest.raises(NoGpu) as caught:
        choose("cuda", {}, no_driver)
    assert str(caught.value) == (
        "--device cuda: nvidia-smi is not in PATH; --device cpu needs no GPU"
    )


# ---- the option


@pytest.mark.skipif(bool(why_forbidden()), reason="engines may not read each other's memory here")
def test_the_demo_chooses_by_the_machine(machine: Callable[..., None]):
    machine("0, GPU-1, 9.0\\n1, GPU-2, 9.0\\n")
    assert _parse(DIRECT).choice.gpus == ("0", "1")
    assert _parse([*DIRECT, "--device", "cuda"]).choice.gpus == ("0", "1")
    assert _parse([*DIRECT, "--device", "cpu"]).choice.gpus == ()


def test_between_gpus_the_kernel_need_not_permit_reads(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    machine("0, GPU-1, 9.0\\n")
    monkeypatch.setattr("demo.__main__.why_forbidden", lambda: "it is forbidden")

    assert _parse(DIRECT).choice.device == "cuda"
    with pytest.raises(SystemExit):
        _parse([*DIRECT, "--device", "cpu"])


@pytest.mark.parametrize("other", [[], ["--pd"], ["--pd", "--nodes", "2"], ["--ssd"]])
def test_cuda_is_for_direct_reads_only(
    other: list[str], machine: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    machine("0, GPU-1, 9.0\\n")
    with pytest.raises(SystemExit):
        _parse(["--device", "cuda", *other])
    assert "--device cuda needs --pd --direct" in capsys.readouterr().err
    assert _parse(other).choice.device == "cpu", "the other setups stay on the CPU"


def test_cuda_without_a_gpu_ends_the_demo(
    machine: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    machine("No devices were found\\n", 6)
    with pytest.raises(SystemExit) as caught:
        _parse([*DIRECT, "--device", "cuda"])
    assert caught.value.code == 2
    assert "--device cuda: nvidia-smi failed: No devices were found" in capsys.readouterr().err


# ---- what ./dev installs


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (DIRECT, "cuda"),
        ([*DIRECT, "--device=cuda", "--seed", "3"], "cuda"),
        ([*DIRECT, "--device", "cpu"], "cpu"),
        (["--pd"], "cpu"),
        (["--ssd", "--device", "cuda"], "cpu"),
        (["--help"], "cpu"),
    ],
)
def test_dev_learns_the_device_before_it_installs_a_vllm(
    arguments: list[str],
    expected: str,
    machine: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
):
    machine("0, GPU-1, 9.0\\n")
    assert device.main(arguments) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_dev_does_not_install_for_a_gpu_that_is_missing(
    machine: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    machine("No devices were found\\n", 6)
    assert device.main([*DIRECT, "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("demo: --device cuda: nvidia-smi failed")


def test_the_device_is_chosen_without_any_package():
    # -I -S: neither site-packages nor PYTHONPATH.
    command = [sys.executable, "-S", "-c", "import demo.device"]
    assert subprocess.run(command, cwd=REPOSITORY, env={}, check=False).returncode == 0


def test_both_installations_have_the_same_vllm():
    found = [
        re.search(r"^vllm(?:-cpu)?==(.+)$", path.read_text(), re.MULTILINE)
        for path in sorted((REPOSITORY / "tools").glob("vllm-?pu/requirements.txt"))
    ]
    assert len(found) == 2
    assert len({match and match[1] for match in found}) == 1


# ---- the engines


def test_the_prefill_engine_gets_the_first_gpu_and_the_decode_engine_the_second():
    prefill, decode = engine_environments(["0", "1", "2"], {})
    assert prefill == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"}
    assert decode == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}


def test_one_gpu_is_shared_by_both():
    prefill, decode = engine_environments(["0"], {})
    assert prefill == decode
    assert prefill["CUDA_VISIBLE_DEVICES"] == "0"


def test_gpus_that_the_user_named_keep_the_users_order():
    environment = {"CUDA_VISIBLE_DEVICES": "3,1"}
    assert engine_environments(["3", "1"], environment) == (
        {"CUDA_VISIBLE_DEVICES": "3"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    )


def test_engines_on_gpus_run_the_vllm_of_this_python(tmp_path: Path):
    engines = Engines.on_gpus(["0", "1"])
    options = VllmOptions(
        Path("model"), dtype=engines.shape.dtype, arguments=engines.arguments, python=engines.python
    )
    command = VllmServer(options, tmp_path, engines.decode_env).command()

    assert command[:4] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    assert command[command.index("--dtype") + 1] == "bfloat16"
    share = float(command[command.index("--gpu-memory-utilization") + 1])
    assert share <= 0.1, "both fit on one GPU, beside other programs"


def test_a_prompt_has_room_in_every_cache_on_a_gpu():
    engines = Engines.on_gpus(["0"])
    prompt = engines.long_tokens * engines.shape.kv_bytes_per_token()
    assert engines.long_tokens + 100 < engines.max_model_len
    assert prompt < engines.kv_cache_bytes / 2, "half of it may hold prompts that are computed"
    assert prompt < int(engines.pool_size.removesuffix("gb")) << 30
    assert engines.long_tokens / engines.chunk_tokens > 4, "a kill comes in the middle"


def test_the_model_of_the_cpu_is_the_one_it_was():
    assert Engines().shape == ModelShape(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32)
    assert Engines().lane == "process_vm_readv"
    assert Engines.on_gpus(["0"]).lane == "cuda"


class _Child:
    """Notes what happens to it."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.log_file = Path(f"{name}.log")
        self._name, self._notes = name, notes

    def __getattr__(self, what: str) -> Callable[[], None]:
        return lambda: self._notes.append(f"{what} {self._name}")


class _Starter(StartsChildren):
    progress = Progress()

    def diagnose(self) -> None:
        raise AssertionError("nothing failed")


def test_engines_on_gpus_start_together():
    notes: list[str] = []
    first, second = _Child("first", notes), _Child("second", notes)

    with _Starter().running(first, second, together=True):
        assert notes == [
            "launch first",
            "launch second",
            "wait_until_started first",
            "wait_until_started second",
        ]

    assert notes[4:] == ["stop second", "stop first"]


# ---- the lane


class _Log:
    def __init__(self, *lines: str) -> None:
        self._lines = lines

    def log_text(self) -> str:
        return "\n".join(self._lines)


def lanes(*lines: str) -> set[str]:
    stage = PdStage.__new__(PdStage)
    stage.decode = _Log(*lines)
    return stage.lanes()


def test_the_lane_is_the_one_that_the_decode_engine_logs():
    line = (
        "info mover: blocks are read out of the memory of another engine engine=1 lane={} blocks=9"
    )
    assert lanes(line.format("cuda"), "lane=tcp") == {"cuda"}
    assert lanes(line.format("cuda"), line.format("ucx")) == {"cuda", "ucx"}
    assert lanes("info server: ready lane=cuda") == set()
