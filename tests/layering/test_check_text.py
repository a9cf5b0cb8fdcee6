"""tools/check_text.py refuses paths and hosts that mean something on one machine only."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

import check_text  # noqa: E402


class CheckTextTest(unittest.TestCase):
    def test_what_belongs_to_one_machine_is_refused(self) -> None:
        # Each is put together here, so that this file passes the check itself.
        for parts in (
            ("see /wo", "rk/main/dev"),
            ("cd /ro", "ot/.cache"),
            ("'/ho", "me/ada/src'"),
            ("/tm", "p/w/log"),
            ("--index", "-url https://example.org"),
            ("https://pypi.bank", ".internal/simple"),
            ("<<<<<", "<< HEAD"),
            ("a line ", " "),
        ):
            line = "".join(parts)
            with self.subTest(line):
                self.assertEqual(len(check_text.problems_of("x", line + "\n")), 1)

    def test_ordinary_text_passes(self) -> None:
        text = "src/work/units.h, {tmp}/work/x, /home/a/.cache/x, /run/pegaflow, network/root/x, https://docs.vllm.ai/x\n=======\n"
        self.assertEqual(check_text.problems_of("x", text), [])

    def test_a_link_that_leads_nowhere_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs").mkdir()
            (root / "STYLE.md").write_text("# A `header`, twice\n\n## Here\n\n## Here\n")
            text = (
                "# Here\n[a](../STYLE.md#a-header-twice) [a](../STYLE.md#here-1) [b](https://x.org/y.md)"
                " [c](#here) [d](gone.md) [e](../STYLE.md#gone) [f](#gone)\n"
                "```\n# No heading [g](gone.md)\n```\n[h](#no-heading-g)\n"
            )

            problems = check_text.dead_links(root, "docs/page.md", text)

        self.assertEqual(
            problems,
            [
                "docs/page.md: a link to the missing file gone.md",
                "docs/page.md: a link to the missing heading ../STYLE.md#gone",
                "docs/page.md: a link to the missing heading #gone",
                "docs/page.md: a link to the missing heading #no-heading-g",
            ],
        )

    def test_a_table_whose_lines_were_joined_is_refused(self) -> None:
        table = "| a | b |\n|---|---|\n| 1 | |\n\n   | c | |\n   |---|:--|\n"
        code = "1. x\n   ```\n   | a | |---|\n   ```\n"
        self.assertEqual(check_text.joined_tables("x.md", table + code), [])
        self.assertEqual(
            check_text.joined_tables("x.md", code + "   | a | b | |---|---| | 1 | 2 |\n"),
            ["x.md:5: the lines of a table are joined: | a | b | |---|---| | 1 | 2 |"],
        )

    def test_a_last_line_without_an_end_is_refused(self) -> None:
        self.assertEqual(len(check_text.problems_of("x", "one\ntwo")), 1)


if __name__ == "__main__":
    unittest.main()
