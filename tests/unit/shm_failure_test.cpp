#include "shm_support.hpp"
#include "support.hpp"

namespace lockstep::test::shm_failure_test {
namespace {

// The action must throw an Error with this code and text; "" if it does.
template <class Action>
std::string fails_with(Code code, const std::vector<std::string>& fragments, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    if (error.code() != code) return "another code: " + error.block();
    for (const auto& fragment : fragments) {
      if (error.block().find(fragment) == std::string::npos) {
        return "no \"" + fragment + "\" in " + error.block();
      }
    }
    return "";
  }
  return "no error";
}

void all_reduce_one(Backend& backend, double deadline_s) {
  float data = 1;
  backend.all_reduce({&data, 1}, ReduceOp::kSum, 1, within(deadline_s, "loss"))->wait();
}

TEST(ShmFailure, AKilledRankIsNamedAtOnce) {
  for (const int64_t count : {1, 5'000'000}) {  // waiting for it, and in the middle of the data
    ForkedRanks ranks(3, [count](Backend& backend) -> std::string {
      std::vector<float> data(static_cast<size_t>(count), 1.0F);
      const auto reduce = [&] {
        backend.all_reduce({data.data(), count}, ReduceOp::kMax, 1, within(20))->wait();
      };
      reduce();
      if (backend.rank() == 1 && count == 1) {
        ::raise(SIGKILL);
      } else if (backend.rank() == 1) {
        std::thread([] {
          ::usleep(3000);
          ::raise(SIGKILL);
        }).detach();
      }
      const int64_t begun_ns = monotonic_ns();
      const std::string wrong = fails_with(
          Code::kRankFailed, {"all_reduce #", "rank 1 of 3 died: process ", "has ended"}, [&] {
            for (int i = 0; i < 100'000; ++i) reduce();
          });
      if (monotonic_ns() - begun_ns > 2'000'000'000) return "it took longer than 2 s";
      if (!wrong.empty()) return wrong;
      return fails_with(Code::kRankFailed, {"rank 1 of 3 died"},
                        [&] { backend.barrier(within(20)); });
    });
    EXPECT_EQ(ranks.wait(1), 128 + SIGKILL);
    EXPECT_EQ(ranks.wait(0), 0);
    EXPECT_EQ(ranks.wait(2), 0);
  }
}

TEST(ShmFailure, AStoppedRankIsNamedAtTheDeadline) {
  ForkedRanks ranks(3, [](Backend& backend) -> std::string {
    all_reduce_one(backend, 20);
    if (backend.rank() == 2) ::raise(SIGSTOP);
    if (backend.rank() == 2) {  // when it goes on, the others have given up
      return fails_with(Code::kRankFailed, {"gave up", "rank 2 of 3 absent"},
                        [&] { all_reduce_one(backend, 1); });
    }
    const int64_t begun_ns = monotonic_ns();
    const std::string wrong =
        fails_with(Code::kRankAbsent,
                   {"all_reduce #2 (loss): 1 x F32, sum: rank 2 of 3 absent after",
                    "is stopped by a", "(state T)", "it has begun 1 collective"},
                   [&] { all_reduce_one(backend, 0.3); });
    const int64_t waited_ns = monotonic_ns() - begun_ns;
    if (waited_ns < 250'000'000 || waited_ns > 1'500'000'000) return "not at the deadline";
    return wrong;
  });
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
  ::kill(ranks.pid(2), SIGCONT);
  EXPECT_EQ(ranks.wait(2), 0);
}

TEST(ShmFailure, ARankThatLeavesIsNamed) {
  run_threads(3, [](Backend& backend) -> std::string {
    backend.barrier(within(20));
    if (backend.rank() == 0) return "";
    return fails_with(Code::kRankFailed, {"barrier #2", "rank 0 of 3 left"},
                      [&] { backend.barrier(within(20)); });
  });
}

TEST(ShmFailure, WhatARankDidBeforeItLeftCounts) {
  run_threads(3, [](Backend& backend) -> std::string {
    int64_t data = backend.rank();
    if (backend.rank() == 2) ::usleep(50'000);  // rank 1 has left by then
    if (backend.rank() > 0) {
      backend.send({&data, 1, Dtype::kI64}, 0, 0, within(20))->wait();
      return "";
    }
    for (const int from : {2, 1}) {
      backend.recv({&data, 1, Dtype::kI64}, from, 0, within(20))->wait();
      if (data != from) return "another rank's message";
    }
    return fails_with(Code::kRankFailed, {"recv #2", "rank 1 of 3 left the communicator"}, [&] {
      backend.recv({&data, 1, Dtype::kI64}, 1, 0, within(20))->wait();
    });
  });
}

TEST(ShmFailure, AnAbortReachesThoseWhoWaitAndThoseWhoComeLater) {
  run_threads(3, [](Backend& backend) -> std::string {
    backend.barrier(within(20));
    if (backend.rank() == 1) {
      backend.abort("disk full");
      return fails_with(Code::kRankFailed, {"this rank gave up: disk full"},
                        [&] { backend.barrier(within(20)); });
    }
    if (backend.rank() == 2) ::usleep(30'000);
    for (int i = 0; i < 2; ++i) {
      const std::string wrong =
          fails_with(Code::kRankFailed, {"barrier #2", "rank 1 of 3 gave up: disk full"},
                     [&] { backend.barrier(within(20)); });
      if (!wrong.empty()) return wrong;
    }
    return "";
  });
}

TEST(ShmFailure, AnExceptionThatDestroysTheCommunicatorIsAFailure) {
  auto backends = make_shm_thread_backends(2);
  std::thread failing([mine = std::move(backends[0])]() mutable {
    try {
      const std::unique_ptr<Backend> backend = std::move(mine);
      throw std::runtime_error("the program's own");
    } catch (const std::runtime_error&) {
    }
  });
  expect_error(Code::kRankFailed, {"rank 0 of 2 gave up: failed with an exception"},
               [&] { backends[1]->barrier(within(20)); });
  failing.join();
}

TEST(ShmFailure, ACallThatIsDroppedAborts) {
  run_threads(2, [](Backend& backend) -> std::string {
    float data = 0;
    if (backend.rank() == 0) {
      backend.all_reduce({&data, 1}, ReduceOp::kSum, 1, within(20));
      return fails_with(Code::kRankFailed, {"dropped a call"},
                        [&] { backend.barrier(within(20)); });
    }
    ::usleep(20'000);
    return fails_with(Code::kRankFailed, {"rank 0 of 2 gave up: dropped a call"},
                      [&] { all_reduce_one(backend, 20); });
  });
}

TEST(ShmFailure, DifferentCallsAreAnErrorOnEveryRank) {
  run_threads(3, [](Backend& backend) -> std::string {
    std::vector<double> data(100'000, 1.0);
    const auto call = [&] {
      const int64_t count = backend.rank() == 2 ? 99'999 : 100'000;
      backend.all_reduce({data.data(), count, Dtype::kF64}, ReduceOp::kSum, 1, within(20))->wait();
    };
    for (int i = 0; i < 2; ++i) {  // and again at the second call
      const std::string wrong = fails_with(Code::kCallMismatch,
                                           {"rank 2 called all_reduce #1: 99999 x F64, sum",
                                            "ranks 0, 1 called all_reduce #1: 100000 x F64, sum"},
                                           call);
      if (!wrong.empty()) return wrong;
    }
    for (const double x : data) {
      if (x != 1.0) return "data moved";
    }
    return "";
  });
}

TEST(ShmFailure, AMessageThatDoesNotFitIsAnErrorOnBothSides) {
  run_threads(2, [](Backend& backend) -> std::string {
    std::vector<float> data(2'000'000, static_cast<float>(backend.rank()));
    const auto call = [&] {
      if (backend.rank() == 0) {  // too large to return before the receiver comes
        backend.send({data.data(), 2'000'000}, 1, 7, within(20))->wait();
      } else {
        backend.recv({data.data(), 2'000'000}, 0, 8, within(20))->wait();
      }
    };
    const std::string wrong = fails_with(Code::kCallMismatch,
                                         {"rank 0 called send #1: 2000000 x F32, tag 7",
                                          "rank 1 called recv #1: 2000000 x F32, tag 8"},
                                         call);
    if (data[0] != static_cast<float>(backend.rank())) return "data moved";
    return wrong;
  });
}

TEST(ShmFailure, AMissingMessageEndsAtTheDeadline) {
  run_threads(2, [](Backend& backend) -> std::string {
    float data = 0;
    if (backend.rank() == 0) {
      ::usleep(300'000);
      return "";
    }
    return fails_with(Code::kRankAbsent, {"recv #1", "rank 0 of 2 absent after"}, [&] {
      backend.recv({&data, 1}, 0, 0, within(0.1))->wait();
    });
  });
}

TEST(ShmFailure, BadArgumentsAreRefusedAndHarmNobody) {
  run_threads(2, [](Backend& backend) -> std::string {
    int64_t data[4] = {1, 1, 1, 1};
    const std::vector<std::function<void()>> bad = {
        [&] {
          backend.all_reduce({data, 1, Dtype::kI64}, ReduceOp::kMean, 1, within(20));
        },
        [&] {
          backend.all_reduce({data, 1, Dtype::kF64}, ReduceOp::kMean, -1, within(20))->wait();
        },
        [&] {
          backend.all_reduce({data, -1, Dtype::kI64}, ReduceOp::kSum, 1, within(20))->wait();
        },
        [&] {
          backend.broadcast({data, 1, Dtype::kI64}, 2, within(20))->wait();
        },
        [&] {
          backend.send({data, 1, Dtype::kI64}, -1, 0, within(20))->wait();
        },
        [&] { backend.allocate(-1, within(20)); },
        [&] {
          backend.all_gather({data, 2, Dtype::kI64}, {data, 3, Dtype::kI64}, within(20))->wait();
        },
        [&] {
          backend.all_gather({data, 2, Dtype::kI64}, {data, 4, Dtype::kF64}, within(20))->wait();
        },
    };
    for (size_t i = 0; i < bad.size(); ++i) {
      const std::string wrong = fails_with(Code::kUsage, {"help: "}, bad[i]);
      if (!wrong.empty()) return std::to_string(i) + ": " + wrong;
    }
    backend.barrier(within(20));
    return "";
  });
}

TEST(ShmFailure, WeightsThatAreAllZeroHaveNoMean) {
  run_threads(2, [](Backend& backend) -> std::string {
    float data = 1;
    return fails_with(Code::kUsage, {"the weights of all ranks are zero"}, [&] {
      backend.all_reduce({&data, 1}, ReduceOp::kMean, 0, within(20))->wait();
    });
  });
}

TEST(ShmFailure, TooMuchMemoryIsAnErrorOnEveryRank) {
  const int64_t too_much = 2 * ::sysconf(_SC_PHYS_PAGES) * ::sysconf(_SC_PAGESIZE);
  run_threads(2, [too_much](Backend& backend) -> std::string {
    try {
      backend.allocate(too_much, within(20));
    } catch (const Error& error) {  // its own, or the peer's where that was first
      const bool says_why =
          error.block().find("no memory for shared memory: need ") != std::string::npos;
      return says_why ? "" : error.block();
    }
    return "no error";
  });
}

}  // namespace
}  // namespace lockstep::test::shm_failure_test
