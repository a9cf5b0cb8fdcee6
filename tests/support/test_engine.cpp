#include "tests/support/test_engine.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

namespace pegaflow::testing {
namespace {

[[noreturn]] void hangs(const std::string& what) { throw std::runtime_error("hangs: " + what); }

template <typename T>
T value_of(Result<T>&& result) {
  if (!result) throw std::runtime_error(to_string(result.error()));
  return std::move(*result);
}

}  // namespace

BlockKey numbered_key(std::uint64_t n) {
  BlockKey key;
  // Uniform, as an engine's hash is.
  fill_page(key.bytes.data(), key.bytes.size(), n);
  return key;
}

std::vector<BlockKey> numbered_keys(const std::vector<std::uint64_t>& numbers) {
  std::vector<BlockKey> keys;
  keys.reserve(numbers.size());
  for (const std::uint64_t n : numbers) keys.push_back(numbered_key(n));
  return keys;
}

std::vector<std::uint64_t> numbers_from(std::uint64_t first, std::size_t count) {
  std::vector<std::uint64_t> numbers(count);
  for (std::uint64_t& number : numbers) number = first++;
  return numbers;
}

std::vector<std::uint32_t> blocks_from(std::uint32_t first, std::size_t count) {
  std::vector<std::uint32_t> blocks(count);
  std::iota(blocks.begin(), blocks.end(), first);
  return blocks;
}

std::size_t cut_connections(const std::string& socket_path) {
  std::size_t cut = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename().string());
    sockaddr_un peer{};
    socklen_t size = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
    if (peer.sun_family != AF_UNIX || socket_path != peer.sun_path) continue;
    if (::shutdown(fd, SHUT_RDWR) == 0) ++cut;
  }
  return cut;
}

LinkOptions patient_link() {
  LinkOptions link;
  link.connect_deadline = link.lookup_deadline = link.open_deadline = link.reserve_deadline = kHang;
  return link;
}

Mover::Options patient_mover() {
  Mover::Options mover;
  mover.link = patient_link();
  mover.load_patience = kHang;
  return mover;
}

TestEngine::TestEngine(Options options, EngineMemory& memory, Device& device) : memory_(memory) {
  const auto complete = [&](LinkOptions& link) {
    link.socket_path = options.socket;
    link.instance = options.instance;
    link.build = "test";
  };
  complete(options.session);
  complete(options.mover.link);
  options.mover.factors = {{"model", options.model}};
  session_ = value_of(CacheSession::start(options.session));
  mover_ = value_of(Mover::start(options.mover, memory.layout(), device));
}

void TestEngine::wait_ready() {
  if (!mover_->wait_for(LinkState::kReady, kHang)) {
    hangs("the mover is not ready: " + mover_->status().detail);
  }
  if (!session_->wait_for(LinkState::kReady, kHang)) {
    hangs("the session is not ready: " + session_->status().detail);
  }
}

Result<void> TestEngine::start_save(std::uint64_t job, const std::vector<std::uint64_t>& numbers,
                                    const std::vector<std::uint32_t>& blocks) {
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    memory_.fill(blocks[i], seed_of(numbers[i], weights));
  }
  return mover_->save(scheduler, job, numbered_keys(numbers), blocks, Device::Event::kNow);
}

Mover::Finished TestEngine::save(const std::vector<std::uint64_t>& numbers,
                                 const std::vector<std::uint32_t>& blocks) {
  if (Result<void> started = start_save(++last_job, numbers, blocks); !started) {
    throw std::runtime_error(to_string(started.error()));
  }
  return next_finished();
}

Result<CacheSession::Answer> TestEngine::lookup(const std::vector<std::uint64_t>& numbers) {
  return session_->lookup(numbered_keys(numbers)).and_then([this](CacheSession::Ticket ticket) {
    auto answer = session_->take(ticket, kHang);
    if (!answer) hangs("a lookup is not answered");
    return std::move(*answer);
  });
}

Result<CacheSession::Answer> TestEngine::claim(const std::vector<std::uint64_t>& numbers) {
  return session_->claim(numbered_keys(numbers)).and_then([this](CacheSession::Ticket ticket) {
    auto answer = session_->take(ticket, kHang);
    if (!answer) hangs("a claim is not answered");
    return std::move(*answer);
  });
}

Mover::Finished TestEngine::load(const Id128& token, const std::vector<std::uint32_t>& blocks,
                                 std::size_t first) {
  if (Result<void> started = mover_->load(++last_job, token, first, blocks); !started) {
    throw std::runtime_error(to_string(started.error()));
  }
  return next_finished();
}

Mover::Finished TestEngine::next_finished() {
  while (finished_.empty()) {
    pollfd wanted{mover_->finished_fd(), POLLIN, 0};
    const int limit_ms = static_cast<int>(std::chrono::milliseconds(kHang).count());
    if (::poll(&wanted, 1, limit_ms) != 1) hangs("a job is not reported");
    finished_ = mover_->take_finished();
  }
  Mover::Finished first = std::move(finished_.front());
  finished_.erase(finished_.begin());
  return first;
}

std::size_t TestEngine::wrong_blocks(const std::vector<std::uint64_t>& numbers,
                                     const std::vector<std::uint32_t>& blocks,
                                     const std::vector<std::uint32_t>& failed) const {
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const bool counts = std::find(failed.begin(), failed.end(), blocks[i]) == failed.end();
    if (counts && !memory_.holds(blocks[i], seed_of(numbers[i], weights))) ++wrong;
  }
  return wrong;
}

}  // namespace pegaflow::testing
