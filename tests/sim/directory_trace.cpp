#include "tests/sim/directory_trace.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <stdexcept>
#include <utility>

#include <nlohmann/json.hpp>

namespace pegaflow::directory {
namespace {

constexpr std::uint64_t kTokens = 512;

}  // namespace

std::uint64_t named(std::uint64_t one, std::uint64_t other) noexcept {
  std::uint64_t word = one ^ (other + 1) * 0x9e3779b97f4a7c15ULL;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ULL;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebULL;
  return word ^ (word >> 31);
}

SiteTrace SiteTrace::read(const std::string& path) {
  std::ifstream lines(path);
  if (!lines) throw std::runtime_error(path + " cannot be read");
  SiteTrace trace;
  trace.name = path.substr(path.rfind('/') + 1);
  for (std::string line; std::getline(lines, line);) {
    const auto object = nlohmann::json::parse(line);
    Request request{.at = object.at("timestamp").get<double>() / 1000,
                    .units = object.at("hash_ids").get<std::vector<std::uint64_t>>()};
    // The last one may be a part.
    request.units.resize(std::min<std::size_t>(
        request.units.size(), object.at("input_length").get<std::uint64_t>() / kTokens));
    if (!request.units.empty()) trace.requests.push_back(std::move(request));
  }
  if (trace.requests.empty()) throw std::runtime_error(path + " has no request");
  trace.seconds = trace.requests.back().at + 1;
  return trace;
}

SiteTrace SiteTrace::generate(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  SiteTrace trace;
  trace.name = "generated conversations";
  std::vector<std::vector<std::uint64_t>> conversations;
  std::uint64_t last = 0;
  std::vector<std::vector<std::uint64_t>> systems(20);
  for (std::size_t i = 0; i < systems.size(); ++i) {
    for (std::size_t unit = 0; unit <= i / 2; ++unit) systems[i].push_back(++last);
  }
  for (std::size_t i = 0; i < 6000; ++i) {
    const bool is_new = conversations.empty() || random() % 3 == 0;
    if (is_new) conversations.push_back(systems[random() % systems.size()]);
    auto& units = is_new
                      ? conversations.back()
                      : conversations[conversations.size() - 1 -
                                      random() % std::min<std::size_t>(200, conversations.size())];
    for (std::size_t more = 4 + random() % 25; more > 0 && units.size() < 200; --more) {
      units.push_back(++last);
    }
    trace.requests.push_back({.at = 0.3 * static_cast<double>(i), .units = units});
  }
  trace.seconds = 0.3 * static_cast<double>(trace.requests.size());
  return trace;
}

ManySites::ManySites(const SiteTrace& trace, double requests_per_second, std::mt19937_64& random)
    : trace_(trace) {
  const double rate = static_cast<double>(trace.requests.size()) / trace.seconds;
  const auto groups =
      static_cast<std::size_t>(std::max(1.0, std::ceil(requests_per_second / rate)));
  speed_ = requests_per_second / (rate * static_cast<double>(groups));
  for (std::size_t i = 0; i < groups; ++i) {
    const std::size_t first = random() % trace.requests.size();
    groups_.push_back(
        {.next = first, .salt = random(), .begin = -trace.requests[first].at / speed_});
    queue(i);
  }
}

double ManySites::time_of(const Group& group) const {
  return group.begin + trace_.requests[group.next].at / speed_;
}

void ManySites::queue(std::size_t group) { due_.emplace(time_of(groups_[group]), group); }

ManySites::Prompt ManySites::next() {
  const auto [at, number] = due_.top();
  due_.pop();
  Group& group = groups_[number];
  Prompt prompt{.at = at, .units = trace_.requests[group.next].units};
  for (std::uint64_t& unit : prompt.units) unit = named(group.salt, unit);
  if (++group.next == trace_.requests.size()) {
    group.next = 0;
    group.begin += trace_.seconds / speed_;
    group.salt = named(group.salt, 0);
  }
  queue(number);
  return prompt;
}

}  // namespace pegaflow::directory
