#pragma once
/// \file
/// The checks of a request that need its head only.

#include <string>
#include <string_view>

#include "cluster/peer_proof.h"
#include "router/request/access_record.h"
#include "router/request/client_request.h"

namespace pegaflow::router {

/// The whole response to a request that is refused, or answered, by its head alone (path, method,
/// key, rate, preflight); empty for all others. Sets the request's route and key name, and the
/// record's status.
std::string check_head(ClientRequest& request, AccessRecord& record);

/// Whether the request has a token that was made with one of the secrets, for this body.
bool has_token(const cluster::PeerSecrets& secrets, const RequestHead& head, std::string_view body);

}  // namespace pegaflow::router
