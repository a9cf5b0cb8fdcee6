#include "engine/kept/kept_tables.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/page_layout.h"
#include "base/units.h"
#include "engine/tables/store_order.h"
#include "engine/types/hash.h"
#include "engine/types/numa_ranges.h"

namespace pegaflow::engine {
namespace {

constexpr std::uint64_t kMagic = 0x5045474150'4f4f4cULL;  // "PEGAPOOL", as a number.
constexpr std::size_t kPageBytes = 4096;
constexpr unsigned kSlots = 2;
constexpr unsigned kRecords = 2;
/// Enough for every policy: 16 bytes for each row that the pool can have, and as much as it wants
/// at least. Costs memory only where a policy wrote, or touched what it will write.
constexpr std::uint64_t kPolicyBytesPerPage = 16;
constexpr std::uint64_t kLeastPolicyBytes = std::uint64_t{1280} << 10;

}  // namespace

std::uint64_t KeptExtent::hash() const noexcept {
  KeptExtent covered = *this;
  covered.check = 0;
  covered.touched = 0;
  constexpr std::size_t kEnd = offsetof(KeptExtent, runs) + sizeof(KeptExtent::runs);
  return hash64(std::as_bytes(std::span(&covered, 1)).first(kEnd));
}

bool KeptExtent::is_whole() const noexcept {
  return serial != 0 && run_count != 0 && run_count <= runs.size() && check == hash();
}

// ---- layout

struct KeptTables::Header {
  std::uint64_t magic = 0;
  std::uint32_t format = 0;
  std::uint32_t row_bytes = 0;  ///< A build with other rows has another format.
  Layout layout;
  std::int64_t made_ns = 0;
  std::uint64_t check = 0;  ///< A hash of the members before it.
  // Members from here on change.
  std::uint32_t uses = 0;
  std::uint32_t is_usable = 0;
  std::uint64_t checksum_count = 0;
  std::uint64_t huge_bytes = 0;

  [[nodiscard]] std::uint64_t hash() const noexcept {
    return hash64(std::as_bytes(std::span(this, 1)).first(offsetof(Header, check)), kMagic);
  }
};

struct KeptTables::RecordHead {
  std::uint64_t sequence = 0;  ///< 0: none. Written last, cleared first.
  std::uint64_t bytes = 0;
  std::uint64_t check = 0;
};

/// Offsets in the memfd, in bytes.
struct KeptTables::Sections {
  explicit Sections(std::uint64_t pool_bytes) {
    const std::uint64_t unit_bytes = unit_bytes_for(pool_bytes);
    const std::uint64_t whole = pool_bytes / kSlotAlignment * kSlotAlignment;
    units = (whole + unit_bytes - 1) / unit_bytes;
    row_count = units * (unit_bytes / kSlotAlignment);
    page_count = pool_bytes / kSlotAlignment;
    records = kPageBytes;
    extents = records + kRecords * kSlots * kMaxRecordBytes;
    rows = align(extents + units * sizeof(KeptExtent));
    proofs = align(rows + row_count * sizeof(Block));
    checksums = align(proofs + row_count * sizeof(std::uint64_t));
    policies = align(checksums + page_count * sizeof(std::uint64_t));
    policy_bytes = align(kLeastPolicyBytes + page_count * kPolicyBytesPerPage);
    end = policies + kPolicies * policy_bytes;
  }
  static std::uint64_t align(std::uint64_t offset) {
    return (offset + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  std::uint64_t units;
  std::uint64_t row_count;
  std::uint64_t page_count;
  std::uint64_t records;
  std::uint64_t extents;
  std::uint64_t rows;
  std::uint64_t proofs;
  std::uint64_t checksums;
  std::uint64_t policies;
  std::uint64_t policy_bytes;
  std::uint64_t end;
};

KeptTables::KeptTables(UniqueFd fd, std::span<std::byte> bytes) noexcept
    : fd_(std::move(fd)), bytes_(bytes) {}

KeptTables::KeptTables(KeptTables&& other) noexcept
    : fd_(std::move(other.fd_)), bytes_(std::exchange(other.bytes_, {})) {}

KeptTables& KeptTables::operator=(KeptTables&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

KeptTables::~KeptTables() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

Result<KeptTables> KeptTables::map(UniqueFd fd, std::uint64_t size) {
  void* const base =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (base == MAP_FAILED) {
    return fail(Errc::kOutOfCapacity, "map the kept tables of {}: {}", format_bytes(size),
                std::strerror(errno));
  }
  KeptTables tables(std::move(fd), {static_cast<std::byte*>(base), size});
  // As ZeroPages: a row must not cost a huge page. A child must not keep the memory.
  ::madvise(base, size, MADV_NOHUGEPAGE);
  // A core dump reads every page, and a page of a memfd is allocated when it is read: the memory
  // for the policies is twice the pool, and a keeper would hold it from then on.
  if (::madvise(base, size, MADV_DONTDUMP) != 0) {
    return fail_errno(errno, "keep the kept tables out of core dumps");
  }
  if (::madvise(base, size, MADV_DONTFORK) != 0) {
    return fail_errno(errno, "keep the kept tables from forked children");
  }
  return tables;
}

Result<KeptTables> KeptTables::create(const Layout& layout, const Clock& clock) {
  UniqueFd fd(::memfd_create("pegaflow-tables", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fail_errno(errno, "memfd_create");
  const Sections sections(layout.pool_bytes);
  if (::ftruncate(fd.get(), static_cast<off_t>(sections.end)) != 0) {
    return fail_errno(errno, "set the size of the kept tables");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return fail_errno(errno, "seal the kept tables");
  }
  PEGA_TRY_LET(KeptTables tables, map(std::move(fd), sections.end));
  Header& header = tables.header();
  header.format = kFormat;
  header.row_bytes = sizeof(Block);
  header.layout = layout;
  header.made_ns = clock.now().time_since_epoch().count();
  header.magic = kMagic;
  header.check = header.hash();
  return tables;
}

Result<KeptTables> KeptTables::open(UniqueFd fd) {
  struct stat status = {};
  if (::fstat(fd.get(), &status) != 0) return fail_errno(errno, "look at the kept tables");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (size < kPageBytes || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return fail(Errc::kCorrupt, "the kept tables are no sealed memory of a server");
  }
  PEGA_TRY_LET(KeptTables tables, map(std::move(fd), size));
  const Header& header = tables.header();
  if (header.magic != kMagic) {
    return fail(Errc::kCorrupt, "the kept tables do not begin with those of a server");
  }
  if (header.format != kFormat || header.row_bytes != sizeof(Block)) {
    return fail(Errc::kRefused, "the kept tables have format {}, this server has {}", header.format,
                kFormat);
  }
  if (header.check != header.hash() || Sections(header.layout.pool_bytes).end != size) {
    return fail(Errc::kCorrupt, "the header of the kept tables is damaged");
  }
  return tables;
}

KeptTables::Header& KeptTables::header() const noexcept {
  static_assert(sizeof(Header) <= kPageBytes && std::is_trivially_copyable_v<Header>);
  return *reinterpret_cast<Header*>(bytes_.data());
}

KeptTables::Layout KeptTables::layout() const noexcept { return header().layout; }
TimePoint KeptTables::made() const noexcept { return TimePoint(Duration(header().made_ns)); }
std::uint32_t& KeptTables::uses() const noexcept { return header().uses; }
std::uint64_t& KeptTables::checksum_count() const noexcept { return header().checksum_count; }

void KeptTables::set_usable(bool is_usable) noexcept {
  std::atomic_ref(header().is_usable).store(is_usable ? 1 : 0, std::memory_order_release);
  order_stores();
}
bool KeptTables::is_usable() const noexcept { return header().is_usable != 0; }

void KeptTables::set_huge_bytes(std::uint64_t bytes) noexcept { header().huge_bytes = bytes; }
std::uint64_t KeptTables::huge_bytes() const noexcept { return header().huge_bytes; }

std::span<Block> KeptTables::rows() const noexcept {
  const Sections sections(header().layout.pool_bytes);
  return {reinterpret_cast<Block*>(bytes_.data() + sections.rows), sections.row_count};
}

std::span<std::uint64_t> KeptTables::proofs() const noexcept {
  const Sections sections(header().layout.pool_bytes);
  return {reinterpret_cast<std::uint64_t*>(bytes_.data() + sections.proofs), sections.row_count};
}

std::span<std::uint64_t> KeptTables::checksums() const noexcept {
  const Sections sections(header().layout.pool_bytes);
  return {reinterpret_cast<std::uint64_t*>(bytes_.data() + sections.checksums),
          sections.page_count};
}

std::span<KeptExtent> KeptTables::extents() const noexcept {
  const Sections sections(header().layout.pool_bytes);
  return {reinterpret_cast<KeptExtent*>(bytes_.data() + sections.extents), sections.units};
}

std::span<std::byte> KeptTables::policy(std::uint32_t shape) const noexcept {
  const Sections sections(header().layout.pool_bytes);
  return bytes_.subspan(sections.policies + shape * sections.policy_bytes, sections.policy_bytes);
}

void KeptTables::forget_policy(std::uint32_t shape) const noexcept {
  const std::span<std::byte> memory = policy(shape);
  forget_zero_pages(memory.data(), memory.data() + memory.size(), true);
}

void KeptTables::set_extent(std::uint32_t unit, const KeptExtent& extent) noexcept {
  KeptExtent& kept = extents()[unit];
  clear_extent(unit);
  KeptExtent written = extent;
  written.serial = 0;
  written.check = extent.hash();
  kept = written;
  std::atomic_ref(kept.serial).store(extent.serial, std::memory_order_release);
}

void KeptTables::clear_extent(std::uint32_t unit) noexcept {
  std::atomic_ref(extents()[unit].serial).store(0, std::memory_order_release);
  order_stores();
}

// ---- records

std::span<std::byte> KeptTables::slot(Record record, unsigned number) const noexcept {
  const Sections sections(header().layout.pool_bytes);
  const std::size_t place = static_cast<std::size_t>(record) * kSlots + number;
  return bytes_.subspan(sections.records + place * kMaxRecordBytes, kMaxRecordBytes);
}

std::optional<unsigned> KeptTables::newest(Record record) const {
  std::optional<unsigned> found;
  std::uint64_t sequence = 0;
  for (unsigned number = 0; number < kSlots; ++number) {
    const std::span<std::byte> bytes = slot(record, number);
    RecordHead head;
    std::memcpy(&head, bytes.data(), sizeof head);
    if (head.sequence <= sequence || head.bytes > bytes.size() - sizeof head ||
        head.check != hash64(bytes.subspan(sizeof head, head.bytes), head.sequence)) {
      continue;
    }
    sequence = head.sequence;
    found = number;
  }
  return found;
}

Result<void> KeptTables::write(Record record, std::span<const std::byte> bytes) {
  if (bytes.size() > kMaxRecordBytes - sizeof(RecordHead)) {
    return fail(Errc::kOutOfCapacity, "keep a record of {}: at most {}", format_bytes(bytes.size()),
                format_bytes(kMaxRecordBytes));
  }
  const std::optional<unsigned> present = newest(record);
  RecordHead head;
  if (present) std::memcpy(&head, slot(record, *present).data(), sizeof head);
  const std::uint64_t sequence = head.sequence + 1;
  const std::span<std::byte> to = slot(record, present ? 1 - *present : 0);
  auto& written = *reinterpret_cast<RecordHead*>(to.data());
  written.sequence = 0;
  order_stores();
  std::copy(bytes.begin(), bytes.end(), to.begin() + sizeof written);
  written.bytes = bytes.size();
  written.check = hash64(bytes, sequence);
  std::atomic_ref(written.sequence).store(sequence, std::memory_order_release);
  order_stores();
  return {};
}

std::optional<std::vector<std::byte>> KeptTables::read(Record record) const {
  const std::optional<unsigned> number = newest(record);
  if (!number) return std::nullopt;
  const std::span<std::byte> bytes = slot(record, *number);
  RecordHead head;
  std::memcpy(&head, bytes.data(), sizeof head);
  const std::span<std::byte> content = bytes.subspan(sizeof head, head.bytes);
  return std::vector<std::byte>(content.begin(), content.end());
}

}  // namespace pegaflow::engine
