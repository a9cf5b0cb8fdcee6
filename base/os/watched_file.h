#pragma once
/// \file
/// A file that is read again when it changes.

#include <string>
#include <utility>

#include <sys/stat.h>

#include <fmt/format.h>

namespace pegaflow {

/// Detects changes of a file. Thread-bound.
class WatchedFile {
 public:
  /// Records the current state. Construct it before reading the file, so that no change is missed.
  /// An empty path names no file and never changes.
  explicit WatchedFile(std::string path) : path_(std::move(path)), stamp_(stamp()) {}

  /// Whether the file changed, appeared or disappeared since the last call.
  bool has_changed() {
    std::string now = stamp();
    if (now == stamp_) return false;
    stamp_ = std::move(now);
    return true;
  }

 private:
  /// Fields that change with the content, even if the file is replaced within one second.
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
