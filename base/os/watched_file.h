#pragma once
/// \file
/// A file that is read again when it changes.

#include <string>
#include <utility>

#include <sys/stat.h>

#include <fmt/format.h>

namespace pegaflow {

/// Remembers what a file looked like. Thread-bound.
class WatchedFile {
 public:
  /// As it is now: made before the file is read, so that no change is missed. An empty path names
  /// no file, which never changes.
  explicit WatchedFile(std::string path) : path_(std::move(path)), stamp_(stamp()) {}

  /// Whether it changed, came or went since it was last asked.
  bool has_changed() {
    std::string now = stamp();
    if (now == stamp_) return false;
    stamp_ = std::move(now);
    return true;
  }

 private:
  /// What changes with the content, also when a file is replaced within one second.
  [[nodiscard]] std::string stamp() const {
    struct stat info {};
    if (path_.empty() || ::stat(path_.c_str(), &info) != 0) return {};
    return fmt::format("{} {} {} {} {}", info.st_dev, info.st_ino, info.st_size,
                       info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
  }

  std::string path_;
  std::string stamp_;
};

}  // namespace pegaflow
