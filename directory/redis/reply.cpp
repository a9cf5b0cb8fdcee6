#include "directory/redis/reply.h"

#include <charconv>
#include <string_view>
#include <utility>

namespace pegaflow::directory {
namespace {

Result<std::int64_t> number_of(std::string_view text) {
  std::int64_t number = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (status != std::errc() || end != text.data() + text.size() || text.empty()) {
    return fail(Errc::kCorrupt, "a reply has a header without a number");
  }
  return number;
}

}  // namespace

void ReplyReader::consume(std::size_t bytes) {
  begin_ += bytes;
  taken_ += bytes;
  // In steps, so that many small replies do not move the rest of the buffer each time.
  if (begin_ == input_.size() || begin_ > (std::size_t{64} << 10)) {
    input_.erase(0, begin_);
    begin_ = 0;
  }
}

Result<std::optional<std::string>> ReplyReader::line() {
  const std::string_view rest = std::string_view(input_).substr(begin_);
  const std::size_t end = rest.substr(0, limits_.line_bytes + 2).find("\r\n");
  if (end == std::string_view::npos) {
    if (rest.size() > limits_.line_bytes + 1) {
      return fail(Errc::kCorrupt, "a reply has a line of more than {} bytes", limits_.line_bytes);
    }
    return std::optional<std::string>();
  }
  return std::optional<std::string>(std::string(rest.substr(0, end)));
}

Result<std::optional<Reply>> ReplyReader::text_of(std::int64_t length, std::size_t header_end) {
  if (length == -1) {
    consume(header_end);
    return std::optional<Reply>(Reply{});
  }
  if (length < 0 || static_cast<std::uint64_t>(length) > limits_.reply_bytes) {
    return fail(Errc::kCorrupt, "a reply has a text of {} bytes, the limit is {}", length,
                limits_.reply_bytes);
  }
  const auto bytes = static_cast<std::size_t>(length);
  if (input_.size() - begin_ < header_end + bytes + 2) return std::optional<Reply>();
  const std::string_view rest = std::string_view(input_).substr(begin_ + header_end, bytes + 2);
  if (!rest.ends_with("\r\n")) return fail(Errc::kCorrupt, "a text of a reply has no end");
  Reply reply{.kind = Reply::Kind::kText, .text = std::string(rest.substr(0, bytes)), .items = {}};
  consume(header_end + bytes + 2);
  return std::optional<Reply>(std::move(reply));
}

Result<std::optional<Reply>> ReplyReader::element(std::size_t& left) {
  left = 0;
  PEGA_TRY_LET(std::optional<std::string> header, line());
  if (!header) return std::optional<Reply>();
  if (header->empty()) return fail(Errc::kCorrupt, "a reply begins with an empty line");
  const std::size_t header_end = header->size() + 2;
  const char type = header->front();
  std::string text = header->substr(1);
  Reply reply;
  switch (type) {
    case '+':
    case '-':
      reply.kind = type == '+' ? Reply::Kind::kStatus : Reply::Kind::kError;
      reply.text = std::move(text);
      break;
    case ':': {
      PEGA_TRY_LET(reply.integer, number_of(text));
      reply.kind = Reply::Kind::kInteger;
      break;
    }
    case '$': {
      PEGA_TRY_LET(const std::int64_t length, number_of(text));
      return text_of(length, header_end);
    }
    case '*': {
      PEGA_TRY_LET(const std::int64_t count, number_of(text));
      if (count < -1 || (count > 0 && static_cast<std::uint64_t>(count) > limits_.items)) {
        return fail(Errc::kCorrupt, "a reply has {} items, the limit is {}", count, limits_.items);
      }
      if (count >= 0) reply.kind = Reply::Kind::kArray;
      if (count > 0) left = static_cast<std::size_t>(count);
      break;
    }
    default:
      return fail(Errc::kCorrupt, "a reply begins with byte {}, which is no type of RESP2",
                  static_cast<unsigned>(static_cast<unsigned char>(type)));
  }
  consume(header_end);
  return std::optional<Reply>(std::move(reply));
}

Result<std::optional<Reply>> ReplyReader::next() {
  for (;;) {
    if (taken_ > limits_.reply_bytes) {
      return fail(Errc::kCorrupt, "a reply has more than {} bytes", limits_.reply_bytes);
    }
    std::size_t left = 0;
    PEGA_TRY_LET(std::optional<Reply> found, element(left));
    if (!found) return std::optional<Reply>();
    if (++elements_ > limits_.items) {
      return fail(Errc::kCorrupt, "a reply has more than {} items", limits_.items);
    }
    if (left != 0) {
      if (open_.size() == limits_.depth) {
        return fail(Errc::kCorrupt, "a reply has arrays {} deep", limits_.depth + 1);
      }
      open_.push_back({.array = std::move(*found), .left = left});
      continue;
    }
    while (!open_.empty()) {
      Open& array = open_.back();
      array.array.items.push_back(std::move(*found));
      if (--array.left != 0) break;
      *found = std::move(array.array);
      open_.pop_back();
    }
    if (!open_.empty()) continue;
    taken_ = 0;
    elements_ = 0;
    return found;
  }
}

}  // namespace pegaflow::directory
