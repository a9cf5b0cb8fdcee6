#include "base/program/options.h"

#include <cstdlib>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

struct Fixture {
  std::string name = "x";
  std::uint64_t pool_size = 1 << 20;
  std::int64_t workers = 4;
  bool verbose = false;
  Duration deadline = std::chrono::milliseconds(50);
  std::vector<std::string> peers;
  std::ostringstream out;
  OptionTable table{"prog", "Does things."};

  Fixture() {
    table.text("name", name, "Its name.");
    table.bytes("pool-size", pool_size, 4096, std::uint64_t{1} << 40, "Memory.");
    table.integer("workers", workers, 1, 64, "Threads.");
    table.flag("verbose", verbose, "More lines.");
    table.duration("deadline", deadline, std::chrono::milliseconds(1), std::chrono::seconds(10),
                   "Patience.");
    table.list("peers", peers, "Others.");
    table.ignored("blockwise-alloc", false, "every allocation is blockwise.");
    table.ignored("shards", true, "there is one pool.");
  }
  ~Fixture() {
    ::unsetenv("PEGA_WORKERS");
    ::unsetenv("PEGA_POOL_SIZE");
  }
  Result<OptionTable::Next> parse(std::vector<const char*> words) {
    words.insert(words.begin(), "prog");
    return table.parse(static_cast<int>(words.size()), words.data(), out);
  }
};

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text) {
    const int fd = ::mkstemp(path_.data());
    REQUIRE(fd >= 0);
    ::close(fd);
    std::ofstream(path_) << text;
  }
  ~TemporaryFile() { ::unlink(path_.c_str()); }
  [[nodiscard]] const char* path() const { return path_.c_str(); }

 private:
  std::string path_ = "/tmp/pega-options-XXXXXX";
};

TEST_SUITE("OptionTable") {
  TEST_CASE("flags set their targets, absent ones keep the default") {
    Fixture f;
    REQUIRE(
        f.parse({"--pool-size", "1.5gb", "--verbose", "--deadline=2s", "--peers", "a,b"}).value() ==
        OptionTable::Next::kRun);
    CHECK(f.pool_size == 1536ULL << 20);
    CHECK(f.verbose);
    CHECK(f.deadline == std::chrono::seconds(2));
    CHECK(f.peers == std::vector<std::string>{"a", "b"});
    CHECK(f.workers == 4);
  }

  TEST_CASE("an option is given by each source, also with the value of its default") {
    const TemporaryFile file("workers = 4\n");
    Fixture f;
    ::setenv("PEGA_POOL_SIZE", std::to_string(f.pool_size).c_str(), 1);
    REQUIRE(f.parse({"--config", file.path(), "--name", f.name.c_str()}));
    CHECK(f.table.is_given("workers"));
    CHECK(f.table.is_given("pool-size"));
    CHECK(f.table.is_given("name"));
    CHECK_FALSE(f.table.is_given("deadline"));
    CHECK_FALSE(f.table.is_given("verbose"));
  }

  TEST_CASE("a flag beats the environment, which beats the file, which beats the default") {
    const TemporaryFile file("workers = 5\npool-size = 8kb\nname = \"from file\"\n");
    Fixture f;
    ::setenv("PEGA_WORKERS", "6", 1);
    ::setenv("PEGA_POOL_SIZE", "16kb", 1);
    REQUIRE(f.parse({"--config", file.path(), "--pool-size", "32kb"}));
    CHECK(f.name == "from file");
    CHECK(f.workers == 6);
    CHECK(f.pool_size == 32 << 10);
  }

  TEST_CASE("the error for an invalid value names the option, the value, its source and the fix") {
    Fixture f;
    CHECK(f.parse({"--workers", "99"}).error().detail ==
          "--workers (from the command line): 99 is not between 1 and 64");
    ::setenv("PEGA_POOL_SIZE", "30 parsec", 1);
    CHECK(f.parse({}).error().detail ==
          "--pool-size (from the environment variable PEGA_POOL_SIZE): \"30 parsec\": unknown unit "
          "\"parsec\"; use b, kb, mb, gb or tb");
  }

  TEST_CASE("an unknown flag, an unknown key in the file and a missing file are errors") {
    Fixture f;
    CHECK(f.parse({"--pool-sizes", "1"}).error().detail.find("--pool-sizes") != std::string::npos);
    const TemporaryFile file("wrkers = 5\n");
    CHECK(f.parse({"--config", file.path()}).error().detail.find("\"wrkers\"") !=
          std::string::npos);
    CHECK(f.parse({"--config", "/nonexistent/file"}).error().detail ==
          "--config /nonexistent/file: cannot be read: No such file or directory");
  }

  TEST_CASE("a size in a file may have a blank, and a list there has commas") {
    const TemporaryFile file("pool-size = 512 MiB\npeers = a:1,b:2\nname = two words\n");
    Fixture f;
    REQUIRE(f.parse({"--config", file.path()}));
    CHECK(f.pool_size == std::uint64_t{512} << 20);
    CHECK(f.peers == std::vector<std::string>{"a:1", "b:2"});
    CHECK(f.name == "two words");
  }

  TEST_CASE("the output of --print-options is a valid file of options") {
    Fixture f;
    REQUIRE(f.parse({"--pool-size", "2gb", "--verbose", "--deadline", "2s", "--peers", "a:1,b:2",
                     "--print-options"}));
    const TemporaryFile file(f.out.str());
    Fixture g;
    REQUIRE(g.parse({"--config", file.path()}));
    CHECK(g.pool_size == std::uint64_t{2} << 30);
    CHECK(g.verbose);
    CHECK(g.deadline == std::chrono::seconds(2));
    CHECK(g.peers == std::vector<std::string>{"a:1", "b:2"});
    CHECK(g.name == "x");
  }

  TEST_CASE("a directory is rejected as a file of options") {
    Fixture f;
    CHECK(f.parse({"--config", "/tmp"}).error().detail == "--config /tmp: it is a directory");
  }

  TEST_CASE("a word behind a value belongs to no option, and given twice the last value counts") {
    Fixture f;
    CHECK(f.parse({"--workers", "2", "stray"}).error().detail ==
          "\"stray\" belongs to no option; --help lists all options");
    CHECK(f.parse({"--nosuch=1", "--workers", "2"}).error().detail ==
          "unknown option --nosuch; --help lists all options");
    Fixture g;
    REQUIRE(g.parse({"--workers", "2", "--workers", "3"}));
    CHECK(g.workers == 3);
  }

  TEST_CASE("a time without a unit is rejected with an example that has one") {
    Fixture f;
    CHECK(f.parse({"--deadline", "5"}).error().detail ==
          "--deadline (from the command line): \"5\" has no unit; write for example 250ms, 2s or "
          "1m");
  }

  TEST_CASE("a flag without effect is accepted and reported") {
    Fixture f;
    REQUIRE(f.parse({"--blockwise-alloc", "--shards", "4", "--workers", "2"}));
    REQUIRE(f.table.ignored().size() == 2);
    CHECK(f.table.ignored()[0] ==
          "--blockwise-alloc has no effect: every allocation is blockwise.");
    CHECK(f.workers == 2);
  }

  TEST_CASE("--help, --version and --print-options print and exit") {
    Fixture f;
    CHECK(f.parse({"--help"}).value() == OptionTable::Next::kExit);
    CHECK(f.out.str().find("--pool-size") != std::string::npos);
    Fixture g;
    CHECK(g.parse({"--version"}).value() == OptionTable::Next::kExit);
    CHECK(g.out.str().find("prog ") == 0);
    Fixture h;
    CHECK(h.parse({"--print-options", "--workers", "7"}).value() == OptionTable::Next::kExit);
    CHECK(h.out.str().find("workers = 7  # command line") != std::string::npos);
  }
}

}  // namespace
}  // namespace pegaflow
