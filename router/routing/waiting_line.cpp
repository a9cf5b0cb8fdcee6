#include "router/routing/waiting_line.h"

#include <algorithm>

namespace pegaflow::router {

void WaitingLine::serve(const Fleet& fleet, const std::shared_ptr<Engine>& engine) {
  const auto first = std::find_if(places_.begin(), places_.end(), [&](const Place* place) {
    return fleet.has_room_for(*engine, place->request);
  });
  if (first == places_.end()) return;
  Place* const place = *first;
  places_.erase(first);
  place->called({engine, Fleet::Why::kFound});
}

void WaitingLine::serve_all(Fleet& fleet) {
  for (auto each = places_.begin(); each != places_.end();) {
    Place* const place = *each;
    const Fleet::Choice choice = fleet.choose(Role::kDecode, place->request);
    if (choice.why == Fleet::Why::kBusy) {
      ++each;
      continue;
    }
    each = places_.erase(each);
    place->called(choice);
  }
}

}  // namespace pegaflow::router
