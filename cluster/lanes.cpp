#include "cluster/lanes.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fmt/ranges.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/units.h"
#include "transport/tcp/tcp_fabric.h"
#include "transport/ucx/nic.h"
#include "transport/ucx/ucx_fabric.h"

namespace pegaflow::cluster {
namespace {

constexpr Log kLog{"lanes"};

constexpr const char* kRdma = "rdma";
constexpr const char* kSockets = "tcp";
/// The value of --nics for no card at all.
constexpr const char* kNoCard = "none";
/// For tests: network interfaces over which UCX runs on TCP, as if they were cards.
constexpr const char* kTestVariable = "PEGAFLOW_TEST_UCX_OVER_TCP";

/// More than one packet of any network, so that a route whose ends disagree about the packet size
/// fails.
constexpr std::size_t kTrialBytes = std::size_t{16} << 10;
constexpr std::size_t kMostTrials = 64;

/// The trial page of a node: each node has other bytes.
std::vector<std::byte> trial_page(const Id128& incarnation) {
  std::vector<std::byte> page(kTrialBytes);
  std::uint64_t place = 0;
  for (std::size_t at = 0; at < page.size(); at += sizeof(std::uint64_t), ++place) {
    const std::uint64_t word = (place % 2 == 0 ? incarnation.low : incarnation.high) + place;
    std::memcpy(page.data() + at, &word, sizeof word);
  }
  return page;
}

/// The plan without RDMA cards.
Lanes::Plan without_rdma(Lanes::Plan plan, std::string why) {
  plan.cards.clear();
  plan.ucx_library.clear();
  plan.ucx_version.clear();
  plan.why_not = std::move(why);
  return plan;
}

}  // namespace

Result<Lanes::Plan> Lanes::plan(const Cards& options, std::string listen,
                                const std::filesystem::path& sysfs) {
  Plan plan{.requires_rdma = options.require_rdma, .listen = std::move(listen)};
  const bool is_off = options.nics == std::vector<std::string>{kNoCard};
  if (is_off && options.require_rdma) {
    return fail(Errc::kInvalidArgument, "--require-rdma and --nics none contradict each other");
  }
  const auto refuse_or = [&](std::string why) -> Result<Plan> {
    if (options.require_rdma) return fail(Errc::kRefused, "--require-rdma: {}", why);
    return without_rdma(plan, std::move(why));
  };
  if (is_off) return without_rdma(plan, "--nics none");

  if (const char* const interfaces = std::getenv(kTestVariable)) {
    plan.cards = {interfaces};
    plan.is_test = true;
  } else {
    ucx::NicChoice choice =
        ucx::choose_nics(ucx::find_nics(sysfs), options.nics, options.deny_nics);
    for (const ucx::Nic& nic : choice.rails) plan.cards.push_back(nic.name());
    plan.refused = std::move(choice.refused);
    if (plan.cards.empty()) {
      if (!options.nics.empty() && !options.require_rdma) {
        kLog.warn("no card of --nics can be used, falling back to sockets");
      }
      return refuse_or(plan.refused.empty() ? "this machine has no RDMA card"
                                            : fmt::format("no RDMA card can be used ({})",
                                                          fmt::join(plan.refused, "; ")));
    }
  }
  // Its first call sets variables of the environment.
  auto ucx = UcxFabric::load_library(options.ucx_library);
  if (!ucx) {
    if (!options.ucx_library.empty() && !options.require_rdma) {
      kLog.warn("the library of --ucx-library cannot be used, falling back to sockets");
    }
    return refuse_or(ucx.error().detail);
  }
  plan.ucx_library = std::move(ucx->file);
  plan.ucx_version = std::move(ucx->version);
  return plan;
}

Lanes::Lanes(Plan plan, std::size_t batches)
    : plan_(std::move(plan)),
      // Each batch may be completed and quiesced separately.
      completions_(2 * (batches + kMostTrials) + 2) {
  for (std::size_t place = kMostTrials; place > 0; --place) {
    free_places_.push_back(place * kTrialBytes);
  }
}

Lanes::~Lanes() = default;

Result<std::unique_ptr<Lanes>> Lanes::open(Plan plan, std::span<std::byte> pool, const Clock& clock,
                                           std::size_t batches) {
  std::unique_ptr<Lanes> lanes(new Lanes(std::move(plan), batches));
  lanes->clock_ = &clock;
  Plan& opened = lanes->plan_;
  if (!opened.cards.empty()) {
    if (auto done = lanes->add_rdma(pool, clock); !done) {
      if (opened.requires_rdma) return tl::unexpected<Error>(std::move(done.error()));
      kLog.error(
          "RDMA cannot be used, falling back to sockets; run `pegaflow doctor` reason=\"{}\"",
          to_string(done.error()));
      opened = without_rdma(opened, done.error().detail);
    }
  }
  if (!opened.requires_rdma) PEGA_TRY(lanes->add_sockets(pool, clock));
  if (!opened.refused.empty()) {
    kLog.info("RDMA cards are not used reasons=\"{}\"", fmt::join(opened.refused, "; "));
  }
  return lanes;
}

Fabric::CompletionSink Lanes::sink() {
  return [this](Fabric::Completion&& done) {
    const bool sent = completions_.try_send(std::move(done));  // There is a place for each.
    PEGA_ASSERT(sent, "the mailbox of completions is full");
  };
}

Result<void> Lanes::add_sockets(std::span<std::byte> pool, const Clock& clock) {
  Lane lane;
  lane.name = kSockets;
  PEGA_TRY_LET(lane.fabric, TcpFabric::create({.listen = plan_.listen}, clock, sink()));
  PEGA_TRY_LET(lane.pool, lane.fabric->register_region(pool));
  lane.backend = lane.fabric->describe().backend;
  lanes_.push_back(std::move(lane));
  return {};
}

Result<void> Lanes::add_rdma(std::span<std::byte> pool, const Clock& clock) {
  Lane lane;
  lane.name = kRdma;
  UcxFabric::Options options{
      .rails = plan_.cards, .library = plan_.ucx_library, .sockets = plan_.is_test};
  // Nodes connect rarely, and a busy card that needs longer is not broken.
  options.connect_timeout = std::chrono::seconds(5);
  PEGA_TRY_LET(lane.fabric, UcxFabric::create(options, clock, sink()));
  if (plan_.is_test) {
    kLog.warn(
        "UCX over TCP is for tests: any host that reaches interface={} may read all memory of this "
        "process",
        plan_.cards.front());
  }
  const TimePoint begin = clock.now();
  PEGA_TRY_LET(lane.pool, lane.fabric->register_region(pool));
  const Duration took = clock.now() - begin;
  const double seconds = std::chrono::duration<double>(took).count();
  kLog.info("pool registered with RDMA cards={} pool={} took={} rate={}/s ucx={} library={}",
            fmt::join(plan_.cards, ","), format_bytes(pool.size()), format_duration(took),
            format_bytes(static_cast<std::uint64_t>(static_cast<double>(pool.size()) /
                                                    std::max(seconds, 1e-6))),
            plan_.ucx_version, plan_.ucx_library);
  PEGA_TRY(add_trial(lane));
  lane.backend = lane.fabric->describe().backend;
  lanes_.push_back(std::move(lane));
  return {};
}

Result<void> Lanes::add_trial(Lane& lane) {
  constexpr std::size_t kBytes = (1 + kMostTrials) * kTrialBytes;
  lane.trial_memory = std::make_unique<std::byte[]>(kBytes);
  const std::vector<std::byte> ours = trial_page(lane.fabric->describe().incarnation);
  std::copy(ours.begin(), ours.end(), lane.trial_memory.get());
  PEGA_TRY_LET(lane.trial,
               lane.fabric->register_region(std::span(lane.trial_memory.get(), kBytes)));
  return lane.fabric->lend(*lane.trial, TimePoint::max());
}

bool Lanes::is_link_up(std::size_t lane) const {
  if (!needs_trial(lane) || plan_.is_test) return true;
  return !ucx::choose_nics(ucx::find_nics(), plan_.cards, {}).rails.empty();
}

Result<void> Lanes::lend(TimePoint until) {
  for (const Lane& lane : lanes_) PEGA_TRY(lane.fabric->lend(lane.pool, until));
  return {};
}

// ---- descriptions that nodes exchange

std::vector<FabricDescriptor> Lanes::describe() const {
  std::vector<FabricDescriptor> all;
  for (const Lane& lane : lanes_) {
    FabricDescriptor& one = all.emplace_back(lane.fabric->describe());
    std::stable_partition(one.regions.begin(), one.regions.end(),
                          [&](const auto& region) { return region.region == lane.pool; });
  }
  // The first is what nodes of version 0.1 read.
  std::stable_partition(all.begin(), all.end(),
                        [](const auto& one) { return one.backend == kSockets; });
  return all;
}

const FabricDescriptor* Lanes::description_for(std::size_t lane,
                                               const std::vector<FabricDescriptor>& theirs) const {
  const auto found = std::find_if(theirs.begin(), theirs.end(), [&](const auto& one) {
    // The pool, and behind it the page for trials.
    return one.backend == lanes_.at(lane).backend &&
           one.regions.size() >= (needs_trial(lane) ? 2 : 1);
  });
  return found == theirs.end() ? nullptr : &*found;
}

// ---- trials

kj::Promise<Result<void>> Lanes::try_route(std::size_t lane, Fabric::PeerId peer,
                                           const FabricDescriptor& described, Duration patience) {
  if (free_places_.empty()) {
    return Result<void>(
        fail(Errc::kBusy, "{} peers have trials in flight, which is the limit", kMostTrials));
  }
  const std::size_t place = free_places_.back();
  const std::uint64_t ticket = ++last_trial_;
  const Lane& used = lanes_.at(lane);
  std::fill_n(used.trial_memory.get() + place, kTrialBytes, std::byte{});
  auto accepted = used.fabric->read({.ticket = ticket,
                                     .peer = peer,
                                     .priority = Fabric::Priority::kForeground,
                                     .deadline = clock_->now() + patience,
                                     .chunks = {{.remote_region = described.regions[1].region,
                                                 .remote_offset = 0,
                                                 .local_region = *used.trial,
                                                 .local_offset = place,
                                                 .size_bytes = kTrialBytes}}});
  if (!accepted) return Result<void>(tl::unexpected<Error>(std::move(accepted.error())));
  free_places_.pop_back();
  auto pair = kj::newPromiseAndFulfiller<Result<void>>();
  trials_.emplace(ticket, Trial{.lane = lane,
                                .place = place,
                                .expected = trial_page(described.incarnation),
                                .caller = kj::mv(pair.fulfiller)});
  return kj::mv(pair.promise);
}

void Lanes::completed_trial(const Fabric::Completion& completion) {
  const auto found = trials_.find(completion.ticket);
  PEGA_ASSERT(found != trials_.end(), "completion for unknown trial {}", completion.ticket);
  Trial& trial = found->second;
  if (!std::exchange(trial.is_answered, true)) {
    Result<void> outcome;
    const std::byte* const page = lanes_[trial.lane].trial_memory.get() + trial.place;
    if (const auto error = completion.chunks.at(0)) {
      outcome = fail(*error, "{}", completion.detail);
    } else if (!std::equal(trial.expected.begin(), trial.expected.end(), page)) {
      outcome = fail(Errc::kCorrupt, "the trial read other bytes than the peer has");
    }
    trial.caller->fulfill(kj::mv(outcome));
  }
  if (!completion.quiesced) return;  // Its place may still be written to.
  free_places_.push_back(trial.place);
  trials_.erase(found);
}

void Lanes::read_completions(const std::function<void(const Fabric::Completion&)>& use) {
  completions_.drain([&](Fabric::Completion&& done) {
    if (done.ticket > kFirstTrialTicket) {
      completed_trial(done);
    } else {
      use(done);
    }
  });
}

}  // namespace pegaflow::cluster
