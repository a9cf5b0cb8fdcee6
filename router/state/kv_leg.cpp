#include "router/state/kv_leg.h"

#include <utility>

#include "router/kv/kv_routing.h"
#include "router/state/shared.h"
#include "router/upstream/prefetches.h"

namespace pegaflow::router {

KvLeg::KvLeg(Shared& shared, KvRequest* request, const Engine& engine)
    : shared_(shared), request_(request) {
  if (request_ == nullptr) return;
  shared_.kv->sent(*request_, engine, shared_.now());
  if (shared_.prefetches == nullptr) return;
  auto order = shared_.kv->prefetch_for(*request_);
  if (order) prefetch_ = shared_.prefetches->start(std::move(*order));
}

KvLeg::~KvLeg() {
  if (request_ == nullptr) return;
  if (account_) shared_.kv->leg_ended(*account_, shared_.now());
  if (!is_detached_) shared_.kv->leg_ended(*request_, shared_.now());
  if (prefetch_ == 0) return;
  if (is_detached_ ? has_answer_ : request_->has_answer) {
    shared_.prefetches->ended(prefetch_);
  } else {
    shared_.prefetches->cancel(prefetch_);
  }
}

void KvLeg::detach() {
  is_detached_ = true;
  if (request_ != nullptr) account_ = KvRouting::take_leg(*request_);
}

void KvLeg::answered() {
  has_answer_ = true;
  if (account_) {
    shared_.kv->computed(*account_, shared_.now());
  } else if (request_ != nullptr && !is_detached_) {
    shared_.kv->computed(*request_, shared_.now());
  }
}

std::string_view KvLeg::hint() const {
  // After a prefill the body has the prefill engine's parameters.
  if (request_ == nullptr || !request_->placed || request_->is_prefilled) return {};
  return request_->placed->hint;
}

std::string_view KvLeg::body_session() const {
  if (request_ == nullptr || !request_->placed || !request_->has_lesson) return {};
  if (!request_->adds_session) return {};
  const KvFleet::Rank* const rank =
      shared_.kv->fleet().find_rank(request_->placed->engine, request_->placed->rank);
  const bool wants = rank != nullptr && rank->address.wants_body_session;
  return wants ? std::string_view(request_->session) : std::string_view();
}

}  // namespace pegaflow::router
