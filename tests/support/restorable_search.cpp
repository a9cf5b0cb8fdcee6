// Answers searches for restorable prefixes, for comparisons with an engine's own search.
//
// Each line of the input is one search: UNIT ALIGNMENT UNITS LOCAL, then for each kind
// RULE TOKENS BLOCK PRESENT, where RULE is the number of engine::KindRule and PRESENT has a digit,
// 0 or 1, for each block ("-" without a block). Each line of the output is the longest restorable
// prefix in tokens.

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/kinds/restorable.h"

namespace pegaflow::engine {
namespace {

class Digits final : public BlockPresence {
 public:
  explicit Digits(std::vector<std::string> present) : present_(std::move(present)) {}
  std::uint64_t present(std::size_t kind, std::size_t first, std::size_t count) override {
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < count; ++i) {
      bits |= std::uint64_t{present_[kind].at(first + i) == '1'} << i;
    }
    return bits;
  }

 private:
  std::vector<std::string> present_;
};

Result<std::uint64_t> search(const std::string& line) {
  std::istringstream words(line);
  BlockKinds kinds;
  std::size_t units = 0;
  std::uint64_t local_tokens = 0;
  words >> kinds.unit_tokens >> kinds.alignment_tokens >> units >> local_tokens;
  std::vector<std::string> present;
  int rule = 0;
  BlockKind kind;
  std::string digits;
  while (words >> rule >> kind.tokens >> kind.block_tokens >> digits) {
    kind.rule = static_cast<KindRule>(rule);
    kinds.kinds.push_back(kind);
    present.push_back(digits == "-" ? std::string() : digits);
  }
  PEGA_TRY(kinds.check());
  Digits blocks(std::move(present));
  return RestorableSearch(kinds, units, blocks).longest(local_tokens);
}

int run() {
  std::string line;
  while (std::getline(std::cin, line)) {
    const auto found = search(line);
    if (!found) {
      std::fprintf(stderr, "%s\n", to_string(found.error()).c_str());
      return 1;
    }
    std::printf("%llu\n", static_cast<unsigned long long>(*found));
  }
  return 0;
}

}  // namespace
}  // namespace pegaflow::engine

int main() { return pegaflow::engine::run(); }
