#pragma once
/// \file
/// The namespaces of one disk: their numbers, and the epochs whose blocks may be served.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/ssd/format.h"

namespace pegaflow::engine::ssd {

/// Owns the numbers that entries use for (namespace, kind, epoch). A number is used once: after a
/// reset the namespace gets another, and every entry with the old one is dead. Epochs never go
/// back.
///
/// At most kMostNames names; the one that was used longest ago gives way, with its blocks. Numbers
/// end at kLastNumber: see is_exhausted(). Thread-bound.
class NameTable {
 public:
  static constexpr std::uint16_t kLastNumber = 0xFFFE;

  /// The content of the disk.
  void load(const Names& names);
  [[nodiscard]] Names save() const;
  /// The number of changes that save() has to bring to the disk; each of them raises it by one.
  [[nodiscard]] std::uint64_t version() const noexcept { return names_.sequence; }

  /// The number for blocks of this origin; no value if they were never stored, or its epoch is not
  /// the one that is recorded.
  [[nodiscard]] std::optional<std::uint16_t> find(const SpaceName& name, const Epoch& epoch) const;
  /// The same, after it was recorded if there was none: then the names have to be written. No value
  /// when a newer epoch is recorded, or numbers are exhausted.
  std::optional<std::uint16_t> number(const Origin& origin, std::uint32_t now_s);
  /// Whose blocks have this number; null: they are dead.
  [[nodiscard]] const Origin* origin(std::uint16_t number) const;
  /// Records a newer epoch, if the disk has blocks of the name. Returns whether it had older ones:
  /// the names have to be written before the reset is confirmed.
  bool reset(const SpaceName& name, const Epoch& epoch);
  /// No number is left: after every segment was dropped, restart() begins again with 1.
  [[nodiscard]] bool is_exhausted() const noexcept { return names_.next_number > kLastNumber; }
  /// Forgets every number, and keeps the epochs.
  void restart();
  [[nodiscard]] const std::vector<NameRecord>& records() const noexcept { return names_.records; }

 private:
  NameRecord* record(const SpaceName& name);
  void make_room();
  std::optional<std::uint16_t> take_number();

  Names names_;
};

}  // namespace pegaflow::engine::ssd
