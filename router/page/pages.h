#pragma once
/// \file
/// What the router itself says: errors, its health, the models of all engines.

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

/// A whole answer with an error in the form that clients of OpenAI's (or Anthropic's) API expect.
/// `fields` are whole lines.
std::string error_answer(unsigned status, std::string_view text, bool is_anthropic,
                         std::string_view fields, bool keep_alive);

/// An event that says that the stream ends here and is not whole. No [DONE] follows it.
std::string error_frame(bool is_anthropic, Errc why);

struct HealthPage {
  std::string text;  ///< JSON.
  bool is_serving = false;
};
HealthPage health_page(const Fleet& fleet, const NamespaceView& namespaces, bool is_draining,
                       TimePoint now);

/// The answer to a request for a model that no engine serves, as vLLM gives it.
std::string unknown_model_answer(std::string_view model, bool is_anthropic, std::string_view fields,
                                 bool keep_alive);

/// Of an engine's list of models.
inline constexpr std::size_t kModelListBytes = std::size_t{1024} * 1024;

/// The ids in an answer to GET /v1/models, in order; nothing for what is no such answer.
std::optional<std::vector<std::string>> read_model_ids(std::string_view answer);

/// One list of models of the answers of several engines to GET /v1/models; a model that several
/// have is listed once, as the first one has it. What is no such answer is left out.
std::string merge_models(std::span<const std::string> answers);

}  // namespace pegaflow::router
