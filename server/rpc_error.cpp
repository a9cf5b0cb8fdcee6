#include "server/rpc_error.h"

#include <string>

#include <kj/string.h>

namespace pegaflow {

Error error_from(const kj::Exception& exception) {
  const kj::StringPtr detail = exception.getDescription();
  Errc code = Errc::kInternal;
  switch (exception.getType()) {
    case kj::Exception::Type::DISCONNECTED:
      code = Errc::kPeerLost;
      break;
    case kj::Exception::Type::OVERLOADED:
      code = Errc::kBusy;
      break;
    case kj::Exception::Type::UNIMPLEMENTED:
    case kj::Exception::Type::FAILED:
      break;
  }
  return {.code = code, .detail = std::string(detail.begin(), detail.size())};
}

kj::Exception to_exception(const Error& error) {
  const auto type =
      error.code == Errc::kBusy ? kj::Exception::Type::OVERLOADED : kj::Exception::Type::FAILED;
  return {type, __FILE__, __LINE__, kj::heapString(error.detail.data(), error.detail.size())};
}

}  // namespace pegaflow
