#pragma once
/// \file
/// Thousands of file descriptors that cross to other processes as one.

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/os/unique_fd.h"

namespace pegaflow {

/// A socket whose unread messages hold descriptors. The process that receives the socket finds
/// duplicates of them in there, as often as it looks: a look leaves the messages unread. The kernel
/// closes what is inside once the last duplicate of the socket is closed, in any process.
///
/// The kernel charges what is inside to the user: as long as a user has more descriptors in
/// messages than a process may have open, that process can send none, unless it has
/// CAP_SYS_RESOURCE. So a box is closed as soon as its receiver has looked.
///
/// The socket holds one message with up to 253 sockets, the kernel's limit for a message, each of
/// which holds one message with up to 253 of the descriptors. Thread-bound.
class DescriptorBox {
 public:
  static constexpr std::size_t kPerMessage = 253;
  static constexpr std::size_t kMost = kPerMessage * kPerMessage;

  /// Puts a descriptor into the box, behind the others. After an error the box is empty.
  /// Errors: kRefused with the fix when the kernel has too many of this user's descriptors in
  /// messages, or this process too many open; kInvalidArgument beyond kMost; kIo.
  Result<void> add(UniqueFd descriptor);
  /// The socket. The box is empty afterwards. Errors: those of add().
  Result<UniqueFd> close();
  /// A box with duplicates of these descriptors. Errors: those of add().
  static Result<UniqueFd> pack(std::span<const UniqueFd> descriptors);

  /// Calls `take` with duplicates of all descriptors in the box, in their order, until it fails.
  /// At most 2 x kPerMessage of them are open at once. Never waits.
  /// Errors: kInvalidArgument when `box` is not a box or has another number of descriptors than
  /// `count`; kRefused with the fix when this process has too many open descriptors; that of
  /// `take`.
  static Result<void> look(int box, std::size_t count,
                           const std::function<Result<void>(UniqueFd)>& take);

 private:
  Result<void> seal();

  std::vector<UniqueFd> added_;   ///< Not in a message yet.
  std::vector<UniqueFd> sealed_;  ///< Sockets with a message.
};

}  // namespace pegaflow
