#include "base/assert.h"

#include <cstdio>
#include <cstdlib>

namespace pegaflow {
namespace {

thread_local int t_throwing = 0;

}  // namespace

ThrowOnAssert::ThrowOnAssert() noexcept { ++t_throwing; }
ThrowOnAssert::~ThrowOnAssert() { --t_throwing; }

void assertion_failed(const char* file, int line, const char* condition,
                      const std::string& detail) {
  const std::string text =
      fmt::format("{}:{}: broken invariant: {} ({})", file, line, condition, detail);
  if (t_throwing > 0) throw BrokenInvariant(text);
  std::fprintf(stderr, "%s\n", text.c_str());
  std::abort();
}

}  // namespace pegaflow
