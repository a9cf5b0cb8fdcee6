#include "client/rpc_error.h"

namespace pegaflow {

Error to_error(const kj::Exception& exception) {
  const Errc code =
      exception.getType() == kj::Exception::Type::DISCONNECTED ? Errc::kPeerLost : Errc::kInternal;
  return Error{code, exception.getDescription().cStr()};
}

}  // namespace pegaflow
