#include "client/loop.h"

#include <exception>

#include "base/assert.h"

namespace pegaflow {

std::optional<Error> run_loop(const std::function<void(kj::AsyncIoContext&)>& body) {
  const ThrowOnAssert throw_on_assert;
  try {
    kj::AsyncIoContext io = kj::setupAsyncIo();
    body(io);
    return std::nullopt;
  } catch (const kj::Exception& exception) {  // KJ's form of a BrokenInvariant.
    return Error{Errc::kInternal, exception.getDescription().cStr()};
  } catch (const std::exception& exception) {
    return Error{Errc::kInternal, exception.what()};
  }
}

}  // namespace pegaflow
