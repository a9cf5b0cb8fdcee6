// router_bench: the processes around a router that is measured; each is one subcommand.
//
//   router_bench engine [EVENTS_PORT]  responds like an engine that needs no time, and names the
//                                      port where KV events about it are published
//   router_bench relay ENGINE_PORT     a bare relay on Beast: the bound for the router
//   router_bench load PORT CONNECTIONS REQUESTS BODY_BYTES PATH [same|new|ids]
//                                      sequential requests on each connection; prints one line of
//                                      JSON with their times. All have one prompt, or one of their
//                                      own, or one of token ids
//   router_bench streams PORT COUNT    keeps COUNT streams open until standard input ends
//
// The first two print the port that they listen on. perf/router.py puts them together.
#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/buffer_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/serializer.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <fmt/format.h>

namespace pegaflow {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::use_awaitable;
using asio::ip::tcp;
using SteadyTime = std::chrono::steady_clock;

unsigned long number(std::string_view text) {
  unsigned long value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

tcp::endpoint local(unsigned long port) {
  return {asio::ip::address_v4::loopback(), static_cast<std::uint16_t>(port)};
}

/// Ignores the end of a connection: runs end by closing connections.
void ignore_end(const std::exception_ptr&) {}

asio::awaitable<void> accept_all(std::function<asio::awaitable<void>(tcp::socket)> serve) {
  const auto executor = co_await asio::this_coro::executor;
  tcp::acceptor acceptor(executor, local(0));
  acceptor.listen(4096);
  std::printf("%d\n", int{acceptor.local_endpoint().port()});
  std::fflush(stdout);
  while (true) {
    tcp::socket socket = co_await acceptor.async_accept(use_awaitable);
    socket.set_option(tcp::no_delay(true));
    asio::co_spawn(executor, serve(std::move(socket)), ignore_end);
  }
}

/// Reads a message of `Content-Length` bytes into `buffer`. Returns the offset of its body.
asio::awaitable<std::size_t> read_message(tcp::socket& socket, std::string& buffer) {
  const std::size_t head = co_await asio::async_read_until(socket, asio::dynamic_buffer(buffer),
                                                           "\r\n\r\n", use_awaitable);
  const std::size_t at = buffer.find("Content-Length: ");
  const std::size_t length = at < head ? number(std::string_view(buffer).substr(at + 16)) : 0;
  if (buffer.size() < head + length) {
    co_await asio::async_read(socket, asio::dynamic_buffer(buffer),
                              asio::transfer_exactly(head + length - buffer.size()), use_awaitable);
  }
  co_return head;
}

// ---- an engine

std::string whole_answer(std::string_view body) {
  return fmt::format(
      "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
      body.size(), body);
}

asio::awaitable<void> serve_engine(tcp::socket socket, unsigned long events_port) {
  constexpr std::string_view kBegin =
      "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
  const std::string event =
      "data: {\"choices\":[{\"text\":\"" + std::string(160, 'x') + "\"}]}\n\n";
  const std::string chunk = fmt::format("{:x}\r\n{}\r\n", event.size(), event);
  const std::string answer =
      whole_answer("{\"choices\":[{\"text\":\"" + std::string(160, 'x') + "\"}]}");
  const std::string sources = whole_answer(
      events_port == 0
          ? std::string("{}")
          : fmt::format(R"({{"0":{{"publisher":"zmq","endpoint":"tcp://*:{}"}}}})", events_port));
  std::string buffer;
  while (true) {
    const std::size_t head = co_await read_message(socket, buffer);
    const bool streams = buffer.find("\"stream\":true", head) != std::string::npos;
    const bool asks_sources = buffer.starts_with("GET /kv_event_sources ");
    buffer = std::string();
    if (asks_sources) {
      co_await asio::async_write(socket, asio::buffer(sources), use_awaitable);
      continue;
    }
    if (!streams) {
      co_await asio::async_write(socket, asio::buffer(answer), use_awaitable);
      continue;
    }
    co_await asio::async_write(socket, asio::buffer(kBegin), use_awaitable);
    asio::steady_timer timer(socket.get_executor());
    while (true) {  // One event per second, until the peer leaves.
      co_await asio::async_write(socket, asio::buffer(chunk), use_awaitable);
      timer.expires_after(std::chrono::seconds(1));
      co_await timer.async_wait(use_awaitable);
    }
  }
}

// ---- the bound

asio::awaitable<void> serve_relay(tcp::socket client, unsigned long engine_port) {
  tcp::socket engine(client.get_executor());
  co_await engine.async_connect(local(engine_port), use_awaitable);
  engine.set_option(tcp::no_delay(true));
  beast::flat_buffer from_client;
  beast::flat_buffer from_engine;
  std::array<char, std::size_t{16} * 1024> piece{};
  while (true) {
    http::request_parser<http::string_body> request;
    request.body_limit(boost::none);
    co_await http::async_read(client, from_client, request, use_awaitable);
    co_await http::async_write(engine, request.get(), use_awaitable);
    http::response_parser<http::buffer_body> response;
    response.body_limit(boost::none);
    http::response_serializer<http::buffer_body> out(response.get());
    co_await http::async_read_header(engine, from_engine, response, use_awaitable);
    co_await http::async_write_header(client, out, use_awaitable);
    do {
      auto& body = response.get().body();
      if (response.is_done()) {
        body.data = nullptr;
        body.size = 0;
      } else {
        body.data = piece.data();
        body.size = piece.size();
        boost::system::error_code ec;
        co_await http::async_read_some(engine, from_engine, response,
                                       asio::redirect_error(use_awaitable, ec));
        if (ec && ec != http::error::need_buffer) throw boost::system::system_error(ec);
        body.size = piece.size() - body.size;
        body.data = piece.data();
      }
      body.more = !response.is_done();
      boost::system::error_code ec;
      co_await http::async_write(client, out, asio::redirect_error(use_awaitable, ec));
      if (ec && ec != http::error::need_buffer) throw boost::system::system_error(ec);
    } while (!response.is_done() || !out.is_done());
  }
}

// ---- load

struct Load {
  unsigned long left = 0;
  std::size_t open = 0;
  std::vector<double> times_us;
  std::uint64_t failed = 0;
  std::mt19937_64 draw{std::random_device{}()};
};

/// Where a request has 16 digits of its own; 0: nowhere.
asio::awaitable<void> ask(unsigned long port, const std::string& first, std::size_t digits,
                          Load& load) {
  std::string request = first;
  tcp::socket socket(co_await asio::this_coro::executor);
  co_await socket.async_connect(local(port), use_awaitable);
  socket.set_option(tcp::no_delay(true));
  std::string buffer;
  while (load.left > 0) {
    --load.left;
    if (digits != 0) request.replace(digits, 16, fmt::format("{:016x}", load.draw()));
    const auto began = SteadyTime::now();
    co_await asio::async_write(socket, asio::buffer(request), use_awaitable);
    co_await read_message(socket, buffer);
    if (buffer.compare(0, 12, "HTTP/1.1 200") != 0) ++load.failed;
    buffer.clear();
    load.times_us.push_back(
        std::chrono::duration<double, std::micro>(SteadyTime::now() - began).count());
  }
}

std::string post(std::string_view path, const std::string& body) {
  return fmt::format(
      "POST {} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: "
      "{}\r\n\r\n{}",
      path, body.size(), body);
}

/// A prompt of `bytes` as JSON: text, or token ids below 50,000.
std::string prompt_of(std::size_t bytes, bool is_ids) {
  if (!is_ids) return '"' + std::string(bytes, 'p') + '"';
  std::string ids = "[1";
  for (std::uint32_t i = 1; ids.size() < bytes; ++i) {
    ids += fmt::format(",{}", i * 2654435761U % 50'000);
  }
  return ids + ']';
}

int run_load(unsigned long port, unsigned long connections, unsigned long requests,
             unsigned long body_bytes, std::string_view path, std::string_view kind) {
  asio::io_context io(1);
  Load load;
  load.left = requests;
  load.times_us.reserve(requests);
  const std::string body = R"({"model":"m","max_tokens":8,"prompt":)" +
                           prompt_of(body_bytes > 64 ? body_bytes - 44 : 20, kind == "ids") + "}";
  const std::string request = post(path, body);
  const std::size_t digits = kind == "new" ? request.find("pppp") : 0;
  bool broke = false;
  const auto began = SteadyTime::now();
  for (unsigned long i = 0; i < connections; ++i) {
    asio::co_spawn(io, ask(port, request, digits, load),
                   [&](const std::exception_ptr& problem) { broke = broke || problem != nullptr; });
  }
  io.run();
  const double seconds = std::chrono::duration<double>(SteadyTime::now() - began).count();
  std::vector<double>& times = load.times_us;
  std::sort(times.begin(), times.end());
  if (broke || times.size() != requests) {
    std::fprintf(stderr, "router_bench: a connection broke after %zu answers\n", times.size());
    return 1;
  }
  const auto at = [&](double share) {
    return times[std::min(times.size() - 1,
                          static_cast<std::size_t>(share * static_cast<double>(times.size())))];
  };
  fmt::print("{{\"n\":{},\"failed\":{},\"seconds\":{:.6f},\"p50_us\":{:.2f},\"p99_us\":{:.2f}}}\n",
             times.size(), load.failed, seconds, at(0.5), at(0.99));
  return load.failed == 0 ? 0 : 1;
}

asio::awaitable<void> hold_stream(unsigned long port, const std::string& request,
                                  std::size_t& begun) {
  tcp::socket socket(co_await asio::this_coro::executor);
  co_await socket.async_connect(local(port), use_awaitable);
  co_await asio::async_write(socket, asio::buffer(request), use_awaitable);
  std::array<char, 512> piece{};
  bool first = true;
  while (true) {
    (void)co_await socket.async_read_some(asio::buffer(piece), use_awaitable);
    begun += first ? 1 : 0;
    first = false;
  }
}

int run_streams(unsigned long port, unsigned long count) {
  asio::io_context io(1);
  const std::string request = post("/v1/completions", "{\"prompt\":\"x\",\"stream\":true}");
  std::size_t begun = 0;
  std::size_t broken = 0;
  const auto hold = [&]() -> asio::awaitable<void> {
    asio::steady_timer timer(io);
    for (unsigned long i = 0; i < count; ++i) {
      asio::co_spawn(io, hold_stream(port, request, begun),
                     [&](const std::exception_ptr&) { ++broken; });
      // At most the length of a backlog at once.
      while (i >= begun + broken + 256) {
        timer.expires_after(std::chrono::milliseconds(1));
        co_await timer.async_wait(use_awaitable);
      }
    }
    while (begun + broken < count) {
      timer.expires_after(std::chrono::milliseconds(1));
      co_await timer.async_wait(use_awaitable);
    }
    fmt::print("{{\"open\":{},\"broken\":{}}}\n", begun - broken, broken);
    std::fflush(stdout);
  };
  asio::co_spawn(io, hold(), asio::detached);
  asio::posix::stream_descriptor input(io, ::dup(0));
  std::array<char, 1> byte{};
  input.async_read_some(asio::buffer(byte),
                        [&](const boost::system::error_code&, std::size_t) { io.stop(); });
  io.run();
  return broken == 0 ? 0 : 1;
}

int run(const std::vector<std::string_view>& words) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &limit);
  }
  asio::io_context io(1);
  if ((words.size() == 1 || words.size() == 2) && words[0] == "engine") {
    const unsigned long events = words.size() == 2 ? number(words[1]) : 0;
    const auto serve = [events](tcp::socket socket) {
      return serve_engine(std::move(socket), events);
    };
    asio::co_spawn(io, accept_all(serve), ignore_end);
    io.run();
    return 0;
  }
  if (words.size() == 2 && words[0] == "relay") {
    const unsigned long port = number(words[1]);
    const auto serve = [port](tcp::socket socket) { return serve_relay(std::move(socket), port); };
    asio::co_spawn(io, accept_all(serve), ignore_end);
    io.run();
    return 0;
  }
  if ((words.size() == 6 || words.size() == 7) && words[0] == "load") {
    return run_load(number(words[1]), number(words[2]), number(words[3]), number(words[4]),
                    words[5], words.size() == 7 ? words[6] : "same");
  }
  if (words.size() == 3 && words[0] == "streams") {
    return run_streams(number(words[1]), number(words[2]));
  }
  std::fprintf(stderr,
               "usage: router_bench engine [EVENTS_PORT] | relay ENGINE_PORT |\n"
               "       load PORT CONNECTIONS REQUESTS BODY_BYTES PATH [same|new|ids] |\n"
               "       streams PORT COUNT\n");
  return 2;
}

}  // namespace
}  // namespace pegaflow

int main(int argc, char** argv) {
  try {
    return pegaflow::run({argv + 1, argv + argc});
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "router_bench: %s\n", problem.what());
    return 1;
  }
}
