#pragma once
/// \file
/// The right to have one request in flight at an engine.

#include <memory>
#include <utility>

#include "router/state/shared.h"

namespace pegaflow::router {

/// Counts one request in flight at an engine, and reports its outcome to the engine's breaker. The
/// destructor gives the room to the next request in the line. Movable. Thread-bound.
class EnginePermit {
 public:
  EnginePermit(Shared& shared, std::shared_ptr<Engine> engine)
      : shared_(&shared), engine_(std::move(engine)) {
    ++engine_->inflight;
    engine_->breaker.started(shared.now());
  }
  ~EnginePermit() {
    if (!engine_) return;
    --engine_->inflight;
    if (!is_judged_) engine_->breaker.withdrawn();
    if (engine_->role == Role::kDecode)
      shared_->line.serve(shared_->fleet, engine_, shared_->now());
  }
  EnginePermit(EnginePermit&& other) noexcept
      : shared_(other.shared_), engine_(std::move(other.engine_)), is_judged_(other.is_judged_) {}
  EnginePermit(const EnginePermit&) = delete;
  EnginePermit& operator=(const EnginePermit&) = delete;
  EnginePermit& operator=(EnginePermit&&) = delete;

  void succeeded() {
    is_judged_ = true;
    engine_->breaker.succeeded();
  }
  void failed() {
    is_judged_ = true;
    ++engine_->counters.failures;
    engine_->breaker.failed(shared_->now());
  }
  [[nodiscard]] const std::shared_ptr<Engine>& engine() const { return engine_; }

 private:
  Shared* shared_;
  std::shared_ptr<Engine> engine_;
  bool is_judged_ = false;
};

}  // namespace pegaflow::router
