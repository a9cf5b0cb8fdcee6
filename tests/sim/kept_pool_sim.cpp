// Kills a process at random instructions of the block store, and compares what the next one finds.
//
// PEGA_KEPT_KILLS sets the number of kills (default 150), PEGA_TEST_SEED repeats the choices.
#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/assert.h"
#include "engine/block_store.h"
#include "engine/frames/block_listener.h"
#include "engine/kept/kept_tables.h"
#include "tests/support/kept_copy.h"
#include "tests/support/seed.h"

namespace pegaflow::sim {
namespace {

using engine::BlockStore;
using engine::EvictionKind;
using engine::FrameIndex;
using engine::KeptTables;
using engine::SpaceId;

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kFrames = 96;
constexpr std::uint64_t kKeys = 200;
/// Two shapes: of one page, and of three. A generation has one of them.
constexpr std::array<std::uint64_t, 2> kPages = {1, 3};
constexpr std::size_t kSpaces = 2;
constexpr std::size_t kMostRows = kFrames;
/// Operations of a process that is not killed earlier.
constexpr std::uint32_t kOperations = 400;
/// The exit status of a skipped test.
constexpr int kSkipped = 77;
/// Instructions of an operation in which it is killed: most have fewer.
constexpr double kMostInstructions = 30'000;

engine::Shape shape_of(std::size_t place) { return {{{.page_bytes = kPages[place] * kPage}}}; }

BlockKey key_of(std::uint64_t number) {
  BlockKey key;
  const std::uint64_t mixed = (number + 1) * 0x9E3779B97F4A7C15ULL;
  std::memcpy(key.bytes.data(), &mixed, sizeof mixed);
  std::memcpy(key.bytes.data() + 16, &number, sizeof number);
  return key;
}

/// The knowledge of the world, in memory that all processes share. Each member is written before or
/// after the call of the store that it is about, so that it never claims more than what holds.
struct Oracle {
  struct Name {
    std::uint32_t space = 0;   ///< The generation whose blocks may be found.
    std::uint32_t former = 0;  ///< While a reset is in progress: the one before it.
  };
  std::array<Name, kSpaces> names;
  std::uint32_t operations = 0;
  std::uint32_t target = 0;  ///< The operation before which the process stops itself.
  /// By place of the name and key: the generation in which it is certainly present; 0: none.
  std::array<std::array<std::uint32_t, kKeys>, kSpaces> present;
  /// By row: whether a client may write or read it.
  std::array<std::uint8_t, kMostRows> touched;
  /// By row: the generation and the key whose bytes are in the pages.
  struct Stamp {
    std::uint32_t space = 0;
    std::uint64_t key = 0;
  };
  std::array<Stamp, kMostRows> bytes;
};

/// Clears what the store drops, before it does.
class Forgetful final : public engine::BlockListener {
 public:
  explicit Forgetful(Oracle& oracle) : oracle_(oracle) {}
  void sealed(FrameIndex, From) override {}
  void dropped(FrameIndex frame, bool) override {
    const Oracle::Stamp& stamp = oracle_.bytes[frame];
    for (auto& of_name : oracle_.present) {
      if (of_name[stamp.key] == stamp.space) of_name[stamp.key] = 0;
    }
  }

 private:
  Oracle& oracle_;
};

[[noreturn]] void wrong(const std::string& what) {
  fmt::print(stderr, "kept_pool: {}\n", what);
  std::abort();
}

struct Names {
  std::array<std::uint32_t, kSpaces> spaces;
  std::array<std::uint32_t, kSpaces> shapes;
};

/// One process that has the pool.
class Process {
 public:
  Process(int tables, Oracle& oracle, std::uint64_t seed)
      : oracle_(oracle), random_(seed), tables_(open(tables)) {
    auto made = BlockStore::create(
        {.pool_bytes = kFrames * kPage,
         .instance_share = 1,
         .server_share = 1,
         .fetch_share = 1,
         .save_reserve = 0,
         .eviction = seed % 2 == 0 ? EvictionKind::kWeightedLru : EvictionKind::kAdaptive,
         .kept = &tables_,
         .slice_blocks = 8},
        clock_);
    if (!made) wrong(made.error().detail);
    store_ = std::move(*made);
    adopt();
    forgetful_ = std::make_unique<Forgetful>(oracle_);
    store_->set_listener(forgetful_.get());
    holder_ = store_->add_holder(1, Id128{1, 1});
  }

  /// Compares what was adopted with the oracle.
  void check() {
    if (const auto checked = store_->check(); !checked) wrong(checked.error().detail);
    for (std::size_t name = 0; name < kSpaces; ++name) check_name(name);
    // What a client may touch is neither free nor evictable: fill the pool to see it.
    const auto blocks = static_cast<std::size_t>(kFrames);
    std::vector<BlockKey> fresh;
    for (std::size_t i = 0; i < blocks; ++i) fresh.push_back(key_of(1'000'000 + i));
    const SpaceId space = store_->make_space(shapes_[0]);
    const auto got = store_->reserve(holder_, space, JobId{{7, 7}, 1}, 0, fresh);
    if (!got) wrong(got.error().detail);
    for (const FrameIndex frame : *got) {
      if (frame != engine::kNoFrame && oracle_.touched[frame] != 0) {
        wrong(fmt::format("row {} is given out, and a client may touch it", frame));
      }
    }
  }

  void run() {
    for (std::uint32_t i = 0; i < kOperations; ++i) {
      if (++oracle_.operations == oracle_.target) ::raise(SIGSTOP);
      step();
    }
  }

 private:
  static KeptTables open(int fd) {
    auto opened = KeptTables::open(UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)));
    if (!opened) wrong(opened.error().detail);
    return std::move(*opened);
  }

  void adopt() {
    Names names{};
    const auto record = tables_.read(KeptTables::Record::kNames);
    std::vector<BlockStore::FormerShape> shapes;
    std::vector<BlockStore::FormerSpace> spaces;
    if (record) {
      std::memcpy(&names, record->data(), sizeof names);
      for (std::size_t i = 0; i < kSpaces; ++i) {
        shapes.push_back({names.shapes[i], shape_of(i)});
        spaces.push_back({SpaceId{names.spaces[i]}, names.shapes[i]});
      }
    }
    const auto adopted = store_->adopt(shapes, spaces);
    if (!adopted) wrong(adopted.error().detail);
    former_ = adopted->former;
    for (std::size_t i = 0; i < kSpaces; ++i) {
      shapes_[i] =
          record ? engine::ShapeId{names.shapes[i]} : store_->add_shape(shape_of(i)).value();
      if (record) {
        if (names.spaces[i] != oracle_.names[i].space &&
            names.spaces[i] != oracle_.names[i].former) {
          wrong("the record names a generation that has ended");
        }
      } else {
        names.spaces[i] = static_cast<std::uint32_t>(store_->make_space(shapes_[i]));
      }
      oracle_.names[i] = {.space = names.spaces[i], .former = 0};
    }
    write_names();
    while (store_->work()) {
    }
  }

  void write_names() {
    Names names{};
    for (std::size_t i = 0; i < kSpaces; ++i) {
      names.spaces[i] = oracle_.names[i].space;
      names.shapes[i] = static_cast<std::uint32_t>(shapes_[i]);
    }
    if (!tables_.write(KeptTables::Record::kNames, std::as_bytes(std::span(&names, 1)))) {
      wrong("the names cannot be written");
    }
  }

  void check_name(std::size_t name) {
    const SpaceId space{oracle_.names[name].space};
    for (std::uint64_t number = 0; number < kKeys; ++number) {
      const BlockKey key = key_of(number);
      const bool is_found = store_->present(space, std::span(&key, 1)) == 1;
      if (oracle_.present[name][number] == oracle_.names[name].space && !is_found) {
        wrong(fmt::format("key {} of name {} is lost", number, name));
      }
      if (!is_found) continue;
      if (store_->claim(holder_, space, std::span(&key, 1), Id128{5, number + 1}) != 1) {
        wrong("a block that is present cannot be claimed");
      }
      const auto frame = store_->claimed_frame(Id128{5, number + 1}, 0);
      if (!frame) wrong("a claimed block has no frame");
      const Oracle::Stamp& stamp = oracle_.bytes[*frame];
      if (stamp.space != oracle_.names[name].space || stamp.key != number) {
        wrong(fmt::format("row {} has the bytes of key {} in {}, and is found as {} in {}", *frame,
                          stamp.key, stamp.space, number, oracle_.names[name].space));
      }
      store_->unclaim(holder_, Id128{5, number + 1});
    }
  }

  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }

  void step() {
    const std::size_t name = below(kSpaces);
    switch (below(12)) {
      case 0:
        return end_former();
      case 1:
        return below(4) == 0 ? reset(name) : release();
      case 2:
      case 3:
        return read(name);
      case 4:
        return release();
      case 5:
        return fetch(name);
      case 6:
        return end_fetch();
      case 7:
        store_->work();
        return;
      case 8:
        return end_save(below(4) != 0);
      default:
        return save(name);
    }
  }

  void end_former() {
    if (!former_ || below(3) != 0) return;
    // The clients of the former process have ended their copies. Those of this one go on.
    for (std::size_t row = 0; row < kMostRows; ++row) {
      if (!is_own(static_cast<FrameIndex>(row))) oracle_.touched[row] = 0;
    }
    store_->holder_gone(*std::exchange(former_, std::nullopt));
  }

  [[nodiscard]] bool is_own(FrameIndex row) const {
    const auto has = [row](const std::vector<FrameIndex>& frames) {
      return std::find(frames.begin(), frames.end(), row) != frames.end();
    };
    return std::any_of(saves_.begin(), saves_.end(),
                       [&](const Save& each) { return has(each.frames); }) ||
           std::any_of(reads_.begin(), reads_.end(),
                       [&](const Read& each) { return has(each.frames); });
  }

  std::vector<std::uint64_t> draw_keys() {
    const std::uint64_t first = below(kKeys);
    const std::uint64_t count = std::min<std::uint64_t>(1 + below(6), kKeys - first);
    std::vector<std::uint64_t> numbers;
    for (std::uint64_t i = 0; i < count; ++i) numbers.push_back(first + i);
    return numbers;
  }
  static std::vector<BlockKey> keys_of(const std::vector<std::uint64_t>& numbers) {
    std::vector<BlockKey> keys;
    for (const std::uint64_t number : numbers) keys.push_back(key_of(number));
    return keys;
  }

  void save(std::size_t name) {
    if (saves_.size() > 4) return end_save(true);
    const std::vector<std::uint64_t> numbers = draw_keys();
    Save save{.name = name, .space = oracle_.names[name].space, .job = {{1, 1}, ++last_job_}};
    const auto frames =
        store_->reserve(holder_, SpaceId{save.space}, save.job, 0, keys_of(numbers));
    if (!frames) return;
    for (std::size_t i = 0; i < frames->size(); ++i) {
      const FrameIndex frame = (*frames)[i];
      if (frame == engine::kNoFrame) continue;
      // The client has the answer, and writes.
      oracle_.touched[frame] = 1;
      oracle_.bytes[frame] = {.space = save.space, .key = numbers[i]};
      save.frames.push_back(frame);
      save.keys.push_back(numbers[i]);
    }
    if (!save.frames.empty()) saves_.push_back(std::move(save));
  }

  void end_save(bool publishes) {
    if (saves_.empty()) return;
    const std::size_t place = below(saves_.size());
    Save save = std::move(saves_[place]);
    saves_.erase(saves_.begin() + static_cast<std::ptrdiff_t>(place));
    for (const FrameIndex frame : save.frames) oracle_.touched[frame] = 0;
    if (!publishes) return store_->abandon(holder_, save.job);
    if (!store_->publish(holder_, save.job)) return;
    for (std::size_t i = 0; i < save.keys.size(); ++i) {
      if (store_->resident(save.frames[i])) oracle_.present[save.name][save.keys[i]] = save.space;
    }
  }

  void read(std::size_t name) {
    if (reads_.size() > 3) return release();
    const std::vector<std::uint64_t> numbers = draw_keys();
    const Id128 token{3, ++last_job_};
    const auto claimed =
        store_->claim(holder_, SpaceId{oracle_.names[name].space}, keys_of(numbers), token);
    if (!claimed || *claimed == 0) return;
    const auto pages = store_->open(holder_, token, 0, *claimed, engine::PinId{last_job_});
    if (pages) {
      for (const FrameIndex frame : pages->frames) oracle_.touched[frame] = 1;
      reads_.push_back({engine::PinId{last_job_}, pages->frames});
    }
    store_->unclaim(holder_, token);
  }

  void release() {
    if (reads_.empty()) return;
    const Read read = std::move(reads_.back());
    reads_.pop_back();
    for (const FrameIndex frame : read.frames) {
      if (!is_own(frame)) oracle_.touched[frame] = 0;
    }
    store_->release(holder_, read.pin);
  }

  void fetch(std::size_t name) {
    if (!fetched_.empty()) return end_fetch();
    const std::vector<std::uint64_t> numbers = draw_keys();
    const Id128 token{4, ++last_job_};
    const auto made = store_->fetch(holder_, SpaceId{oracle_.names[name].space}, token, 0,
                                    keys_of(numbers), numbers.size());
    if (!made) return;
    fetch_token_ = token;
    for (const auto& frame : made->frames) {
      oracle_.bytes[frame.frame] = {.space = oracle_.names[name].space,
                                    .key = numbers[frame.place]};
      fetched_.push_back(frame.frame);
    }
  }

  void end_fetch() {
    if (fetched_.empty()) return;
    const FrameIndex frame = fetched_.back();
    fetched_.pop_back();
    if (below(3) == 0) {
      store_->give_up(frame);
      store_->quiesced(frame);
    } else {
      store_->fetched(frame);
    }
    if (fetched_.empty()) store_->unclaim(holder_, fetch_token_);
  }

  void reset(std::size_t name) {
    for (auto& each : oracle_.present[name]) each = 0;
    const std::uint32_t former = oracle_.names[name].space;
    oracle_.names[name].former = former;
    const SpaceId next = store_->make_space(shapes_[name], SpaceId{former});
    store_->retire_space(SpaceId{former});
    oracle_.names[name].space = static_cast<std::uint32_t>(next);
    write_names();
    oracle_.names[name].former = 0;  // The reset is answered: the former one is never found again.
  }

  struct Save {
    std::size_t name = 0;
    std::uint32_t space = 0;
    JobId job;
    std::vector<FrameIndex> frames{};
    std::vector<std::uint64_t> keys{};
  };
  struct Read {
    engine::PinId pin{};
    std::vector<FrameIndex> frames;
  };

  Oracle& oracle_;
  std::mt19937_64 random_;
  ManualClock clock_;
  KeptTables tables_;
  std::unique_ptr<BlockStore> store_;
  std::unique_ptr<Forgetful> forgetful_;
  std::array<engine::ShapeId, kSpaces> shapes_{};
  engine::HolderId holder_{};
  std::optional<engine::HolderId> former_;
  std::uint64_t last_job_ = 0;
  std::vector<Save> saves_;
  std::vector<Read> reads_;
  std::vector<FrameIndex> fetched_;
  Id128 fetch_token_;
};

/// Runs `work` in a child until it ends by itself, or was stopped and executed `instructions` more.
/// Returns whether it was killed.
template <typename Work>
bool run_and_kill(Work&& work, std::uint64_t instructions) {
  const pid_t child = ::fork();
  if (child < 0) wrong("fork");
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(kSkipped);
    work();
    ::_exit(0);
  }
  int status = 0;
  if (::waitpid(child, &status, 0) != child) wrong("waitpid");
  if (WIFEXITED(status) && WEXITSTATUS(status) == kSkipped) {
    fmt::print("skipped: this user may not trace a process\n");
    std::exit(kSkipped);
  }
  if (WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP) {
    for (std::uint64_t i = 0; i < instructions; ++i) {
      if (::ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) wrong("PTRACE_SINGLESTEP");
      if (::waitpid(child, &status, 0) != child) wrong("waitpid");
      if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) break;
    }
    if (WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return true;
    }
    // It continues: it was stopped by another signal, which is an error of its own.
    if (WIFSTOPPED(status)) ::kill(child, SIGKILL);
    if (WIFSTOPPED(status)) ::waitpid(child, &status, 0);
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    wrong("a process failed; its message is above");
  return false;
}

int run() {
  const char* const wanted = std::getenv("PEGA_KEPT_KILLS");
  const std::uint64_t kills = wanted == nullptr ? 150 : std::strtoull(wanted, nullptr, 10);
  std::mt19937_64 random(testing::seed());
  const SteadyClock clock;
  std::uint64_t killed = 0;
  std::uint64_t ended = 0;
  while (killed < kills) {
    auto tables = KeptTables::create({.pool = {1, 1}, .pool_bytes = kFrames * kPage}, clock);
    if (!tables) wrong(tables.error().detail);
    void* const shared =
        ::mmap(nullptr, sizeof(Oracle), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    auto& oracle = *new (shared) Oracle();
    // The processes of one pool, each after the end of the one before.
    for (int process = 0; process < 10 && killed < kills; ++process) {
      oracle.operations = 0;
      oracle.target = static_cast<std::uint32_t>(1 + random() % kOperations);
      const double share = std::uniform_real_distribution<double>(0, 1)(random);
      const auto instructions = static_cast<std::uint64_t>(std::pow(kMostInstructions, share));
      const std::uint64_t seed = random();
      const bool was_killed =
          run_and_kill([&]() { Process(tables->fd(), oracle, seed).run(); }, instructions);
      ++(was_killed ? killed : ended);
      // In a process of its own: it changes the pool, which goes on as it was left.
      run_and_kill(
          [&]() {
            Oracle copy = oracle;
            Process(testing::copy_of(tables->fd()).get(), copy, seed).check();
          },
          0);
    }
    ::munmap(shared, sizeof(Oracle));
  }
  fmt::print("{} kills at single instructions, {} processes ended by themselves\n", killed, ended);
  return 0;
}

}  // namespace
}  // namespace pegaflow::sim

int main() { return pegaflow::sim::run(); }
