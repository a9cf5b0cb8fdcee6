#include "tests/support/test_network.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <sched.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

namespace pegaflow::testing {
namespace {

constexpr const char* kBridge = "nodes";

UniqueFd open_namespace() {
  return UniqueFd(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
}

/// Throws if the command fails; its output goes to ours.
void run(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  std::string text;
  for (const std::string& word : command) {
    arguments.push_back(const_cast<char*>(word.c_str()));
    text += " " + word;
  }
  arguments.push_back(nullptr);
  pid_t pid = 0;
  const int error = ::posix_spawnp(&pid, arguments[0], nullptr, nullptr, arguments.data(), environ);
  if (error != 0) throw std::runtime_error(std::string(std::strerror(error)) + ":" + text);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (status != 0) throw std::runtime_error("failed:" + text);
}

void run(std::vector<std::string> prefix, const std::vector<std::string>& command) {
  prefix.insert(prefix.end(), command.begin(), command.end());
  run(prefix);
}

std::vector<std::string> shape(const std::string& device, const std::string& rate) {
  if (rate.empty()) return {"tc", "qdisc", "del", "dev", device, "root"};
  // A cut link still delivers no more than the queue.
  return {"tc",   "qdisc", "replace", "dev",  device,  "root", "tbf",
          "rate", rate,    "burst",   "32kb", "limit", "64kb"};
}

}  // namespace

std::optional<std::string> TestNetwork::why_not() {
  try {
    const TestNetwork tried(1);
    tried[0].limit_sent("1gbit");
    return std::nullopt;
  } catch (const std::runtime_error& error) {
    return fmt::format("network namespaces with iproute2 and root: {}", error.what());
  }
}

TestNetwork::TestNetwork(std::size_t nodes) : outside_(open_namespace()), nodes_(nodes) {
  if (::unshare(CLONE_NEWNET) != 0) {
    throw std::runtime_error(fmt::format("unshare: {}", std::strerror(errno)));
  }
  const UniqueFd home = open_namespace();
  try {
    run({"ip", "link", "set", "lo", "up"});
    run({"ip", "link", "add", kBridge, "type", "bridge"});
    run({"ip", "link", "set", kBridge, "up"});
    for (std::size_t i = 0; i < nodes; ++i) {
      Node& node = nodes_[i];
      node.number_ = i + 1;
      if (::unshare(CLONE_NEWNET) != 0) throw std::runtime_error("unshare");
      node.namespace_ = open_namespace();
      if (::setns(home.get(), CLONE_NEWNET) != 0) throw std::runtime_error("setns");
      const std::string there = fmt::format("/proc/{}/fd/{}", ::getpid(), node.namespace_.get());
      const std::string control = fmt::format("at-{}", node.number_);
      run({"ip", "link", "add", node.port(), "type", "veth", "peer", "name", "data", "netns",
           there});
      run({"ip", "link", "add", control, "type", "veth", "peer", "name", "control", "netns",
           there});
      run({"ip", "address", "add", fmt::format("10.78.{}.1/30", node.number_), "dev", control});
      run({"ip", "link", "set", control, "up"});
      run({"ip", "link", "set", node.port(), "master", kBridge, "up"});
      run(node.prefix(), {"ip", "link", "set", "lo", "up"});
      run(node.prefix(), {"ip", "address", "add", node.address() + "/24", "dev", "data"});
      run(node.prefix(),
          {"ip", "address", "add", node.control_address() + "/30", "dev", "control"});
      run(node.prefix(), {"ip", "link", "set", "data", "up"});
      run(node.prefix(), {"ip", "link", "set", "control", "up"});
    }
  } catch (...) {
    (void)::setns(outside_.get(), CLONE_NEWNET);
    throw;
  }
}

TestNetwork::~TestNetwork() { (void)::setns(outside_.get(), CLONE_NEWNET); }

std::string TestNetwork::Node::address() const { return fmt::format("10.77.0.{}", number_); }

std::string TestNetwork::Node::control_address() const {
  return fmt::format("10.78.{}.2", number_);
}

std::string TestNetwork::Node::port() const { return fmt::format("to-{}", number_); }

std::vector<std::string> TestNetwork::Node::prefix() const {
  return {"nsenter", fmt::format("--net=/proc/{}/fd/{}", ::getpid(), namespace_.get()), "--"};
}

void TestNetwork::Node::limit_sent(const std::string& rate) const {
  run(prefix(), shape("data", rate));
}
void TestNetwork::Node::limit_received(const std::string& rate) const { run(shape(port(), rate)); }
void TestNetwork::Node::cut() const { run({"ip", "link", "set", port(), "nomaster"}); }
void TestNetwork::Node::mend() const { run({"ip", "link", "set", port(), "master", kBridge}); }
void TestNetwork::Node::run_here(const std::vector<std::string>& command) const {
  run(prefix(), command);
}
void TestNetwork::Node::cut_from(const Node& other) const {
  // No port has this address, so that the bridge's ports discard what is sent to it.
  constexpr const char* kNobody = "02:00:00:00:00:01";
  for (const auto& [from, to] : {std::pair(this, &other), std::pair(&other, this)}) {
    from->run_here({"ip", "neigh", "replace", to->address(), "lladdr", kNobody, "dev", "data",
                    "nud", "permanent"});
  }
}
void TestNetwork::Node::mend_to(const Node& other) const {
  for (const auto& [from, to] : {std::pair(this, &other), std::pair(&other, this)}) {
    from->run_here({"ip", "neigh", "del", to->address(), "dev", "data"});
  }
}
void TestNetwork::Node::pull_cable() const { run({"ip", "link", "set", port(), "down"}); }
void TestNetwork::Node::plug_cable() const { run({"ip", "link", "set", port(), "up"}); }

std::uint64_t TestNetwork::Node::sent_bytes() const {
  std::ifstream devices("/proc/thread-self/net/dev");
  for (std::string line; std::getline(devices, line);) {
    std::istringstream words(line);
    std::string name;
    std::uint64_t received = 0;  // By the bridge's end of the link.
    if (words >> name >> received && name == port() + ":") return received;
  }
  throw std::runtime_error(port() + " is not in /proc/net/dev");
}

}  // namespace pegaflow::testing
