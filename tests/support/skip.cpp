// Counts test cases that skip themselves, which doctest cannot.
#include "tests/support/skip.h"

#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include <doctest/doctest.h>

namespace pegaflow::testing {
namespace {

std::optional<std::string>& skip_of_this_case() {
  static std::optional<std::string> reason;
  return reason;
}

/// Prints a line for each skipped case: tests/support/counting.py counts them.
struct SkipReporter final : doctest::IReporter {
  explicit SkipReporter(const doctest::ContextOptions& /*options*/) {}

  void test_case_start(const doctest::TestCaseData& which) override {
    name = which.m_name;
    skip_of_this_case().reset();
  }
  void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
    if (!skip_of_this_case() || stats.failure_flags != 0) return;
    std::printf("[skipped] %s: %s\n", name.c_str(), skip_of_this_case()->c_str());
    std::fflush(stdout);
  }

  void report_query(const doctest::QueryData& /*query*/) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& /*stats*/) override {}
  void test_case_reenter(const doctest::TestCaseData& /*which*/) override {}
  void test_case_exception(const doctest::TestCaseException& /*thrown*/) override {}
  void subcase_start(const doctest::SubcaseSignature& /*which*/) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData& /*check*/) override {}
  void log_message(const doctest::MessageData& /*message*/) override {}
  void test_case_skipped(const doctest::TestCaseData& /*which*/) override {}

  std::string name;
};

REGISTER_LISTENER("skips", 1, SkipReporter);

}  // namespace

void note_skip(std::string reason) { skip_of_this_case() = std::move(reason); }

}  // namespace pegaflow::testing
