#pragma once
/// \file
/// The lanes to other nodes that are open at this node.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include <kj/async.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/mailbox.h"
#include "transport/fabric.h"

namespace pegaflow::cluster {

/// One or two fabrics over the same pool: RDMA, where there are cards for it, and sockets.
///
/// A node with RDMA serves sockets too, so that nodes without RDMA, or without an RDMA route to
/// this one, still share its cache; only --require-rdma leaves sockets out. The reader chooses the
/// lane for each peer (PeerLink).
///
/// Cards at both ends do not prove that packets pass between them. So an RDMA lane is tried before
/// it is used: a page is read over it and compared (try_route()).
///
/// Thread-bound: the RPC thread; the fabrics' threads only put completions into a mailbox.
class Lanes {
 public:
  /// The options about cards.
  struct Cards {
    std::vector<std::string> nics{};       ///< --nics; empty: every card that can be used.
    std::vector<std::string> deny_nics{};  ///< --deny-nics.
    bool require_rdma = false;             ///< --require-rdma.
    std::string ucx_library{};             ///< --ucx-library; empty: the installed one.
  };
  /// The lanes that follow from the options and the machine, before anything is opened.
  struct Plan {
    std::vector<std::string> cards{};  ///< Cards of the RDMA lane, "mlx5_0:1"; empty: no such lane.
    std::vector<std::string> refused{};  ///< Unused cards, with the reason.
    std::string why_not{};               ///< Why there is no RDMA lane.
    bool requires_rdma = false;          ///< Sockets are left out.
    bool is_test = false;                ///< UCX over TCP; `cards` are network interfaces.
    std::string listen{};                ///< The address of sockets: IP:PORT.
    std::string ucx_library{};           ///< The file of libucp; empty: there is no RDMA lane.
    std::string ucx_version{};           ///< "1.13.1"; empty without an RDMA lane.
  };
  /// Plans the lanes. Loads UCX, so it is called before other threads start. `sysfs` is another
  /// folder in tests.
  /// Errors: kRefused for --require-rdma where there can be no RDMA; kInvalidArgument for options
  /// that contradict each other.
  static Result<Plan> plan(const Cards& options, std::string listen,
                           const std::filesystem::path& sysfs = "/sys");

  /// Opens the lanes and registers `pool`, which outlives them, with each. At most `batches` are in
  /// flight on all lanes together. Without --require-rdma an RDMA lane that cannot be opened is
  /// left out, and logged.
  /// Errors: those of the fabrics.
  static Result<std::unique_ptr<Lanes>> open(Plan plan, std::span<std::byte> pool,
                                             const Clock& clock, std::size_t batches);
  /// Afterwards no lane accesses the pool.
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  /// Best first. "rdma" or "tcp".
  [[nodiscard]] std::size_t count() const noexcept { return lanes_.size(); }
  [[nodiscard]] const std::string& name(std::size_t lane) const { return lanes_.at(lane).name; }
  [[nodiscard]] Fabric& fabric(std::size_t lane) const { return *lanes_.at(lane).fabric; }
  [[nodiscard]] RegionId pool(std::size_t lane) const { return lanes_.at(lane).pool; }
  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  /// Whether the kernel reports the link of one of the lane's cards as up.
  [[nodiscard]] bool is_link_up(std::size_t lane) const;

  /// Lends the pool on every lane. Errors: those of Fabric::lend().
  [[nodiscard]] Result<void> lend(TimePoint until);

  /// The descriptions for peers, sockets first. The pool is the first region of each.
  [[nodiscard]] std::vector<FabricDescriptor> describe() const;
  /// The one of `theirs` for this lane; null if they do not have it.
  [[nodiscard]] const FabricDescriptor* description_for(
      std::size_t lane, const std::vector<FabricDescriptor>& theirs) const;

  /// Whether a route on this lane is used only after try_route().
  [[nodiscard]] bool needs_trial(std::size_t lane) const {
    return lanes_.at(lane).trial.has_value();
  }
  /// Reads the trial page of `peer`, which sent `described`, and compares it. Resolves within
  /// `patience`.
  /// Errors: those of the fabric; kCorrupt for other bytes; kBusy when too many trials are in
  /// flight.
  kj::Promise<Result<void>> try_route(std::size_t lane, Fabric::PeerId peer,
                                      const FabricDescriptor& described, Duration patience);

  /// Completions of batches and trials. Once the mailbox is readable, call read_completions() in an
  /// event-loop iteration.
  [[nodiscard]] Mailbox<Fabric::Completion>& completions() noexcept { return completions_; }
  /// Passes those that are not of trials to `use`.
  void read_completions(const std::function<void(const Fabric::Completion&)>& use);

  /// Tickets of batches, which the caller chooses, are below this.
  static constexpr std::uint64_t kFirstTrialTicket = std::uint64_t{1} << 63;

 private:
  struct Lane {
    std::string name;
    std::string backend;
    std::unique_ptr<std::byte[]> trial_memory;  ///< This node's page, then one for each trial.
    std::unique_ptr<Fabric> fabric;
    RegionId pool{};
    std::optional<RegionId> trial;
  };
  struct Trial {
    std::size_t lane = 0;
    std::size_t place = 0;  ///< Where its bytes go, in trial_memory.
    std::vector<std::byte> expected;
    kj::Own<kj::PromiseFulfiller<Result<void>>> caller;
    bool is_answered = false;
  };

  Lanes(Plan plan, std::size_t batches);
  Result<void> add_sockets(std::span<std::byte> pool, const Clock& clock);
  Result<void> add_rdma(std::span<std::byte> pool, const Clock& clock);
  Result<void> add_trial(Lane& lane);
  [[nodiscard]] Fabric::CompletionSink sink();
  void completed_trial(const Fabric::Completion& completion);

  Plan plan_;
  const Clock* clock_ = nullptr;
  Mailbox<Fabric::Completion> completions_;
  std::vector<Lane> lanes_;
  std::uint64_t last_trial_ = kFirstTrialTicket;
  std::unordered_map<std::uint64_t, Trial> trials_;  ///< By ticket, until quiesced.
  std::vector<std::size_t> free_places_;
};

}  // namespace pegaflow::cluster
