#pragma once

#include <cmath>
#include <utility>
#include <vector>

namespace lockstep::cli {

/// A vector as a sum of multiples of others.
struct Fit {
  std::vector<double> coefficients;  ///< [column]
  double residual = 0;               ///< what is left, relative to the vector's norm
};

/// The coefficients that leave the least, by the normal equations with pivoting. Columns that
/// depend on each other share what they explain.
inline Fit least_squares(const std::vector<std::vector<double>>& columns,
                         const std::vector<double>& wanted) {
  const size_t n = columns.size();
  const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  };
  std::vector<std::vector<double>> rows(n, std::vector<double>(n + 1));
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) rows[i][j] = dot(columns[i], columns[j]);
    rows[i][i] *= 1 + 1e-10;
    rows[i][n] = dot(columns[i], wanted);
  }
  for (size_t i = 0; i < n; ++i) {
    size_t pivot = i;
    for (size_t j = i + 1; j < n; ++j) {
      if (std::abs(rows[j][i]) > std::abs(rows[pivot][i])) pivot = j;
    }
    std::swap(rows[i], rows[pivot]);
    if (rows[i][i] == 0) continue;
    for (size_t j = 0; j < n; ++j) {
      if (j == i) continue;
      const double times = rows[j][i] / rows[i][i];
      for (size_t k = i; k <= n; ++k) rows[j][k] -= times * rows[i][k];
    }
  }
  Fit fit;
  for (size_t i = 0; i < n; ++i) {
    fit.coefficients.push_back(rows[i][i] == 0 ? 0 : rows[i][n] / rows[i][i]);
  }
  double left = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    double rest = wanted[i];
    for (size_t j = 0; j < n; ++j) rest -= fit.coefficients[j] * columns[j][i];
    left += rest * rest;
  }
  const double norm = dot(wanted, wanted);
  fit.residual = norm > 0 ? std::sqrt(left / norm) : 0;
  return fit;
}

}  // namespace lockstep::cli
