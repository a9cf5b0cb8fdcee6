#include "router/exchange/stream_relay.h"

#include <string_view>
#include <utility>

#include "router/body/first_token.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// A longer event is sent in pieces.
constexpr std::size_t kEventBytes = std::size_t{256} * 1024;
/// An idle stream keeps no larger buffers.
constexpr std::size_t kKeptBytes = 4096;

std::string_view framing(bool is_chunked) {
  return is_chunked ? "Transfer-Encoding: chunked\r\n" : "";
}

}  // namespace

asio::awaitable<bool> send_opening(ResponseWriter& writer, OpeningEvent& opening,
                                   const ResponseHead& head) {
  AccessRecord& record = writer.record();
  const bool is_chunked = writer.request().is_chunked();
  std::string out = writer.head(head, framing(is_chunked));
  append_piece(out, opening.text, is_chunked);
  record.bytes_out += opening.text.size();
  record.events = 1;
  record.first_event_time = writer.request().shared().now() - record.began;
  opening.is_sent = true;
  co_return co_await writer.request().client().send(out);
}

StreamRelay::StreamRelay(ResponseWriter& writer, UpstreamCall& call, OpeningEvent* opening)
    : writer_(writer), call_(call), opening_(opening), is_chunked_(writer.request().is_chunked()) {}

bool StreamRelay::take_events(std::size_t before) {
  AccessRecord& record = writer_.record();
  const std::size_t ended = tracker_.feed(std::string_view(pending_).substr(before));
  std::size_t size = ended > 0 ? before + ended : 0;
  if (call_.is_complete() || pending_.size() - size > kEventBytes) size = pending_.size();
  record.events = tracker_.events() + (opening_ != nullptr ? 1 : 0);
  if (size == 0 && !call_.is_complete()) return false;
  is_in_event_ = size != before + ended;
  out_.clear();
  if (!std::exchange(has_begun_, true)) {
    if (opening_ == nullptr) {
      out_ = writer_.head(call_.head(), framing(is_chunked_));
      record.first_event_time = writer_.request().shared().now() - record.began;
    }
    writer_.begin(pending_, call_);
  }
  const std::string_view piece = std::string_view(pending_).substr(0, size);
  writer_.note_piece(piece);
  if (opening_ != nullptr) {
    append_piece(out_, with_first_token_counted(piece), is_chunked_);
  } else {
    append_piece(out_, piece, is_chunked_);
  }
  if (call_.is_complete() && is_chunked_) out_ += "0\r\n\r\n";
  record.bytes_out += size;
  if (size == pending_.size()) {
    pending_.clear();
    if (pending_.capacity() > kKeptBytes) pending_.shrink_to_fit();
  } else {
    pending_.erase(0, size);
  }
  return true;
}

asio::awaitable<Relayed> StreamRelay::run(Error& error) {
  Client& client = writer_.request().client();
  const RouterOptions& options = writer_.request().shared().options;
  if (opening_ != nullptr && !opening_->is_sent) {
    const bool sent = co_await send_opening(writer_, *opening_, call_.head());
    if (!sent) co_return Relayed::kGone;
  }
  while (true) {
    const std::size_t before = pending_.size();
    Result<void> got =
        co_await call_.more(pending_, has_begun_ ? options.event_timeout : options.answer_timeout);
    if (!got) {
      error = std::move(got.error());
      if (client.is_gone()) co_return Relayed::kGone;
      if (!has_begun_) co_return Relayed::kNothingSent;
      co_return co_await end_broken(error);
    }
    if (!take_events(before)) continue;
    const bool sent = co_await client.send(out_);
    if (!sent) co_return Relayed::kGone;
    if (call_.is_complete()) co_return Relayed::kWhole;
    if (out_.capacity() > kKeptBytes) std::string().swap(out_);
  }
}

asio::awaitable<Relayed> StreamRelay::end_broken(const Error& error) {
  bool sent = false;
  // After the closing event nothing is missing.
  if (tracker_.is_finished()) {
    out_ = is_chunked_ ? "0\r\n\r\n" : "";
    sent = co_await writer_.request().client().send(out_);
  } else {
    sent = co_await writer_.end_stream_with_error(error, is_in_event_);
  }
  co_return sent ? Relayed::kErrorFrame : Relayed::kGone;
}

}  // namespace pegaflow::router
