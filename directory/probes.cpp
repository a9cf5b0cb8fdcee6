#include "directory/probes.h"

#include <algorithm>

#include "directory/anchor.h"

namespace pegaflow::directory {

std::vector<Candidate> candidates_of(std::span<const BlockKey> keys, std::size_t most) {
  std::vector<Candidate> found;
  for (std::size_t place = 0; place < keys.size() && found.size() < most; ++place) {
    const bool is_sure = is_anchor(keys[place], false);
    if (!is_sure && (place >= kHeadBlocks || !is_anchor(keys[place], true))) continue;
    found.push_back(
        {.place = static_cast<std::uint32_t>(place), .is_sure = is_sure, .key = keys[place]});
  }
  return found;
}

std::vector<std::size_t> first_probes(std::span<const Candidate> candidates) {
  std::vector<std::size_t> sure;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].is_sure) sure.push_back(i);
  }
  std::vector<std::size_t> probes;
  if (!candidates.empty()) probes.push_back(0);
  // Without sure ones, as in a short prompt, the others are all there is.
  if (sure.empty() && candidates.size() > 1) probes.push_back(candidates.size() - 1);
  for (std::size_t step = 1; step <= sure.size() && probes.size() + 1 < kFirstProbes; step *= 2) {
    probes.push_back(sure[step - 1]);
  }
  if (!sure.empty()) probes.push_back(sure.back());
  std::sort(probes.begin(), probes.end());
  probes.erase(std::unique(probes.begin(), probes.end()), probes.end());
  return probes;
}

std::vector<std::size_t> second_probes(std::span<const Candidate> candidates,
                                       std::span<const std::size_t> probed,
                                       const std::vector<bool>& found) {
  std::size_t begin = 0;
  std::size_t end = candidates.size();
  bool is_any = false;
  for (std::size_t i = 0; i < probed.size(); ++i) {
    if (!found[i]) continue;
    is_any = true;
    begin = probed[i] + 1;
  }
  if (!is_any) return {};
  for (std::size_t i = probed.size(); i-- > 0;) {
    if (probed[i] >= begin && !found[i] && candidates[probed[i]].is_sure) end = probed[i];
  }
  std::vector<std::size_t> between;
  for (std::size_t i = begin; i < end; ++i) {
    if (std::find(probed.begin(), probed.end(), i) == probed.end()) between.push_back(i);
  }
  const std::size_t most = kMostProbes - std::min(kMostProbes, probed.size());
  if (between.size() <= most) return between;
  std::vector<std::size_t> spread;
  for (std::size_t i = 0; i < most; ++i) spread.push_back(between[i * between.size() / most]);
  return spread;
}

}  // namespace pegaflow::directory
