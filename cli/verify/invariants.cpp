#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "cli/verify/diagnosis.hpp"
#include "cli/verify/divergence.hpp"
#include "cli/verify/least_squares.hpp"

namespace lockstep::cli {
namespace {

using nlohmann::json;
using Rows = std::vector<int64_t>;

// The rows of each rank that was given any. Ranks that hold parts of one model compute the same
// rows together, so they count once: those with other slices.
std::map<int, Rows> rows_by_rank(const TracedStep& step) {
  std::set<int> with_parts;
  for (const auto& [key, pieces] : step.pieces) {
    if (!key.starts_with("weight/")) continue;
    for (const auto& piece : pieces) {
      if (!piece.is_whole() && piece.slice.local.size() > 1) with_parts.insert(piece.rank);
    }
  }
  std::map<int, Rows> rows;
  for (const auto& [rank, facts] : step.facts) {
    auto own = facts.at("rows").get<Rows>();
    if (own.empty()) continue;
    const bool known = with_parts.contains(rank) &&
                       std::any_of(rows.begin(), rows.end(),
                                   [&](const auto& other) { return other.second == own; });
    if (!known) rows.emplace(rank, std::move(own));
  }
  return rows;
}

std::map<int64_t, int64_t> counted(const std::map<int, Rows>& rows) {
  std::map<int64_t, int64_t> counts;
  for (const auto& [rank, own] : rows) {
    for (const int64_t row : own) ++counts[row];
  }
  return counts;
}

std::optional<Divergence> check_rows(const TracedStep& step, const TracedStep* reference) {
  if (reference == nullptr) return std::nullopt;
  const auto rows = rows_by_rank(step);
  const auto wanted = counted(rows_by_rank(*reference));
  const auto given = counted(rows);
  if (rows.empty() || wanted.empty() || given == wanted) return std::nullopt;
  // A program may give each rank as many rows as one rank has alone, but not the same rows. Where
  // equal rows are in the data, as those of single numbers, repetitions say nothing.
  const bool is_other_training = rows_of(step) > rows_of(*reference);
  const bool has_equal_rows =
      std::any_of(wanted.begin(), wanted.end(), [](const auto& each) { return each.second > 1; }) ||
      std::any_of(rows.begin(), rows.end(), [](const auto& each) {
        return std::set<int64_t>(each.second.begin(), each.second.end()).size() <
               each.second.size();
      });
  // A rank that repeats another's rows, and one that has rows of no rank in the reference.
  std::map<int64_t, int> owner;
  for (const auto& [rank, own] : rows) {
    size_t repeated = 0;
    size_t foreign = 0;
    int other = rank;
    for (const int64_t row : own) {
      const auto expected = wanted.find(row);
      if (expected == wanted.end()) ++foreign;
      const auto [earlier, is_new] = owner.emplace(row, rank);
      const int64_t times = expected == wanted.end() ? 1 : expected->second;
      if (is_new || times >= given.at(row)) continue;
      ++repeated;
      other = earlier->second;
    }
    const auto missing = std::count_if(wanted.begin(), wanted.end(), [&](const auto& each) {
      const auto found = given.find(each.first);
      return found == given.end() || found->second < each.second;
    });
    if (repeated == own.size()) {
      return Divergence{
          step.step,
          "",
          {rank},
          "rows-repeated",
          fmt::format("rank {} computes the rows of rank {} again, and {} rows of the "
                      "step are computed by nobody: both take the same shard",
                      rank, other, missing)};
    }
    // One row may be a sampler's padding, which repeats the first rows of an epoch.
    if (is_other_training && repeated > 1 && !has_equal_rows) {
      return Divergence{step.step,
                        "",
                        {rank},
                        "rows-repeated",
                        fmt::format("{} of {} rows of rank {} are rank {}'s too: their shards "
                                    "overlap",
                                    repeated, own.size(), rank, other)};
    }
    if (is_other_training) continue;
    if (foreign > 0 || repeated > 0) {
      return Divergence{
          step.step,
          "",
          {rank},
          "rows-shifted",
          foreign == own.size()
              ? fmt::format("none of the {} rows of rank {} belongs to this step: it draws rows by "
                            "random numbers of its own, or its shard begins in the wrong place",
                            own.size(), rank)
              : fmt::format("of {} rows of rank {}, {} do not belong to this step and {} are "
                            "also another rank's; {} rows are computed by nobody: its shard "
                            "begins in the wrong place",
                            own.size(), rank, foreign, repeated, missing)};
    }
  }
  if (is_other_training) return std::nullopt;
  return Divergence{step.step,
                    "",
                    {},
                    "rows-missing",
                    fmt::format("{} rows of the step are computed by nobody",
                                rows_of(*reference) - rows_of(step))};
}

// The first of some ranks' facts that differs from rank 0's.
std::optional<int> first_different(const TracedStep& step, const char* fact) {
  const json& first = step.facts.begin()->second.at(fact);
  for (const auto& [rank, facts] : step.facts) {
    if (facts.at(fact) != first) return rank;
  }
  return std::nullopt;
}

std::optional<Divergence> check_start(const TracedStep& step) {
  if (step.holds_parts()) return std::nullopt;
  std::map<std::string, std::pair<int, json>> first;  // [name]
  for (const auto& [rank, facts] : step.facts) {
    for (const auto& [name, hash] : facts.at("before").items()) {
      const auto [known, is_new] = first.emplace(name, std::pair(rank, hash));
      if (is_new || known->second.second == hash) continue;
      return Divergence{step.step,
                        name,
                        {rank},
                        "initial-weights",
                        fmt::format("rank {} begins the step with other weights than rank {}: they "
                                    "were not sent to all ranks",
                                    rank, known->second.first)};
    }
  }
  return std::nullopt;
}

bool has(const TracedStep& step, const char* list, const char* word) {
  return step.words(list).contains(word);
}

// With virtual shards all ranks have one seed, and each part draws numbers of its own from it. Of
// other random numbers than dropout's, such as those that leave out a layer, all ranks may draw the
// same.
std::optional<Divergence> check_random(const TracedStep& step) {
  if (has(step, "wrappers", "virtual_shards")) return std::nullopt;
  const auto rows = rows_by_rank(step);
  if (!has(step, "kinds", "dropout") || rows.size() < 2) return std::nullopt;
  const auto& [first, own] = *rows.begin();
  for (const auto& [rank, others] : rows) {
    const bool same = step.facts.at(rank).at("generator") == step.facts.at(first).at("generator");
    if (rank == first || !same || own == others) continue;
    return Divergence{step.step,
                      "",
                      {rank},
                      "one-seed",
                      fmt::format("rank {} has drawn the random numbers of rank {}: their dropout "
                                  "masks are the same, although their rows are not",
                                  rank, first)};
  }
  return std::nullopt;
}

std::optional<Divergence> check_buffers(const TracedStep& step) {
  if (!has(step, "wrappers", "ddp")) return std::nullopt;
  const auto rank = first_different(step, "forward_buffers");
  if (!rank) return std::nullopt;
  return Divergence{
      step.step,
      "buffers",
      {*rank},
      "buffers-differ",
      fmt::format("rank {} begins a synchronised forward with other buffers than rank 0: "
                  "rank 0's were not sent, and running statistics are stale",
                  *rank)};
}

// How often a rank's gradient of a parameter was averaged in this step.
int64_t averages_of(const TracedStep& step, int rank, const std::string& name) {
  return step.facts.at(rank).at("averages").value(name, int64_t{0});
}

std::optional<Divergence> check_averages(const TracedStep& step) {
  for (const auto& [rank, facts] : step.facts) {
    // More than one if a program makes its update from several gradients, each of them averaged.
    const auto wanted = std::max<int64_t>(1, facts.value("synchronised_forwards", int64_t{1}));
    for (const auto& [name, count] : facts.at("averages").items()) {
      const auto times = count.get<int64_t>();
      const auto forwards = facts.value("forwards", int64_t{0});
      if (times <= wanted) continue;
      if (times < forwards) {
        return Divergence{
            step.step,
            name,
            {},
            "sync-boundary",
            fmt::format("its gradient was averaged {} times in {} micro-steps: the last "
                        "average must follow the last micro-step, and no other",
                        times, forwards)};
      }
      return Divergence{
          step.step,
          name,
          {},
          "averaged-too-often",
          fmt::format("its gradient was averaged {} times in one update, and {} bytes "
                      "were sent instead of {}: NoSync had no effect",
                      times, facts.at("sent_bytes").get<int64_t>(),
                      facts.at("sent_bytes").get<int64_t>() / times)};
    }
  }
  const bool wrapped = has(step, "wrappers", "ddp") || has(step, "wrappers", "sharded");
  const bool none = std::all_of(step.facts.begin(), step.facts.end(), [](const auto& each) {
    return each.second.at("averages").empty();
  });
  const bool has_gradients =
      std::any_of(step.pieces.begin(), step.pieces.end(),
                  [](const auto& each) { return each.first.starts_with("gradient/"); });
  if (wrapped && none && has_gradients && rows_by_rank(step).size() > 1) {
    return Divergence{
        step.step, "", {}, "not-averaged", "ranks have rows of their own, and averaged nothing"};
  }
  const auto rank = first_different(step, "sent_bytes");
  if (!rank || has(step, "wrappers", "pipeline")) return std::nullopt;
  return Divergence{step.step,
                    "",
                    {*rank},
                    "traffic-differs",
                    fmt::format("rank {} sent {} bytes of gradients, rank 0 {}", *rank,
                                step.facts.at(*rank).at("sent_bytes").get<int64_t>(),
                                step.facts.begin()->second.at("sent_bytes").get<int64_t>())};
}

std::optional<Divergence> check_weights_in_mean(const TracedStep& step) {
  const auto rows = rows_by_rank(step);
  const json& first = step.facts.begin()->second;
  if (rows.size() < 2 || first.at("averages").empty() || first.value("weighed", false)) {
    return std::nullopt;
  }
  const bool uneven = std::any_of(rows.begin(), rows.end(), [&](const auto& each) {
    return each.second.size() != rows.begin()->second.size();
  });
  const auto weight = [&](int rank) { return step.facts.at(rank).at("weight").get<double>(); };
  const bool alike = std::all_of(rows.begin(), rows.end(), [&](const auto& each) {
    return weight(each.first) == weight(rows.begin()->first);
  });
  if (!uneven || !alike) return std::nullopt;
  std::vector<std::string> counts;
  for (const auto& [rank, own] : rows) counts.push_back(std::to_string(own.size()));
  return Divergence{
      step.step,
      "",
      {},
      "counted-alike",
      fmt::format("ranks have {} rows and count alike in the mean: rows of a rank with "
                  "fewer weigh more",
                  fmt::join(counts, ", "))};
}

// Where the loss is a mean over rows, a micro-batch counts for its share of them.
std::optional<Divergence> check_micro_batches(const TracedStep& step) {
  for (const auto& [rank, facts] : step.facts) {
    const auto rows = facts.value("micro_batch_rows", std::vector<int64_t>{});
    const auto shares = facts.value("micro_batch_shares", std::vector<double>{});
    const auto all = static_cast<double>(std::accumulate(rows.begin(), rows.end(), int64_t{0}));
    for (size_t i = 0; i < rows.size() && i < shares.size(); ++i) {
      const double right = static_cast<double>(rows[i]) / all;
      if (std::abs(shares[i] - right) <= 1e-12) continue;
      return Divergence{
          step.step,
          "",
          {rank},
          "counted-alike",
          fmt::format("micro-batches have {} rows: one of {} counts for {:.4g} of the "
                      "loss instead of {:.4g}",
                      fmt::join(rows, ", "), rows[i], shares[i], right)};
    }
  }
  return std::nullopt;
}

// ---- The average is the mean of what the ranks put into it.

// What one rank put into the mean, as the optimizer used it.
struct Share {
  int rank = 0;
  double weight = 0;
  std::vector<double> values;
};

// In ascending order, since ranks with other stages may make their updates in another.
std::vector<double> factors_of(const TracedStep& step, int rank) {
  std::vector<double> factors;
  for (const json& update : step.updates.at(rank)) factors.push_back(factor_of(update));
  std::sort(factors.begin(), factors.end());
  return factors;
}

// The slices that ranks put into a mean, each with its shares.
std::vector<std::pair<Slice, std::vector<Share>>> shares_of(const TracedStep& step,
                                                            const std::string& name,
                                                            const std::vector<TracedPiece>& local) {
  std::vector<std::pair<Slice, std::vector<Share>>> groups;
  for (const auto& piece : local) {
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& each) { return each.first == piece.slice; });
    if (group == groups.end()) group = groups.insert(groups.end(), {piece.slice, {}});
    Share share{piece.rank, step.facts.at(piece.rank).at("weight").get<double>(), piece.values()};
    for (double& value : share.values) value *= step.factor(piece.rank, name);
    group->second.push_back(std::move(share));
  }
  return groups;
}

// How numbers are rounded that a gradient is averaged in.
struct Rounding {
  double unit = 0x1p-23;    // relative to a number's size
  double floor = 0x1p-149;  // between the smallest numbers
};

// The rounding of the precision that a gradient is averaged in: its own, or a compression's.
Rounding rounding_of(const TracedStep& step, Dtype own) {
  const std::string sent = step.facts.begin()->second.at("sent_dtype").get<std::string>();
  if (sent == "bfloat16" || own == Dtype::kBF16) return {0x1p-8, 0x1p-133};
  if (sent == "float16" || own == Dtype::kF16) return {0x1p-10, 0x1p-24};
  return {};
}

// Where the mean leaves the bound; its elements are sums of as many terms as there are ranks.
struct Misfit {
  size_t count = 0;  // of elements
  size_t first = 0;
  size_t size = 0;
};

// `factor`: what the optimizer multiplied the mean by, after it was rounded.
Misfit misfit_of(const std::vector<double>& mean, const std::vector<Share>& shares,
                 const Rounding& rounding, double factor) {
  double all = 0;
  for (const auto& share : shares) all += share.weight;
  Misfit misfit{.size = mean.size()};
  for (size_t i = 0; i < mean.size(); ++i) {
    double expected = 0;
    double size = 0;
    for (const auto& share : shares) {
      expected += share.weight * share.values[i] / all;
      size += std::abs(share.weight * share.values[i]) / all;
    }
    const double bound = static_cast<double>(shares.size() + 4) *
                             (rounding.unit * size + rounding.floor * std::abs(factor)) +
                         1e-37;
    if (std::abs(mean[i] - expected) <= bound || !std::isfinite(expected)) continue;
    if (misfit.count++ == 0) misfit.first = i;
  }
  return misfit;
}

// Explains a wrong mean by the multiple of each rank's gradient that it contains.
Divergence explain_mean(const TracedStep& step, const TracedStep* before, const std::string& name,
                        int rank, const std::vector<double>& mean, const std::vector<Share>& shares,
                        const Misfit& misfit) {
  Divergence finding{step.step, name, {rank}, "mean-wrong", ""};
  std::vector<std::vector<double>> columns;
  double all = 0;
  for (const auto& share : shares) {
    columns.push_back(share.values);
    all += share.weight;
  }
  const auto fit = least_squares(columns, mean);
  const auto ranks = static_cast<double>(shares.size());
  const auto are = [&](double times) {
    for (size_t i = 0; i < shares.size(); ++i) {
      const double expected = times * shares[i].weight / all;
      if (std::abs(fit.coefficients[i] - expected) > 0.02 * std::abs(expected)) return false;
    }
    return true;
  };
  const size_t own = static_cast<size_t>(
      std::find_if(shares.begin(), shares.end(), [&](const Share& s) { return s.rank == rank; }) -
      shares.begin());
  const auto only = [&](size_t which) {
    for (size_t i = 0; i < shares.size(); ++i) {
      if (std::abs(fit.coefficients[i] - (i == which ? 1.0 : 0.0)) > 0.02) return false;
    }
    return true;
  };
  const auto earlier = before == nullptr ? std::nullopt : before->merged("gradient/" + name);
  if (earlier && distance_of(*earlier, mean) <= 1e-6 * norm_of(mean)) {
    finding.ranks.clear();
    finding.cause = "lags-one-step";
    finding.text = fmt::format("the gradient is the mean of step {}", before->step);
  } else if (fit.residual < 1e-3 && own < shares.size() && only(own)) {
    finding.cause = "not-averaged";
    finding.text = fmt::format("the gradient equals rank {}'s own: it was not averaged", rank);
  } else if (fit.residual < 1e-3 && are(ranks)) {
    finding.ranks.clear();
    finding.cause = "summed";
    finding.text = fmt::format(
        "ratio {:.2f} to the mean of the ranks' own gradients: they were "
        "summed and not divided by {}",
        ranks, shares.size());
  } else if (fit.residual < 1e-3 && are(1 / ranks)) {
    finding.ranks.clear();
    finding.cause = "divided-twice";
    finding.text = fmt::format(
        "ratio {:.3f} to the mean of the ranks' own gradients: divided by "
        "{} once more",
        1 / ranks, shares.size());
  } else if (misfit.count < misfit.size || misfit.first > 0) {
    bool tail = true;
    for (size_t i = misfit.first; i < mean.size(); ++i) {
      const double got = own < shares.size() ? shares[own].values[i] : 0;
      tail = tail && (mean[i] == 0 || std::abs(mean[i] - got) <= 1e-5 * std::abs(got));
    }
    finding.cause = tail ? "tail-dropped" : "mean-wrong";
    finding.text =
        tail ? fmt::format(
                   "from element {} of {} on the gradient is still rank {}'s own: the end "
                   "of its bucket was not averaged",
                   misfit.first, misfit.size, rank)
             : fmt::format("{} of {} elements are not the mean of the ranks' own gradients",
                           misfit.count, misfit.size);
  } else {
    std::vector<std::string> parts;
    for (size_t i = 0; i < shares.size(); ++i) {
      parts.push_back(fmt::format("{:.3f} of rank {}'s", fit.coefficients[i], shares[i].rank));
    }
    finding.text = fmt::format(
        "it is not the mean of the ranks' own gradients, but {} (and {:.0f} "
        "% of something else)",
        fmt::join(parts, " + "), 100 * fit.residual);
  }
  return finding;
}

// Its gradient is a sum over two stages that have a copy each.
bool is_tied(const TracedStep& step, const std::string& name) {
  return std::any_of(step.facts.begin(), step.facts.end(), [&](const auto& each) {
    return each.second.value("tied", std::set<std::string>{}).contains(name);
  });
}

// A rank that uses a mean and put nothing into it.
std::optional<Divergence> absent_share(const TracedStep& step, const std::string& name,
                                       const std::vector<TracedPiece>& local,
                                       const std::vector<TracedPiece>& gradient) {
  for (const auto& piece : gradient) {
    const bool took_part = std::any_of(local.begin(), local.end(),
                                       [&](const auto& each) { return each.rank == piece.rank; });
    if (took_part) continue;
    return Divergence{step.step,
                      name,
                      {piece.rank},
                      "not-averaged",
                      fmt::format("rank {} put nothing into its mean, and rank {} did", piece.rank,
                                  local.front().rank)};
  }
  return std::nullopt;
}

std::optional<Divergence> check_mean(const TracedStep& step, const TracedStep* before) {
  std::optional<Divergence> worst;
  size_t wrong = 0;
  size_t looked_at = 0;
  for (const auto& [key, local] : step.pieces) {
    if (!key.starts_with("local/")) continue;
    const std::string name = parameter_of(key);
    const auto gradient = step.pieces.find("gradient/" + name);
    if (gradient == step.pieces.end()) continue;
    // An update that is made from several averages is no mean of the last one.
    if (averages_of(step, local.front().rank, name) > 1 || is_tied(step, name)) continue;
    ++looked_at;
    if (auto absent = absent_share(step, name, local, gradient->second)) return absent;
    const Rounding rounding = rounding_of(step, local.front().dtype);
    for (const auto& [slice, shares] : shares_of(step, name, local)) {
      if (shares.size() < 2) continue;
      std::vector<std::pair<int, std::vector<double>>> means;
      for (const auto& piece : gradient->second) {
        if (piece.slice == slice) means.emplace_back(piece.rank, piece.values());
      }
      if (means.empty() && slice.blocks.empty()) {
        if (auto merged = step.merged(gradient->first)) {
          means.emplace_back(gradient->second.front().rank, std::move(*merged));
        }
      }
      for (const auto& [rank, mean] : means) {
        const Misfit misfit = misfit_of(mean, shares, rounding, step.factor(rank, name));
        if (misfit.count == 0) continue;
        if (!worst) worst = explain_mean(step, before, name, rank, mean, shares, misfit);
        ++wrong;
        break;
      }
    }
  }
  if (worst) worst->text += fmt::format(" ({} of {} parameters)", wrong, looked_at);
  return worst;
}

// ---- The update.

std::optional<Divergence> check_skipped(const TracedStep& step) {
  if (step.updates.empty()) return std::nullopt;
  const int first = step.updates.begin()->first;
  for (const auto& [rank, updates] : step.updates) {
    if (step.is_skipped(rank) == step.is_skipped(first)) continue;
    const int skipping = step.is_skipped(rank) ? rank : first;
    return Divergence{
        step.step,
        "",
        {rank},
        "skip-not-agreed",
        fmt::format("rank {} skipped the step and rank {} did not: an overflow on one "
                    "rank must skip the update on all",
                    skipping, skipping == rank ? first : rank)};
  }
  const auto factors = factors_of(step, first);
  for (const auto& [rank, updates] : step.updates) {
    const auto own = factors_of(step, rank);
    if (own.size() != factors.size()) continue;  // ranks of other stages
    const auto [mine, other] =
        std::mismatch(own.begin(), own.end(), factors.begin(),
                      [](double a, double b) { return std::abs(a - b) <= 1e-6 * std::abs(b); });
    if (mine == own.end()) continue;
    return Divergence{
        step.step,
        "",
        {rank},
        "factor-differs",
        fmt::format("rank {} multiplied its gradients by {:.4g} and rank {} by {:.4g}: "
                    "each clips by the norm of its own part",
                    rank, *mine, first, *other)};
  }
  return std::nullopt;
}

std::optional<Divergence> check_masters(const TracedStep& step) {
  for (const auto& [key, pieces] : step.pieces) {
    if (!key.starts_with("rounded/")) continue;
    const auto& masters = step.pieces.at("weight/" + parameter_of(key));
    for (const auto& piece : pieces) {
      const auto master = std::find_if(masters.begin(), masters.end(), [&](const auto& each) {
        return each.rank == piece.rank && each.slice == piece.slice;
      });
      if (master == masters.end()) continue;
      const double unit = piece.dtype == Dtype::kBF16 ? 0x1p-8 : 0x1p-11;
      const auto rounded = piece.values();
      const auto exact = master->values();
      size_t stale = 0;
      for (size_t i = 0; i < rounded.size(); ++i) {
        if (std::abs(rounded[i] - exact[i]) > unit * std::abs(exact[i]) + 0x1p-24) ++stale;
      }
      if (stale == 0) continue;
      return Divergence{
          step.step,
          parameter_of(key),
          {piece.rank},
          "master-not-written",
          fmt::format("{} of {} elements are not their float32 master rounded: the model "
                      "goes on with older weights",
                      stale, rounded.size())};
    }
  }
  return std::nullopt;
}

std::optional<Divergence> check_replicas(const TracedStep& step) {
  for (const char* kind : {"gradient/", "state/", "weight/"}) {
    for (const auto& [key, pieces] : step.pieces) {
      if (!key.starts_with(kind)) continue;
      for (size_t i = 1; i < pieces.size(); ++i) {
        const auto same =
            std::find_if(pieces.begin(), pieces.begin() + static_cast<long>(i),
                         [&](const auto& each) { return each.slice == pieces[i].slice; });
        if (same == pieces.begin() + static_cast<long>(i) || same->bytes == pieces[i].bytes)
          continue;
        return Divergence{
            step.step,
            parameter_of(key),
            {pieces[i].rank},
            "replicas-differ",
            fmt::format("its {} on rank {} is not that of rank {}",
                        std::string_view(kind).substr(0, std::string_view(kind).size() - 1),
                        pieces[i].rank, same->rank)};
      }
    }
  }
  return std::nullopt;
}

}  // namespace

size_t rows_of(const TracedStep& step) {
  size_t count = 0;
  for (const auto& [rank, rows] : rows_by_rank(step)) count += rows.size();
  return count;
}

size_t ranks_with_rows(const TracedStep& step) {
  return rows_by_rank(step).size();
}

void find_batch_dimension(TracedStep& step, TracedStep& reference) {
  const auto all = [](const TracedStep& each, const char* fact) {
    std::set<int64_t> hashes;
    for (const auto& [rank, facts] : each.facts) {
      for (const json& hash : facts.value(fact, json::array())) hashes.insert(hash.get<int64_t>());
    }
    return hashes;
  };
  const auto has_common = [&](const char* fact) {
    const auto known = all(reference, fact);
    const auto given = all(step, fact);
    return std::any_of(given.begin(), given.end(),
                       [&](int64_t hash) { return known.contains(hash); });
  };
  if (has_common("rows") || !has_common("columns")) return;
  for (auto* each : {&step, &reference}) {
    for (auto& [rank, facts] : each->facts) facts["rows"] = facts.at("columns");
  }
}

bool trains_alone(const TracedStep& step, const TracedStep& reference) {
  const auto wrappers = step.words("wrappers");
  if (step.facts.size() < 2 || step.holds_parts() || wrappers.empty()) return false;
  const bool of_one_process = std::all_of(wrappers.begin(), wrappers.end(), [](const auto& each) {
    return each == "pipeline" || each == "data_parallel";
  });
  const auto rows = reference.facts.empty() ? json() : reference.facts.begin()->second.at("rows");
  return of_one_process && std::all_of(step.facts.begin(), step.facts.end(), [&](const auto& each) {
           return each.second.at("averages").empty() && each.second.at("rows") == rows;
         });
}

std::string module_of(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? parameter : parameter.substr(0, dot);
}

std::string ranks_text(const std::vector<int>& ranks) {
  if (ranks.empty()) return "all";
  return fmt::format("{}", fmt::join(ranks, ", "));
}

std::optional<Divergence> broken_invariant(const TracedStep& step, const TracedStep* before,
                                           const TracedStep* reference) {
  if (step.facts.empty()) return std::nullopt;
  if (auto found = check_rows(step, reference)) return found;
  if (auto found = check_micro_batches(step)) return found;
  if (step.facts.size() == 1) return check_masters(step);
  if (auto found = check_start(step)) return found;
  if (auto found = check_random(step)) return found;
  if (auto found = check_buffers(step)) return found;
  if (auto found = check_averages(step)) return found;
  if (auto found = check_weights_in_mean(step)) return found;
  if (auto found = check_skipped(step)) return found;
  if (auto found = check_mean(step, before)) return found;
  if (auto found = check_masters(step)) return found;
  return check_replicas(step);
}

}  // namespace lockstep::cli
