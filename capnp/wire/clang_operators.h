#pragma once
/// \file
/// Lets clang 16 and later compile KJ 0.9. The build includes it before every file where that is
/// needed.
///
/// In C++20 KJ leaves out comparisons with a literal on the left, since the language turns them
/// around by itself. Since P2468 (clang 16) it no longer does where operator!= is declared too, so
/// <capnp/blob.h> does not compile. g++ 12 and KJ 1.0 need none of this.

#include <type_traits>

namespace kj {

class StringPtr;

// Templates, because StringPtr is not complete yet. The right side is made a StringPtr so that
// these operators, turned around, do not call themselves.
template <typename String>
  requires std::is_same_v<String, StringPtr>
inline bool operator==(const char* left, const String& right) {
  return right == String(left);
}

template <typename String>
  requires std::is_same_v<String, StringPtr>
inline bool operator!=(const char* left, const String& right) {
  return !(right == String(left));
}

}  // namespace kj
