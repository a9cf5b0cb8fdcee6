#pragma once
/// \file
/// The router's own responses: errors, its health, the models of all engines.

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "router/routing/fleet.h"
#include "router/routing/namespaces.h"

namespace pegaflow::router {

/// A whole error response in the format of OpenAI's (or Anthropic's) API. `fields` are whole lines.
std::string error_response(unsigned status, std::string_view text, bool is_anthropic,
                           std::string_view fields, bool keep_alive);

/// An event that reports an incomplete stream and ends it. No [DONE] follows.
std::string error_frame(bool is_anthropic, Errc why);

class KvRouting;

struct HealthPage {
  std::string text;  ///< JSON.
  bool is_serving = false;
};
/// `kv` is nullptr when no policy is kv-aware.
HealthPage health_page(const Fleet& fleet, const NamespaceView& namespaces, const KvRouting* kv,
                       bool is_draining, TimePoint now);

/// The response to a request for a model that no engine serves, in vLLM's format.
std::string unknown_model_response(std::string_view model, bool is_anthropic,
                                   std::string_view fields, bool keep_alive);

/// The maximum size of an engine's list of models.
inline constexpr std::size_t kModelListBytes = std::size_t{1024} * 1024;

/// The ids in a response to GET /v1/models, in order; nullopt for an invalid response.
std::optional<std::vector<std::string>> read_model_ids(std::string_view answer);

/// The ids in such a response that are adapters: those with a `parent`.
std::vector<std::string> read_adapter_ids(std::string_view answer);

/// Merges the responses of several engines to GET /v1/models into one. A model that several engines
/// have is listed once, as the first engine lists it. Invalid responses are left out.
std::string merge_models(std::span<const std::string> answers);

}  // namespace pegaflow::router
