// A node that knows the secret and has what is asked for, but lies about its bytes. Whatever it
// says: not a byte of the pool changes but where a read of it is open, nothing of it is sealed, the
// engine is answered, and another owner's bytes come.
#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <string>

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "tests/fault/lying_node.h"
#include "tests/support/nodes.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPiece = kLyingPageBytes / 2;
/// Of the reader itself, and not of the liar: what lies beside the places that are read into.
constexpr std::uint64_t kOwn = 5001;
constexpr std::size_t kOwnBlocks = 48;

constexpr const char* kWhole = "pegaflow_fetch_blocks_total{result=\"whole\"}";

/// tests/fault/lying_node, a child of ours.
class LyingNode {
 public:
  LyingNode(const std::string& address, const std::string& secret, Lie lie)
      : log_(directory_.path() / "lies") {
    const UniqueFd output(
        ::open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, S_IRUSR | S_IWUSR));
    REQUIRE(output);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, output.get(), STDOUT_FILENO);
    std::array<std::string, 4> words{PEGA_LYING_NODE, address, secret,
                                     std::to_string(static_cast<int>(lie))};
    const std::array<char*, 5> arguments{words[0].data(), words[1].data(), words[2].data(),
                                         words[3].data(), nullptr};
    REQUIRE(::posix_spawn(&pid_, PEGA_LYING_NODE, &actions, nullptr, arguments.data(), environ) ==
            0);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~LyingNode() {
    ::kill(pid_, SIGKILL);
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  LyingNode(const LyingNode&) = delete;
  LyingNode& operator=(const LyingNode&) = delete;

  /// How often it has lied so far: a line each.
  [[nodiscard]] std::size_t lies() const { return std::filesystem::file_size(log_) / 5; }

 private:
  TemporaryDirectory directory_;
  std::filesystem::path log_;
  pid_t pid_ = -1;
};

/// Bytes of lies in the pool of a server, by the piece of 16.
std::size_t lies_in_pool(const ServerProcess& server) {
  std::array<std::byte, 16> lie{};
  for (std::size_t i = 0; i < lie.size(); ++i) lie[i] = lying_byte(i);
  std::size_t pools = 0;
  std::size_t found = 0;
  const std::filesystem::path descriptors = fmt::format("/proc/{}/fd", server.pid());
  for (const auto& entry : std::filesystem::directory_iterator(descriptors)) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    if (target.rfind("/memfd:", 0) != 0) continue;
    const UniqueFd pool(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status {};
    REQUIRE(::fstat(pool.get(), &status) == 0);
    const auto size = static_cast<std::size_t>(status.st_size);
    void* const mapped = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, pool.get(), 0);
    REQUIRE(mapped != MAP_FAILED);
    ++pools;
    for (std::size_t at = 0; at + lie.size() <= size; at += lie.size()) {
      const auto* const piece = static_cast<const std::byte*>(mapped) + at;
      if (std::memcmp(piece, lie.data(), lie.size()) == 0) found += lie.size();
    }
    ::munmap(mapped, size);
  }
  REQUIRE(pools > 0);
  return found;
}

/// The reader, a node that lies, which is asked first, and one that does not.
struct Cluster {
  explicit Cluster(Lie lie) : liar(at[0], secret, lie), own_engine(reader, kPiece, kOwnBlocks) {
    REQUIRE(own_engine.engine->save(numbers_from(kOwn, kOwnBlocks), blocks_from(0, kOwnBlocks))
                .blocks == kOwnBlocks);
  }

  /// Claims and loads what the liar says that it has; what comes is right. The count of what did.
  std::size_t load() {
    // Who was found lying is lost, and greeted again.
    REQUIRE(sees(reader, at[0]));
    REQUIRE(sees(reader, at[1]));
    const auto claimed =
        own_engine.engine->claim(numbers_from(kFirstLyingBlock, kLyingBlocks)).value();
    if (claimed.blocks == 0) return 0;
    return own_engine.load_and_check(claimed, kFirstLyingBlock).blocks;
  }
  void check_own_blocks() {
    const auto claimed = own_engine.engine->claim(numbers_from(kOwn, kOwnBlocks)).value();
    CHECK(claimed.blocks == kOwnBlocks);
    CHECK(claimed.coming == 0);
    CHECK(own_engine.load_and_check(claimed, kOwn).blocks == kOwnBlocks);
  }

  std::vector<std::string> at = node_addresses(3);
  TemporaryDirectory directory;
  std::string secret = secret_file(directory.path(), "one-secret-for-all-of-them");
  LyingNode liar;
  ServerProcess other{node_options(at[1], {}, {"--peer-secret-file", secret})};
  ServerProcess reader{node_options(at[2], {at[0], at[1]}, {"--peer-secret-file", secret})};
  EngineAt own_engine;
};

/// `in_place`: lies may lie where a read of them was open, and nowhere else.
void check_lie(Lie lie, bool in_place = false) {
  Cluster nodes(lie);

  CHECK(nodes.load() == 0);
  CHECK(nodes.reader.metric(kWhole) == 0);
  check_nothing_is_left(nodes.reader, 0);
  const std::size_t lies = nodes.liar.lies();
  CHECK(lies > 0);
  if (!in_place) CHECK(lies_in_pool(nodes.reader) == 0);
  nodes.check_own_blocks();

  // Greeted anew, the liar is asked first again, and then the other one.
  REQUIRE(nodes.reader.metric_becomes(
      fmt::format("pegaflow_peer_greetings_total{{peer=\"{}\"}}", nodes.at[0]), 2));
  EngineAt engine(nodes.other, kPiece, kLyingBlocks);
  REQUIRE(engine.engine
              ->save(numbers_from(kFirstLyingBlock, kLyingBlocks), blocks_from(0, kLyingBlocks))
              .blocks == kLyingBlocks);
  CHECK(nodes.load() == kLyingBlocks);
  CHECK(nodes.reader.metric(kWhole) == kLyingBlocks);
  CHECK(nodes.liar.lies() > lies);
  check_nothing_is_left(nodes.reader, 0);
  if (!in_place) CHECK(lies_in_pool(nodes.reader) == 0);
  nodes.check_own_blocks();
}

TEST_SUITE("a node that lies") {
  TEST_CASE("while it tells the truth it is believed") {
    Cluster nodes(Lie::kNone);

    CHECK(nodes.load() == kLyingBlocks);
    CHECK(nodes.reader.metric(kWhole) == kLyingBlocks);
    CHECK(nodes.liar.lies() == 0);
    check_nothing_is_left(nodes.reader, 0);
  }

  TEST_CASE("bytes for a question that nobody asked") { check_lie(Lie::kUnasked); }
  TEST_CASE("bytes under the place of another question") { check_lie(Lie::kOtherPlace); }
  TEST_CASE("bytes under a place that there is not") { check_lie(Lie::kBeyondPlaces); }
  TEST_CASE("more bytes than were asked for") { check_lie(Lie::kLonger); }
  TEST_CASE("fewer bytes than were asked for") { check_lie(Lie::kShorter); }
  TEST_CASE("other bytes than their checksum says") { check_lie(Lie::kOtherBytes, true); }
  TEST_CASE("an answer as an incarnation before") { check_lie(Lie::kOldLife); }
  TEST_CASE("an answer that it is another incarnation") { check_lie(Lie::kOldVerdict); }

  TEST_CASE("a second answer to what was answered: the first stands") {
    Cluster nodes(Lie::kTwice);

    (void)nodes.load();  // What came before the lie was found out is right.
    CHECK(nodes.liar.lies() > 0);
    CHECK(lies_in_pool(nodes.reader) == 0);
    check_nothing_is_left(nodes.reader, 0);
    nodes.check_own_blocks();
  }
}

}  // namespace
}  // namespace pegaflow::testing
