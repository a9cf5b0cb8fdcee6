#include "tests/support/software_cuda.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "transport/cuda/kernels.h"
#include "transport/cuda/page_hash.h"

namespace pegaflow::testing {
namespace {

using cuda::DeviceAddress;
using cuda::HashArguments;
using cuda::MoveArguments;
using cuda::Piece;
using cuda::PullArguments;
using cuda::Status;

constexpr Status kInvalidValue = 1;

constexpr std::array<std::string_view, 5> kKernelNames = {
    "pega_gather", "pega_scatter", "pega_hash_sums", "pega_hash_chain", "pega_pull"};

/// The content of a handle.
struct Exported {
  DeviceAddress base = 0;
  std::uint64_t bytes = 0;
};

std::byte* at(DeviceAddress address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}
std::uint64_t word_at(const std::byte* bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// The kernels of kernels.cu, one thread at a time.

void move(const MoveArguments& a, bool gather) {
  for (std::uint32_t page = 0; page < a.page_count; ++page) {
    const std::uint32_t block = a.blocks[page];
    for (std::uint32_t i = 0; i < a.piece_count; ++i) {
      Piece piece{};
      std::memcpy(&piece, at(a.pieces) + i * sizeof piece, sizeof piece);
      std::byte* const in_block = at(piece.base + block * piece.stride);
      std::byte* const staged = at(a.staging + page * a.pitch + (piece.page_offset - a.origin));
      std::memcpy(gather ? staged : in_block, gather ? in_block : staged, piece.bytes);
    }
  }
}

void pull(const PullArguments& a) {
  for (std::uint32_t page = 0; page < a.page_count; ++page) {
    for (std::uint32_t i = 0; i < a.piece_count; ++i) {
      Piece to{};
      Piece from{};
      std::memcpy(&to, at(a.pieces) + i * sizeof to, sizeof to);
      std::memcpy(&from, at(a.peers_pieces) + i * sizeof from, sizeof from);
      std::memcpy(at(to.base + a.blocks[page] * to.stride),
                  at(from.base + a.peers_blocks[page] * from.stride), from.bytes);
    }
  }
}

void add_stripe(std::array<std::uint64_t, cuda::kHashLanes>& state, const std::byte* bytes,
                unsigned secret_byte) {
  for (unsigned lane = 0; lane < cuda::kHashLanes; ++lane) {
    const std::uint64_t word = word_at(bytes + lane * 8);
    state.at(lane) += cuda::hash_product(word, lane, secret_byte);
    state.at(lane ^ 1U) += word;
  }
}

void sum_up(const HashArguments& a) {
  const std::uint64_t blocks = cuda::hash_blocks(a.page_bytes);
  for (std::uint64_t page = 0; page < a.page_count; ++page) {
    for (std::uint64_t block = 0; block < blocks; ++block) {
      std::array<std::uint64_t, cuda::kHashLanes> sums{};
      const std::byte* const bytes = at(a.staging + page * a.pitch + block * cuda::kHashBlock);
      for (unsigned n = 0; n < cuda::kHashStripes; ++n) {
        add_stripe(sums, bytes + n * cuda::kHashStripe, 8 * n);
      }
      std::memcpy(at(a.sums) + (page * blocks + block) * sizeof sums, sums.data(), sizeof sums);
    }
  }
}

void chain(const HashArguments& a) {
  const std::uint64_t blocks = cuda::hash_blocks(a.page_bytes);
  for (std::uint64_t page = 0; page < a.page_count; ++page) {
    std::array<std::uint64_t, cuda::kHashLanes> state{};
    for (unsigned lane = 0; lane < cuda::kHashLanes; ++lane) {
      state.at(lane) = cuda::hash_start(lane);
      for (std::uint64_t block = 0; block < blocks; ++block) {
        const std::uint64_t sum =
            word_at(at(a.sums) + ((page * blocks + block) * cuda::kHashLanes + lane) * 8);
        state.at(lane) = cuda::hash_scramble(state.at(lane) + sum, lane);
      }
    }
    const std::byte* const bytes = at(a.staging + page * a.pitch);
    for (unsigned n = 0; n < cuda::hash_tail_stripes(a.page_bytes); ++n) {
      add_stripe(state, bytes + blocks * cuda::kHashBlock + n * cuda::kHashStripe, 8 * n);
    }
    add_stripe(state, bytes + a.page_bytes - cuda::kHashStripe, cuda::kLastStripeSecret);
    const std::uint64_t hash = cuda::hash_finish(state.data(), a.page_bytes);
    std::memcpy(at(a.hashes) + page * sizeof hash, &hash, sizeof hash);
  }
}

}  // namespace

SoftwareCuda::SoftwareCuda(std::uint64_t seed, std::uint64_t memory_bytes)
    : random_(seed), memory_left_(memory_bytes) {
  streams_.emplace(nullptr, std::make_unique<StreamState>());  // the default one
  thread_ = std::thread([this] { run(); });
}

SoftwareCuda::~SoftwareCuda() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    held_ = false;
  }
  changed_.notify_all();
  thread_.join();
  return_adopted();
}

void SoftwareCuda::hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
  allowed_ = 0;
}
void SoftwareCuda::resume() {
  const std::lock_guard lock(mutex_);
  held_ = false;
  changed_.notify_all();
}
void SoftwareCuda::allow(std::size_t operations) {
  const std::lock_guard lock(mutex_);
  allowed_ += operations;
  changed_.notify_all();
}
void SoftwareCuda::settle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] {
    for (const auto& [name, stream] : streams_) {
      if (stream->runs) return false;
    }
    return (held_ && allowed_ == 0) || broken_ != cuda::kSuccess || runnable().empty();
  });
}
void SoftwareCuda::block(cuda::Stream stream, bool blocked) {
  const std::lock_guard lock(mutex_);
  streams_.at(stream)->blocked = blocked;
  changed_.notify_all();
}
void SoftwareCuda::break_device(Status status) {
  std::unique_lock lock(mutex_);
  broken_ = status;
  changed_.notify_all();
  // The running operation ends first: afterwards no byte is accessed.
  changed_.wait(lock, [this] {
    for (const auto& [name, stream] : streams_) {
      if (stream->runs) return false;
    }
    return true;
  });
}
void SoftwareCuda::refuse_allocations_from(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  refuse_from_ = bytes;
}
void SoftwareCuda::adopt(std::byte* memory, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  memory_.emplace(reinterpret_cast<DeviceAddress>(memory),
                  std::pair(std::unique_ptr<std::byte[]>(), bytes));
}
void SoftwareCuda::refuse_sharing() {
  const std::lock_guard lock(mutex_);
  refuses_sharing_ = true;
}
void SoftwareCuda::need_flushes(bool has_flushes) {
  const std::lock_guard lock(mutex_);
  orders_writes_ = false;
  has_flushes_ = has_flushes;
}
void SoftwareCuda::fail_registration(std::size_t n) {
  const std::lock_guard lock(mutex_);
  fail_registration_ = n;
}
std::size_t SoftwareCuda::registered_ranges() const {
  const std::lock_guard lock(mutex_);
  return locked_.size();
}
std::size_t SoftwareCuda::live_objects() const {
  const std::lock_guard lock(mutex_);
  return streams_.size() - 1 + events_.size() + memory_.size() + locked_.size() + opened_.size() +
         reserved_.size() + mapped_.size();
}
std::size_t SoftwareCuda::copies() const {
  const std::lock_guard lock(mutex_);
  return copies_;
}
std::size_t SoftwareCuda::launches() const {
  const std::lock_guard lock(mutex_);
  return launches_;
}
std::size_t SoftwareCuda::flushes() const {
  const std::lock_guard lock(mutex_);
  return flushes_;
}

// ---- execution

std::vector<SoftwareCuda::StreamState*> SoftwareCuda::runnable() {
  std::vector<StreamState*> found;
  for (const auto& [name, stream] : streams_) {
    if (stream->queue.empty() || stream->blocked) continue;
    const Operation& head = stream->queue.front();
    if (!head.waits_for || head.waits_for->reached >= head.until) found.push_back(stream.get());
  }
  return found;
}

void SoftwareCuda::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::vector<StreamState*> ready;
    changed_.wait(lock, [&] {
      ready = runnable();
      if (broken_ != cuda::kSuccess) ready.clear();
      return stopping_ || (!ready.empty() && (!held_ || allowed_ != 0));
    });
    if (ready.empty())
      return;  // Stopping, and the remaining operations wait for events that never come.
    if (held_) --allowed_;
    StreamState& stream = *ready[random_() % ready.size()];
    const Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    stream.runs = true;
    lock.unlock();
    if (operation.body) operation.body();
    lock.lock();
    stream.runs = false;
    changed_.notify_all();
  }
}

Status SoftwareCuda::push(cuda::Stream stream, Operation operation) {
  if (broken_ != cuda::kSuccess) return broken_;
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return kInvalidValue;
  found->second->queue.push_back(std::move(operation));
  changed_.notify_all();
  return cuda::kSuccess;
}

// ---- the driver

Status SoftwareCuda::device_count(int& count) {
  count = 1;
  return cuda::kSuccess;
}
Status SoftwareCuda::device_name(int /*ordinal*/, std::string& name) {
  name = "software";
  return cuda::kSuccess;
}
Status SoftwareCuda::attribute(int /*ordinal*/, cuda::Attribute which, int& value) {
  const std::lock_guard lock(mutex_);
  switch (which) {
    case cuda::Attribute::kMultiprocessors:
      value = 4;
      break;
    case cuda::Attribute::kFlushOptions:
      value = has_flushes_ ? 1 : 0;
      break;
    case cuda::Attribute::kWritesOrdering:
      value = orders_writes_ ? cuda::kOrderedForOwner : 0;
      break;
    case cuda::Attribute::kComputeMajor:
    case cuda::Attribute::kComputeMinor:
      value = 9;
      break;
  }
  return cuda::kSuccess;
}
Status SoftwareCuda::pci_address(int ordinal, std::string& address) {
  address = fmt::format("0000:{:02x}:00.0", 16 + ordinal);
  return cuda::kSuccess;
}
Status SoftwareCuda::retain_primary_context(int /*ordinal*/, cuda::Context& context) {
  context = this;
  return cuda::kSuccess;
}
Status SoftwareCuda::release_primary_context(int /*ordinal*/) { return cuda::kSuccess; }
Status SoftwareCuda::push_context(cuda::Context context) {
  return context == this ? cuda::kSuccess : kInvalidValue;
}
Status SoftwareCuda::set_context(cuda::Context context) { return push_context(context); }
Status SoftwareCuda::pop_context() { return cuda::kSuccess; }
Status SoftwareCuda::priority_range(int& least, int& greatest) {
  least = 0;
  greatest = -5;
  return cuda::kSuccess;
}

Status SoftwareCuda::create_stream(int /*priority*/, cuda::Stream& stream) {
  const std::lock_guard lock(mutex_);
  if (broken_ != cuda::kSuccess) return broken_;
  auto state = std::make_unique<StreamState>();
  stream = state.get();
  streams_.emplace(stream, std::move(state));
  return cuda::kSuccess;
}
Status SoftwareCuda::destroy_stream(cuda::Stream stream) {
  const std::lock_guard lock(mutex_);
  return streams_.erase(stream) == 1 ? cuda::kSuccess : kInvalidValue;
}
Status SoftwareCuda::synchronize(cuda::Stream stream) {
  std::unique_lock lock(mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return kInvalidValue;
  const StreamState& state = *found->second;
  changed_.wait(lock,
                [&] { return (state.queue.empty() || broken_ != cuda::kSuccess) && !state.runs; });
  return broken_;
}

Status SoftwareCuda::create_event(bool /*timing*/, cuda::EventHandle& event) {
  const std::lock_guard lock(mutex_);
  if (broken_ != cuda::kSuccess) return broken_;
  auto state = std::make_shared<EventState>();
  event = state.get();
  events_.emplace(event, std::move(state));
  return cuda::kSuccess;
}
Status SoftwareCuda::destroy_event(cuda::EventHandle event) {
  const std::lock_guard lock(mutex_);
  return events_.erase(event) == 1 ? cuda::kSuccess : kInvalidValue;
}
Status SoftwareCuda::record(cuda::EventHandle event, cuda::Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return kInvalidValue;
  const std::shared_ptr<EventState> state = found->second;
  const std::uint64_t number = ++state->recorded;
  return push(stream, {[this, state, number] {
                         const std::lock_guard inner(mutex_);
                         state->reached = std::max(state->reached, number);
                       },
                       nullptr, 0});
}
Status SoftwareCuda::wait(cuda::Stream stream, cuda::EventHandle event) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return kInvalidValue;
  return push(stream, {nullptr, found->second, found->second->recorded});
}
Status SoftwareCuda::query(cuda::EventHandle event) {
  const std::lock_guard lock(mutex_);
  if (broken_ != cuda::kSuccess) return broken_;
  const auto found = events_.find(event);
  if (found == events_.end()) return kInvalidValue;
  return found->second->reached == found->second->recorded ? cuda::kSuccess : cuda::kNotReady;
}
Status SoftwareCuda::elapsed_ms(cuda::EventHandle /*begin*/, cuda::EventHandle /*end*/,
                                float& milliseconds) {
  milliseconds = 1;
  return cuda::kSuccess;
}

Status SoftwareCuda::allocate(std::uint64_t bytes, DeviceAddress& address) {
  const std::lock_guard lock(mutex_);
  if (broken_ != cuda::kSuccess) return broken_;
  if (bytes > memory_left_ || bytes >= refuse_from_) return cuda::kOutOfMemory;
  if (piece_bytes_ != 0) return allocate_expandable(bytes, address);
  memory_left_ -= bytes;
  // Aligned as CUDA's allocations are.
  auto memory = std::make_unique<std::byte[]>(bytes + 256);
  address = (reinterpret_cast<std::uintptr_t>(memory.get()) + 255) / 256 * 256;
  std::memset(at(address), 0xA5, bytes);
  memory_.emplace(address, std::pair(std::move(memory), bytes));
  return cuda::kSuccess;
}
Status SoftwareCuda::release(DeviceAddress address) {
  const std::lock_guard lock(mutex_);
  if (reserved_.contains(address)) return release_expandable(address);
  const auto found = memory_.find(address);
  if (found == memory_.end()) return kInvalidValue;
  memory_left_ += found->second.second;
  memory_.erase(found);
  return cuda::kSuccess;
}
Status SoftwareCuda::export_memory(DeviceAddress address, cuda::IpcHandle& handle,
                                   DeviceAddress& base) {
  const std::lock_guard lock(mutex_);
  if (broken_ != cuda::kSuccess) return broken_;
  const auto behind = memory_.upper_bound(address);
  if (refuses_sharing_ || behind == memory_.begin()) return kInvalidValue;
  const auto& [first, memory] = *std::prev(behind);
  if (address - first >= memory.second) return kInvalidValue;
  base = first;
  const Exported exported{first, memory.second};
  std::memcpy(handle.data(), &exported, sizeof exported);
  return cuda::kSuccess;
}
Status SoftwareCuda::open_exported(const cuda::IpcHandle& handle, DeviceAddress& base,
                                   std::uint64_t& bytes) {
  const std::lock_guard lock(mutex_);
  if (broken_ != cuda::kSuccess) return broken_;
  if (refuses_sharing_) return kInvalidValue;
  Exported exported;
  std::memcpy(&exported, handle.data(), sizeof exported);
  base = exported.base;
  bytes = exported.bytes;
  ++opened_[base];
  return cuda::kSuccess;
}
Status SoftwareCuda::close_exported(DeviceAddress base) {
  const std::lock_guard lock(mutex_);
  const auto found = opened_.find(base);
  if (found == opened_.end()) return kInvalidValue;
  if (--found->second == 0) opened_.erase(found);
  return cuda::kSuccess;
}
Status SoftwareCuda::allocate_host(std::uint64_t bytes, std::byte*& memory,
                                   DeviceAddress& on_device) {
  const Status status = allocate(bytes, on_device);
  if (status == cuda::kSuccess) memory = at(on_device);
  return status;
}
Status SoftwareCuda::release_host(std::byte* memory) {
  return release(reinterpret_cast<DeviceAddress>(memory));
}
Status SoftwareCuda::register_host(std::byte* memory, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (broken_ != cuda::kSuccess) return broken_;
  if (fail_registration_ && (*fail_registration_)-- == 0) {
    fail_registration_.reset();
    return cuda::kOutOfMemory;
  }
  return locked_.emplace(memory, bytes).second ? cuda::kSuccess : kInvalidValue;
}
Status SoftwareCuda::unregister_host(std::byte* memory) {
  const std::lock_guard lock(mutex_);
  return locked_.erase(memory) == 1 ? cuda::kSuccess : kInvalidValue;
}

bool SoftwareCuda::may_copy(const std::byte* host, std::uint64_t bytes) const {
  // Within one page-locked range, or in ordinary memory outside of all of them.
  for (const auto& [begin, size] : locked_) {
    const std::byte* const end = begin + size;
    if (host < end && host + bytes > begin) return host >= begin && host + bytes <= end;
  }
  return true;
}

Status SoftwareCuda::copy(cuda::Direction direction, const cuda::Transfer* transfers,
                          std::size_t count, cuda::Stream stream) {
  const std::lock_guard lock(mutex_);
  std::vector<cuda::Transfer> all(transfers, transfers + count);
  for (const cuda::Transfer& one : all) {
    if (one.bytes == 0 || !may_copy(one.host, one.bytes)) return kInvalidValue;
  }
  std::shuffle(all.begin(), all.end(), random_);
  copies_ += count;
  return push(stream, {[direction, all = std::move(all)] {
                         for (const cuda::Transfer& one : all) {
                           const bool to_host = direction == cuda::Direction::kToHost;
                           std::memcpy(to_host ? one.host : at(one.device),
                                       to_host ? at(one.device) : one.host, one.bytes);
                         }
                       },
                       nullptr, 0});
}
Status SoftwareCuda::fill(DeviceAddress address, unsigned char value, std::uint64_t bytes,
                          cuda::Stream stream) {
  const std::lock_guard lock(mutex_);
  return push(stream, {[=] { std::memset(at(address), value, bytes); }, nullptr, 0});
}

Status SoftwareCuda::flush_network_writes() {
  const std::lock_guard lock(mutex_);
  if (broken_ != cuda::kSuccess) return broken_;
  if (!has_flushes_) return cuda::kNotSupported;
  ++flushes_;
  return cuda::kSuccess;
}

Status SoftwareCuda::load_module(const void* image, cuda::Module& module) {
  module = this;
  return image != nullptr ? cuda::kSuccess : kInvalidValue;
}
Status SoftwareCuda::unload_module(cuda::Module /*module*/) { return cuda::kSuccess; }
Status SoftwareCuda::find_function(cuda::Module /*module*/, const char* name,
                                   cuda::Function& function) {
  // A function is its number and 1: no pointer that is ever followed.
  const auto found = std::find(kKernelNames.begin(), kKernelNames.end(), std::string_view(name));
  if (found == kKernelNames.end()) return kInvalidValue;
  const auto number = static_cast<std::uintptr_t>(found - kKernelNames.begin());
  function = reinterpret_cast<cuda::Function>(number + 1);  // NOLINT(performance-no-int-to-ptr)
  return cuda::kSuccess;
}
Status SoftwareCuda::launch(cuda::Function function, unsigned blocks, unsigned threads,
                            void* arguments, cuda::Stream stream) {
  const std::uintptr_t kernel = reinterpret_cast<std::uintptr_t>(function) - 1;
  if (kernel >= kKernelNames.size() || blocks == 0 || threads == 0 || threads > cuda::kThreads)
    return kInvalidValue;
  std::function<void()> body;
  if (kernel < 2) {
    body = [a = *static_cast<MoveArguments*>(arguments), kernel] { move(a, kernel == 0); };
  } else if (kernel == 4) {
    body = [a = *static_cast<PullArguments*>(arguments)] { pull(a); };
  } else {
    body = [a = *static_cast<HashArguments*>(arguments), kernel] {
      kernel == 2 ? sum_up(a) : chain(a);
    };
  }
  const std::lock_guard lock(mutex_);
  ++launches_;
  return push(stream, {std::move(body), nullptr, 0});
}

std::string SoftwareCuda::describe(Status status) {
  return fmt::format("software error {}", status);
}

}  // namespace pegaflow::testing
