#include "perf/replay/request_trace.h"

#include <sstream>

#include <unistd.h>

#include <doctest/doctest.h>

#include "harness/child.h"

namespace pegaflow::perf {
namespace {

constexpr const char* kTwoRequests =
    R"({"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]})"
    "\n"
    R"({"timestamp": 3000.5, "input_length": 600, "output_length": 0, "hash_ids": [7, 12]})"
    "\n";

Result<RequestTrace> read(const std::string& text, std::size_t limit = 0) {
  std::istringstream lines(text);
  return read_trace(lines, "some.jsonl", limit);
}

/// The error of a trace with this third line.
std::string complaint(const std::string& third_line) {
  const Result<RequestTrace> trace = read(kTwoRequests + third_line + "\n" + kTwoRequests);
  REQUIRE_FALSE(trace);
  CHECK(trace.error().code == Errc::kInvalidArgument);
  CHECK(trace.error().detail.starts_with("some.jsonl, line 3: expected "));
  return trace.error().detail;
}

bool has(const std::string& text, const char* words) {
  INFO(text);
  return text.find(words) != std::string::npos;
}

TEST_SUITE("request_trace") {
  TEST_CASE("requests keep the order of their lines") {
    const RequestTrace trace = read(kTwoRequests).value();
    CHECK(trace.name == "some.jsonl");
    REQUIRE(trace.requests.size() == 2);
    CHECK(trace.requests[0] == Prompt{7, 8, 9});
    CHECK(trace.requests[1] == Prompt{7, 12});
  }

  TEST_CASE("empty lines, requests without a block and carriage returns are skipped") {
    const RequestTrace trace =
        read("\n" + std::string(kTwoRequests) +
             R"({"timestamp": 1, "input_length": 0, "output_length": 0, "hash_ids": []})"
             "\r\n \r\n" +
             kTwoRequests)
            .value();
    CHECK(trace.requests.size() == 4);
  }

  TEST_CASE("a last line without a newline counts") {
    std::string text = kTwoRequests;
    text.pop_back();
    CHECK(read(text).value().requests.size() == 2);
  }

  TEST_CASE("a limit ends the reading, so that lines after it may be malformed") {
    CHECK(read(std::string(kTwoRequests) + "garbage\n", 2).value().requests.size() == 2);
    CHECK(read(kTwoRequests, 1).value().requests.size() == 1);
    CHECK(read(kTwoRequests, 3).value().requests.size() == 2);
  }

  TEST_CASE("the error of a malformed line has its number and what was expected") {
    CHECK(has(complaint("garbage"), "a JSON object with timestamp"));
    CHECK(has(complaint("garbage"), "got \"garbage\""));
    CHECK(has(complaint("[1, 2]"), "a JSON object"));
    CHECK(has(complaint(R"({"timestamp": 0)"), "a JSON object"));
    CHECK(has(complaint(R"({"timestamp": 0, "input_length": 5, "hash_ids": [1]})"),
              "the field \"output_length\""));
    CHECK(has(
        complaint(R"({"timestamp": "0", "input_length": 5, "output_length": 1, "hash_ids": [1]})"),
        "\"timestamp\" to be a number from 0 on, got \"0\""));
    CHECK(has(
        complaint(R"({"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [1]})"),
        "\"input_length\" to be a number from 0 on, got -5"));
    CHECK(has(complaint(R"({"timestamp": 0, "input_length": 5, "output_length": 1})"),
              "\"hash_ids\" to be an array, which is missing"));
    CHECK(has(
        complaint(R"({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": "1"})"),
        "\"hash_ids\" to be an array, got"));
    for (const char* const id : {"-1", "1.5", "\"1\"", "null", "[1]"}) {
      CAPTURE(id);
      CHECK(has(
          complaint(fmt::format(
              R"({{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0, {}]}})",
              id)),
          "a whole number from 0 on, got"));
    }
  }

  TEST_CASE("a request with more blocks than one call may have is rejected") {
    std::string line = R"({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0)";
    for (std::size_t i = 1; i < kMaxPromptBlocks; ++i) line += fmt::format(",{}", i);
    CHECK(read(line + "]}").value().requests.at(0).size() == kMaxPromptBlocks);
    CHECK(has(complaint(line + ",1]}"), "at most 8192 hash_ids, got 8193"));
  }

  TEST_CASE("the error of a compressed trace has the command that decompresses it") {
    CHECK(has(read("\x28\xB5\x2F\xFDxyz\n").error().detail, "zstd -dc FILE |"));
    CHECK(has(read("\x1F\x8Bxyz\n").error().detail, "gzip -dc FILE |"));
  }

  TEST_CASE("the error of a long line shows its beginning, without control characters") {
    const std::string words = complaint("\x1b[2J" + std::string(10'000, 'x'));
    CHECK(words.size() < 300);
    CHECK(has(words, "\"?[2Jxxx"));
  }

  TEST_CASE("a trace without a request is an error") {
    CHECK(read("").error().code == Errc::kInvalidArgument);
    CHECK(has(read("\n\n").error().detail, "some.jsonl has no request"));
  }

  TEST_CASE("the error of an unreadable file has its path") {
    const Result<RequestTrace> missing = read_trace_file("/nonexistent/trace.jsonl", 0);
    CHECK(missing.error().code == Errc::kIo);
    CHECK(has(missing.error().detail, "/nonexistent/trace.jsonl: No such file"));
    const harness::TemporaryDirectory directory = harness::TemporaryDirectory::create().value();
    CHECK(read_trace_file(directory.path(), 0).error().code == Errc::kIo);
  }

  TEST_CASE("a summary counts the prefixes that an unlimited cache would find") {
    const TraceSummary summary =
        summarize({.name = "", .requests = {{1, 2, 3}, {1, 2, 4}, {5, 2}, {1, 2, 4, 6}}});
    CHECK(summary.requests == 4);
    CHECK(summary.blocks == 12);
    CHECK(summary.distinct == 6);
    // Two blocks of the second, three of the last; 2 after the unknown 5 is not in a prefix.
    CHECK(summary.reusable == 5);
  }
}

}  // namespace
}  // namespace pegaflow::perf
