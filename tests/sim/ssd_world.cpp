#include "tests/sim/ssd_world.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "transport/checksum.h"

namespace pegaflow::server {
namespace {

namespace ssd = engine::ssd;

constexpr std::uint64_t kSegments = 5;
constexpr std::uint64_t kSize = ssd::kLogOffset + kSegments * ssd::kLeastSegment;
constexpr std::size_t kFrames = 10;
constexpr std::uint64_t kKeys = 24;
constexpr std::size_t kFrameBytes = 192 << 10;
constexpr int kSteps = 120;

BlockKey key_of(std::uint64_t number) {
  BlockKey key;
  std::memcpy(key.bytes.data(), &number, sizeof number);
  return key;
}

/// The word at one place of a page: other for each name, kind, state of the weights, key and page.
std::uint64_t word(const ssd::Origin& origin, std::uint64_t weights, std::uint64_t key,
                   std::size_t page, std::size_t place) {
  std::uint64_t mixed = static_cast<std::uint64_t>(origin.name[0]) * 0x9E3779B97F4A7C15ULL;
  for (const std::uint64_t each :
       {std::uint64_t{origin.kind}, weights, key, std::uint64_t{page}, std::uint64_t{place}}) {
    mixed = (mixed ^ each) * 0xD6E8FEB86659FD93ULL;
    mixed ^= mixed >> 32;
  }
  return mixed;
}

}  // namespace

SsdWorld::SsdWorld(std::uint64_t seed, const SsdDisk::Options::Mistakes& mistakes,
                   const Rates& rates, Counts& counts)
    : random_(seed),
      mistakes_(mistakes),
      rates_(rates),
      counts_(counts),
      drive_(clock_, seed, kSize),
      frames_(kFrames) {
  for (Frame& frame : frames_) frame.memory = std::make_unique<AlignedBuffer>(kFrameBytes);
  for (std::uint8_t i = 0; i < 3; ++i) {
    Name name;
    name.origin.name[0] = std::byte{i};
    name.origin.kind = i;
    names_.push_back(name);
  }
}

SsdWorld::~SsdWorld() { stop(); }

std::string SsdWorld::run() {
  ++counts_.schedules;
  start();
  for (int i = 0; i < kSteps && violation_.empty(); ++i) step();
  if (violation_.empty() && happens(0.5)) check_durable();
  stop();
  if (violation_.empty() && jobs_ != 0) fail(fmt::format("{} jobs have not ended", jobs_));
  counts_.faults += drive_.counts().faults;
  return violation_;
}

/// A new process opens the drive. Where faults prevent it, an operator would try again.
void SsdWorld::start() {
  for (int attempt = 0;; ++attempt) {
    drive_.set_faults({});
    drive_.release_hung();
    run_until_idle();
    // The names of the namespaces are the same in each process, their epochs come from the disk.
    for (Name& name : names_) name.origin.epoch = {};
    auto disk = drive_.open({}, [this](Disk::Completion&& completion) {
      if (disk_) disk_->completed(std::move(completion));
    });
    if (!disk) return fail("the drive is locked: " + to_string(disk.error()));
    SsdDisk::Options options;
    options.size_bytes = kSize;
    options.segment_bytes = ssd::kLeastSegment;
    options.format = attempt == 1;
    options.mistakes = mistakes_;
    disk_ = std::make_unique<SsdDisk>(std::move(*disk), options, clock_);
    const auto opened = disk_->open([this] { advance(); });
    if (opened) break;
    // Damaged superblocks are refused by name; the second attempt formats.
    disk_.reset();
    if (attempt == 1) return fail("the drive cannot be opened: " + to_string(opened.error()));
  }
  for (const ssd::NameRecord& record : disk_->names()) {
    for (Name& name : names_) {
      if (name.origin.name == record.origin.name) name.origin.epoch = record.origin.epoch;
    }
  }
  disk_->start_scan();
  if (happens(0.7)) run_until_idle();
  set_faults();
}

void SsdWorld::stop() {
  if (!disk_) return;
  const std::uint64_t failed = disk_->stats().proof_failures;
  counts_.failed_proofs += failed;
  if (failed != 0 && drive_.counts().faults == 0 && !had_power_cut_) {
    fail("a proof failed without a fault: a segment was used again while it was read");
  }
  disk_.reset();
}

void SsdWorld::set_faults() {
  SimDrive::Faults faults;
  if (happens(0.5)) {
    const auto some = [&](double most) { return happens(0.4) ? most : 0; };
    faults.read_error = some(0.01);
    faults.write_error = some(0.01);
    faults.no_space = some(0.005);
    faults.torn_write = some(0.02);
    faults.lost_write = some(0.02);
    faults.misdirected_write = some(0.02);
    faults.misdirected_read = some(0.02);
    faults.read_flip = some(0.02);
    faults.rot = some(0.01);
    faults.short_transfer = some(0.01);
    faults.slow = some(0.05);
    faults.hang = some(0.005);
    faults.flush_error = some(0.05);
  }
  drive_.set_faults(faults);
}

void SsdWorld::advance() {
  const TimePoint next = drive_.next_time();
  if (next != TimePoint::max() && next > clock_.now()) clock_.advance(next - clock_.now());
  drive_.run();
}

void SsdWorld::run_until_idle() {
  while (drive_.next_time() != TimePoint::max()) advance();
}

SsdWorld::Frame* SsdWorld::free_frame() {
  const std::size_t first = any(kFrames);
  for (std::size_t i = 0; i < kFrames; ++i) {
    Frame& frame = frames_[(first + i) % kFrames];
    if (!frame.is_busy) return &frame;
  }
  return nullptr;
}

/// One to three pages, whose sizes follow from the namespace.
SsdDisk::Block SsdWorld::block_of(std::size_t name, std::uint64_t key, Frame& frame) {
  SsdDisk::Block block{.origin = names_[name].origin, .key = key_of(key)};
  std::span<std::byte> rest = frame.memory->bytes();
  for (std::size_t page = 0; page <= name; ++page) {
    const std::uint64_t bytes = 9000 * (page + 1);
    const std::uint64_t padded = (bytes + ssd::kSector - 1) / ssd::kSector * ssd::kSector;
    block.page_bytes.push_back(bytes);
    block.memory.push_back(rest.first(padded));
    rest = rest.subspan(padded);
  }
  return block;
}

void SsdWorld::fill(const SsdDisk::Block& block, std::uint64_t key) {
  const std::uint64_t weights = names_[block.origin.kind].weights;
  for (std::size_t page = 0; page < block.memory.size(); ++page) {
    for (std::size_t at = 0; at + 8 <= block.page_bytes[page]; at += 8) {
      const std::uint64_t value = word(block.origin, weights, key, page, at);
      std::memcpy(block.memory[page].data() + at, &value, sizeof value);
    }
  }
}

bool SsdWorld::is_whole(const SsdDisk::Block& block) const {
  const Name& name = names_[block.origin.kind];
  for (std::uint64_t weights = name.confirmed; weights <= name.weights; ++weights) {
    if (is_of(block, weights)) return true;
  }
  return false;
}

bool SsdWorld::is_of(const SsdDisk::Block& block, std::uint64_t weights) const {
  std::uint64_t key = 0;
  std::memcpy(&key, block.key.bytes.data(), sizeof key);
  for (std::size_t page = 0; page < block.memory.size(); ++page) {
    for (std::size_t at = 0; at + 8 <= block.page_bytes[page]; at += 8) {
      const std::uint64_t value = word(block.origin, weights, key, page, at);
      if (std::memcmp(block.memory[page].data() + at, &value, sizeof value) != 0) return false;
    }
  }
  return true;
}

void SsdWorld::step() {
  switch (any(24)) {
    case 0:
      return happens(rates_.reset) ? reset() : advance();
    case 1:
      return happens(rates_.restart) ? restart(happens(0.5)) : advance();
    case 2:
      return set_faults();
    case 3:
      clock_.advance(std::chrono::milliseconds(any(900)));
      drive_.run();
      return disk_->poll();
    case 4:
    case 5:
      return use_frame_again();
    case 6:
    case 7:
    case 8:
    case 9:
    case 10:
    case 11:
    case 12:
      return save();
    case 13:
    case 14:
    case 15:
    case 16:
    case 17:
      return load();
    case 18:
      return happens(0.2) ? run_until_idle() : advance();
    case 19:
      if (happens(0.1)) check_durable();
      return;
    case 20:
      return happens(0.1) ? drop_all() : advance();
    default:
      return advance();
  }
}

void SsdWorld::save() {
  Frame* const frame = free_frame();
  if (frame == nullptr) return;
  const std::uint64_t key = any(kKeys);
  const SsdDisk::Block block = block_of(any(names_.size()), key, *frame);
  fill(block, key);
  std::vector<std::uint64_t> checksums;
  for (std::size_t page = 0; page < block.memory.size() && happens(0.5); ++page) {
    checksums.push_back(happens(0.8)
                            ? PageChecksum::of(block.memory[page].first(block.page_bytes[page]))
                            : SsdDisk::kNoChecksum);
  }
  // Another process wrote to the pool since the writer took its checksum.
  const bool is_damaged =
      !checksums.empty() && checksums.back() != SsdDisk::kNoChecksum && happens(0.1);
  if (is_damaged) block.memory[checksums.size() - 1][any(9000)] ^= std::byte{1};
  const Key at{block.origin.kind, key};
  const auto write =
      disk_->write(block, std::move(checksums),
                   [this, frame, at, is_damaged, drops = drops_](SsdDisk::Written written) {
                     --jobs_;
                     frame->is_busy = false;
                     frame->write.reset();
                     if (written == SsdDisk::Written::kDamaged) ++counts_.damaged;
                     if (written == SsdDisk::Written::kDamaged && !is_damaged)
                       fail("a good block is damaged");
                     if (written != SsdDisk::Written::kKept) return;
                     ++counts_.kept;
                     if (drops == drops_) dropped_.erase(at);
                   });
  if (!write) return;
  ++jobs_;
  ++counts_.writes;
  frame->is_busy = true;
  frame->write = write;
}

void SsdWorld::load() {
  Frame* const frame = free_frame();
  if (frame == nullptr) return;
  std::size_t name = 0;
  std::uint64_t key = 0;
  for (int i = 0; i < 20; ++i) {
    name = any(names_.size());
    key = any(kKeys);
    if (disk_->has(names_[name].origin.name, names_[name].origin.epoch, key_of(key))) break;
  }
  const SsdDisk::Block block = block_of(name, key, *frame);
  const bool is_begun =
      disk_->read(block, [this, frame, name, block, drops = drops_](SsdDisk::Loaded&& loaded) {
        --jobs_;
        frame->is_busy = false;
        if (!loaded.proven) return;
        ++counts_.proven;
        // A reset while the read is in flight is noticed by the store: the generation is retired.
        if (block.origin.epoch != names_[name].origin.epoch) return;
        std::uint64_t number = 0;
        std::memcpy(&number, block.key.bytes.data(), sizeof number);
        if (drops == drops_ && dropped_.contains({name, number}))
          fail("a dropped block was delivered");
        if (!is_whole(block))
          fail("a block was delivered with wrong bytes, or from before a reset");
      });
  if (!is_begun) return;
  ++jobs_;
  ++counts_.loads;
  frame->is_busy = true;
}

/// The block of a write in flight is evicted, and another block is saved into its frame.
void SsdWorld::use_frame_again() {
  for (Frame& frame : frames_) {
    if (!frame.write) continue;
    disk_->forget(*frame.write);
    SsdDisk::Block other = block_of(any(names_.size()), 0, frame);
    fill(other, kKeys + any(kKeys));
    if (happens(0.5)) return;
  }
}

/// An operator empties the disk.
void SsdWorld::drop_all() {
  ++drops_;
  ++counts_.drops;
  for (std::size_t name = 0; name < names_.size(); ++name) {
    for (std::uint64_t key = 0; key < kKeys; ++key) dropped_.emplace(name, key);
  }
  ++jobs_;
  is_drop_durable_ = false;
  disk_->drop_all([this, drops = drops_](bool is_durable) {
    --jobs_;
    if (drops == drops_) is_drop_durable_ = is_durable;
  });
}

void SsdWorld::reset() {
  const std::size_t at = any(names_.size());
  ssd::Epoch& epoch = names_[at].origin.epoch;
  epoch = {epoch.counter + 1, random_()};
  const std::uint64_t weights = ++names_[at].weights;
  ++counts_.resets;
  ++jobs_;
  disk_->reset(names_[at].origin.name, epoch, [this, at, weights](bool is_durable) {
    --jobs_;
    if (is_durable) names_[at].confirmed = std::max(names_[at].confirmed, weights);
  });
}

void SsdWorld::restart(bool is_power_cut) {
  ++(is_power_cut ? counts_.power_cuts : counts_.kills);
  had_power_cut_ = had_power_cut_ || is_power_cut;
  if (is_power_cut) {
    drive_.power_cut();
  } else {
    drive_.kill();
  }
  // The memory of a dead process may still be written until the lock is free.
  drive_.release_hung();
  while (drive_.is_locked()) advance();
  // A drive that loses or misdirects writes may lose both copies of the record.
  if (!is_drop_durable_ || drive_.counts().faults != 0) dropped_.clear();
  stop();
  start();
}

/// Checks that flushed blocks are found after a power cut.
void SsdWorld::check_durable() {
  if (disk_->state() != SsdDisk::State::kReady) return;
  drive_.set_faults({});
  drive_.release_hung();
  run_until_idle();
  const std::uint64_t faults = drive_.counts().faults;
  if (faults != 0 || !violation_.empty()) return;  // An earlier fault may have damaged anything.
  bool is_synced = false;
  disk_->sync([&is_synced] { is_synced = true; });
  while (!is_synced && drive_.next_time() != TimePoint::max()) advance();
  if (!is_synced) return fail("a sync did not end");
  std::vector<Key> there;
  for (std::size_t name = 0; name < names_.size(); ++name) {
    for (std::uint64_t key = 0; key < kKeys; ++key) {
      const ssd::Origin& origin = names_[name].origin;
      if (disk_->has(origin.name, origin.epoch, key_of(key))) there.emplace_back(name, key);
    }
  }
  if (const auto checked = disk_->check(); !checked) return fail(checked.error().detail);
  restart(true);
  if (!violation_.empty()) return;
  drive_.set_faults({});
  run_until_idle();
  ++counts_.durable_checks;
  for (const auto& [name, key] : there) {
    const ssd::Origin& origin = names_[name].origin;
    if (!disk_->has(origin.name, origin.epoch, key_of(key))) {
      return fail(fmt::format("block {} of namespace {} was flushed and is lost", key, name));
    }
  }
}

}  // namespace pegaflow::server
