#pragma once
/// \file
/// A test case that cannot run on this machine.

#include <string>

namespace pegaflow::testing {

/// Marks the running test case as skipped. The runner counts it as skipped, with the reason, unless
/// one of its checks failed.
void note_skip(std::string reason);

}  // namespace pegaflow::testing

/// Ends the function, which has no result, and counts its test case as skipped and not as passed.
#define PEGA_SKIP(reason)                     \
  do {                                        \
    ::pegaflow::testing::note_skip((reason)); \
    return;                                   \
  } while (false)
