#pragma once
/// \file
/// The engines behind the router: their list, their state, and the choice for each request.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "router/routing/breaker.h"
#include "router/routing/early_watch.h"
#include "router/routing/handover_watch.h"
#include "router/routing/model_list.h"
#include "router/routing/policy.h"

namespace pegaflow::router {

enum class Role : unsigned char { kPrefill, kDecode };
inline constexpr std::size_t kRoleCount = 2;
std::string_view to_string(Role role) noexcept;

/// The address of an engine.
struct EngineUrl {
  std::string text;  ///< "http://host:port": the engine's name everywhere.
  std::string host;
  std::string port;
  bool is_name = false;  ///< "dns://host:port": each address of the host is an engine.
  std::string name{};    ///< The "dns://host:port" that this address was resolved from.

  /// Errors: kInvalidArgument for anything but http://HOST[:PORT][/] and dns://HOST[:PORT][/].
  static Result<EngineUrl> parse(std::string_view text);
};

/// The configured engines.
struct EngineList {
  std::array<std::vector<EngineUrl>, kRoleCount> by_role;

  /// Parses lines `prefill URL` and `decode URL`; ignores blank lines and text after #.
  /// Errors: kInvalidArgument that names the line.
  static Result<EngineList> parse(std::string_view text);
};

/// When an engine was asked for the addresses of its KV events.
struct EventSourcesState {
  bool is_asked = false;  ///< A request is in flight.
  std::optional<TimePoint> asked_at{};
};

/// When an engine is asked for its load.
struct LoadState {
  bool is_asked = false;  ///< A request is in flight.
  TimePoint next{};
};

/// One engine in one role. Thread-bound.
struct Engine {
  Engine(EngineUrl its_url, Role its_role, const Breaker::Options& options);

  const EngineUrl url;
  const Role role;
  const std::uint64_t id;  ///< For policies.
  Breaker breaker;
  HandoverWatch handover;  ///< Used with prefill engines only.
  EarlyWatch early;        ///< Used with prefill engines only.
  /// Its last stream that continues after a prefill engine's token has begun. Used with decode
  /// engines only.
  bool continues = false;
  ModelList models;
  EventSourcesState event_sources;
  LoadState load;
  bool is_up = true;        ///< The result of its health checks; assumed before the first.
  bool is_removed = false;  ///< No longer listed: finishes its requests.
  std::size_t inflight = 0;
  std::size_t failed_checks = 0;  ///< Consecutive.

  struct Counters {
    std::uint64_t requests = 0;
    std::uint64_t failures = 0;
    std::uint64_t connects = 0;
    std::uint64_t checks_failed = 0;
  } counters;
};

/// Owns the engines. Thread-bound.
class Fleet {
 public:
  struct Options {
    Breaker::Options breaker;
    std::array<std::size_t, kRoleCount> max_inflight{64, 256};  ///< Per engine, by role.
    bool passes_unknown_models = false;  ///< A model that no engine lists may go to any of them.
  };

  /// The requirements of a request on its engine.
  struct Request {
    RequestView view{};
    std::string_view model{};             ///< Empty: any.
    std::vector<const Engine*> tried{};   ///< Used only when there is no other engine.
    std::vector<std::string> excluded{};  ///< URLs of engines that must not receive it.
  };

  /// `policies` by role; `clock` outlives the fleet.
  Fleet(const Options& options, std::array<std::unique_ptr<Policy>, kRoleCount> policies,
        const Clock& clock);

  /// Replaces the engines by those of `list`. Engines that stay keep their state; a removed engine
  /// is destroyed after its last request.
  void set(const EngineList& list);

  enum class Why : unsigned char {
    kFound,
    kNone,       ///< No engine of the role serves the model, or all are excluded.
    kDown,       ///< The engines that serve it are down.
    kBusy,       ///< They have their limit of requests, or enough to compute (--engine-queue-time).
    kSuspended,  ///< The engines announce no blocks: see HandoverWatch.
  };
  struct Choice {
    std::shared_ptr<Engine> engine;  ///< Set when `why` is kFound.
    Why why = Why::kFound;
  };
  /// The engine for a request: one that lists its model, or else one whose models are not known. An
  /// engine with an open breaker is used only when there is no other: trying is better than
  /// refusing.
  Choice choose(Role role, const Request& request);

  /// The engines among which choose() would choose now; empty when there is none.
  [[nodiscard]] std::vector<Candidate> candidates(Role role, const Request& request) const;

  /// Policy::may_wait() of the role.
  [[nodiscard]] bool may_wait(Role role, const Request& request) const {
    return policies_[static_cast<std::size_t>(role)]->may_wait(request.view);
  }
  /// Whether choose() could return `engine` for the request now.
  [[nodiscard]] bool has_room_for(const Engine& engine, const Request& request) const;

  /// Whether the models of all decode engines are known, and none of them is `model`.
  [[nodiscard]] bool is_unknown_model(std::string_view model) const;
  /// The model for a request that names none, so that all its engines use the same: empty while all
  /// engines serve the same model.
  [[nodiscard]] std::string unnamed_model() const;

  [[nodiscard]] const std::vector<std::shared_ptr<Engine>>& engines() const { return engines_; }
  [[nodiscard]] bool has(Role role) const;
  /// Whether any engine of the role is up.
  [[nodiscard]] bool any_up(Role role) const;

 private:
  struct Found {
    std::vector<std::shared_ptr<Engine>> engines{};
    std::vector<Candidate> candidates{};  // In the order of `engines`.
    Why why = Why::kFound;
  };
  [[nodiscard]] Found find(Role role, const Request& request) const;
  [[nodiscard]] bool has_room(const Engine& engine) const;
  /// The minimum of Serves that an engine needs for the request; kNo: any engine.
  [[nodiscard]] Serves wanted(Role role, const Request& request) const;

  Options options_;
  std::array<std::unique_ptr<Policy>, kRoleCount> policies_;
  const Clock& clock_;
  std::vector<std::shared_ptr<Engine>> engines_;
};

}  // namespace pegaflow::router
