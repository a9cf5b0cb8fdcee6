/// \file
/// pegaflow._native: the client for Python, as thin as possible. _native.pyi documents it.
/// The GIL is released before every wait. Calls that only pass a command on keep it: other threads
/// hold their locks only briefly and never take the GIL, while getting it back from a busy Python
/// thread may take 5 ms.

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/log.h"
#include "client/cache_session.h"
#include "client/decline_notice.h"
#include "client/mover.h"
#include "client/socket_path.h"
#include "pyclient/arguments.h"
#include "pyclient/hex_keys.h"
#include "pyclient/network.h"
#include "pyclient/py_error.h"
#include "transport/cuda/cuda_device.h"
#include "transport/device.h"
#include "transport/host/host_device.h"
#include "version.h"

namespace pegaflow {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;  // NOLINT(google-build-using-namespace): only its "_a"
using py_arguments::from_id;
using py_arguments::to_blocks;
using py_arguments::to_duration;
using py_arguments::to_id;
using py_arguments::to_keys;
using py_error::raise;
using py_error::value_or_raise;

constexpr Log kLog{"mover"};

/// Runs `work` without the GIL.
template <typename Work>
auto without_gil(Work&& work) {
  const py::gil_scoped_release release;
  return work();
}

double to_seconds(Duration time) { return std::chrono::duration<double>(time).count(); }

py::dict to_dict(const LinkStatus& status) {
  return py::dict("state"_a = std::string(to_string(status.state)), "detail"_a = status.detail,
                  "connections"_a = status.connections,
                  "server"_a = status.server.is_none() ? std::string() : to_string(status.server),
                  "server_build"_a = status.server_build,
                  "namespace_hash"_a = status.namespace_hash);
}

// ---- the scheduler's side

/// `nodes` are incarnations of 16 bytes each.
SessionHints to_hints(const std::vector<py::bytes>& nodes, bool no_nodes) {
  SessionHints hints{.nodes = {}, .no_nodes = no_nodes};
  for (const py::bytes& node : nodes) hints.nodes.push_back(to_id(node));
  return hints;
}

/// None for no bytes.
Id128 to_id_or_none(const py::bytes& bytes) { return py::len(bytes) == 0 ? Id128{} : to_id(bytes); }

class PySession {
 public:
  PySession(std::string socket_path, std::string instance, std::string build,
            const py::kwargs& named) {
    LinkOptions options;
    options.socket_path = std::move(socket_path);
    options.instance = std::move(instance);
    options.build = std::move(build);
    py::dict left = named;
    py_arguments::take_link_options(left, options);
    py_arguments::refuse_unknown(left);
    session_ = value_or_raise(without_gil([&] { return CacheSession::start(options); }));
  }
  ~PySession() { close(); }

  /// A call in progress on another thread keeps the session alive until it returns.
  void close() {
    without_gil([session = std::exchange(session_, nullptr)]() mutable { session.reset(); });
  }

  std::uint64_t lookup(const py::bytes& packed, std::size_t key_bytes, std::size_t local_units,
                       const std::vector<py::bytes>& nodes, bool no_nodes,
                       const py::bytes& prefill_node) {
    SessionHints hints = to_hints(nodes, no_nodes);
    hints.prefill_node = to_id_or_none(prefill_node);
    return static_cast<std::uint64_t>(
        value_or_raise(open()->lookup(to_keys(packed, key_bytes), local_units, hints)));
  }
  std::uint64_t claim(const py::bytes& packed, std::size_t key_bytes, double compute_delay_s,
                      double compute_block_s, std::size_t local_units,
                      const std::vector<py::bytes>& nodes, bool no_nodes) {
    const CacheSession::Compute compute{
        .delay = to_duration(compute_delay_s, "compute_delay_s"),
        .per_block = to_duration(compute_block_s, "compute_block_s")};
    return static_cast<std::uint64_t>(value_or_raise(open()->claim(
        to_keys(packed, key_bytes), compute, local_units, to_hints(nodes, no_nodes))));
  }
  std::uint64_t boundaries(const py::bytes& packed, std::size_t key_bytes,
                           std::size_t local_units) {
    return static_cast<std::uint64_t>(
        value_or_raise(open()->boundaries(to_keys(packed, key_bytes), local_units)));
  }

  py::object take(std::uint64_t number, double patience_s) {
    const auto taken = take_answer(number, patience_s);
    if (!taken) return py::none();
    return py::make_tuple(taken->blocks, taken->complete, from_id(taken->token), taken->coming,
                          taken->offered);
  }
  py::object take_claim(std::uint64_t number, double patience_s) {
    const auto taken = take_answer(number, patience_s);
    if (!taken) return py::none();
    return py::make_tuple(taken->blocks, taken->complete, from_id(taken->token), taken->coming,
                          to_seconds(taken->first), to_seconds(taken->last));
  }

  py::object take_ranges(std::uint64_t number, double patience_s) {
    const auto taken = take_answer(number, patience_s);
    if (!taken) return py::none();
    py::list ranges;
    for (const KindRange& range : taken->ranges) {
      ranges.append(py::make_tuple(range.kind, range.first, range.count));
    }
    return py::make_tuple(taken->blocks, taken->complete, from_id(taken->token), ranges,
                          taken->coming, to_seconds(taken->first), to_seconds(taken->last));
  }
  py::object take_boundaries(std::uint64_t number, double patience_s) {
    const auto session = open();
    const auto taken = take_by(patience_s, [&](Duration patience) {
      return session->take_boundaries(CacheSession::Ticket{number}, patience);
    });
    if (!taken) return py::none();
    return py::make_tuple(taken->multiples, taken->complete);
  }

  std::uint64_t journal(std::uint64_t space, std::uint64_t position) {
    return static_cast<std::uint64_t>(value_or_raise(open()->journal(space, position)));
  }
  py::object take_journal(std::uint64_t number, double patience_s) {
    return journal_tuple(number, patience_s, [](const py::bytes& key, bool there, std::uint8_t) {
      return py::make_tuple(key, there);
    });
  }
  py::object take_journal_of_kinds(std::uint64_t number, double patience_s) {
    return journal_tuple(number, patience_s,
                         [](const py::bytes& key, bool there, std::uint8_t kind) {
                           return py::make_tuple(key, there, kind);
                         });
  }

  bool wants_chains() { return open()->wants_chains(); }
  void report_chain(const std::string& session, const py::bytes& packed, std::size_t key_bytes,
                    std::uint32_t block_tokens) {
    open()->report_chain(session, to_keys(packed, key_bytes), block_tokens);
  }

  std::uint64_t await_job(const py::bytes& server, const py::bytes& scheduler, std::uint64_t number,
                          double patience_s, bool begun) {
    return static_cast<std::uint64_t>(value_or_raise(open()->await_job(
        to_id(server), {to_id(scheduler), number}, to_duration(patience_s, "patience_s"), begun)));
  }
  std::optional<std::uint64_t> take_wait(std::uint64_t number, double patience_s) {
    const auto session = open();
    const CacheSession::Ticket ticket{number};
    const Duration patience = to_duration(patience_s, "patience_s");
    auto answer = session->take_wait(ticket);
    if (!answer && patience > Duration::zero()) {
      answer = without_gil([&] { return session->take_wait(ticket, patience); });
    }
    if (!answer) return std::nullopt;
    if (!*answer) raise(answer->error());
    return **answer;
  }

  std::uint64_t events() { return open()->events(); }
  bool await_event(std::uint64_t seen, double patience_s) {
    const auto session = open();
    const Duration patience = to_duration(patience_s, "patience_s");
    return without_gil([&] { return session->await_event(seen, patience); });
  }
  void interrupt() { open()->interrupt(); }

  void forget(std::uint64_t ticket) { open()->forget(CacheSession::Ticket{ticket}); }
  void unclaim(const py::bytes& token) { open()->unclaim(to_id(token)); }

  std::uint64_t ask_reset(double deadline_s) {
    const Duration deadline = to_duration(deadline_s, "deadline_s");
    return static_cast<std::uint64_t>(value_or_raise(open()->ask_reset(deadline)));
  }

  py::object take_reset(std::uint64_t number, double patience_s) {
    const auto session = open();
    const CacheSession::Ticket ticket{number};
    const Duration patience = to_duration(patience_s, "patience_s");
    auto answer = without_gil([&] { return session->take_reset(ticket, patience); });
    if (!answer) return py::none();
    return reset_tuple(value_or_raise(std::move(*answer)));
  }

  py::tuple reset_cache(double patience_s) {
    const auto session = open();
    const Duration patience = to_duration(patience_s, "patience_s");
    return reset_tuple(value_or_raise(without_gil([&] { return session->reset_cache(patience); })));
  }

  [[nodiscard]] bool wait_ready(double patience_s) const {
    const auto session = open();
    const Duration patience = to_duration(patience_s, "patience_s");
    return without_gil([&] { return session->wait_for(LinkState::kReady, patience); });
  }

  [[nodiscard]] py::dict status() const {
    if (session_ != nullptr) return to_dict(session_->status());
    LinkStatus closed;
    closed.state = LinkState::kRetired;
    closed.detail = "closed";
    return to_dict(closed);
  }

 private:
  static py::tuple reset_tuple(const CacheSession::Reset& reset) {
    return py::make_tuple(reset.generation, reset.unconfirmed);
  }

  /// Takes an answer by `take(patience)`, or no value: not yet. Releases the GIL only to wait.
  template <typename Take>
  auto take_by(double patience_s, Take take)
      -> std::optional<typename decltype(take(Duration()))::value_type::value_type> {
    const Duration patience = to_duration(patience_s, "patience_s");
    auto answer = take(Duration::zero());
    if (!answer && patience > Duration::zero()) {
      answer = without_gil([&] { return take(patience); });
    }
    if (!answer) return std::nullopt;
    return value_or_raise(std::move(*answer));
  }

  std::optional<CacheSession::Answer> take_answer(std::uint64_t number, double patience_s) {
    const auto session = open();
    return take_by(patience_s, [&](Duration patience) {
      return session->take(CacheSession::Ticket{number}, patience);
    });
  }

  template <typename Entry>
  py::object journal_tuple(std::uint64_t number, double patience_s, Entry entry) {
    const auto session = open();
    const auto taken = take_by(patience_s, [&](Duration patience) {
      return session->take_journal(CacheSession::Ticket{number}, patience);
    });
    if (!taken) return py::none();
    py::list said;
    for (std::size_t i = 0; i < taken->keys.size(); ++i) {
      const auto& key = taken->keys[i].bytes;
      said.append(entry(py::bytes(reinterpret_cast<const char*>(key.data()), key.size()),
                        bool{taken->there[i]}, taken->kinds[i]));
    }
    return py::make_tuple(taken->space, taken->position, taken->lost, taken->more, said);
  }

  [[nodiscard]] std::shared_ptr<CacheSession> open() const {
    if (session_ == nullptr) raise({Errc::kPeerLost, "the session was closed"});
    return session_;
  }

  std::shared_ptr<CacheSession> session_;  ///< The GIL guards the pointer.
};

// ---- a side that does not use the cache

class PyNotice {
 public:
  PyNotice(std::string socket_path, std::string instance, std::string build,
           const std::string& side, std::uint32_t rank, std::string reason, std::string detail,
           const py::kwargs& named) {
    DeclineNotice::Options options;
    options.link.socket_path = std::move(socket_path);
    options.link.instance = std::move(instance);
    options.link.build = std::move(build);
    options.is_worker = side == "worker";
    options.rank = rank;
    options.reason = std::move(reason);
    options.detail = std::move(detail);
    py::dict left = named;
    py_arguments::take_link_options(left, options.link);
    py_arguments::refuse_unknown(left);
    if (!options.is_worker && side != "scheduler") {
      raise({Errc::kInvalidArgument, fmt::format("side=\"{}\" is not scheduler or worker", side)});
    }
    notice_ = value_or_raise(without_gil([&] { return DeclineNotice::start(options); }));
  }
  ~PyNotice() { close(); }

  void close() {
    without_gil([notice = std::exchange(notice_, nullptr)]() mutable { notice.reset(); });
  }
  [[nodiscard]] py::dict status() const {
    if (notice_ != nullptr) return to_dict(notice_->status());
    LinkStatus closed;
    closed.state = LinkState::kRetired;
    closed.detail = "closed";
    return to_dict(closed);
  }

 private:
  std::unique_ptr<DeclineNotice> notice_;  ///< The GIL guards the pointer.
};

// ---- the worker's side

DeviceReport report_of(const CudaDevice::Info& info) {
  using Path = DeviceReport::CopyPath;
  return {
      .name = info.name,
      .kernels = info.kernels ? DeviceReport::Kernels::kPresent : DeviceReport::Kernels::kMissing,
      .copy_path = !info.path                          ? Path::kUnknown
                   : *info.path == cuda::Path::kStaged ? Path::kStaged
                                                       : Path::kDirect};
}

/// Uses no Python object, so that the mover's thread needs no GIL.
std::function<DeviceReport()> describer_of(const std::shared_ptr<Device>& device) {
  if (const auto cuda = std::dynamic_pointer_cast<CudaDevice>(device)) {
    return [cuda = std::weak_ptr(cuda)] {
      const auto there = cuda.lock();
      return there ? report_of(there->info()) : DeviceReport();
    };
  }
  if (std::dynamic_pointer_cast<HostDevice>(device)) {
    return [] {
      return DeviceReport{.name = "host memory",
                          .kernels = DeviceReport::Kernels::kNotNeeded,
                          .copy_path = DeviceReport::CopyPath::kHost};
    };
  }
  return {};
}

/// Keeps the device alive as long as the mover.
class PyMover {
 public:
  /// The arguments of both constructors but for the layout.
  struct Arguments {
    std::string socket_path;
    std::string instance;
    std::shared_ptr<Device> device;
    std::vector<std::pair<std::string, std::string>> factors;
    std::uint32_t rank = 0;
    std::uint32_t ranks = 1;
    std::string build;
  };

  PyMover(std::string socket_path, std::string instance, std::shared_ptr<Device> device,
          const py::sequence& segments, std::uint64_t block_count,
          std::vector<std::pair<std::string, std::string>> factors, std::uint32_t rank,
          std::uint32_t ranks, std::string build, const py::kwargs& named)
      : device_(std::move(device)) {
    py::dict left = named;
    const NetworkChoice network = py_arguments::take_network(left);
    Mover::Options options = options_of({std::move(socket_path), std::move(instance), device_,
                                         std::move(factors), rank, ranks, std::move(build)},
                                        left);
    const std::vector<PageLayout> layouts =
        py_arguments::to_layouts(segments, block_count, options.cells);
    if (!network.nics.empty() && !options.direct_group.empty()) {
      auto with = without_gil([&] { return with_network(device_, layouts.front(), network); });
      if (with) {
        device_ = std::move(with->device);
        options.is_network_fast = with->is_fast;
      } else {
        kLog.warn(
            "engines of other hosts cannot read this one's memory, blocks go through the pools of "
            "both nodes error=\"{}\"",
            to_string(with.error()));
      }
    }
    mover_ = value_or_raise(without_gil([&] {
      return options.cells == 0 ? Mover::start(options, layouts.front(), *device_)
                                : Mover::start_cells(options, layouts, *device_);
    }));
  }
  PyMover(Arguments arguments, const MoverKinds& kinds, const py::kwargs& named)
      : device_(arguments.device) {
    const Mover::Options options = options_of(std::move(arguments), named);
    mover_ = value_or_raise(without_gil([&] { return Mover::start(options, kinds, *device_); }));
  }
  ~PyMover() {
    without_gil([this] { mover_.reset(); });
  }

  static std::unique_ptr<PyMover> of_kinds(std::string socket_path, std::string instance,
                                           std::shared_ptr<Device> device,
                                           const py::sequence& kinds, std::uint32_t unit_tokens,
                                           std::uint32_t alignment_tokens,
                                           std::vector<std::pair<std::string, std::string>> factors,
                                           std::uint32_t rank, std::uint32_t ranks,
                                           std::string build, const py::kwargs& named) {
    return std::make_unique<PyMover>(
        Arguments{std::move(socket_path), std::move(instance), std::move(device),
                  std::move(factors), rank, ranks, std::move(build)},
        py_arguments::to_kinds(kinds, unit_tokens, alignment_tokens), named);
  }

  [[nodiscard]] std::uint64_t page_bytes() const { return mover_->page_bytes().front(); }
  [[nodiscard]] std::vector<std::uint64_t> kind_page_bytes() const { return mover_->page_bytes(); }

  /// For save() in the same step: a device reuses its events.
  std::uint64_t record(std::uintptr_t queue) {
    return static_cast<std::uint64_t>(value_or_raise(device_->record_event(Device::Queue{queue})));
  }
  void save(const py::bytes& scheduler, std::uint64_t job, const py::bytes& packed,
            std::size_t key_bytes, const py::object& blocks, std::uintptr_t queue, std::size_t kind,
            const std::string& depths, bool may_refuse, std::optional<std::uint64_t> computed) {
    const std::span<const std::uint8_t> sent(reinterpret_cast<const std::uint8_t*>(depths.data()),
                                             depths.size());
    const Device::Event after{record(queue)};
    value_or_raise(mover_->save(to_id(scheduler), job, kind, to_keys(packed, key_bytes),
                                to_blocks(blocks), after, sent, may_refuse,
                                computed ? Device::Event{*computed} : after));
  }
  void load(std::uint64_t load, const py::bytes& token, std::size_t first, const py::object& blocks,
            const std::optional<std::pair<double, double>>& computing) {
    value_or_raise(
        mover_->load(load, to_id(token), first, to_blocks(blocks), to_computing(computing)));
  }
  void load_ranges(std::uint64_t load, const py::bytes& token, const py::sequence& ranges,
                   const py::sequence& claimed,
                   const std::optional<std::pair<double, double>>& computing) {
    const py_arguments::LoadRanges wanted = py_arguments::to_load_ranges(ranges);
    value_or_raise(mover_->load(load, to_id(token), wanted.ranges, py_arguments::to_ranges(claimed),
                                to_computing(computing)));
  }
  void load_following(std::uint64_t load, const py::bytes& packed, std::size_t key_bytes,
                      const py::object& blocks, double patience_s, const py::bytes& node) {
    value_or_raise(mover_->load_following(load, to_keys(packed, key_bytes), to_blocks(blocks),
                                          to_duration(patience_s, "patience_s"),
                                          to_id_or_none(node)));
  }
  void cancel_load(std::uint64_t load) { mover_->cancel_load(load); }
  std::vector<Mover::Finished> take_finished() { return mover_->take_finished(); }
  std::vector<Mover::Followed> follow(double within_s, std::uintptr_t queue) {
    return mover_->follow(Device::Queue{queue}, to_duration(within_s, "within_s"));
  }
  [[nodiscard]] int finished_fd() const { return mover_->finished_fd(); }
  [[nodiscard]] py::dict status() const { return to_dict(mover_->status()); }
  [[nodiscard]] bool wait_ready(double patience_s) const {
    const Duration patience = to_duration(patience_s, "patience_s");
    return without_gil([&] { return mover_->wait_for(LinkState::kReady, patience); });
  }

  /// Keeps the mover for its last reports.
  void close() {
    without_gil([this] { mover_->close(); });
  }

 private:
  static Mover::Options options_of(Arguments&& arguments, const py::dict& named) {
    if (arguments.device == nullptr) raise({Errc::kInvalidArgument, "device is None"});
    Mover::Options options;
    options.link.socket_path = std::move(arguments.socket_path);
    options.link.instance = std::move(arguments.instance);
    options.link.build = std::move(arguments.build);
    options.rank = arguments.rank;
    options.ranks = arguments.ranks;
    options.factors = std::move(arguments.factors);
    options.describe_device = describer_of(arguments.device);
    py::dict left = named;
    py_arguments::take_link_options(left, options.link);
    py_arguments::take_mover_options(left, options);
    py_arguments::refuse_unknown(left);
    return options;
  }
  static std::optional<LoadPace::Computing> to_computing(
      const std::optional<std::pair<double, double>>& computing) {
    if (!computing) return std::nullopt;
    return LoadPace::Computing{.delay = to_duration(computing->first, "computing"),
                               .per_block = to_duration(computing->second, "computing")};
  }

  std::shared_ptr<Device> device_;
  std::unique_ptr<Mover> mover_;
};

std::string kind_of(const Mover::Finished& job) {
  return job.kind == Mover::Finished::Kind::kSave ? "save" : "load";
}

void add_functions(py::module_& module) {
  module.def("random_id", [] { return from_id(Id128::random()); });
  module.def("pack_hex_keys", &py_arguments::pack_hex_keys, "digests"_a);
  module.def(
      "default_socket_path",
      [](std::uint16_t port) {
        return default_socket_path(port, RuntimeDirectories::from_environment());
      },
      "port"_a);
  module.def(
      "set_log_level",
      [](const std::string& name) { set_log_level(value_or_raise(parse_log_level(name))); },
      "name"_a);
}

void add_session(py::module_& module) {
  py::class_<PySession>(module, "CacheSession")
      .def(py::init<std::string, std::string, std::string, const py::kwargs&>(), "socket_path"_a,
           "instance"_a, "build"_a = "")
      .def("lookup", &PySession::lookup, "keys"_a, "key_bytes"_a, "local_units"_a = 0,
           "nodes"_a = py::tuple(), "no_nodes"_a = false, "prefill_node"_a = py::bytes())
      .def("claim", &PySession::claim, "keys"_a, "key_bytes"_a, "compute_delay_s"_a = 0.0,
           "compute_block_s"_a = 0.0, "local_units"_a = 0, "nodes"_a = py::tuple(),
           "no_nodes"_a = false)
      .def("boundaries", &PySession::boundaries, "keys"_a, "key_bytes"_a, "local_units"_a = 0)
      .def("take", &PySession::take, "ticket"_a, "patience_s"_a = 0.0)
      .def("take_claim", &PySession::take_claim, "ticket"_a, "patience_s"_a = 0.0)
      .def("take_ranges", &PySession::take_ranges, "ticket"_a, "patience_s"_a = 0.0)
      .def("take_boundaries", &PySession::take_boundaries, "ticket"_a, "patience_s"_a = 0.0)
      .def("journal", &PySession::journal, "space"_a, "position"_a)
      .def("take_journal", &PySession::take_journal, "ticket"_a, "patience_s"_a = 0.0)
      .def("take_journal_of_kinds", &PySession::take_journal_of_kinds, "ticket"_a,
           "patience_s"_a = 0.0)
      .def("wants_chains", &PySession::wants_chains)
      .def("report_chain", &PySession::report_chain, "session"_a, "keys"_a, "key_bytes"_a,
           "block_tokens"_a)
      .def("await_job", &PySession::await_job, "server"_a, "scheduler"_a, "number"_a,
           "patience_s"_a, "begun"_a = false)
      .def("take_wait", &PySession::take_wait, "ticket"_a, "patience_s"_a = 0.0)
      .def("events", &PySession::events)
      .def("await_event", &PySession::await_event, "seen"_a, "patience_s"_a)
      .def("interrupt", &PySession::interrupt)
      .def("forget", &PySession::forget, "ticket"_a)
      .def("unclaim", &PySession::unclaim, "token"_a)
      .def("ask_reset", &PySession::ask_reset, "deadline_s"_a)
      .def("take_reset", &PySession::take_reset, "ticket"_a, "patience_s"_a = 0.0)
      .def("reset_cache", &PySession::reset_cache, "patience_s"_a)
      .def("status", &PySession::status)
      .def("wait_ready", &PySession::wait_ready, "patience_s"_a)
      .def("close", &PySession::close);
}

void add_notice(py::module_& module) {
  py::class_<PyNotice>(module, "DeclineNotice")
      .def(py::init<std::string, std::string, std::string, const std::string&, std::uint32_t,
                    std::string, std::string, const py::kwargs&>(),
           "socket_path"_a, "instance"_a, "build"_a = "", "side"_a = "scheduler", "rank"_a = 0,
           "reason"_a = "other", "detail"_a = "")
      .def("status", &PyNotice::status)
      .def("close", &PyNotice::close);
}

/// Loads CUDA's driver, if there is one.
std::shared_ptr<CudaDevice> make_cuda_device(int ordinal) {
  return value_or_raise(without_gil([&]() -> Result<std::unique_ptr<CudaDevice>> {
    PEGA_TRY_LET(std::shared_ptr<cuda::Driver> driver, cuda::Driver::load());
    return CudaDevice::create({.ordinal = ordinal}, std::move(driver));
  }));
}

py::dict to_dict(const CudaDevice::Info& info) {
  return py::dict("name"_a = info.name, "kernels"_a = info.kernels,
                  "path"_a = !info.path                          ? "none"
                             : *info.path == cuda::Path::kStaged ? "staged"
                                                                 : "direct",
                  "direct_share"_a = info.direct_share,
                  "register_s"_a = std::chrono::duration<double>(info.register_time).count());
}

void add_devices(py::module_& module) {
  const py::class_<Device, std::shared_ptr<Device>> device(module, "Device");
  py::class_<HostDevice, Device, std::shared_ptr<HostDevice>>(module, "HostDevice")
      .def(py::init([](int threads) {
             return std::shared_ptr<HostDevice>(
                 value_or_raise(HostDevice::create({.threads = threads})));
           }),
           "threads"_a = 1);
  py::class_<CudaDevice, Device, std::shared_ptr<CudaDevice>>(module, "CudaDevice")
      .def(py::init(&make_cuda_device), "ordinal"_a = 0)
      .def("info", [](const CudaDevice& device) { return to_dict(device.info()); });
}

void add_finished(py::module_& module) {
  py::class_<Mover::Finished>(module, "Finished")
      .def_property_readonly("kind", &kind_of)
      .def_readonly("id", &Mover::Finished::id)
      .def_readonly("blocks", &Mover::Finished::blocks)
      .def_readonly("skipped", &Mover::Finished::skipped)
      .def_readonly("bytes", &Mover::Finished::bytes)
      .def_readonly("direct_bytes", &Mover::Finished::direct_bytes)
      .def_property_readonly("took_s",
                             [](const Mover::Finished& job) {
                               return std::chrono::duration<double>(job.took).count();
                             })
      .def_property_readonly("copying_s",
                             [](const Mover::Finished& job) { return to_seconds(job.copying); })
      .def_property_readonly(
          "cut",
          [](const Mover::Finished& job) {
            if (!job.cut) return std::string();
            return std::string(*job.cut == LoadPace::Cut::kStuck ? "stuck" : "slow");
          })
      .def_readonly("failed_blocks", &Mover::Finished::failed_blocks)
      .def_readonly("verified", &Mover::Finished::verified)
      .def_readonly("corrupt", &Mover::Finished::corrupt)
      .def_property_readonly("error",
                             [](const Mover::Finished& job) {
                               return job.error ? std::optional(to_string(*job.error))
                                                : std::nullopt;
                             })
      .def_property_readonly("error_code",
                             [](const Mover::Finished& job) {
                               return job.error
                                          ? std::optional(std::string(to_string(job.error->code)))
                                          : std::nullopt;
                             })
      .def("__repr__", [](const Mover::Finished& job) {
        return fmt::format("Finished({} {}, blocks={}, skipped={}, failed={}, error={})",
                           kind_of(job), job.id, job.blocks, job.skipped, job.failed_blocks.size(),
                           job.error ? to_string(*job.error) : "None");
      });
}

void add_mover(py::module_& module) {
  py::class_<Mover::Followed>(module, "Followed")
      .def_readonly("load", &Mover::Followed::load)
      .def_readonly("blocks", &Mover::Followed::blocks)
      .def_readonly("bytes", &Mover::Followed::bytes)
      .def_property_readonly("took_s", [](const Mover::Followed& load) {
        return std::chrono::duration<double>(load.took).count();
      });

  py::class_<PyMover>(module, "Mover")
      .def(py::init<std::string, std::string, std::shared_ptr<Device>, const py::sequence&,
                    std::uint64_t, std::vector<std::pair<std::string, std::string>>, std::uint32_t,
                    std::uint32_t, std::string, const py::kwargs&>(),
           "socket_path"_a, "instance"_a, "device"_a, "segments"_a, "block_count"_a, "factors"_a,
           "rank"_a = 0, "ranks"_a = 1, "build"_a = "")
      .def_static("of_kinds", &PyMover::of_kinds, "socket_path"_a, "instance"_a, "device"_a,
                  "kinds"_a, "unit_tokens"_a, "alignment_tokens"_a, "factors"_a, "rank"_a = 0,
                  "ranks"_a = 1, "build"_a = "")
      .def_property_readonly("page_bytes", &PyMover::page_bytes)
      .def_property_readonly("kind_page_bytes", &PyMover::kind_page_bytes)
      .def("record", &PyMover::record, "queue"_a = 0)
      .def("save", &PyMover::save, "scheduler"_a, "job"_a, "keys"_a, "key_bytes"_a, "blocks"_a,
           "queue"_a = 0, "kind"_a = 0, "depths"_a = py::bytes(), "may_refuse"_a = false,
           "computed"_a = py::none())
      .def("load", &PyMover::load, "load"_a, "token"_a, "first"_a, "blocks"_a,
           "computing"_a = py::none())
      .def("load_ranges", &PyMover::load_ranges, "load"_a, "token"_a, "ranges"_a, "claimed"_a,
           "computing"_a = py::none())
      .def("load_following", &PyMover::load_following, "load"_a, "keys"_a, "key_bytes"_a,
           "blocks"_a, "patience_s"_a, "node"_a = py::bytes())
      .def("cancel_load", &PyMover::cancel_load, "load"_a)
      .def("follow", &PyMover::follow, "within_s"_a, "queue"_a = 0)
      .def("take_finished", &PyMover::take_finished)
      .def("finished_fd", &PyMover::finished_fd)
      .def("status", &PyMover::status)
      .def("wait_ready", &PyMover::wait_ready, "patience_s"_a)
      .def("close", &PyMover::close);
}

}  // namespace
}  // namespace pegaflow

PYBIND11_MODULE(_native, module) {
  module.doc() = "The C++ client of PegaFlow. Importing it starts no thread and opens no socket.";
  module.attr("__version__") = pegaflow::kVersion;
  module.attr("MAX_KEYS") = pegaflow::CacheSession::kMaxKeys;
  module.attr("HAS_CUDA_KERNELS") = pegaflow::CudaDevice::has_kernels();
  module.attr("JOURNAL_END") = pegaflow::CacheSession::kJournalEnd;
  pegaflow::py_error::add_exceptions(module);
  pegaflow::add_functions(module);
  pegaflow::add_session(module);
  pegaflow::add_notice(module);
  pegaflow::add_devices(module);
  pegaflow::add_finished(module);
  pegaflow::add_mover(module);
}
