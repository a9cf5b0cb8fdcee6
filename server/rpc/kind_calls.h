#pragma once
/// \file
/// Lookups and claims of engines whose namespace has several kinds of blocks.

#include <kj/async.h>

#include "base/error.h"
#include "base/id128.h"
#include "capnp/cache.capnp.h"
#include "server/cache/cache_service.h"
#include "server/fetches/fetches.h"
#include "server/rpc/measured.h"
#include "server/rpc/session_context.h"

namespace pegaflow::server {

/// The calls of one connection. Thread-bound.
class KindCalls {
 public:
  using LookupContext = capnp::CallContext<wire::Keys, wire::Session::LookupResults>;
  using ClaimContext = capnp::CallContext<wire::Session::ClaimParams, wire::Session::ClaimResults>;

  /// Both outlive it.
  KindCalls(SessionContext& context, const Id128& connection, Fetches& fetches)
      : context_(context), service_(context.service), connection_(connection), fetches_(fetches) {}

  kj::Promise<void> lookup(LookupContext& call, const Measured& measured);
  kj::Promise<void> claim(ClaimContext& call, const Measured& measured);

 private:
  /// Claims what is restorable from this node.
  kj::Promise<void> claim_here(ClaimContext& call, const Measured& measured);
  template <typename T>
  kj::Promise<void> finish(const Measured& measured, const Result<T>& result);

  SessionContext& context_;
  CacheService& service_;
  const Id128 connection_;
  Fetches& fetches_;
};

}  // namespace pegaflow::server
