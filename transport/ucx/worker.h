#pragma once
/// \file
/// Owners of UCX's objects: the context of a card, its workers, and their endpoints.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/memory.h"
#include "transport/ucx/ucp_api.h"
#include "transport/ucx/wire.h"

namespace pegaflow::ucx {

/// The kind of memory as UCX names it.
constexpr ucs_memory_type_t ucx_type(MemoryKind kind) {
  return kind == MemoryKind::kCuda ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
}

/// One card, or for tests one network interface. Thread-bound.
class Context {
 public:
  struct Options {
    std::string device;    ///< "mlx5_0:1"; with `sockets` an interface: "lo".
    bool sockets = false;  ///< UCX over TCP.
    bool gpu = false;      ///< UCX may use a GPU, for memory of it.
    std::size_t peers = 256;
  };
  /// Environment variables UCX_* override our settings. Errors: kRefused when UCX has no such
  /// device or no transport for it; as ucx_error().
  static Result<std::unique_ptr<Context>> open(const UcpApi& api, const Options& options);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// Whether this UCX supports memory of that kind on this machine: that of a GPU from 1.21 on.
  /// Errors: kRefused; as ucx_error().
  [[nodiscard]] Result<void> check_kind(MemoryKind kind) const;
  /// Registers memory with the card. Requires check_kind(); with memory of a GPU, its context is
  /// current on this thread. Errors: as ucx_error().
  Result<ucp_mem_h> map(const Memory& memory);
  /// Afterwards the card no longer reaches the memory, whatever keys peers have.
  void unmap(ucp_mem_h handle);
  /// Returns the key that a peer unpacks to read the memory.
  Result<std::vector<std::byte>> pack_key(ucp_mem_h handle);

  [[nodiscard]] const UcpApi& api() const noexcept { return api_; }
  [[nodiscard]] ucp_context_h get() const noexcept { return context_; }

 private:
  Context(const UcpApi& api, ucp_context_h context) : api_(api), context_(context) {}
  const UcpApi& api_;
  ucp_context_h context_;
};

/// Progresses endpoints and collects messages. Thread-bound.
class Worker {
 public:
  struct Arrived {
    Message message;
    std::vector<std::byte> rest;
  };
  static Result<std::unique_ptr<Worker>> create(Context& context);
  /// All endpoints are destroyed before. Operations that are left write nowhere afterwards.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Returns whether anything happened.
  bool progress();
  /// Prepares for sleeping on fd(). Returns false when something happened meanwhile: call
  /// progress() first.
  bool arm();
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] const std::vector<std::byte>& address() const noexcept { return address_; }
  /// Returns the messages since the last call, in order per endpoint.
  std::vector<Arrived> take_arrived() { return std::exchange(arrived_, {}); }

  /// Returns whether one of its endpoints broke since the last call.
  bool take_break() noexcept { return std::exchange(a_break_, false); }
  void note_break() noexcept { a_break_ = true; }

  [[nodiscard]] const UcpApi& api() const noexcept { return api_; }
  [[nodiscard]] ucp_worker_h get() const noexcept { return worker_; }

 private:
  Worker(const UcpApi& api, ucp_worker_h worker) : api_(api), worker_(worker) {}
  static ucs_status_t on_message(void* self, const void* header, std::size_t header_size,
                                 void* data, std::size_t size,
                                 const ucp_am_recv_param_t* parameters);
  const UcpApi& api_;
  ucp_worker_h worker_;
  int fd_ = -1;
  bool a_break_ = false;
  std::vector<std::byte> address_;
  std::vector<Arrived> arrived_;
};

/// A connection from a local worker to one of a peer. Does not move: UCX keeps its address.
/// Thread-bound.
class Endpoint {
 public:
  /// Returns at once; broken() reports a peer that cannot be reached.
  static Result<std::unique_ptr<Endpoint>> connect(Worker& worker,
                                                   std::span<const std::byte> address);
  /// Requires closed().
  ~Endpoint() = default;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  void send(const Message& message, std::span<const std::byte> rest = {});
  enum class Close : std::uint8_t {
    kNow,    ///< Operations in flight end soon with their callbacks, complete or not.
    kFlush,  ///< After everything sent has left.
  };
  /// Begins to close it. Each operation still ends with its callback.
  void close(Close how);
  /// Whether UCX has released it.
  [[nodiscard]] bool closed();
  /// The reason why it broke; no value while it works, as far as is known.
  [[nodiscard]] std::optional<ucs_status_t> broken() const noexcept { return broken_; }
  void set_broken(ucs_status_t status) noexcept {
    if (!broken_) broken_ = status;
    worker_.note_break();
  }
  [[nodiscard]] ucp_ep_h get() const noexcept { return endpoint_; }

 private:
  explicit Endpoint(Worker& worker) : worker_(worker) {}
  static void on_error(void* self, ucp_ep_h endpoint, ucs_status_t status);
  Worker& worker_;
  ucp_ep_h endpoint_ = nullptr;
  void* closing_ = nullptr;
  std::optional<ucs_status_t> broken_;
};

}  // namespace pegaflow::ucx
