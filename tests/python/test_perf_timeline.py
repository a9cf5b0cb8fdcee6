"""The notes of two engines become the steps of a handover."""

import json

import pytest

from perf.support import handover_timeline


def notes(tmp_path, *lines):
    """Writes a note for each (seconds, engine, event, number), and reads them back."""
    for engine in ("0", "1"):
        own = [json.dumps(line) for line in lines if line[1] == engine]
        (tmp_path / f"{engine}.jsonl").write_text("".join(line + "\n" for line in own))
    return handover_timeline.read(tmp_path)


PREFILL = (
    (10.000, "0", "scheduled", 8192),
    (10.010, "0", "scheduled", 1809),
    (10.200, "0", "computed", 8192),
    (10.250, "0", "computed", 1809),
    (10.251, "0", "answered", 1),
)
DECODE = (
    (10.020, "1", "asked", 10000),
    (10.210, "1", "loaded", 0),
    (10.252, "1", "loaded", 0),
    (10.253, "1", "received", 1),
    (10.256, "1", "scheduled", 1),
    (10.257, "1", "launched", 0),
    (10.262, "1", "computed", 1),
    (10.263, "1", "answered", 1),
)


def rounded(steps):
    return {name: round(value, 3) for name, value in steps.items()}


def test_a_handover_is_divided_into_steps_after_the_last_kernel_of_the_prefill(tmp_path):
    found = handover_timeline.of_request(
        notes(tmp_path, *PREFILL, *DECODE), 9.99, 10.265, tokens=10001, is_alone=False
    )
    assert rounded(found) == {
        "prefill": 260,
        "asked": -230,
        "loaded": 2,
        "received": 1,
        "scheduled": 3,
        "launched": 1,
        "computed": 5,
        "answered": 1,
        "client": 2,
    }


def test_a_prompt_that_the_prefill_engine_answers_has_no_step_of_the_decode_engine(tmp_path):
    found = handover_timeline.of_request(
        notes(tmp_path, *PREFILL), 9.99, 10.253, tokens=10001, is_alone=True
    )
    assert rounded(found) == {"prefill": 260, "answered": 1, "client": 2}


@pytest.mark.parametrize("chunks", [(8192, 1), (8192, 8192), (8192, 8192, 1), (16,), (1, 1)])
def test_the_prefill_ends_with_its_last_chunk_whatever_the_number_of_its_tokens(tmp_path, chunks):
    """The next step, which computes one more token, is scheduled before the chunk is computed."""
    steps = [(number, tokens) for number, tokens in enumerate((*chunks, 1))]
    lines = [(10.0 + number / 10, "0", "scheduled", tokens) for number, tokens in steps]
    lines += [(10.11 + number / 10, "0", "computed", tokens) for number, tokens in steps]
    computed = 10.01 + len(chunks) / 10
    lines.append((computed + 0.001, "0", "answered", 1))
    found = handover_timeline.of_request(
        notes(tmp_path, *lines), 9.99, computed + 0.002, tokens=sum(chunks), is_alone=True
    )
    prefill_ms = 20 + len(chunks) * 100
    assert rounded(found) == {"prefill": prefill_ms, "answered": 1, "client": 1}


def test_a_request_of_which_a_note_is_missing_is_left_out(tmp_path):
    for missing in range(4):
        some = [*PREFILL[:missing], *PREFILL[missing + 1 :], *DECODE]
        found = handover_timeline.of_request(
            notes(tmp_path, *some), 9.99, 10.265, tokens=10001, is_alone=False
        )
        assert found is None, PREFILL[missing]
    for missing in range(len(DECODE)):
        if DECODE[missing][2] in ("asked", "loaded"):
            continue  # the load began unseen; its parts are not told apart
        some = [*PREFILL, *DECODE[:missing], *DECODE[missing + 1 :]]
        found = handover_timeline.of_request(
            notes(tmp_path, *some), 9.99, 10.265, tokens=10001, is_alone=False
        )
        assert found is None, DECODE[missing]


def test_a_line_that_is_being_written_is_no_note(tmp_path):
    (tmp_path / "0.jsonl").write_text('[1.5, "0", "arrived", 0]\n[1.6, "0", "sched')
    assert [note.event for note in handover_timeline.read(tmp_path)] == ["arrived"]


def test_arms_are_summed_up_by_their_medians(tmp_path):
    rows = [("direct", {"loaded": value}) for value in (1.0, 9.0, 2.0)] + [("alone", {"client": 1})]
    assert handover_timeline.table(rows) == [
        "direct, n = 3, ms after the step before: loaded 2.00 (1.00 to 9.00)",
        "alone, n = 1, ms after the step before: client 1.00 (1.00 to 1.00)",
    ]
