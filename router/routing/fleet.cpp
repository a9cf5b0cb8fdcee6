#include "router/routing/fleet.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace pegaflow::router {
namespace {

bool may_have(const Engine& engine, const Fleet::Request& request, Serves least) {
  return (least == Serves::kNo || engine.models.serves(request.model) >= least) &&
         std::find(request.excluded.begin(), request.excluded.end(), engine.url.text) ==
             request.excluded.end();
}

}  // namespace

std::string_view to_string(Role role) noexcept {
  return role == Role::kPrefill ? "prefill" : "decode";
}

Result<EngineUrl> EngineUrl::parse(std::string_view text) {
  const auto wrong = [&](std::string_view why) {
    return fail(Errc::kInvalidArgument,
                "\"{}\" is not http://HOST:PORT, or dns://NAME:PORT for all "
                "addresses of a name: {}",
                text, why);
  };
  constexpr std::string_view kNameScheme = "dns://";
  const bool is_name = text.substr(0, kNameScheme.size()) == kNameScheme;
  const std::string_view scheme = is_name ? kNameScheme : "http://";
  if (text.substr(0, scheme.size()) != scheme) return wrong("only plain HTTP is supported");
  std::string_view place = text.substr(scheme.size());
  if (!place.empty() && place.back() == '/') place.remove_suffix(1);
  for (const char c : place) {
    const bool fits = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                      std::string_view(".-_:[]").find(c) != std::string_view::npos;
    if (!fits) return wrong("it may contain only a host and a port");
  }
  EngineUrl url;
  url.is_name = is_name;
  std::string_view port = "80";
  if (!place.empty() && place.front() == '[') {
    const std::size_t end = place.find(']');
    if (end == std::string_view::npos) return wrong("the closing bracket is missing");
    url.host = place.substr(1, end - 1);
    place.remove_prefix(end + 1);
    if (!place.empty()) {
      if (place.front() != ':') return wrong("the port must follow the bracket");
      port = place.substr(1);
    }
  } else {
    const std::size_t colon = place.find(':');
    if (colon != std::string_view::npos) port = place.substr(colon + 1);
    url.host = place.substr(0, colon);
  }
  unsigned number = 0;
  const auto [rest, status] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (status != std::errc() || rest != port.data() + port.size() || number == 0 || number > 65535) {
    return wrong("the port is not a number from 1 to 65535");
  }
  if (url.host.empty()) return wrong("the host is missing");
  url.port = port;
  url.text = text;
  if (url.text.back() == '/') url.text.pop_back();
  return url;
}

Result<EngineList> EngineList::parse(std::string_view text) {
  EngineList list;
  std::size_t number = 0;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    ++number;
    line = line.substr(0, line.find('#'));
    std::vector<std::string_view> words;
    constexpr std::string_view kBlanks = " \t\r";
    for (std::size_t at = line.find_first_not_of(kBlanks); at != std::string_view::npos;
         at = line.find_first_not_of(kBlanks, at)) {
      const std::size_t stop = std::min(line.find_first_of(kBlanks, at), line.size());
      words.push_back(line.substr(at, stop - at));
      at = stop;
    }
    if (words.empty()) continue;
    if (words.size() != 2 || (words[0] != "prefill" && words[0] != "decode")) {
      return fail(Errc::kInvalidArgument, "line {}: expected `prefill URL` or `decode URL`",
                  number);
    }
    auto url = EngineUrl::parse(words[1]);
    if (!url) return fail(Errc::kInvalidArgument, "line {}: {}", number, url.error().detail);
    const Role role = words[0] == "prefill" ? Role::kPrefill : Role::kDecode;
    list.by_role[static_cast<std::size_t>(role)].push_back(std::move(*url));
  }
  return list;
}

Engine::Engine(EngineUrl its_url, Role its_role, const Breaker::Options& options)
    : url(std::move(its_url)), role(its_role), id(hash_key(url.text)), breaker(options) {}

Fleet::Fleet(const Options& options, std::array<std::unique_ptr<Policy>, kRoleCount> policies,
             const Clock& clock)
    : options_(options), policies_(std::move(policies)), clock_(clock) {}

void Fleet::set(const EngineList& list) {
  std::vector<std::shared_ptr<Engine>> engines;
  for (const Role role : {Role::kPrefill, Role::kDecode}) {
    for (const EngineUrl& url : list.by_role[static_cast<std::size_t>(role)]) {
      const auto same = [&](const std::shared_ptr<Engine>& each) {
        return each->role == role && each->url.text == url.text;
      };
      if (std::any_of(engines.begin(), engines.end(), same)) continue;  // Listed twice.
      const auto known = std::find_if(engines_.begin(), engines_.end(), same);
      engines.push_back(
          known != engines_.end() ? *known : std::make_shared<Engine>(url, role, options_.breaker));
    }
  }
  for (const auto& old : engines_) old->is_removed = true;
  for (const auto& now : engines) now->is_removed = false;
  engines_ = std::move(engines);
}

Serves Fleet::wanted(Role role, const Request& request) const {
  if (request.model.empty()) return Serves::kNo;  // Any engine will do.
  Serves best = Serves::kNo;                      // Of the engines that are up.
  Serves listed = Serves::kNo;                    // Of all engines.
  for (const auto& engine : engines_) {
    if (engine->role != role) continue;
    const Serves serves = engine->models.serves(request.model);
    listed = std::max(listed, serves);
    if (engine->is_up) best = std::max(best, serves);
  }
  if (best != Serves::kNo) return best;
  if (listed == Serves::kYes) return Serves::kYes;  // All of them are down.
  // An engine that never listed its models may have it. Meanwhile another engine reports that the
  // model is missing.
  const bool any_may = listed == Serves::kUnknown || options_.passes_unknown_models;
  return any_may && role == Role::kDecode ? Serves::kNo : Serves::kUnknown;
}

bool Fleet::has_room(const Engine& engine) const {
  return engine.inflight < options_.max_inflight[static_cast<std::size_t>(engine.role)];
}

bool Fleet::has_room_for(const Engine& engine, const Request& request) const {
  if (engine.is_removed || !engine.is_up || !has_room(engine) ||
      !may_have(engine, request, wanted(engine.role, request))) {
    return false;
  }
  const Candidate alone{engine.id, engine.inflight};
  return !policies_[static_cast<std::size_t>(engine.role)]->should_wait({&alone, 1}, request.view);
}

Fleet::Found Fleet::find(Role role, const Request& request) const {
  const TimePoint now = clock_.now();
  const Serves least = wanted(role, request);
  Found found;
  bool any = false;
  bool up = false;
  bool suspended = false;
  bool busy = false;
  // In the order of preference: breaker closed and not tried, tried, breaker open.
  std::array<std::vector<std::shared_ptr<Engine>>, 3> groups;
  for (const auto& engine : engines_) {
    if (engine->role != role) continue;
    if (!may_have(*engine, request, least)) continue;
    any = true;
    if (!engine->is_up) continue;
    up = true;
    if (role == Role::kPrefill && !engine->handover.allows(now)) {
      suspended = true;
      continue;
    }
    if (!has_room(*engine)) {
      busy = true;
      continue;
    }
    const bool was_tried =
        std::find(request.tried.begin(), request.tried.end(), engine.get()) != request.tried.end();
    groups[!engine->breaker.allows(now) ? 2 : was_tried ? 1 : 0].push_back(engine);
  }
  for (auto& group : groups) {
    if (group.empty()) continue;
    found.engines = std::move(group);
    found.candidates.reserve(found.engines.size());
    for (const auto& each : found.engines) {
      found.candidates.push_back({each->id, each->inflight});
    }
    return found;
  }
  found.why = suspended && !busy ? Why::kSuspended
              : !any             ? Why::kNone
              : !up              ? Why::kDown
                                 : Why::kBusy;
  return found;
}

Fleet::Choice Fleet::choose(Role role, const Request& request) {
  const Found found = find(role, request);
  if (found.why != Why::kFound) return {nullptr, found.why};
  Policy& policy = *policies_[static_cast<std::size_t>(role)];
  if (policy.should_wait(found.candidates, request.view)) return {nullptr, Why::kBusy};
  return {found.engines[policy.choose(found.candidates, request.view)]};
}

std::vector<Candidate> Fleet::candidates(Role role, const Request& request) const {
  return find(role, request).candidates;
}

bool Fleet::is_unknown_model(std::string_view model) const {
  if (options_.passes_unknown_models) return false;
  return std::all_of(engines_.begin(), engines_.end(), [&](const auto& engine) {
    return engine->role != Role::kDecode || engine->models.serves(model) == Serves::kNo;
  });
}

std::string Fleet::unnamed_model() const {
  const auto first = std::find_if(engines_.begin(), engines_.end(), [](const auto& engine) {
    return engine->role == Role::kDecode && !engine->models.first().empty();
  });
  if (first == engines_.end()) return {};
  const std::string& model = (*first)->models.first();
  const bool all = std::none_of(engines_.begin(), engines_.end(), [&](const auto& engine) {
    return engine->models.serves(model) == Serves::kNo;
  });
  return all ? std::string() : model;
}

bool Fleet::has(Role role) const {
  return std::any_of(engines_.begin(), engines_.end(),
                     [&](const auto& engine) { return engine->role == role; });
}

bool Fleet::any_up(Role role) const {
  return std::any_of(engines_.begin(), engines_.end(),
                     [&](const auto& engine) { return engine->role == role && engine->is_up; });
}

}  // namespace pegaflow::router
