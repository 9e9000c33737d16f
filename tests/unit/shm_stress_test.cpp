#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "shm_support.hpp"

namespace lockstep::test::shm_stress_test {
namespace {

// Element i of rank r's data in step s: small whole numbers, so that sums are exact.
float value(int rank, int64_t i, int step) {
  return static_cast<float>((i * 7 + step * 3 + rank * 5) % 101);
}

// Random calls, the same on all ranks, each checked against its closed form.
class Stress {
 public:
  Stress(Backend& backend, int steps) : backend_(backend), steps_(steps) {}

  std::string run() {
    memory_ = backend_.allocate(kRegistered * 4, within(20));
    auto twin = backend_.split(0, -backend_.rank(), "reversed", within(20));
    if (twin->rank() != size() - 1 - rank()) return "split ignored the keys";
    for (int step = 0; step < steps_; ++step) {
      const int kind = static_cast<int>(random_() % 8);
      const int64_t count = random_count();
      const bool registered = random_() % 2 == 0;
      std::string wrong;
      if (kind < 3) wrong = all_reduces(step, count, registered);
      if (kind == 3) wrong = broadcast(step, count, registered);
      if (kind == 4) wrong = reduce_scatter(step, count, registered);
      if (kind == 5) wrong = all_gather(step, count, registered);
      if (kind == 6) wrong = ring(step, count);
      if (kind == 7) wrong = in_twin(*twin, step);
      if (!wrong.empty()) return wrong + ", step " + std::to_string(step);
    }
    backend_.barrier(within(20));
    return "";
  }

 private:
  static constexpr int64_t kRegistered = 1 << 20;  // elements

  int rank() const { return backend_.rank(); }
  int size() const { return backend_.size(); }

  int64_t random_count() {
    static constexpr int64_t kCounts[] = {0, 1, 3, 1023, 1024, 1025, 16384, 70001, 500000};
    return kCounts[random_() % std::size(kCounts)];
  }

  // Where this step's data lies. Ranks differ in their offset.
  float* buffer_of(std::vector<float>& own, int64_t count, bool registered) {
    if (registered) return static_cast<float*>(memory_->data()) + rank() * 3;
    own.resize(static_cast<size_t>(count));
    return own.data();
  }

  // Several in flight, of which the second is waited for first.
  std::string all_reduces(int step, int64_t count, bool registered) {
    std::vector<float> own[2];
    float* data[2] = {buffer_of(own[0], count, registered), nullptr};
    data[1] = registered ? data[0] + count : buffer_of(own[1], count, false);
    for (int i = 0; i < count; ++i) data[0][i] = value(rank(), i, step);
    for (int i = 0; i < count; ++i) data[1][i] = value(rank(), i, step + 1);
    auto first = backend_.all_reduce({data[0], count}, ReduceOp::kSum, 1, within(20, "first"));
    auto second =
        backend_.all_reduce({data[1], count}, ReduceOp::kMean, 1 + rank(), within(20, "second"));
    first->advance();
    second->wait();
    if (!first->advance()) return "the second was done before the first";
    for (int64_t i = 0; i < count; ++i) {
      float sum = 0;
      double mean = 0;
      for (int r = 0; r < size(); ++r) {
        sum += value(r, i, step);
        mean += value(r, i, step + 1) * (1.0 + r);
      }
      mean /= size() * (size() + 1) / 2.0;
      if (data[0][i] != sum) return "all_reduce sum at " + std::to_string(i);
      if (std::abs(data[1][i] - mean) > 1e-4) return "all_reduce mean at " + std::to_string(i);
    }
    return "";
  }

  std::string broadcast(int step, int64_t count, bool registered) {
    const int root = step % size();
    std::vector<float> own;
    float* data = buffer_of(own, count, registered);
    for (int64_t i = 0; i < count; ++i) data[i] = value(rank(), i, step);
    backend_.broadcast({data, count}, root, within(20))->wait();
    for (int64_t i = 0; i < count; ++i) {
      if (data[i] != value(root, i, step)) return "broadcast at " + std::to_string(i);
    }
    return "";
  }

  std::string reduce_scatter(int step, int64_t count, bool registered) {
    count = std::min<int64_t>(count, 70001);
    std::vector<float> own;
    float* data = buffer_of(own, count * size(), registered);
    for (int64_t i = 0; i < count * size(); ++i) data[i] = value(rank(), i, step);
    std::vector<float> result(static_cast<size_t>(count));
    backend_
        .reduce_scatter({data, count * size()}, {result.data(), count}, ReduceOp::kMax, 1,
                        within(20))
        ->wait();
    if (registered) data[0] = -1;  // nobody may read it any more
    for (int64_t i = 0; i < count; ++i) {
      float most = 0;
      for (int r = 0; r < size(); ++r) most = std::max(most, value(r, rank() * count + i, step));
      if (result[static_cast<size_t>(i)] != most) return "reduce_scatter at " + std::to_string(i);
    }
    return "";
  }

  std::string all_gather(int step, int64_t count, bool registered) {
    std::vector<float> own;
    float* data = buffer_of(own, count, registered);
    for (int64_t i = 0; i < count; ++i) data[i] = value(rank(), i, step);
    std::vector<float> result(static_cast<size_t>(count * size()));
    backend_.all_gather({data, count}, {result.data(), count * size()}, within(20))->wait();
    for (int64_t i = 0; i < count && registered; ++i) data[i] = -1;
    for (int64_t i = 0; i < count * size(); ++i) {
      const auto from = static_cast<int>(i / count);
      if (result[static_cast<size_t>(i)] != value(from, i % count, step)) {
        return "all_gather at " + std::to_string(i);
      }
    }
    return "";
  }

  // Everybody sends to the right and receives from the left; in turns, since a large message waits
  // for its receiver.
  std::string ring(int step, int64_t count) {
    const int right = (rank() + 1) % size();
    const int left = (rank() + size() - 1) % size();
    std::vector<float> out(static_cast<size_t>(count));
    std::vector<float> in(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) out[static_cast<size_t>(i)] = value(rank(), i, step);
    if (rank() > 0) backend_.recv({in.data(), count}, left, step, within(20))->wait();
    backend_.send({out.data(), count}, right, step, within(20))->wait();
    if (rank() == 0) backend_.recv({in.data(), count}, left, step, within(20))->wait();
    for (int64_t i = 0; i < count; ++i) {
      if (in[static_cast<size_t>(i)] != value(left, i, step)) return "recv at " + std::to_string(i);
    }
    return "";
  }

  std::string in_twin(Backend& twin, int step) {
    std::vector<int64_t> ranks(static_cast<size_t>(size()));
    const int64_t me = rank() + step;
    twin.all_gather({&me, 1, Dtype::kI64}, {ranks.data(), size(), Dtype::kI64}, within(20))->wait();
    for (int i = 0; i < size(); ++i) {
      if (ranks[static_cast<size_t>(i)] != size() - 1 - i + step) return "the twin's order";
    }
    return "";
  }

  Backend& backend_;
  int steps_;
  std::shared_ptr<RegisteredMemory> memory_;
  std::mt19937 random_{1234};  // the same on all ranks
};

class ShmStress : public ::testing::TestWithParam<int> {};

TEST_P(ShmStress, Threads) {
  run_threads(GetParam(), [](Backend& backend) { return Stress(backend, 120).run(); });
}

TEST_P(ShmStress, Processes) {
  run_processes(GetParam(), [](Backend& backend) { return Stress(backend, 120).run(); });
}

TEST_P(ShmStress, MoreInFlightThanTheRingHolds) {
  run_threads(GetParam(), [](Backend& backend) -> std::string {
    std::vector<int64_t> data(300);
    std::vector<std::unique_ptr<Backend::Work>> work;
    for (size_t i = 0; i < data.size(); ++i) {
      data[i] = backend.rank() + static_cast<int64_t>(i);
      work.push_back(backend.all_reduce({&data[i], 1, Dtype::kI64}, ReduceOp::kSum, 1, within(20)));
    }
    work.back()->wait();
    const int64_t size = backend.size();
    for (size_t i = 0; i < data.size(); ++i) {
      if (!work[i]->advance()) return "not in order";
      if (data[i] != size * (size - 1) / 2 + size * static_cast<int64_t>(i)) return "a wrong sum";
    }
    return "";
  });
}

TEST_P(ShmStress, SmallCallsInARow) {
  run_processes(GetParam(), [](Backend& backend) -> std::string {
    for (int64_t i = 0; i < 2000; ++i) {
      int64_t data = i * (backend.rank() + 1);
      backend.all_reduce({&data, 1, Dtype::kI64}, ReduceOp::kMax, 1, within(20))->wait();
      if (data != i * backend.size()) return "a wrong maximum at " + std::to_string(i);
    }
    return "";
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmStress, ::testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace lockstep::test::shm_stress_test
