"""`./dev demo --ssd`: its options, its chart, and what its checks find. No server."""

import dataclasses
import subprocess
import types
import xml.etree.ElementTree
from pathlib import Path

import pytest

from demo.__main__ import _parse
from demo.chart import Event, Sample, svg_chart, text_chart
from demo.claims.ssd import Pass, damaged, size_that_fits
from demo.client import Answer
from demo.prompts import Prompt
from demo.report import Checks
from demo.ssd_stage import (
    _LOG_OFFSET,
    _SECTOR,
    ANSWER,
    CAPACITY,
    MIB,
    POOL_BYTES,
    PROMPT,
    PROMPTS,
    SEGMENT_BYTES,
    SMALL_CAPACITY,
    Loaded,
    SsdStage,
    small_file_system,
)
from tests.support.vllm_server import ModelShape

# ---- options


def test_the_ssd_tier_is_a_run_of_its_own():
    assert _parse(["--ssd"]).ssd
    assert not _parse([]).ssd


@pytest.mark.parametrize(
    "other",
    [["--pd"], ["--nodes", "3"], ["--prove"], ["--tp", "2"], ["--model", "gemma3"], ["--sglang"]],
)
def test_the_ssd_tier_is_not_combined_with_another_setup(other, capsys):
    with pytest.raises(SystemExit):
        _parse(["--ssd", *other])
    assert "cannot be combined with" in capsys.readouterr().err


# ---- sizes


def test_the_prompts_need_several_pools_and_the_file_has_room_for_them():
    block = 32 * ModelShape().kv_bytes_per_token()
    prompt = PROMPT // 32 * block
    assert (PROMPT + ANSWER) // 32 == PROMPT // 32, "no block ends with the answer"
    # At the end of a prompt the pool keeps 64 MiB of its next victims on the disk.
    assert 64 * MIB < POOL_BYTES < PROMPTS * prompt / 2
    assert prompt < POOL_BYTES / 4
    assert block < SEGMENT_BYTES / 4
    assert (PROMPTS + 3) * prompt < CAPACITY / 2
    assert SMALL_CAPACITY + POOL_BYTES < PROMPTS * prompt


# ---- the chart


def chart(samples, events=(), width=100):
    return text_chart(samples, list(events), width).splitlines()


def cells(lines, column):
    """The characters of a column, from below."""
    return "".join(line.ljust(200)[9 + column] for line in lines[7::-1])


def test_a_column_shows_the_blocks_from_the_disk_below_those_of_the_pool():
    lines = chart([Sample(1, 0.0, 0.0), Sample(2, 0.5, 0.5), Sample(3, 0.0, 1.0)])
    assert cells(lines, 0) == " " * 8
    assert cells(lines, 1) == "####++++"
    assert cells(lines, 2) == "#" * 8


def test_only_a_whole_prompt_fills_a_column_and_a_single_block_is_seen():
    lines = chart([Sample(1, 0.0, 0.99), Sample(2, 0.01, 0.0), Sample(3, 0.34, 0.66)])
    assert cells(lines, 0) == "#" * 7 + " "
    assert cells(lines, 1) == "+" + " " * 7
    assert cells(lines, 2) == "######++"


def test_an_event_is_a_column_between_the_requests_around_it():
    samples = [Sample(1, 0, 0), Sample(3, 0, 1)]
    lines = chart(samples, [Event(2, "the server is killed")])
    assert cells(lines, 1) == "|" * 8
    assert lines[8].strip() == "a"
    assert lines[8].index("a") == 9 + 1
    assert lines[-1] == "  a     2.0 s  the server is killed"


def test_events_are_named_in_the_order_of_time():
    lines = chart([Sample(1, 0, 0)], [Event(5, "later"), Event(2, "first")])
    assert [line.split()[0] for line in lines[-2:]] == ["a", "b"]
    assert lines[-2].endswith("first")


def test_requests_that_do_not_fit_share_columns_on_one_side_of_an_event():
    samples = [Sample(at, 0.0, float(at > 50)) for at in range(101) if at != 50]
    lines = chart(samples, [Event(50, "x")], width=60)
    assert max(map(len, lines[:8])) <= 60
    assert "a column is up to 2 requests" in "".join(lines)
    assert [cells(lines, column)[0] for column in (24, 25, 26)] == [" ", "|", "#"]


def test_a_chart_without_requests_has_its_axes():
    assert chart([])[0].startswith("  100 % |")
    assert svg_chart([], []).startswith("<svg")


def test_the_svg_has_a_bar_for_each_share_and_a_line_for_each_event():
    samples = [Sample(1, 0.25, 0.5), Sample(2, 0.0, 1.0), Sample(3, 0.0, 0.0)]
    picture = svg_chart(samples, [Event(1.5, "a & b < c")])
    root = xml.etree.ElementTree.fromstring(picture)
    named = "{http://www.w3.org/2000/svg}"
    bars = root.findall(f"{named}rect")[1:]
    assert len(bars) == 3
    heights = [float(bar.get("height")) for bar in bars]
    assert heights[0] == pytest.approx(heights[2] / 2, abs=0.1)
    assert heights[1] == pytest.approx(heights[2] / 4, abs=0.1)
    assert "a: 1.5 s, a & b < c" in [text.text for text in root.iter(f"{named}text")]


# ---- servers


def test_both_sides_of_an_engine_are_counted_when_they_use_a_server():
    log = "\n".join(
        [
            'info link: the cache is in use instance=a side=worker server="pegaflow-server 0.1.0"',
            "warning link: continuing without the cache instance=a side=worker error=peer_lost",
            'info link: the cache is in use instance=a side=scheduler server="pegaflow-server"',
            "INFO the cache is in use",
        ]
    )
    stage = types.SimpleNamespace(vllm=types.SimpleNamespace(log_text=lambda: log))
    assert SsdStage._links(stage) == 2


# ---- passes


def loaded(blocks, from_disk=0, whole=20):
    return Loaded(Answer((1,), -1.0, 0.1, 0.2), blocks, from_disk, whole, blocks * 32)


def test_a_pass_adds_up_its_prompts():
    prompts = [Prompt(name, (5,) * PROMPT) for name in "abc"]
    one = Pass(prompts, [loaded(20, 12), loaded(7, 7), loaded(0)])
    assert (one.blocks, one.from_disk, one.whole) == (27, 19, 60)
    assert [prompt.name for prompt in one.incomplete] == ["b", "c"]
    assert str(one) == "27 of 60 blocks (45 %), 19 read from the disk"


def test_a_block_that_is_missing_fails_the_check():
    checks = Checks()
    Pass([Prompt("a", (5,))], [loaded(20)]).check_all_loaded(checks)
    assert checks.failures == []
    Pass([Prompt("a", (5,))], [loaded(19)]).check_all_loaded(checks)
    assert checks.failures == [
        "a: blocks loaded: 19, expected 20",
        "a: tokens of external hits, by vLLM: 608, expected 640",
    ]


class Damaged(types.SimpleNamespace):
    """A stage of one prompt, whose server counts what it is given."""

    def __init__(
        self, *, loaded_blocks=(18, 20), failures=1, pages=1, lost=1, slow=0, tokens=(1, 2)
    ) -> None:
        prompt = Prompt("a", (5,) * PROMPT)
        loads = iter(loaded_blocks)
        super().__init__(
            prompts=[prompt],
            late=[],
            in_flight=[],
            baseline={"a": Answer((1, 2), -1.0, 0.1, 0.2)},
            stored=20,
            figures={},
            progress=types.SimpleNamespace(say=lambda text: None),
            pega=types.SimpleNamespace(
                stop=lambda: 0, log_text=lambda: f"found again damaged_pages={pages} failed_reads=0"
            ),
            load=lambda asked: dataclasses.replace(
                loaded(next(loads)), answer=Answer(tokens, -1.0, 0.1, 0.2)
            ),
            disk=lambda: types.SimpleNamespace(
                blocks=20 - lost, proof_failures=failures, lost=slow
            ),
            flip_bits=lambda: 2,
            overwrite_table=lambda: None,
            mark=lambda text: None,
            start_server=lambda: None,
        )


def test_damage_that_is_a_miss_is_right():
    claim = damaged(Damaged())
    assert claim.held, claim.detail


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"failures": 0}, "no damaged block was noticed"),
        ({"failures": 3}, "3 blocks failed their proof, and 2 were damaged"),
        ({"pages": 0}, "damaged pages of tables that the server has logged: ['0']"),
        ({"lost": 0}, "all blocks were found although a page of a table is overwritten"),
        ({"loaded_blocks": (20,)}, "20 of 20 blocks were loaded, although 1 were damaged"),
        ({"slow": 1}, "all blocks were found although a page of a table is overwritten"),
        ({"loaded_blocks": (18, 18)}, "2 of 2 blocks are still missing"),
        ({"tokens": (1, 3)}, "tokens differ from vLLM without the connector"),
    ],
)
def test_damage_that_is_not_noticed_fails_the_claim(changes, problem):
    claim = damaged(Damaged(**changes))
    assert not claim.held
    assert problem in claim.detail


def test_the_size_that_fits_is_that_of_the_error_about_this_file():
    error = (
        "pegaflow-server: allocate 192 MiB for /d/full/pegaflow.ssd: no space left; 64 MiB are "
        "free: choose a smaller size"
    )
    assert size_that_fits(error, Path("/d/full")) == 64 * MIB
    assert size_that_fits(error, Path("/d/other")) is None
    assert size_that_fits("pegaflow-server has started", Path("/d/full")) is None


# ---- damage


def stage_of(file: Path) -> SsdStage:
    stage = types.SimpleNamespace(file=file)
    stage.segments = lambda: SsdStage.segments(stage)
    return stage


@pytest.fixture
def cache_file(tmp_path: Path) -> Path:
    """A sparse file of three segments, of which the first two have blocks."""
    file = tmp_path / "cache"
    with file.open("wb") as out:
        out.truncate(_LOG_OFFSET + 3 * SEGMENT_BYTES)
        for segment in (0, 1):
            out.seek(_LOG_OFFSET + segment * SEGMENT_BYTES + SEGMENT_BYTES // 2 - 100)
            out.write(b"b" * 200)
    return file


def changed(file: Path, before: Path) -> list[int]:
    """Offsets of the bytes that differ, found page by page."""
    found = []
    with file.open("rb") as one, before.open("rb") as other:
        for page in range(0, file.stat().st_size, MIB):
            now, then = one.read(MIB), other.read(MIB)
            if now != then:
                found += [page + at for at in range(MIB) if now[at] != then[at]]
    return found


def test_one_bit_is_flipped_in_each_segment_with_blocks(cache_file, tmp_path):
    before = tmp_path / "before"
    before.write_bytes(cache_file.read_bytes())
    assert SsdStage.flip_bits(stage_of(cache_file)) == 2
    middle = _LOG_OFFSET + SEGMENT_BYTES // 2
    assert changed(cache_file, before) == [middle, middle + SEGMENT_BYTES]


def test_only_the_first_table_page_of_the_second_segment_is_overwritten(cache_file, tmp_path):
    before = tmp_path / "before"
    before.write_bytes(cache_file.read_bytes())
    SsdStage.overwrite_table(stage_of(cache_file))
    page = _LOG_OFFSET + SEGMENT_BYTES + _SECTOR
    places = changed(cache_file, before)
    assert page <= min(places)
    assert max(places) < page + _SECTOR


def test_a_small_file_system_ends_with_its_command(tmp_path):
    prefix = small_file_system(tmp_path, 8 * MIB)
    if prefix is None:
        pytest.skip("this user may not mount a tmpfs")
    done = subprocess.run(
        [*prefix, "sh", "-c", f"df -B1 --output=size {tmp_path} && touch {tmp_path}/x"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["1B-blocks", str(8 * MIB)]
    assert list(tmp_path.iterdir()) == []
