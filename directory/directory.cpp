#include "directory/directory.h"

#include <algorithm>
#include <utility>

#include <poll.h>

#include "base/assert.h"
#include "base/os/thread.h"
#include "directory/agent.h"

namespace pegaflow::directory {
namespace {

constexpr Duration kReportInterval = std::chrono::milliseconds(500);
/// Commands that are taken before the servers have their turn.
constexpr std::size_t kTogether = 256;

int timeout_ms(TimePoint until, TimePoint now) {
  if (until <= now) return 0;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - now);
  return static_cast<int>(std::min<std::int64_t>(left.count(), 1000));
}

}  // namespace

Result<std::unique_ptr<Directory>> Directory::start(Options options) {
  PEGA_ASSERT(!options.servers.empty() && options.servers.size() <= kMostServers,
              "{} servers of the directory", options.servers.size());
  std::unique_ptr<Directory> made(new Directory(std::move(options)));
  PEGA_TRY_LET(made->thread_, start_thread("pega-directory", [one = made.get()]() { one->run(); }));
  return made;
}

Directory::Directory(Options options) {
  std::vector<Commands*> commands;
  for (RedisServer::Options& each : options.servers) {
    servers_.push_back(std::make_unique<RedisServer>(std::move(each), clock_));
    commands.push_back(servers_.back().get());
  }
  agent_ = std::make_unique<Agent>(
      std::move(commands), std::move(options.keys), *options.agent, clock_,
      Agent::Events{
          // An asker whose answer finds no room has a deadline.
          .found = [this](Found&& found) { (void)news_.try_send(News(std::move(found))); },
          // Epochs come again: the text at the servers differs from that of this node.
          .epochs = [this](const KnownEpochs& known) { (void)news_.try_send(News(known)); }});
  next_report_ = clock_.now();
}

Directory::~Directory() {
  is_stopping_.store(true, std::memory_order_release);  // Pairs with the load in run().
  stop_event_.signal();
  if (thread_.joinable()) thread_.join();
}

void Directory::take(Command&& command) {
  if (auto* const question = std::get_if<Question>(&command)) {
    agent_->ask(std::move(*question));
  } else if (const auto* const announcement = std::get_if<Announcement>(&command)) {
    agent_->take(*announcement);
  } else if (const auto* const known = std::get_if<KnownEpochs>(&command)) {
    agent_->publish(*known);
  } else if (auto* const keys = std::get_if<Keys>(&command)) {
    agent_->set_keys(std::move(*keys));
  }
}

void Directory::report() {
  const TimePoint now = clock_.now();
  const bool is_usable = agent_->is_usable();
  if (now < next_report_ && is_usable == was_usable_) return;
  was_usable_ = is_usable;
  next_report_ = now + kReportInterval;
  Report report{
      .stats = agent_->stats(), .is_usable = is_usable, .knows_epochs = agent_->knows_epochs()};
  for (std::size_t i = 0; i < servers_.size(); ++i) {
    const RedisServer::Stats& from = servers_[i]->stats();
    Stats::Server& to = report.stats.servers[i];
    to.state = to_string(from.state);
    if (!from.why.empty()) to.why = from.why;
    to.connects = from.connects;
    to.losses = from.losses;
    to.failures = from.failures;
    to.commands = from.commands;
    to.late = from.late;
    to.corrupt = from.corrupt;
    to.round_trip = from.round_trip;
    to.info = from.info;
  }
  (void)news_.try_send(News(std::move(report)));  // The next one comes soon.
}

void Directory::wait(TimePoint until) {
  std::vector<pollfd> polled{{.fd = inbox_.fd(), .events = POLLIN, .revents = 0},
                             {.fd = stop_event_.fd(), .events = POLLIN, .revents = 0}};
  for (const auto& server : servers_) {
    until = std::min(until, server->next_step());
    if (server->fd() < 0) continue;
    const short events = server->wants_write() ? POLLIN | POLLOUT : POLLIN;
    polled.push_back({.fd = server->fd(), .events = events, .revents = 0});
  }
  ::poll(polled.data(), polled.size(), timeout_ms(until, clock_.now()));
}

void Directory::run() {
  // Pairs with the store in the destructor.
  while (!is_stopping_.load(std::memory_order_acquire)) {
    for (const auto& server : servers_) server->step();
    inbox_.drain([this](Command&& command) { take(std::move(command)); }, kTogether);
    agent_->step();
    // What the agent has just written.
    for (const auto& server : servers_) server->step();
    report();
    wait(std::min(agent_->next_step(), next_report_));
  }
}

}  // namespace pegaflow::directory
