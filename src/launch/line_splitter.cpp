#include "launch/line_splitter.hpp"

namespace lockstep {

void LineSplitter::add(std::string_view bytes, const Sink& sink) {
  while (!bytes.empty()) {
    if (returned_) {
      const bool both = bytes.front() == '\n';
      sink(line_, both ? '\n' : '\r');
      line_.clear();
      returned_ = false;
      if (both) bytes.remove_prefix(1);
      continue;
    }
    const size_t end = bytes.find_first_of("\n\r");
    const size_t take = std::min({end, bytes.size(), kLongestLine - line_.size()});
    line_.append(bytes.substr(0, take));
    bytes.remove_prefix(take);
    if (!bytes.empty() && bytes.front() == '\r') {
      returned_ = true;
      bytes.remove_prefix(1);
    } else if (!bytes.empty() && bytes.front() == '\n') {
      sink(line_, '\n');
      line_.clear();
      bytes.remove_prefix(1);
    } else if (line_.size() == kLongestLine) {
      sink(line_, '\n');
      line_.clear();
    }
  }
}

void LineSplitter::finish(const Sink& sink) {
  if (!line_.empty()) sink(line_, '\n');
  line_.clear();
  returned_ = false;
}

}  // namespace lockstep
