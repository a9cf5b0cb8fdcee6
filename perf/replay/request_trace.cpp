#include "perf/replay/request_trace.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string_view>
#include <unordered_set>

#include <nlohmann/json.hpp>

namespace pegaflow::perf {
namespace {

using nlohmann::json;

/// The start of a line, for an error text.
std::string shown(std::string_view line) {
  constexpr std::size_t kShown = 60;
  std::string text(line.substr(0, kShown));
  for (char& letter : text) {
    if (static_cast<unsigned char>(letter) < ' ') letter = '?';
  }
  return line.size() > kShown ? text + "..." : text;
}

/// The command that decompresses a file with this beginning; empty: it is not compressed.
std::string_view decompressor(std::string_view line) {
  if (line.starts_with("\x28\xB5\x2F\xFD")) return "zstd";
  return line.starts_with("\x1F\x8B") ? "gzip" : "";
}

struct Line {
  Prompt prompt;
  Arrival arrival;
};

/// A length in tokens; what does not fit is cut.
std::uint32_t tokens(const json& number) {
  constexpr double kMost = 1U << 30U;
  return static_cast<std::uint32_t>(std::min(number.get<double>(), kMost));
}

/// Parses one line. The error describes what is wrong with the line, but not its place.
Result<Line> read_request(const std::string& line) {
  const json object = json::parse(line, nullptr, false);
  if (const std::string_view tool = decompressor(line); !tool.empty()) {
    return fail(
        Errc::kInvalidArgument,
        "expected text, but the file is compressed: {} -dc FILE | pegaflow-perf replay --trace -",
        tool);
  }
  if (!object.is_object()) {
    return fail(Errc::kInvalidArgument,
                "expected a JSON object with timestamp, input_length, output_length and hash_ids, "
                "got \"{}\"",
                shown(line));
  }
  for (const char* const field : {"timestamp", "input_length", "output_length"}) {
    const auto found = object.find(field);
    if (found == object.end()) {
      return fail(Errc::kInvalidArgument, "expected the field \"{}\", which is missing", field);
    }
    if (!found->is_number() || found->get<double>() < 0) {
      return fail(Errc::kInvalidArgument, "expected \"{}\" to be a number from 0 on, got {}", field,
                  shown(found->dump()));
    }
  }
  const auto ids = object.find("hash_ids");
  if (ids == object.end() || !ids->is_array()) {
    return fail(Errc::kInvalidArgument, "expected \"hash_ids\" to be an array, {}",
                ids == object.end() ? "which is missing" : "got " + shown(ids->dump()));
  }
  if (ids->size() > kMaxPromptBlocks) {
    return fail(Errc::kInvalidArgument, "expected at most {} hash_ids, got {}", kMaxPromptBlocks,
                ids->size());
  }
  Line request;
  request.arrival = {.milliseconds = object["timestamp"].get<double>(),
                     .input_tokens = tokens(object["input_length"]),
                     .output_tokens = tokens(object["output_length"])};
  Prompt& prompt = request.prompt;
  prompt.reserve(ids->size());
  for (const json& id : *ids) {
    if (!id.is_number_unsigned()) {
      return fail(Errc::kInvalidArgument,
                  "expected each of \"hash_ids\" to be a whole number from 0 on, got {}",
                  shown(id.dump()));
    }
    prompt.push_back(id.get<std::uint64_t>());
  }
  return request;
}

}  // namespace

Result<RequestTrace> read_trace(std::istream& lines, const std::string& name, std::size_t limit) {
  RequestTrace trace{.name = name, .requests = {}};
  std::string line;
  for (std::size_t number = 1; std::getline(lines, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    auto request = read_request(line);
    if (!request) {
      return fail(Errc::kInvalidArgument, "{}, line {}: {}", name, number, request.error().detail);
    }
    if (!request->prompt.empty()) {
      trace.requests.push_back(std::move(request->prompt));
      trace.arrivals.push_back(request->arrival);
    }
    if (limit != 0 && trace.requests.size() == limit) return trace;
  }
  if (lines.bad()) return fail(Errc::kIo, "read {}: {}", name, std::strerror(errno));
  if (trace.requests.empty()) {
    return fail(Errc::kInvalidArgument, "{} has no request with a block", name);
  }
  return trace;
}

Result<RequestTrace> read_trace_file(const std::string& path, std::size_t limit) {
  if (path == "-") return read_trace(std::cin, "standard input", limit);
  std::error_code ignored;  // A directory opens like a file, but its first read fails.
  if (std::filesystem::is_directory(path, ignored)) {
    return fail(Errc::kIo, "open the trace {}: it is a directory", path);
  }
  std::ifstream file(path);
  if (!file) return fail(Errc::kIo, "open the trace {}: {}", path, std::strerror(errno));
  return read_trace(file, std::filesystem::path(path).filename().string(), limit);
}

TraceSummary summarize(const RequestTrace& trace) {
  TraceSummary summary;
  std::unordered_set<std::uint64_t> seen;
  for (const Prompt& prompt : trace.requests) {
    std::size_t found = 0;
    while (found < prompt.size() && seen.contains(prompt[found])) ++found;
    seen.insert(prompt.begin(), prompt.end());
    ++summary.requests;
    summary.blocks += prompt.size();
    summary.reusable += found;
  }
  summary.distinct = seen.size();
  return summary;
}

}  // namespace pegaflow::perf
