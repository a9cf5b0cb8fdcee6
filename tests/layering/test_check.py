"""The layering check refuses what it must: small trees, each with one thing wrong."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import check  # noqa: E402

# A tree in which everything is as it should be.
GOOD = {
    "base/error.h": "#include <tl/expected.hpp>\n#include <fmt/format.h>\n",
    "base/log.cpp": '#include "base/log.h"\n#include <spdlog/spdlog.h>\n',
    "base/log.h": '#include <string>\n#include "base/error.h"\n',
    "base/program/options.cpp": "#include <CLI/CLI.hpp>\n",
    "capnp/cache.capnp": "@0x1;\n",
    "capnp/wire/codec.h": '#include <capnp/message.h>\n#include "capnp/cache.capnp.h"\n',
    "transport/region.h": '#include "base/error.h"\n',
    "transport/device.h": '#include "base/error.h"\n',
    "transport/host/host_device.h": '#include "transport/device.h"\n',
    "engine/pool/pool.h": '#include <sys/mman.h>\n#include "base/error.h"\n',
    "client/cache_session.h": '#include "base/error.h"\n// kj::Promise stays inside\n',
    "client/connection.h": '#include <kj/async.h>\n#include "capnp/cache.capnp.h"\n',
    "client/cache_session.cpp": (
        '#include "client/cache_session.h"\n#include "client/connection.h"\n'
        '#include "transport/host/host_device.h"\n'
    ),
    "server/http.cpp": (
        "#include <kj/compat/http.h>\n#include <nlohmann/json.hpp>\n"
        '#include "engine/pool/pool.h"\n#include "version.h"\n'
    ),
    "pyclient/native.cpp": '#include <pybind11/pybind11.h>\n#include "client/cache_session.h"\n',
    "perf/main.cpp": '#include <kj/async.h>\n#include "server/options.h"\n',
    "server/options.h": "",
    "tests/unit/engine/pool_test.cpp": (
        '#include "engine/pool/pool.h"\n#include <doctest/doctest.h>\n'
    ),
}


class LayeringTest(unittest.TestCase):
    def problems(self, changes: dict[str, str]) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**GOOD, **changes}.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return check.problems_in(root)

    def test_the_good_tree_is_good(self) -> None:
        self.assertEqual(self.problems({}), [])

    def test_what_the_table_forbids_is_refused(self) -> None:
        forbidden = {
            "base": ("engine/pool/pool.h", "transport/region.h", "capnp/wire/codec.h"),
            "capnp": ("transport/device.h", "engine/pool/pool.h"),
            "transport": ("engine/pool/pool.h", "capnp/wire/codec.h", "client/connection.h"),
            "engine": ("transport/host/host_device.h", "transport/device.h", "capnp/wire/codec.h"),
            "client": ("engine/pool/pool.h", "server/options.h"),
            "server": ("client/connection.h", "perf/main.h"),
            "router": ("engine/pool/pool.h", "server/options.h"),
            "pyclient": ("capnp/wire/codec.h", "engine/pool/pool.h"),
            "perf": ("tests/unit/helper.h",),
        }
        for module, names in forbidden.items():
            for name in names:
                with self.subTest(f"{module} -> {name}"):
                    bad = f"{module}/bad.cpp"
                    found = self.problems({name: "", bad: f'\n#include "{name}"\n'})
                    self.assertEqual(found, [f'{bad}:2: {module} may not use "{name}"'])

    def test_a_part_that_uses_what_is_built_upon_it_is_refused(self) -> None:
        found = self.problems(
            {
                "engine/row.h": '#include "engine/table.h"\n',
                "engine/table.h": '#include "engine/list.h"\n',
                "engine/list.h": "",
                "engine/list.cpp": '#include "engine/list.h"\n#include "engine/row.h"\n',
            }
        )
        self.assertEqual(
            found,
            [
                "engine: a circle of includes: "
                "engine/list -> engine/row -> engine/table -> engine/list"
            ],
        )

    def test_a_class_with_a_private_header_is_no_circle(self) -> None:
        good = {
            "engine/store.h": "",
            "engine/store_impl.h": '#include "engine/store.h"\n',
            "engine/store.cpp": '#include "engine/store.h"\n#include "engine/store_impl.h"\n',
            "engine/store_read.cpp": '#include "engine/store_impl.h"\n',
        }
        self.assertEqual(self.problems(good), [])

    def test_a_backend_does_not_know_its_sibling(self) -> None:
        bad = {"transport/cuda/copy.cpp": '#include "transport/host/host_device.h"\n'}
        self.assertEqual(len(self.problems(bad)), 1)

    def test_foreign_libraries_stay_at_home(self) -> None:
        strays = {
            "engine/bad.cpp": ("kj/async.h", "capnp/message.h", "ucp/api/ucp.h", "liburing.h"),
            "base/bad.cpp": ("CLI/CLI.hpp", "spdlog/spdlog.h", "nlohmann/json.hpp", "kj/common.h"),
            "client/bad.cpp": ("kj/compat/http.h", "Python.h", "cuda_runtime_api.h", "xxhash.h"),
            "server/bad.cpp": ("pybind11/pybind11.h", "doctest/doctest.h", "tl/expected.hpp"),
            "pyclient/bad.cpp": ("kj/async.h", "boost/asio.hpp"),
            "tests/unit/bad.cpp": ("pybind11/embed.h", "CLI/CLI.hpp"),
            "transport/host/bad.cpp": ("cuda.h", "infiniband/verbs.h"),
        }
        for bad, names in strays.items():
            for name in names:
                with self.subTest(f"{bad} -> {name}"):
                    found = self.problems({bad: f"#include <{name}>\n"})
                    self.assertEqual(len(found), 1, found)
                    self.assertIn("may be named in", found[0])

    def test_an_unknown_library_is_refused_until_it_has_a_home(self) -> None:
        (found,) = self.problems({"base/bad.cpp": "#include <absl/strings/str_cat.h>\n"})
        self.assertIn("unknown library", found)

    def test_system_headers_are_free(self) -> None:
        self.assertEqual(
            self.problems({"base/x.cpp": "#include <unistd.h>\n#include <linux/memfd.h>\n"}), []
        )

    def test_ours_is_quoted_from_the_root_and_exists(self) -> None:
        for line in ('"pool.h"', "<base/error.h>", '"engine/gone.h"', '"fmt/format.h"'):
            with self.subTest(line):
                self.assertEqual(len(self.problems({"engine/bad.cpp": f"#include {line}\n"})), 1)

    def test_no_kj_in_what_pyclient_sees_of_the_client(self) -> None:
        # By an include, by a name, and one header further down.
        hidden = (
            {"client/cache_session.h": "#include <kj/async.h>\n"},
            {"client/cache_session.h": "namespace kj { class X; }\nkj::Promise<void> f();\n"},
            {"client/cache_session.h": '#include "client/connection.h"\n'},
            {
                "pyclient/native.cpp": '#include "client/other.h"\n',
                "client/other.h": '#include "client/connection.h"\n',
            },
        )
        for changes in hidden:
            with self.subTest(changes):
                found = self.problems(changes)
                self.assertTrue(found)
                self.assertIn("a public header of the client names", found[0])

    def test_a_folder_may_not_use_one_that_is_built_upon_it(self) -> None:
        lib, main = "perf/lib/figures.h", "perf/gpu/gpu.h"
        self.assertEqual(self.problems({lib: "", main: f'#include "{lib}"\n'}), [])
        found = self.problems({lib: f'#include "{main}"\n', main: ""})
        self.assertIn(f'{lib}:1: perf/lib may not use "{main}"', found)

    def test_a_folder_that_the_table_does_not_name_is_refused(self) -> None:
        found = self.problems({"perf/odd/odd.h": ""})
        self.assertIn("perf/odd/ is missing in FLOORS", found[0])

    def test_a_package_for_all_engines_may_not_import_one(self) -> None:
        name = "pyclient/pegaflow/engine/a.py"
        self.assertEqual(self.problems({name: "from pegaflow.engine import b\nimport os\n"}), [])
        for text in (
            "import os\nimport vllm",
            "def run():\n    from pegaflow.vllm import x",
            "import os\nfrom torch.cuda import y",
        ):
            with self.subTest(text):
                found = self.problems({name: text})
                self.assertIn(f"{name}:2: pyclient/pegaflow/engine/ may not import ", found[0])

    def test_a_name_that_another_file_no_longer_has_is_refused(self) -> None:
        good = {
            "pyclient/pegaflow/__init__.py": "",
            "pyclient/pegaflow/wait.py": "import time\nif True:\n    LIMIT = 1\ndef wait(): ...\n",
            "tests/support/engine.py": "class Engine: ...\n",
            "demo/__init__.py": "",
            "demo/claim.py": (
                "from pegaflow import wait as w\nfrom .other import Claim\n"
                "def run(claim): return w.wait, w.LIMIT, claim.not_of_a_module\n"
            ),
            "demo/other.py": "import os\nfrom pegaflow.wait import LIMIT, wait\nClaim = os.sep\n",
            "tests/integration/a_test.py": (
                "import engine\nfrom engine import Engine\nfrom torch import cuda\n"
                "def of(other): return other.Engine(engine.Engine)\n"
            ),
            "tests/python/open.py": "def __getattr__(name): return name\n",
            "tests/python/user.py": "from open import anything\n",
        }
        self.assertEqual(self.problems(good), [])
        self.assertEqual(
            self.problems(good | {"demo/other.py": "Claim =\n"}),
            ["demo/other.py:1: not Python: invalid syntax"],
        )
        moved = good | {"pyclient/pegaflow/wait.py": "", "tests/support/engine.py": "import os\n"}
        self.assertEqual(
            self.problems(moved),
            [
                "demo/claim.py:3: w has no name wait",
                "demo/claim.py:3: w has no name LIMIT",
                "demo/other.py:2: pegaflow.wait has no name LIMIT",
                "demo/other.py:2: pegaflow.wait has no name wait",
                "tests/integration/a_test.py:2: engine has no name Engine",
                "tests/integration/a_test.py:4: engine has no name Engine",
            ],
        )

    def test_a_folder_with_too_many_files_is_refused(self) -> None:
        files = {f"perf/lib/f{i}.h": "" for i in range(check.table.MOST_FILES)}
        self.assertEqual(self.problems(files), [])
        found = self.problems({**files, "perf/lib/one_more.cpp": ""})
        self.assertEqual(found, ["perf/lib/: 26 source files, more than 25"])

    def test_a_chain_of_includes_that_is_too_long_is_refused(self) -> None:
        most = check.table.MOST_DEPTH
        chain = {f"perf/lib/f{i}.h": f'#include "perf/lib/f{i + 1}.h"\n' for i in range(most)}
        chain[f"perf/lib/f{most}.h"] = ""
        self.assertEqual(self.problems(chain), [])
        found = self.problems({**chain, "perf/lib/top.cpp": '#include "perf/lib/f0.h"\n'})
        self.assertIn("a chain of more than 9 includes: perf/lib/top.cpp -> ", found[0])

    def test_a_long_function_is_refused(self) -> None:
        # Each begins with its own line and has one for each `step` and its end.
        forms = {
            "perf/lib/a.cpp": ("Result<int> Class::name(int a) const {\n", "name"),
            "perf/lib/b.cpp": ("namespace pegaflow {\nint name() {\n", "name"),
            "perf/lib/c.h": ("class Class {\n bool operator==(int) const {\n", "operator_"),
            "perf/lib/d.cpp": ("Class::Class(int a)\n    : a_{a}, b_(f({1})) {\n", "Class::Class"),
            "perf/lib/e.cpp": ("const auto name = [](int a) {\n", "lambda"),
            "perf/lib/f.cpp": ('constexpr char kText[] = "{";  // {\nint name() {\n', "name"),
            "demo/g.py": ("def name(\n) -> None:\n", "name"),
        }
        steps = {".py": "    step()\n"}
        for path, (head, _) in forms.items():
            step = steps.get(path[-3:], "  step();\n")
            own = head.count("\n") - ("namespace" in head or "class " in head or "kText" in head)
            for lines in (check.table.MOST_LINES, check.table.MOST_LINES + 1):
                has_brace = not path.endswith(".py")
                end = "}\n" * (1 + ("namespace" in head or "class " in head)) if has_brace else ""
                text = head + step * (lines - own - has_brace) + end
                with self.subTest(path, lines=lines):
                    found = self.problems({path: text})
                    if lines == check.table.MOST_LINES:
                        self.assertEqual(found, [])
                    else:
                        self.assertEqual(len(found), 1, found)
                        self.assertIn(f"{forms[path][1]} has 61 lines, more than 60", found[0])

    def test_an_option_table_and_a_test_may_be_long(self) -> None:
        text = "void ServerOptions::declare() {\n" + "  step();\n" * 100 + "}\n"
        allowed = {"server/options.cpp": text, "tests/unit/long_test.cpp": text}
        self.assertEqual(self.problems(allowed), [])
        self.assertEqual(len(self.problems({"server/other.cpp": text})), 1)

    def test_no_function_is_missed_beside_initializers(self) -> None:
        found = check.functions.cpp_functions(
            "#define MACRO() {\n"
            "const std::array<int, 2> kBoth{1, 2};\n"
            "const Options kOptions = {.a = f(1), .b = {2}};\n"
            "struct Plan {\n  int a{1};\n  Plan() : a{2} {}\n  ~Plan() { stop(); }\n};\n"
            "template <typename T>\nrequires(sizeof(T) > 1)\nauto first(T&& a) -> T {\n"
            "  if (a == '}') return {};\n  return R\"({)\" + 1'000;\n}\n"
            'extern "C" {\nint second(int a = f({1})) { return a; }\n}\n'
            "enum class Kind : int { kA, kB };\n"
            "MODULE(name, module) {\n}\n"
        )
        self.assertEqual(
            [(each.name, each.line, each.lines) for each in found],
            [
                ("Plan", 6, 1),
                ("~Plan", 7, 1),
                ("first", 9, 6),
                ("second", 16, 1),
                ("MODULE", 19, 2),
            ],
        )

    def test_a_long_file_is_a_warning_only(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "base").mkdir()
            (root / "base" / "long.cpp").write_text("//\n" * 701)
            done = subprocess.run(
                [sys.executable, str(HERE / "check.py"), str(root)],
                capture_output=True,
                text=True,
                check=False,
            )
        self.assertEqual(done.returncode, 0)
        self.assertIn("warning: base/long.cpp: 701 lines", done.stdout)

    def test_an_empty_tree_is_no_pass(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, str(HERE / "check.py"), folder], capture_output=True, check=False
            )
        self.assertEqual(done.returncode, 1)


if __name__ == "__main__":
    unittest.main()
