#include "transport/disk/sim_disk.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include "base/assert.h"
#include "transport/disk/checks.h"
#include "transport/disk/io_queue.h"
#include "transport/disk/sim_medium.h"

namespace pegaflow {

using disk::IoQueue;
using disk::Piece;
using disk::SimMedium;

namespace {

constexpr std::uint64_t kSector = SimMedium::kSector;
constexpr int kFlushLatencies = 20;  // A flush takes that many latencies of a read.

/// A piece that the device works on, with its own copy of the memory's places: the process that
/// began it may die.
struct Flight {
  std::uint32_t piece = 0;
  Disk::Operation operation = Disk::Operation::kRead;
  std::uint64_t offset = 0;
  std::uint64_t size_bytes = 0;
  std::vector<iovec> memory;
  std::uint64_t writes_before = 0;  // SimMedium::now() at its begin, for flushes.
  bool has_owner = true;            // False: its process was killed.
  bool is_hung = false;
};

std::vector<std::byte> gather(const Flight& flight) {
  std::vector<std::byte> bytes;
  bytes.reserve(flight.size_bytes);
  for (const iovec& part : flight.memory) {
    const auto* const begin = static_cast<const std::byte*>(part.iov_base);
    bytes.insert(bytes.end(), begin, begin + part.iov_len);
  }
  return bytes;
}

void scatter(const Flight& flight, std::span<const std::byte> bytes) {
  for (const iovec& part : flight.memory) {
    const std::size_t size = std::min(part.iov_len, bytes.size());
    std::memcpy(part.iov_base, bytes.data(), size);
    bytes = bytes.subspan(size);
  }
}

/// A byte of each sector changes at the begin of a read, so that a reader of unfinished memory does
/// not find the former content.
void spoil(const Flight& flight) {
  for (const iovec& part : flight.memory) {
    for (std::size_t at = 0; at < part.iov_len; at += kSector) {
      static_cast<std::byte*>(part.iov_base)[at] ^= std::byte{0xA5};
    }
  }
}

}  // namespace

/// The drive: time, faults, and the pieces in flight.
class SimDrive::Medium {
 public:
  Medium(const Clock& clock, std::uint64_t seed, std::uint64_t size_bytes)
      : clock_(clock), random_(seed), capacity_(size_bytes), size_bytes_(size_bytes) {
    PEGA_ASSERT(disk::check_size(size_bytes), "a simulated drive of {} bytes", size_bytes);
  }

  void begin(const Piece& piece);
  /// Executes the flights that are due, and returns whether there were any.
  bool run_due();
  /// Executes every flight of the open Disk now and with success.
  void end_all_of_owner();
  void abandon();
  void power_cut();
  void release_hung();
  [[nodiscard]] TimePoint next_time() const;

  const Clock& clock_;
  SimMedium::Random random_;
  const std::uint64_t capacity_;
  std::uint64_t size_bytes_;
  SimMedium sectors_;
  Faults faults_;
  Speed speed_;
  Counts counts_;
  bool is_gone_ = false;
  OpenDisk* open_ = nullptr;
  bool has_news_ = false;  // The open Disk has commands that run() has not seen.
  TimePoint news_at_{};

 private:
  using Key = std::pair<TimePoint, std::uint64_t>;  // The end, and a number in order of begin.
  enum class Fate : std::uint8_t { kAsDrawn, kGood };

  [[nodiscard]] bool chance(double probability);
  [[nodiscard]] Duration some(Duration longest);
  void end(const Flight& flight, Fate fate);
  std::int64_t execute(const Flight& flight, Fate fate);
  std::int64_t read(const Flight& flight, Fate fate);
  std::int64_t write(const Flight& flight, Fate fate);
  std::int64_t flush(const Flight& flight, Fate fate);
  void write_some(const Flight& flight);
  [[nodiscard]] std::uint64_t elsewhere(const Flight& flight);
  [[nodiscard]] std::uint64_t fewer(std::uint64_t size_bytes);

  std::map<Key, Flight> flights_;
  std::uint64_t last_flight_ = 0;
  TimePoint busy_until_{};
};

/// A process's view of the drive.
class SimDrive::OpenDisk final : public Disk {
 public:
  OpenDisk(Medium& medium, const Limits& limits, CompletionSink sink)
      : medium_(&medium),
        limits_(limits),
        sink_(std::move(sink)),
        queue_({.limits = limits, .path = "a simulated disk"}) {
    attributes_ = {.path = "a simulated disk",
                   .backend = "sim",
                   .reason = "the caller simulates",
                   .is_new = medium.sectors_.is_empty()};
    medium.open_ = this;
  }
  ~OpenDisk() override {
    if (medium_ == nullptr) return;
    queue_.cancel_all(medium_->clock_.now());
    while (!queue_.is_empty()) {
      medium_->end_all_of_owner();
      deliver();
    }
    medium_->open_ = nullptr;
  }
  OpenDisk(const OpenDisk&) = delete;
  OpenDisk& operator=(const OpenDisk&) = delete;

  [[nodiscard]] const Attributes& attributes() const noexcept override { return attributes_; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept override {
    return medium_ != nullptr ? medium_->size_bytes_ : 0;
  }

  Result<void> resize(std::uint64_t size_bytes) override {
    PEGA_TRY(check_alive());
    PEGA_TRY(disk::check_size(size_bytes));
    if (open_requests_ != 0) return fail(Errc::kBusy, "resize: requests are in flight");
    if (size_bytes > medium_->capacity_) {
      return fail(Errc::kOutOfCapacity, "allocate {} bytes on a simulated disk of {}", size_bytes,
                  medium_->capacity_);
    }
    medium_->size_bytes_ = size_bytes;
    return {};
  }

  using Disk::submit;
  Result<void> submit(std::vector<Request> requests) override {
    PEGA_TRY(check_alive());
    for (const Request& request : requests) PEGA_TRY(disk::check(request, size_bytes()));
    if (open_requests_ + requests.size() > limits_.requests) {
      return fail(Errc::kBusy, "{} requests more than the limit of {}", requests.size(),
                  limits_.requests);
    }
    open_requests_ += requests.size();
    for (Request& request : requests) queue_.accept(std::move(request), medium_->clock_.now());
    announce();
    return {};
  }

  Result<void> cancel(std::uint64_t ticket) override {
    PEGA_TRY(check_alive());
    queue_.cancel(ticket, medium_->clock_.now());
    announce();
    return {};
  }

  [[nodiscard]] Stats stats() const override {
    Stats stats = queue_.stats();
    stats.open_requests = open_requests_;
    return stats;
  }

  // ---- the drive

  void ended(std::uint32_t piece, std::int64_t result) {
    queue_.ended(piece, result, medium_->clock_.now());
  }
  void begin_pieces() {
    const TimePoint now = medium_->clock_.now();
    for (;;) {
      while (const std::optional<Piece> piece = queue_.next(now)) medium_->begin(*piece);
      if (!queue_.must_prepare(now)) return;
      queue_.prepare(now);
    }
  }
  void deliver() {
    while (std::optional<IoQueue::Finished> finished = queue_.take_finished()) {
      --open_requests_;
      sink_(std::move(finished->completion));
    }
  }
  [[nodiscard]] TimePoint next_time() const { return queue_.next_time(); }
  void die() { medium_ = nullptr; }

 private:
  [[nodiscard]] Result<void> check_alive() const {
    if (medium_ != nullptr) return {};
    return fail(Errc::kGone, "the process of this simulated disk was killed");
  }
  void announce() {
    if (!medium_->has_news_) medium_->news_at_ = medium_->clock_.now();
    medium_->has_news_ = true;
  }

  Medium* medium_;  // None once the process is dead.
  const Limits limits_;
  const CompletionSink sink_;
  Attributes attributes_;
  IoQueue queue_;
  std::size_t open_requests_ = 0;
};

// ---- time

bool SimDrive::Medium::chance(double probability) {
  return probability > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < probability;
}

Duration SimDrive::Medium::some(Duration longest) {
  return Duration(std::uniform_int_distribution<std::int64_t>(0, longest.count())(random_));
}

void SimDrive::Medium::begin(const Piece& piece) {
  Flight flight{.piece = piece.id,
                .operation = piece.operation,
                .offset = piece.offset,
                .size_bytes = piece.size_bytes,
                .memory = {piece.memory.begin(), piece.memory.end()},
                .writes_before = sectors_.now(),
                .is_hung = chance(faults_.hang)};
  if (flight.operation == Disk::Operation::kRead) spoil(flight);
  const TimePoint now = clock_.now();
  busy_until_ = std::max(busy_until_, now) +
                Duration(static_cast<std::int64_t>(1e9 * static_cast<double>(piece.size_bytes) /
                                                   speed_.bytes_per_second));
  const bool is_flush = flight.operation == Disk::Operation::kFlush;
  TimePoint ends = busy_until_ + speed_.latency / 2 + some(speed_.latency) +
                   (is_flush ? kFlushLatencies * speed_.latency : Duration::zero());
  if (chance(faults_.slow)) ends += some(faults_.slowest);
  if (flight.is_hung) ends = TimePoint::max();
  ++counts_.in_flight;
  flights_.emplace(Key(ends, ++last_flight_), std::move(flight));
}

TimePoint SimDrive::Medium::next_time() const {
  TimePoint next = flights_.empty() ? TimePoint::max() : flights_.begin()->first.first;
  if (has_news_) next = std::min(next, news_at_);
  if (open_ != nullptr) next = std::min(next, open_->next_time());
  return next;
}

bool SimDrive::Medium::run_due() {
  bool any = false;
  while (!flights_.empty() && flights_.begin()->first.first <= clock_.now() &&
         !flights_.begin()->second.is_hung) {
    const auto due = flights_.extract(flights_.begin());
    end(due.mapped(), Fate::kAsDrawn);
    any = true;
  }
  return any;
}

void SimDrive::Medium::end(const Flight& flight, Fate fate) {
  --counts_.in_flight;
  const std::int64_t result = execute(flight, fate);
  ++counts_.pieces;
  if (flight.has_owner) open_->ended(flight.piece, result);
}

void SimDrive::Medium::end_all_of_owner() {
  std::map<Key, Flight> all;
  all.swap(flights_);
  for (auto& [key, flight] : all) {
    if (flight.has_owner) {
      end(flight, Fate::kGood);
    } else {
      flights_.emplace(key, std::move(flight));
    }
  }
}

void SimDrive::Medium::abandon() {
  for (auto& [key, flight] : flights_) flight.has_owner = false;
  if (open_ != nullptr) open_->die();
  open_ = nullptr;
  has_news_ = false;
}

void SimDrive::Medium::power_cut() {
  abandon();
  for (const auto& [key, flight] : flights_) {
    if (disk::is_write(flight.operation) && !is_gone_) write_some(flight);
  }
  flights_.clear();
  counts_.in_flight = 0;
  counts_.sectors_lost += sectors_.lose_some(random_);
  busy_until_ = {};
}

void SimDrive::Medium::release_hung() {
  std::map<Key, Flight> all;
  all.swap(flights_);
  for (auto& [key, flight] : all) {
    const TimePoint ends = flight.is_hung ? clock_.now() : key.first;
    flight.is_hung = false;
    flights_.emplace(Key(ends, key.second), std::move(flight));
  }
}

// ---- execution

std::int64_t SimDrive::Medium::execute(const Flight& flight, Fate fate) {
  if (is_gone_) {
    ++counts_.faults;
    return -ENODEV;
  }
  switch (flight.operation) {
    case Disk::Operation::kRead:
      return read(flight, fate);
    case Disk::Operation::kFlush:
      return flush(flight, fate);
    case Disk::Operation::kWrite:
    case Disk::Operation::kDurableWrite:
      break;
  }
  return write(flight, fate);
}

std::uint64_t SimDrive::Medium::elsewhere(const Flight& flight) {
  const std::uint64_t places = (capacity_ - flight.size_bytes) / kSector + 1;
  return random_() % places * kSector;
}

std::uint64_t SimDrive::Medium::fewer(std::uint64_t size_bytes) {
  return random_() % (size_bytes / kSector) * kSector;
}

std::int64_t SimDrive::Medium::read(const Flight& flight, Fate fate) {
  const auto strikes = [&](double probability) {
    const bool hit = fate == Fate::kAsDrawn && chance(probability);
    counts_.faults += hit ? 1 : 0;
    return hit;
  };
  if (sectors_.is_bad(flight.offset, flight.size_bytes)) {
    ++counts_.faults;
    return -EIO;
  }
  if (strikes(faults_.read_error)) return -EIO;
  const auto random_byte = [&] { return random_() % flight.size_bytes; };
  if (strikes(faults_.rot)) {
    sectors_.flip_bit(flight.offset + random_byte(), static_cast<unsigned>(random_() % 8));
  }
  std::vector<std::byte> bytes(flight.size_bytes);
  sectors_.read(strikes(faults_.misdirected_read) ? elsewhere(flight) : flight.offset, bytes);
  if (strikes(faults_.read_flip)) bytes[random_byte()] ^= std::byte{1} << (random_() % 8);
  if (strikes(faults_.short_transfer)) bytes.resize(fewer(flight.size_bytes));
  scatter(flight, bytes);
  counts_.bytes_read += bytes.size();
  return static_cast<std::int64_t>(bytes.size());
}

std::int64_t SimDrive::Medium::write(const Flight& flight, Fate fate) {
  const auto strikes = [&](double probability) {
    const bool hit = fate == Fate::kAsDrawn && chance(probability);
    counts_.faults += hit ? 1 : 0;
    return hit;
  };
  const auto size = static_cast<std::int64_t>(flight.size_bytes);
  if (strikes(faults_.no_space)) return -ENOSPC;
  if (strikes(faults_.write_error)) {
    write_some(flight);
    return -EIO;
  }
  counts_.bytes_written += flight.size_bytes;
  if (strikes(faults_.lost_write)) return size;
  if (strikes(faults_.torn_write)) {
    write_some(flight);
    return size;
  }
  std::vector<std::byte> bytes = gather(flight);
  if (strikes(faults_.short_transfer)) bytes.resize(fewer(flight.size_bytes));
  const std::uint64_t offset =
      strikes(faults_.misdirected_write) ? elsewhere(flight) : flight.offset;
  sectors_.write(offset, bytes, flight.operation == Disk::Operation::kDurableWrite);
  return static_cast<std::int64_t>(bytes.size());
}

/// Each sector is written or keeps its content.
void SimDrive::Medium::write_some(const Flight& flight) {
  const std::vector<std::byte> bytes = gather(flight);
  for (std::uint64_t at = 0; at < bytes.size(); at += kSector) {
    if (random_() % 2 == 0) continue;
    sectors_.write(flight.offset + at, std::span(bytes).subspan(at, kSector),
                   flight.operation == Disk::Operation::kDurableWrite);
  }
}

std::int64_t SimDrive::Medium::flush(const Flight& flight, Fate fate) {
  if (fate == Fate::kAsDrawn && chance(faults_.flush_error)) {
    ++counts_.faults;
    counts_.sectors_lost += sectors_.lose_some(random_);
    return -EIO;
  }
  sectors_.flush(flight.writes_before);
  ++counts_.flushes;
  return 0;
}

// ---- SimDrive

SimDrive::SimDrive(const Clock& clock, std::uint64_t seed, std::uint64_t size_bytes)
    : medium_(std::make_unique<Medium>(clock, seed, size_bytes)) {}

SimDrive::~SimDrive() { medium_->abandon(); }

Result<std::unique_ptr<Disk>> SimDrive::open(const Disk::Limits& limits,
                                             Disk::CompletionSink sink) {
  PEGA_TRY(disk::check(limits));
  if (is_locked()) return fail(Errc::kBusy, "the simulated disk is in use, or its I/O is");
  return std::make_unique<OpenDisk>(*medium_, limits, std::move(sink));
}

TimePoint SimDrive::next_time() const { return medium_->next_time(); }

void SimDrive::run() {
  // Pieces of no latency may end in the iteration in which they begin.
  bool again = true;
  while (again) {
    medium_->has_news_ = false;
    const bool any = medium_->run_due();
    if (medium_->open_ != nullptr) medium_->open_->begin_pieces();
    if (medium_->open_ != nullptr) medium_->open_->deliver();
    again = any || medium_->has_news_;
  }
}

void SimDrive::set_faults(const Faults& faults) { medium_->faults_ = faults; }
void SimDrive::set_speed(const Speed& speed) { medium_->speed_ = speed; }
void SimDrive::kill() { medium_->abandon(); }

bool SimDrive::is_locked() const {
  return medium_->open_ != nullptr || medium_->counts_.in_flight > 0;
}

void SimDrive::power_cut() { medium_->power_cut(); }

void SimDrive::set_gone(bool gone) {
  if (gone && !medium_->is_gone_) medium_->counts_.sectors_lost += medium_->sectors_.lose_all();
  medium_->is_gone_ = gone;
}

void SimDrive::release_hung() { medium_->release_hung(); }

void SimDrive::set_bad_sector(std::uint64_t offset, bool bad) {
  medium_->sectors_.set_bad(offset, bad);
}

void SimDrive::flip_bit(std::uint64_t offset, unsigned bit) {
  medium_->sectors_.flip_bit(offset, bit);
}

void SimDrive::peek(std::uint64_t offset, std::span<std::byte> to) const {
  medium_->sectors_.read(offset, to);
}

void SimDrive::poke(std::uint64_t offset, std::span<const std::byte> from) {
  medium_->sectors_.poke(offset, from);
}

const SimDrive::Counts& SimDrive::counts() const { return medium_->counts_; }

}  // namespace pegaflow
