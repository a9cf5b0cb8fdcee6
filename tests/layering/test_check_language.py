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

    def test_comments_and_strings_of_code_are_texts(self) -> None:
        for name, text, line in (
            ("a.cpp", "int a;\n// Nobody reads it.\n", 2),
            ("a.h", "/// A read is under\n/// way.\nint a;\n", 1),
            ("a.h", "int a;  ///< Blocks that are\n        ///< at rest.\n", 2),
            ("a.cpp", 'f("a copy that\\n"\n  "nobody knows");\n', 2),
            ("a.cpp", 'f(R"(who has it, and\nnobody else)");\n', 1),
            ("a.py", 'def f():\n    """One.\n\n    Nobody calls it.\n    """\n', 4),
            ("a.py", "x = 1\n# A load that\n# was told.\n", 3),
            ("a.py", 'raise ValueError(f"{x}: nobody has it")\n', 1),
            ("a.py", "class T:\n    def test_nobody_is_disturbed(self):\n        pass\n", 2),
            ("a.capnp", "@0x1;\n# Whoever calls it.\n", 2),
            ("t/meson.build", "x = 1  # of its own will\n", 1),
            ("dev", "cat <<EOF\n  anybody may call it\nEOF\n", 2),
            ("deploy/rules.yml", "summary: a person has to act\n", 1),
        ):
            with self.subTest(text):
                found = check_language.problems_of(name, text)
                self.assertTrue(found)
                self.assertTrue(found[0].startswith(f"{name}:{line}: "), found)

    def test_names_in_code_are_no_texts(self) -> None:
        for name, text in (
            ("a.cpp", "int nobody = settle(who);\n"),
            ("a.cpp", '#include "nobody.h"\nchar a = \'"\';\nint anybody;\n'),
            ("a.cpp", "// The account `nobody` owns it.\n"),
            ("a.py", "nobody = 1\ndef nobody_asks(): pass\n"),
            ("a.json", '{"a": "nobody"}\n'),
        ):
            with self.subTest(text):
                self.assertEqual(check_language.problems_of(name, text), [])

    def test_doc_comments_begin_with_what_they_describe(self) -> None:
        for text in ("int a;  ///< Of the peer.\n", "/// What it costs.\nint a;\n"):
            with self.subTest(text):
                self.assertIn("begin with", check_language.problems_of("a.h", text)[0])
        for text in (
            "int a;  ///< Bytes of the peer.\n",
            "/// Offset of what it costs.\nint a;\n",
            "// What it costs is measured.\n",
        ):
            with self.subTest(text):
                self.assertEqual(check_language.problems_of("a.h", text), [])


if __name__ == "__main__":
    unittest.main()
