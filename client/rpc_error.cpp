#include "client/rpc_error.h"

namespace pegaflow {

Error to_error(const kj::Exception& exception) {
  // KJ fails the calls that are open when this side drops the connection, too.
  const bool is_lost = exception.getType() == kj::Exception::Type::DISCONNECTED ||
                       exception.getDescription() == "RpcSystem was destroyed.";
  const Errc code = is_lost ? Errc::kPeerLost : Errc::kInternal;
  return Error{code, exception.getDescription().cStr()};
}

}  // namespace pegaflow
