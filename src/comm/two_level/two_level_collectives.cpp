#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>

#include "comm/two_level/two_level_moves.hpp"

// See Note [Two levels].

namespace lockstep {
namespace {

// One rank of each host carries as much: more ranks would wake each other for little.
constexpr int64_t kLeaderBytes = 16 << 10;

// Large enough that a chunk's calls inside a host cost little compared with its time on the link,
// and small enough that the first chunk is on the link soon.
constexpr int64_t kChunks = 16;
constexpr int64_t kSmallestChunk = 256 << 10;
constexpr int64_t kLargestChunk = 2 << 20;

// Bytes that may be on the link at a time: 10 Gbit/s times 5 ms there and back are 12.5 MB.
constexpr int64_t kWindowBytes = 32 << 20;

int64_t divide_up(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}

}  // namespace

// How a buffer is cut into chunks, alike on all hosts.
struct ChunkPlan {
  int64_t chunks = 1;
  int64_t count = 0;      // elements of a chunk; the last one may have fewer
  int64_t window = 1;     // chunks that may be on the link
  bool everyone = false;  // every host is home to every chunk

  // `unit` elements divide among the ranks of any host.
  static ChunkPlan of(int64_t count, Dtype dtype, int hosts, int64_t unit) {
    const int64_t bytes = dtype_bytes(dtype);
    const int64_t chunk_bytes = std::clamp(count * bytes / kChunks, kSmallestChunk, kLargestChunk);
    ChunkPlan plan;
    plan.chunks = divide_up(count * bytes, chunk_bytes);
    plan.everyone = hosts <= 2 || plan.chunks < hosts;
    if (!plan.everyone) plan.chunks = divide_up(plan.chunks, hosts) * hosts;
    plan.count = divide_up(divide_up(count, plan.chunks), unit) * unit;
    plan.chunks = divide_up(count, plan.count);
    plan.window = std::clamp<int64_t>(kWindowBytes / (plan.count * bytes), 2, plan.chunks + 1);
    return plan;
  }

  ElementRange chunk(int64_t number, int64_t of) const {
    return {number * count, std::min(of, (number + 1) * count)};
  }
};

namespace {

// The fewest elements of which all ranks of every host can own as many; 1 where those are many.
int64_t common_unit(const HostMap& hosts) {
  constexpr int64_t kMost = 1024;
  int64_t unit = 1;
  for (int host = 0; host < hosts.hosts(); ++host) {
    unit = std::lcm(unit, int64_t{hosts.size_of(host)});
    if (unit > kMost) return 1;
  }
  return unit;
}

}  // namespace

// An all_reduce under way: each chunk is expected from other hosts, then begun, then combined, then
// finished. Between these, others have their turn.
class TwoLevelMoves::AllReduce {
 public:
  // Gloo sends nothing before its receiver has asked for it, which takes the link's delay. So the
  // first chunks are expected while the ranks compare their calls: a rank sends after that, and
  // where calls differ nothing ever comes.
  AllReduce(TwoLevelMoves& moves, const Task& task, const Buffer& buffer)
      : moves_(moves),
        hosts_(moves.hosts_),
        task_(task),
        buffer_(buffer),
        plan_(ChunkPlan::of(buffer.count, buffer.dtype, hosts_.hosts(), common_unit(hosts_))),
        owners_{.leaders = buffer.bytes() <= kLeaderBytes},
        chunks_(static_cast<size_t>(std::min(plan_.window, plan_.chunks))) {
    for (int64_t number = 0; number < in_flight(); ++number) expect(number);
  }

  // A step that waits for the link holds up those after it: where all chunks may be on the link at
  // once, all are begun before the first is waited for, and all combined before the first result.
  void run(TwoLevelReduction how) {
    how_ = std::move(how);
    const int64_t last = in_flight() - 1;
    const bool all_at_once = plan_.chunks <= in_flight();
    const int64_t combines = plan_.everyone || all_at_once ? last : last / 2;
    const int64_t finishes = !plan_.everyone && all_at_once ? 2 * last : last;
    for (int64_t step = 0; step < plan_.chunks + finishes; ++step) {
      if (step < plan_.chunks) begin(step);
      if (step >= combines && step - combines < plan_.chunks) combine(step - combines);
      if (step >= finishes) finish(step - finishes);
    }
  }

 private:
  struct Chunk {
    Buffer region;
    ElementRange own;  // of the region: this rank's slice
    std::byte* others = nullptr;
    OnLink in;
    OnLink out;
  };

  int64_t in_flight() const { return static_cast<int64_t>(chunks_.size()); }
  Chunk& chunk(int64_t number) { return chunks_[static_cast<size_t>(number) % chunks_.size()]; }
  int home(int64_t number) const { return static_cast<int>(number % hosts_.hosts()); }
  bool is_home(int64_t number) const { return plan_.everyone || moves_.is_own(home(number)); }

  // Of the chunks under way, which follow each other, a host is home to every H-th or to all.
  size_t scratch_slot(int64_t number) const {
    const int64_t every = plan_.everyone ? 1 : hosts_.hosts();
    return static_cast<size_t>(number / every % divide_up(in_flight(), every));
  }
  static uint32_t sums_part(int64_t number) { return static_cast<uint32_t>(2 * number); }
  static uint32_t result_part(int64_t number) { return static_cast<uint32_t>(2 * number + 1); }

  Buffer slice(const Chunk& chunk) const {
    return {byte_at(chunk.region.data, chunk.own.begin * dtype_bytes(buffer_.dtype)),
            chunk.own.count(), buffer_.dtype};
  }

  // Calls use(rank, what its slice and this rank's have in common) for each owner on that host.
  template <class Use>
  void for_owners(const Chunk& chunk, int host, Use&& use) const {
    const int owners = owners_.count(hosts_, host);
    for (int owner = 0; owner < owners; ++owner) {
      const auto theirs = slice_of(chunk.region.count, owners, owner);
      use(owners_.rank(hosts_, host, owner), overlap(chunk.own, theirs));
    }
  }

  LinkBlocks to_host(const Chunk& chunk, int host, LinkBlocks blocks) const {
    blocks.blocks.input = chunk.region.data;
    for_owners(chunk, host, [&](int rank, ElementRange common) {
      blocks.give(rank, common.begin, common.count());
    });
    return blocks;
  }

  LinkBlocks to_other_hosts(const Chunk& chunk) const {
    LinkBlocks blocks = moves_.link_blocks(buffer_.dtype);
    for (int host = 0; host < hosts_.hosts(); ++host) {
      if (!moves_.is_own(host)) blocks = to_host(chunk, host, std::move(blocks));
    }
    return blocks;
  }

  // At home: the other hosts' sums of this rank's slice, one after the other.
  LinkBlocks sums_of_others(const Chunk& chunk) const {
    LinkBlocks blocks = moves_.link_blocks(buffer_.dtype);
    blocks.blocks.output = chunk.others;
    for (int host = 0; host < hosts_.hosts(); ++host) {
      if (moves_.is_own(host)) continue;
      const int64_t first = moves_.other(host) * chunk.own.count();
      for_owners(chunk, host, [&](int rank, ElementRange common) {
        blocks.take(rank, first + common.begin - chunk.own.begin, common.count());
      });
    }
    return blocks;
  }

  // The result takes the place of this host's sum, which its home has read by then.
  LinkBlocks result_from(const Chunk& chunk, int host) const {
    LinkBlocks blocks = moves_.link_blocks(buffer_.dtype);
    blocks.blocks.output = chunk.region.data;
    for_owners(chunk, host, [&](int rank, ElementRange common) {
      blocks.take(rank, common.begin, common.count());
    });
    return blocks;
  }

  void expect(int64_t number) {
    Chunk& now = chunk(number);
    const ElementRange range = plan_.chunk(number, buffer_.count);
    now.region = {byte_at(buffer_.data, range.begin * dtype_bytes(buffer_.dtype)), range.count(),
                  buffer_.dtype};
    now.own = owners_.own(hosts_, range.count());
    if (is_home(number)) {
      now.others = moves_.scratch(scratch_slot(number), (hosts_.hosts() - 1) * slice(now).bytes());
      now.in = moves_.begin(task_, sums_part(number), sums_of_others(now));
    } else {
      now.in = moves_.begin(task_, result_part(number), result_from(now, home(number)));
    }
  }

  void begin(int64_t number) {
    if (number >= in_flight()) expect(number);
    Chunk& now = chunk(number);
    moves_.reduce_inside(task_, {now.region.data, now.region.count, buffer_.dtype}, slice(now).data,
                         how_, owners_);
    if (plan_.everyone) {
      now.out = moves_.begin(task_, sums_part(number), to_other_hosts(now));
    } else if (!is_home(number)) {
      now.out = moves_.begin(task_, sums_part(number),
                             to_host(now, home(number), moves_.link_blocks(buffer_.dtype)));
    }
  }

  void combine(int64_t number) {
    if (!is_home(number)) return;
    Chunk& now = chunk(number);
    moves_.end(task_, now.in);
    moves_.end(task_, now.out);  // this host's sum, which is about to go
    if (now.own.count() > 0 && hosts_.hosts() > 1) {
      moves_.add_hosts(slice(now), slice(now).data, now.others, how_);
    }
    if (!plan_.everyone) now.out = moves_.begin(task_, result_part(number), to_other_hosts(now));
  }

  void finish(int64_t number) {
    Chunk& now = chunk(number);
    moves_.end(task_, now.in);
    moves_.end(task_, now.out);
    moves_.spread_inside(task_, now.region, owners_);
  }

  TwoLevelMoves& moves_;
  const HostMap& hosts_;
  const Task& task_;
  const Buffer buffer_;
  const ChunkPlan plan_;
  const SliceOwners owners_;
  TwoLevelReduction how_;
  std::vector<Chunk> chunks_;  // those under way, by their number
};

NetworkCore::Body TwoLevelMoves::all_reduce(const Task& task, const Buffer& buffer, ReduceOp op) {
  if (buffer.count == 0) return [](const Task&, Calls) {};
  auto work = std::make_shared<AllReduce>(*this, task, buffer);
  return [this, op, work = std::move(work)](const Task&, Calls calls) {
    work->run(TwoLevelReduction::of(op, calls, hosts_));
  };
}

// Leaders reduce in copies: only the root's buffer changes.
void TwoLevelMoves::reduce(const Task& task, const Buffer& buffer, int root, ReduceOp op,
                           Calls calls) {
  const TwoLevelReduction how = TwoLevelReduction::of(op, calls, hosts_);
  if (buffer.count == 0) return;
  const SliceOwners owners{.leaders = true, .root = root};
  const ChunkPlan plan = ChunkPlan::of(buffer.count, buffer.dtype, 1, 1);
  const int64_t bytes = dtype_bytes(buffer.dtype);
  const bool is_root = core_.group().rank == root;
  const int64_t lag = std::min(plan.window, plan.chunks) - 1;
  std::deque<OnLink> on_link;
  const auto sums = [&](int64_t number) { return static_cast<size_t>(number % (lag + 1)); };
  const auto region = [&](int64_t number) {
    const ElementRange range = plan.chunk(number, buffer.count);
    return Buffer{byte_at(buffer.data, range.begin * bytes), range.count(), buffer.dtype};
  };
  for (int64_t step = 0; step < plan.chunks + lag; ++step) {
    if (step < plan.chunks) {
      const Buffer chunk = region(step);
      const bool leads = owners.own(hosts_, chunk.count).count() > 0;
      void* sum = nullptr;
      LinkBlocks blocks = link_blocks(buffer.dtype);
      if (is_root) {
        sum = chunk.data;
        blocks.blocks.output = scratch(sums(step), (hosts_.hosts() - 1) * chunk.bytes());
        for (int host = 0; host < hosts_.hosts(); ++host) {
          if (is_own(host)) continue;
          blocks.take(owners.rank(hosts_, host, 0), other(host) * chunk.count, chunk.count);
        }
        on_link.push_back(begin(task, static_cast<uint32_t>(step), blocks));
      } else if (leads) {
        sum = scratch(sums(step), chunk.bytes());
      }
      reduce_inside(task, {chunk.data, chunk.count, chunk.dtype}, sum, how, owners);
      if (leads && !is_root) {
        blocks.blocks.input = sum;
        blocks.give(root, 0, chunk.count);
        on_link.push_back(begin(task, static_cast<uint32_t>(step), blocks));
      }
    }
    if (step < lag || on_link.empty()) continue;
    end(task, on_link.front());
    on_link.pop_front();
    const Buffer chunk = region(step - lag);
    if (is_root) add_hosts(chunk, chunk.data, scratch(sums(step - lag), 0), how);
  }
}

void TwoLevelMoves::broadcast(const Task& task, const Buffer& buffer, int root) {
  const SliceOwners owners{.leaders = true, .root = root};
  const ChunkPlan plan = ChunkPlan::of(buffer.count, buffer.dtype, 1, 1);
  const int home = hosts_.host_of(root);
  const bool leads = hosts_.local_rank() == owners.leader(hosts_, hosts_.host());
  const int before = (hosts_.host() + hosts_.hosts() - 1) % hosts_.hosts();
  const int after = (hosts_.host() + 1) % hosts_.hosts();
  const auto range = [&](int64_t number) { return plan.chunk(number, buffer.count); };
  std::deque<OnLink> in;
  std::deque<OnLink> out;
  const auto expect = [&](int64_t number) {
    LinkBlocks blocks = link_blocks(buffer.dtype);
    blocks.blocks.output = buffer.data;
    blocks.take(owners.rank(hosts_, before, 0), range(number).begin, range(number).count());
    in.push_back(begin(task, static_cast<uint32_t>(number), blocks));
  };
  const auto pass_on = [&](int64_t number) {
    LinkBlocks blocks = link_blocks(buffer.dtype);
    blocks.blocks.input = buffer.data;
    blocks.give(owners.rank(hosts_, after, 0), range(number).begin, range(number).count());
    out.push_back(begin(task, static_cast<uint32_t>(number), blocks));
  };
  const int64_t ahead = std::min(plan.window, plan.chunks);
  const bool takes = leads && !is_own(home);
  const bool gives = leads && after != home;
  for (int64_t number = 0; takes && number < ahead; ++number) expect(number);
  for (int64_t number = 0; number < plan.chunks; ++number) {
    if (takes) {
      end(task, in.front());
      in.pop_front();
      if (number + ahead < plan.chunks) expect(number + ahead);
    }
    if (gives) pass_on(number);
    const ElementRange now = range(number);
    spread_inside(
        task,
        {byte_at(buffer.data, now.begin * dtype_bytes(buffer.dtype)), now.count(), buffer.dtype},
        owners);
    if (static_cast<int64_t>(out.size()) <= plan.window) continue;
    end(task, out.front());
    out.pop_front();
  }
  for (OnLink& blocks : out) end(task, blocks);
}

// The blocks of a host's ranks are a region whose home it is. Blocks of other hosts come first:
// they are on the link while this host's own are reduced.
void TwoLevelMoves::reduce_scatter(const Task& task, const ConstBuffer& input, const Buffer& output,
                                   ReduceOp op, Calls calls) {
  const TwoLevelReduction how = TwoLevelReduction::of(op, calls, hosts_);
  if (output.count == 0) return;
  const SliceOwners owners;
  const int64_t bytes = dtype_bytes(output.dtype);
  const auto region = [&](int host) {
    const int64_t first = hosts_.members(host).front() * output.count;
    return ConstBuffer{byte_at(input.data, first * bytes), hosts_.size_of(host) * output.count,
                       output.dtype};
  };
  const int64_t others = hosts_.hosts() - 1;
  const auto sums =
      std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(others * output.bytes()));
  LinkBlocks expected = link_blocks(output.dtype);
  expected.blocks.output = sums.get();
  const ElementRange block = owners.own(hosts_, region(hosts_.host()).count);
  for (int host = 0; host < hosts_.hosts(); ++host) {
    if (is_own(host)) continue;
    for (int owner = 0; owner < hosts_.size_of(host); ++owner) {
      const auto theirs = slice_of(region(hosts_.host()).count, hosts_.size_of(host), owner);
      const ElementRange common = overlap(block, theirs);
      expected.take(owners.rank(hosts_, host, owner),
                    other(host) * output.count + common.begin - block.begin, common.count());
    }
  }
  OnLink in = begin(task, 0, expected);
  std::deque<OnLink> out;
  std::deque<std::unique_ptr<std::byte[]>> slices;
  for (int step = 1; step < hosts_.hosts(); ++step) {
    const int host = (hosts_.host() + step) % hosts_.hosts();
    const ConstBuffer there = region(host);
    const ElementRange own = owners.own(hosts_, there.count);
    slices.push_back(
        std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(own.count() * bytes)));
    reduce_inside(task, there, slices.back().get(), how, owners);
    LinkBlocks given = link_blocks(output.dtype);
    given.blocks.input = slices.back().get();
    for (int owner = 0; owner < hosts_.size_of(host); ++owner) {
      const auto theirs = slice_of(there.count, hosts_.size_of(host), owner);
      const ElementRange common = overlap(own, theirs);
      given.give(owners.rank(hosts_, host, owner), common.begin - own.begin, common.count());
    }
    out.push_back(begin(task, 0, given));
  }
  reduce_inside(task, region(hosts_.host()), output.data, how, owners);
  end(task, in);
  add_hosts(output, output.data, sums.get(), how);
  for (OnLink& blocks : out) end(task, blocks);
}

// Every block goes once to each other host, where its region's owners take what is theirs and
// spread it.
void TwoLevelMoves::all_gather(const Task& task, const ConstBuffer& input, const Buffer& output,
                               const std::vector<int64_t>& counts) {
  const SliceOwners owners;
  const auto counts_of = [&](int host) {
    const auto first = counts.begin() + hosts_.members(host).front();
    return std::vector<int64_t>(first, first + hosts_.size_of(host));
  };
  // In the output, and then in its region.
  const auto begin_of = [&](int host) {
    return std::accumulate(counts.begin(), counts.begin() + hosts_.members(host).front(),
                           int64_t{0});
  };
  const auto block_of = [&](int host, int local_rank) {
    const auto theirs = counts_of(host);
    const int64_t begin = std::accumulate(theirs.begin(), theirs.begin() + local_rank, int64_t{0});
    return ElementRange{begin, begin + theirs[static_cast<size_t>(local_rank)]};
  };
  const auto region = [&](int host) {
    const auto theirs = counts_of(host);
    return Buffer{byte_at(output.data, begin_of(host) * dtype_bytes(output.dtype)),
                  std::accumulate(theirs.begin(), theirs.end(), int64_t{0}), output.dtype};
  };
  std::vector<OnLink> in(static_cast<size_t>(hosts_.hosts()));
  LinkBlocks given = link_blocks(output.dtype);
  given.blocks.input = input.data;
  const ElementRange block = block_of(hosts_.host(), hosts_.local_rank());
  for (int host = 0; host < hosts_.hosts(); ++host) {
    if (is_own(host)) continue;
    LinkBlocks expected = link_blocks(output.dtype);
    expected.blocks.output = region(host).data;
    const ElementRange own = owners.own(hosts_, region(host).count);
    for (int peer = 0; peer < hosts_.size_of(host); ++peer) {
      const ElementRange common = overlap(own, block_of(host, peer));
      expected.take(owners.rank(hosts_, host, peer), common.begin, common.count());
      const auto theirs = slice_of(region(hosts_.host()).count, hosts_.size_of(host), peer);
      const ElementRange sent = overlap(block, theirs);
      given.give(owners.rank(hosts_, host, peer), sent.begin - block.begin, sent.count());
    }
    in[static_cast<size_t>(host)] = begin(task, 0, expected);
  }
  OnLink out = begin(task, 0, given);
  gather_inside(task, input, region(hosts_.host()), counts_of(hosts_.host()));
  for (int step = 1; step < hosts_.hosts(); ++step) {
    const int host = (hosts_.host() + hosts_.hosts() - step) % hosts_.hosts();
    end(task, in[static_cast<size_t>(host)]);
    spread_inside(task, region(host), owners);
  }
  end(task, out);
}

void TwoLevelMoves::exchange(const Task& task, const ConstBuffer& input, const Buffer& output,
                             const BlockExchange& blocks) {
  LinkBlocks far = link_blocks(input.dtype);
  far.blocks.input = input.data;
  far.blocks.output = output.data;
  for (int rank = 0; rank < core_.group().size(); ++rank) {
    if (is_own(hosts_.host_of(rank))) continue;
    const auto number = static_cast<size_t>(rank);
    far.give(rank, blocks.given_offset(rank), blocks.given[number]);
    far.take(rank, blocks.taken_offset(rank), blocks.taken[number]);
  }
  OnLink on_link = begin(task, 0, far);
  const int first = hosts_.members(hosts_.host()).front();
  const auto of_this_host = [&](const std::vector<int64_t>& counts) {
    return std::vector<int64_t>(counts.begin() + first,
                                counts.begin() + first + hosts_.local_size());
  };
  const auto near =
      BlockExchange::all_to_all(of_this_host(blocks.given), of_this_host(blocks.taken));
  const int64_t bytes = dtype_bytes(input.dtype);
  const ConstBuffer given{byte_at(input.data, blocks.given_offset(first) * bytes),
                          near.given_count(), input.dtype};
  const Buffer taken{byte_at(output.data, blocks.taken_offset(first) * bytes), near.taken_count(),
                     output.dtype};
  if (alone()) {
    if (given.count > 0) std::memcpy(taken.data, given.data, static_cast<size_t>(given.bytes()));
  } else {
    call_inside(task, [&](const CallContext& context) {
      inside_->exchange(given, taken, near, context)->wait();
    });
  }
  end(task, on_link);
}

}  // namespace lockstep
