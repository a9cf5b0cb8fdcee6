#include "router/watch/engine_names.h"

#include <algorithm>
#include <set>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <fmt/format.h>

namespace pegaflow::router {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

struct EngineNames::Name {
  Name(EngineNames* its_owner, asio::io_context& io, EngineUrl its_url)
      : owner(its_owner), resolver(io), url(std::move(its_url)) {}

  EngineNames* owner;  // nullptr after the name was removed.
  tcp::resolver resolver;
  const EngineUrl url;
  std::set<std::string> addresses;
  bool is_asked = false;
  bool was_answered = false;
  bool is_failing = false;
};

EngineNames::EngineNames(asio::io_context& io, std::function<void()> on_change,
                         std::function<void(const std::string&)> on_failure)
    : io_(io), on_change_(std::move(on_change)), on_failure_(std::move(on_failure)) {}

EngineNames::~EngineNames() { stop(); }

void EngineNames::stop() {
  for (const auto& [url, name] : names_) {
    name->owner = nullptr;
    name->resolver.cancel();
  }
  names_.clear();
}

void EngineNames::set(EngineList list) {
  list_ = std::move(list);
  std::map<std::string, std::shared_ptr<Name>> names;
  for (const auto& urls : list_.by_role) {
    for (const EngineUrl& url : urls) {
      if (!url.is_name || names.contains(url.text)) continue;
      const auto known = names_.find(url.text);
      names.emplace(url.text,
                    known != names_.end() ? known->second : std::make_shared<Name>(this, io_, url));
    }
  }
  for (const auto& [url, name] : names_) {
    if (names.contains(url)) continue;
    name->owner = nullptr;
    name->resolver.cancel();
  }
  names_ = std::move(names);
}

void EngineNames::ask() {
  for (const auto& [url, name] : names_) {
    if (name->is_asked) continue;
    name->is_asked = true;
    asio::co_spawn(io_, look_up(name), asio::detached);
  }
}

bool EngineNames::is_searching() const {
  return std::any_of(names_.begin(), names_.end(), [](const auto& entry) {
    return entry.second->is_asked && !entry.second->was_answered;
  });
}

asio::awaitable<void> EngineNames::look_up(std::shared_ptr<Name> name) {
  error_code ec;
  const tcp::resolver::results_type found = co_await name->resolver.async_resolve(
      name->url.host, name->url.port, asio::redirect_error(asio::use_awaitable, ec));
  name->is_asked = false;
  name->was_answered = true;
  if (name->owner == nullptr) co_return;
  if (ec) {
    const bool is_new = !std::exchange(name->is_failing, true);
    name->owner->on_failure_(is_new ? fmt::format("{}: {}", name->url.text, ec.message())
                                    : std::string());
    co_return;
  }
  name->is_failing = false;
  const bool has_v4 = std::any_of(found.begin(), found.end(), [](const auto& each) {
    return each.endpoint().address().is_v4();
  });
  std::set<std::string> addresses;
  for (const auto& each : found) {
    const asio::ip::address address = each.endpoint().address();
    if (address.is_v4() != has_v4 || addresses.size() >= kAddresses) continue;
    addresses.insert(has_v4 ? address.to_string() : fmt::format("[{}]", address.to_string()));
  }
  if (addresses == name->addresses) co_return;
  name->addresses = std::move(addresses);
  name->owner->on_change_();
}

EngineList EngineNames::engines() const {
  EngineList list;
  for (std::size_t role = 0; role < kRoleCount; ++role) {
    for (const EngineUrl& url : list_.by_role[role]) {
      if (!url.is_name) {
        list.by_role[role].push_back(url);
        continue;
      }
      const auto name = names_.find(url.text);
      if (name == names_.end()) continue;
      for (const std::string& address : name->second->addresses) {
        // EngineUrl has no scopes (fe80::1%eth0): such an address is left out.
        auto engine = EngineUrl::parse(fmt::format("http://{}:{}", address, url.port));
        if (!engine) continue;
        engine->name = url.text;
        list.by_role[role].push_back(std::move(*engine));
      }
    }
  }
  return list;
}

}  // namespace pegaflow::router
