#include "capnp/wire/rpc_error.h"

#include <string>
#include <string_view>
#include <utility>

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
    case kj::Exception::Type::FAILED:
      // The error of open calls when this side drops the connection.
      if (detail == "RpcSystem was destroyed.") code = Errc::kPeerLost;
      break;
    case kj::Exception::Type::UNIMPLEMENTED:
      break;
  }
  std::string said(detail.begin(), detail.size());
  // KJ prints its expressions with their values; for an unknown host name the last one suffices.
  constexpr std::string_view kName = "params.host = ";
  constexpr std::string_view kReason = "gai_strerror(status) = ";
  const auto name = said.find(kName);
  const auto reason = said.find(kReason);
  if (name != std::string::npos && reason != std::string::npos) {
    const auto from = name + kName.size();
    said = said.substr(from, said.find(';', from) - from) + ": " +
           said.substr(reason + kReason.size());
  }
  return {.code = code, .detail = std::move(said)};
}

kj::Exception to_exception(const Error& error) {
  const auto type =
      error.code == Errc::kBusy ? kj::Exception::Type::OVERLOADED : kj::Exception::Type::FAILED;
  return {type, __FILE__, __LINE__, kj::heapString(error.detail.data(), error.detail.size())};
}

}  // namespace pegaflow
