"""tools/check_language.py refuses phrases that read like a translation, and passes plain ones."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

import check_language  # noqa: E402

#: Sentences that stood in this project, and what stands there now.
BEFORE_AND_AFTER = (
    (
        "a device needs a pool and somebody who hears of it",
        "attach: the pool is empty or no completion sink was given",
    ),
    (
        "Each is asked for so many keys, and only who has all of them for the others.",
        "Each peer is probed with the first 32 keys; only peers that hold all of them receive the "
        "rest.",
    ),
    (
        "Who finds itself at the other end stays there and asks nothing: one list of addresses "
        "does for all nodes.",
        "A node that dials its own address detects it and stays idle, so every node can use the "
        "same peer list.",
    ),
    (
        "Rails pull: a slow one just takes less, and never what the others would have brought "
        "before it has",
        "Rails pull work. A slow rail skips any operation that the others would finish sooner.",
    ),
    (
        "A load is told before it ends. What has been told cannot be taken back.",
        "Early completion: a load is reported to vLLM before its copies finish. A reported load "
        "cannot be withdrawn.",
    ),
    (
        "Connections that sent what is no request",
        "Connections closed after an invalid HTTP request",
    ),
    (
        "peer refused, a person has to change something",
        "peer rejected: fix the configuration",
    ),
    ("Nobody of us reads by it any more", "No local read uses this lease"),
    (
        "takes the cache off in that process",
        "disables the cache in that process",
    ),
    (
        "Answers to `locate` that came after the deadline are no harm but cost",
        "Late `locate` responses are discarded.",
    ),
)

#: What the terms of docs/glossary.md replace.
OLD_TERMS = (
    "a read under way",
    "blocks on their way",
    "a block at rest",
    "a batch that is settled",
    "the load was told ahead",
    "condemned blocks",
    "a turn of the loop",
    "what nobody has",
    "0.98, to reach >= 0.9",
    "the peer lets go",
)


class CheckLanguageTest(unittest.TestCase):
    def test_each_sentence_of_before_is_refused_and_its_successor_passes(self) -> None:
        for before, after in BEFORE_AND_AFTER:
            with self.subTest(before):
                self.assertNotEqual(check_language.problems_of("x.md", before), [])
                self.assertEqual(check_language.problems_of("x.md", after), [])

    def test_old_terms_are_refused(self) -> None:
        for text in OLD_TERMS:
            with self.subTest(text):
                self.assertNotEqual(check_language.problems_of("x.md", text), [])

    def test_the_register_to_keep_passes(self) -> None:
        for text in (
            "A cache may forget, it may never lie.",
            "Full means busy.",
            "A descriptor that is passed is closed with its capability.",
            "The client that asks first decides. No one is disturbed.",
        ):
            with self.subTest(text):
                self.assertEqual(check_language.problems_of("x.md", text), [])

    def test_a_finding_names_file_line_phrase_and_advice(self) -> None:
        found = check_language.problems_of("docs/a.md", "One.\n\nNobody reads it.\n")
        self.assertEqual(
            found,
            [
                'docs/a.md:3: "Nobody": write: name the actor by its role: the owner, the reader, '
                "the client"
            ],
        )

    def test_code_is_no_text(self) -> None:
        for text in (
            "the function `let go()` and `somebody`",
            "```sh\necho nobody\n```\n",
            "[a page](anybody.md)",
        ):
            with self.subTest(text):
                self.assertEqual(check_language.problems_of("x.md", text), [])


if __name__ == "__main__":
    unittest.main()
