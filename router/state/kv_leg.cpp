#include "router/state/kv_leg.h"

#include "router/kv/kv_routing.h"
#include "router/state/shared.h"

namespace pegaflow::router {

KvLeg::KvLeg(Shared& shared, KvRequest* request, const Engine& engine)
    : shared_(shared), request_(request) {
  if (request_ != nullptr) shared_.kv->sent(*request_, engine, shared_.now());
}

KvLeg::~KvLeg() {
  if (request_ != nullptr) shared_.kv->leg_ended(*request_, shared_.now());
}

std::string_view KvLeg::hint() const {
  // After a prefill the body has the prefill engine's parameters.
  if (request_ == nullptr || !request_->placed || request_->is_prefilled) return {};
  return request_->placed->hint;
}

}  // namespace pegaflow::router
