#pragma once
/// \file
/// UCX's objects, each with one owner: the context of a card, its workers, and their endpoints.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/ucx/ucp_api.h"
#include "transport/ucx/wire.h"

namespace pegaflow::ucx {

/// One card, or for tests one network interface. Thread-bound.
class Context {
 public:
  struct Options {
    std::string device;    ///< "mlx5_0:1"; with `sockets` an interface: "lo".
    bool sockets = false;  ///< UCX over TCP.
    std::size_t peers = 256;
  };
  /// Variables UCX_* of the environment win over what we set.
  /// Errors: kRefused when UCX knows no such device or no transport for it; as ucx_error().
  static Result<std::unique_ptr<Context>> open(const UcpApi& api, const Options& options);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// Makes memory known to the card. Errors: as ucx_error().
  Result<ucp_mem_h> map(std::span<std::byte> memory);
  /// Afterwards the card reaches it no more, whatever keys peers have.
  void unmap(ucp_mem_h handle);
  /// What a peer unpacks to read it.
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
  /// Every Endpoint is gone by then. Whatever of its operations was left writes nowhere afterwards.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Whether anything happened.
  bool progress();
  /// False: something happened meanwhile, progress() first. True: fd() tells of the next event.
  bool arm();
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] const std::vector<std::byte>& address() const noexcept { return address_; }
  /// What came since the last call, in the order of each endpoint.
  std::vector<Arrived> take_arrived() { return std::exchange(arrived_, {}); }

  /// Whether an endpoint of it broke since the last call.
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

/// The way from a worker of ours to one of a peer. Stays where it is: UCX knows its address.
/// Thread-bound.
class Endpoint {
 public:
  /// Returns at once; that the peer cannot be reached shows in broken().
  static Result<std::unique_ptr<Endpoint>> connect(Worker& worker,
                                                   std::span<const std::byte> address);
  /// closed() by then.
  ~Endpoint() = default;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  void send(const Message& message, std::span<const std::byte> rest = {});
  enum class Close : std::uint8_t {
    kNow,    ///< Operations under way come back with their callbacks soon, done or not.
    kFlush,  ///< When what was sent has left.
  };
  /// Ends it. Nothing is over before its callback.
  void close(Close how);
  /// Whether UCX has let go of it.
  [[nodiscard]] bool closed();
  /// Why it does not work any more; no value: it does, as far as we know.
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
