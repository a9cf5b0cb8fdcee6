/// \file
/// `pegaflow-perf gpu_peer`: the rate at which an engine on one GPU reads blocks out of another
/// engine's GPU, and the speed that matrix products keep there meanwhile.

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <iostream>
#include <numeric>
#include <random>
#include <thread>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/os/unique_fd.h"
#include "base/units.h"
#include "engine/pool/pool.h"
#include "perf/gpu/batch_inbox.h"
#include "perf/gpu/gemm.h"
#include "perf/gpu/gpu_memory.h"
#include "perf/lib/command.h"
#include "transport/cuda/cuda_device.h"
#include "transport/cuda/cuda_error.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kPeer = 1;
constexpr std::uint64_t kPoolBytes = std::uint64_t{64} << 20;

struct PeerOptions {
  CommonOptions common;
  std::int64_t device = 1;
  std::int64_t source = 0;
  std::int64_t rounds = 20;
  std::int64_t milliseconds = 200;
  std::int64_t blocks = 625;
  std::int64_t pull_blocks = CudaDevice::Options().pull_blocks;
  std::uint64_t page = std::uint64_t{2} << 20;
  std::uint64_t segment = 64 << 10;
  bool no_gemm = false;
  std::string cublas;

  [[nodiscard]] std::uint64_t segments() const { return page / segment; }
  [[nodiscard]] auto count() const { return static_cast<std::uint64_t>(blocks); }
};

/// Bytes of segment `i` of each block of the source.
unsigned char value_of(std::uint64_t i) { return static_cast<unsigned char>(i % 200 + 1); }

cuda::DeviceAddress address_of(const Segment& segment) {
  return std::bit_cast<std::uintptr_t>(segment.base);
}

// ---- between the two processes

/// One segment of the source, as its process describes it.
struct SharedSegment {
  std::uint64_t offset = 0;
  std::uint64_t stride = 0;
  MemoryHandle handle{};
};

enum class Command : std::uint8_t { kMultiply, kPause, kRate };
struct Question {
  Command command{};
  Clock::time_point begin{};  ///< The clock is that of the host.
  Clock::time_point end{};
};

template <typename T>
Result<T> receive(int fd) {
  T value{};
  std::size_t done = 0;
  while (done < sizeof value) {
    const ssize_t count = ::read(fd, reinterpret_cast<char*>(&value) + done, sizeof value - done);
    if (count <= 0) return fail(Errc::kPeerLost, "the other process has ended");
    done += static_cast<std::size_t>(count);
  }
  return value;
}

template <typename T>
Result<void> send(int fd, const T& value) {
  if (::write(fd, &value, sizeof value) == static_cast<ssize_t>(sizeof value)) return {};
  return fail(Errc::kPeerLost, "the other process has ended");
}

// ---- the process whose memory is read

Result<void> share(const PeerOptions& options, const std::shared_ptr<cuda::Driver>& driver,
                   GpuMemory& memory, int out) {
  const int ordinal = static_cast<int>(options.source);
  PEGA_TRY_LET(const std::unique_ptr<CudaDevice> device,
               CudaDevice::create({.ordinal = ordinal}, driver));
  PEGA_TRY_LET(const PeerMemory shared, device->share(memory.layout(), {}));
  if (shared.handles.size() != options.segments()) {
    return fail(Errc::kRefused, "CUDA has no IPC handle for this memory");
  }
  for (std::size_t i = 0; i < shared.handles.size(); ++i) {
    const Segment& segment = shared.segments[i];
    PEGA_TRY(send(
        out, SharedSegment{address_of(segment), segment.block_stride_bytes, shared.handles[i]}));
  }
  return {};
}

Result<void> fill(const PeerOptions& options, cuda::Driver& driver, const PageLayout& layout) {
  cuda::Context context = nullptr;
  const int ordinal = static_cast<int>(options.source);
  PEGA_TRY(cuda::check(driver, driver.retain_primary_context(ordinal, context), "use the GPU"));
  const cuda::CurrentContext current(driver, context);
  cuda::Stream stream = nullptr;
  PEGA_TRY(cuda::check(driver, driver.create_stream(0, stream), "make a stream"));
  for (std::uint64_t i = 0; i < options.segments(); ++i) {
    PEGA_TRY(cuda::check(driver,
                         driver.fill(address_of(layout.segments()[i]), value_of(i),
                                     options.count() * options.segment, stream),
                         "fill GPU memory"));
  }
  return cuda::check(driver, driver.synchronize(stream), "fill GPU memory");
}

/// Until the other process closes its end.
Result<void> serve(const PeerOptions& options, int in, int out) {
  PEGA_TRY_LET(const std::shared_ptr<cuda::Driver> driver, cuda::Driver::load());
  const int ordinal = static_cast<int>(options.source);
  PEGA_TRY_LET(const std::unique_ptr<GpuMemory> memory,
               GpuMemory::create(driver, ordinal, options.page, options.segment, options.count()));
  PEGA_TRY(fill(options, *driver, memory->layout()));
  std::unique_ptr<Gemm> gemm;
  if (!options.no_gemm) {
    PEGA_TRY_LET(gemm, Gemm::start(driver, ordinal, options.cublas));
  }
  PEGA_TRY(share(options, driver, *memory, out));
  for (;;) {
    const Result<Question> question = receive<Question>(in);
    if (!question) return {};
    double rate = 0;
    switch (question->command) {
      case Command::kMultiply:
        gemm->resume();
        break;
      case Command::kPause:
        gemm->pause();
        break;
      case Command::kRate: {
        PEGA_TRY_LET(rate, gemm->rate(question->begin, question->end));
        break;
      }
    }
    PEGA_TRY(send(out, rate));
  }
}

/// A child of fork(), which ends with this.
class Source {
 public:
  /// Before this process uses CUDA.
  static Result<std::unique_ptr<Source>> start(const PeerOptions& options) {
    int to[2] = {};
    int from[2] = {};
    if (::pipe2(to, O_CLOEXEC) != 0 || ::pipe2(from, O_CLOEXEC) != 0) {
      return fail_errno(errno, "pipe");
    }
    auto source = std::make_unique<Source>();
    source->pid_ = ::fork();
    if (source->pid_ < 0) return fail_errno(errno, "fork");
    if (source->pid_ == 0) {
      ::close(to[1]);
      const Result<void> done = serve(options, to[0], from[1]);
      if (!done) std::cerr << "the other process: " << to_string(done.error()) << "\n";
      ::_exit(done ? 0 : 1);
    }
    ::close(to[0]);
    ::close(from[1]);
    source->out_ = UniqueFd(to[1]);
    source->in_ = UniqueFd(from[0]);
    source->pidfd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, source->pid_, 0)));
    return source;
  }
  Source() = default;
  ~Source() {
    out_.reset();
    if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  Result<PeerMemory> memory(const PeerOptions& options) {
    PeerMemory memory{.segments = {}, .block_count = options.count(), .process = pidfd_.get()};
    for (std::uint64_t i = 0; i < options.segments(); ++i) {
      PEGA_TRY_LET(const SharedSegment segment, receive<SharedSegment>(in_.get()));
      // An offset, not an address. NOLINTNEXTLINE(performance-no-int-to-ptr)
      auto* const base = reinterpret_cast<std::byte*>(segment.offset);
      memory.segments.push_back({base, segment.stride, options.segment});
      memory.handles.push_back(segment.handle);
    }
    return memory;
  }
  Result<double> ask(const Question& question) {
    PEGA_TRY(send(out_.get(), question));
    return receive<double>(in_.get());
  }

 private:
  pid_t pid_ = -1;
  UniqueFd out_;
  UniqueFd in_;
  UniqueFd pidfd_;
};

// ---- the bound

/// Contiguous copies out of the other process's memory by the copy engine: one of each allocation.
class ContiguousCopies {
 public:
  static Result<std::unique_ptr<ContiguousCopies>> create(std::shared_ptr<cuda::Driver> driver,
                                                          const PeerOptions& options,
                                                          const PeerMemory& memory,
                                                          const PageLayout& own) {
    auto copies = std::make_unique<ContiguousCopies>();
    copies->driver_ = std::move(driver);
    copies->bytes_ = options.count() * options.segment;
    const int ordinal = static_cast<int>(options.device);
    cuda::Driver& cuda = *copies->driver_;
    PEGA_TRY(cuda::check(cuda, cuda.retain_primary_context(ordinal, copies->context_), "a GPU"));
    const cuda::CurrentContext current(cuda, copies->context_);
    PEGA_TRY(cuda::check(cuda, cuda.create_stream(0, copies->stream_), "make a stream"));
    for (std::uint64_t i = 0; i < options.segments(); ++i) {
      cuda::DeviceAddress base = 0;
      std::uint64_t bytes = 0;
      PEGA_TRY(cuda::check(cuda, cuda.open_exported(memory.handles[i], base, bytes),
                           "map the other process's memory"));
      copies->from_.push_back(base + address_of(memory.segments[i]));
      copies->to_.push_back(address_of(own.segments()[i]));
    }
    // The project itself copies nothing from GPU to GPU this way.
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW);
    copies->copy_ = reinterpret_cast<Copy>(
        library != nullptr ? ::dlsym(library, "cuMemcpyDtoDAsync_v2") : nullptr);
    if (copies->copy_ == nullptr) return fail(Errc::kRefused, "no cuMemcpyDtoDAsync_v2");
    return copies;
  }

  /// GB/s of a copy of everything.
  Result<double> run() {
    const cuda::CurrentContext current(*driver_, context_);
    const auto begin = Clock::now();
    for (std::size_t i = 0; i < from_.size(); ++i) {
      PEGA_TRY(cuda::check(*driver_, copy_(to_[i], from_[i], bytes_, stream_), "copy"));
    }
    PEGA_TRY(cuda::check(*driver_, driver_->synchronize(stream_), "copy"));
    const std::chrono::duration<double> took = Clock::now() - begin;
    return static_cast<double>(bytes_ * from_.size()) / took.count() / 1e9;
  }

 private:
  using Copy = cuda::Status (*)(cuda::DeviceAddress, cuda::DeviceAddress, std::size_t,
                                cuda::Stream);
  std::shared_ptr<cuda::Driver> driver_;
  cuda::Context context_ = nullptr;
  cuda::Stream stream_ = nullptr;
  Copy copy_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::vector<cuda::DeviceAddress> from_;
  std::vector<cuda::DeviceAddress> to_;
};

// ---- the process that reads

class PeerBench {
 public:
  PeerBench(const PeerOptions& options, Source& source, std::shared_ptr<cuda::Driver> driver,
            std::vector<Figure>& figures)
      : options_(options), source_(source), driver_(std::move(driver)), figures_(figures) {}
  ~PeerBench() {
    if (device_) device_->detach();
  }
  PeerBench(const PeerBench&) = delete;
  PeerBench& operator=(const PeerBench&) = delete;

  Result<void> run() {
    const int ordinal = static_cast<int>(options_.device);
    PEGA_TRY_LET(peer_, source_.memory(options_));
    PEGA_TRY_LET(memory_, GpuMemory::create(driver_, ordinal, options_.page, options_.segment,
                                            options_.count()));
    const std::atomic<bool> stop{false};
    PEGA_TRY_LET(pool_, engine::Pool::create({.size_bytes = kPoolBytes}, stop,
                                             [](std::uint64_t, std::uint64_t) {}));
    PEGA_TRY_LET(device_,
                 CudaDevice::create({.ordinal = ordinal,
                                     .pull_blocks = static_cast<unsigned>(options_.pull_blocks)},
                                    driver_));
    PEGA_TRY(device_->attach(memory_->layout(), pool_->bytes(),
                             [this](Device::Completion&& done) { inbox_.put(std::move(done)); }));
    PEGA_TRY(device_->add_peer(kPeer, peer_));
    PEGA_TRY_LET(contiguous_,
                 ContiguousCopies::create(driver_, options_, peer_, memory_->layout()));
    shuffle();
    PEGA_TRY(memory_->clear());
    PEGA_TRY(pull());
    PEGA_TRY(check());
    PEGA_TRY(measure_idle());
    if (!options_.no_gemm) PEGA_TRY(measure_products());
    return {};
  }

 private:
  void shuffle() {
    std::mt19937_64 random(static_cast<std::uint64_t>(options_.common.seed));
    std::vector<std::uint32_t> theirs(options_.count());
    std::iota(theirs.begin(), theirs.end(), 0);
    std::vector<std::uint32_t> own = theirs;
    std::shuffle(theirs.begin(), theirs.end(), random);
    std::shuffle(own.begin(), own.end(), random);
    for (std::size_t i = 0; i < own.size(); ++i) copies_.push_back({own[i], theirs[i]});
  }

  /// GB/s from submit() to the completion of all blocks.
  Result<double> pull() {
    const auto begin = Clock::now();
    PEGA_TRY(device_->submit({.ticket = ++sent_,
                              .direction = Device::Direction::kLoad,
                              .copies = copies_,
                              .peer = kPeer}));
    PEGA_TRY(inbox_.wait(sent_, 0));
    const std::chrono::duration<double> took = Clock::now() - begin;
    return static_cast<double>(options_.count() * options_.page) / took.count() / 1e9;
  }

  /// Every byte of every block.
  Result<void> check() {
    cuda::Context context = nullptr;
    const int ordinal = static_cast<int>(options_.device);
    cuda::Driver& cuda = *driver_;
    PEGA_TRY(cuda::check(cuda, cuda.retain_primary_context(ordinal, context), "use the GPU"));
    const cuda::CurrentContext current(cuda, context);
    cuda::Stream stream = nullptr;
    PEGA_TRY(cuda::check(cuda, cuda.create_stream(0, stream), "make a stream"));
    std::vector<std::byte> bytes(options_.count() * options_.segment);
    for (std::uint64_t i = 0; i < options_.segments(); ++i) {
      const cuda::Transfer all{bytes.data(), address_of(memory_->layout().segments()[i]),
                               bytes.size()};
      PEGA_TRY(cuda::check(cuda, cuda.copy(cuda::Direction::kToHost, &all, 1, stream), "read"));
      PEGA_TRY(cuda::check(cuda, cuda.synchronize(stream), "read"));
      const auto wrong = std::ranges::find_if(
          bytes, [&](std::byte each) { return each != std::byte{value_of(i)}; });
      if (wrong == bytes.end()) continue;
      return fail(Errc::kCorrupt, "segment {} differs at byte {}", i, wrong - bytes.begin());
    }
    return {};
  }

  Result<void> measure_idle() {
    progress("idle");
    Rounds rounds;
    for (std::int64_t i = 0; i < options_.rounds; ++i) {
      PEGA_TRY_LET(const double bound, contiguous_->run());
      PEGA_TRY_LET(const double ours, pull());
      rounds.add({ours}, {bound});
    }
    return add(rounds, "read, idle", "GB/s", "contiguous copies from GPU to GPU", 0.9);
  }

  /// The products at the source, beside reads one after the other.
  Result<void> measure_products() {
    progress("beside matrix products of the source");
    const std::chrono::milliseconds window(options_.milliseconds);
    Rounds reads;
    Rounds products;
    for (std::int64_t i = 0; i < options_.rounds; ++i) {
      PEGA_TRY_LET(const double idle, pull());
      PEGA_TRY(source_.ask({.command = Command::kMultiply}));
      std::this_thread::sleep_for(window);
      PEGA_TRY_LET(const double before, alone(window));
      const auto begin = Clock::now();
      std::vector<double> rates;
      while (Clock::now() < begin + window) {
        PEGA_TRY_LET(rates.emplace_back(), pull());
      }
      const auto end = Clock::now();
      PEGA_TRY_LET(const double behind, alone(window));
      PEGA_TRY_LET(const double kept, source_.ask({Command::kRate, begin, end}));
      PEGA_TRY(source_.ask({.command = Command::kPause}));
      reads.add(std::move(rates), {idle});
      products.add({kept}, {(before + behind) / 2});
    }
    PEGA_TRY(add(reads, "read beside GEMM of the source", "GB/s", "read, idle", std::nullopt));
    return add(products, "GEMM kept at the source", "TFLOP/s", "GEMM alone", 0.99);
  }

  Result<double> alone(std::chrono::milliseconds window) {
    const auto begin = Clock::now();
    std::this_thread::sleep_for(window);
    return source_.ask({Command::kRate, begin, Clock::now()});
  }

  Result<void> add(const Rounds& rounds, const std::string& what, std::string unit,
                   std::string bound_name, std::optional<double> target) {
    PEGA_TRY_LET(const Rounds::Comparison compared, rounds.compare());
    figures_.push_back(
        {.run = fmt::format("{}, {} blocks of {}, segments of {}, {} thread blocks", what,
                            options_.blocks, format_bytes(options_.page),
                            format_bytes(options_.segment), options_.pull_blocks),
         .params = {{"segment_bytes", static_cast<std::int64_t>(options_.segment)},
                    {"page_bytes", static_cast<std::int64_t>(options_.page)},
                    {"blocks", options_.blocks},
                    {"pull_blocks", options_.pull_blocks},
                    {"gpu", device_->info().name}},
         .figure = compared.figure.median(),
         .unit = std::move(unit),
         .bound = compared.bound.median(),
         .bound_name = std::move(bound_name),
         .side = Side::kAtLeast,
         .target = target,
         .n = compared.rounds,
         .spread = fmt::format("ratio {:.3f} to {:.3f}", compared.ratio_low, compared.ratio_high)});
    return {};
  }

  const PeerOptions& options_;
  Source& source_;
  const std::shared_ptr<cuda::Driver> driver_;
  std::vector<Figure>& figures_;
  PeerMemory peer_;
  std::optional<engine::Pool> pool_;
  std::unique_ptr<GpuMemory> memory_;
  std::unique_ptr<ContiguousCopies> contiguous_;
  std::vector<Device::Copy> copies_;
  BatchInbox inbox_;
  std::uint64_t sent_ = 0;
  std::unique_ptr<CudaDevice> device_;  ///< Last: its thread uses the inbox.
};

void declare(OptionTable& table, PeerOptions& o) {
  declare(table, o.common);
  table.integer("device", o.device, 0, 63, "The GPU that reads, by its number in this process.");
  table.integer("source", o.source, 0, 63, "The GPU that is read; it may be the same one.");
  table.integer("blocks", o.blocks, 1, 100'000, "Blocks of one read.");
  table.bytes("page", o.page, 64 << 10, std::uint64_t{64} << 20, "Bytes of a block.");
  table.bytes("segment", o.segment, 4 << 10, std::uint64_t{64} << 20,
              "The share of one layer in a block, a divisor of --page.");
  table.integer("pull-blocks", o.pull_blocks, 1, 1000, "Thread blocks of the kernel that reads.");
  table.integer("rounds", o.rounds, 1, 1000, "Rounds that alternate with the bound.");
  table.integer("milliseconds", o.milliseconds, 20, 10'000, "Length of one round beside products.");
  table.flag("no-gemm", o.no_gemm, "Measure only on idle GPUs.");
  table.text("cublas", o.cublas, "Path of cuBLAS if the loader does not find it.");
}

}  // namespace

Outcome run_gpu_peer(int argc, const char* const* argv) {
  PeerOptions options;
  OptionTable table("pegaflow-perf gpu_peer",
                    "Measures reads of blocks out of the GPU of another process, as a decode "
                    "engine reads those of a prefill engine, beside contiguous copies from GPU to "
                    "GPU, idle and beside matrix products at the source.");
  declare(table, options);
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;
  if (options.page % options.segment != 0 || options.segment % 16 != 0) {
    return fail(Errc::kInvalidArgument, "--segment: {} is no divisor of --page, or of 16 bytes",
                format_bytes(options.segment));
  }
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  PEGA_TRY_LET(const std::unique_ptr<Source> source, Source::start(options));
  PEGA_TRY_LET(const std::shared_ptr<cuda::Driver> driver, cuda::Driver::load());
  std::vector<Figure> figures;
  {
    PeerBench bench(options, *source, driver, figures);
    PEGA_TRY(bench.run());
  }
  return Report{.title = "pegaflow-perf gpu_peer",
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
