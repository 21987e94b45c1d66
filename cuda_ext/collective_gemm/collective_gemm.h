// Products of a matrix whose rows lie on several devices, each of which runs the same call:
//
//   all-gather, product    y_i[a, q, r, n] = Σ_k x_q[a, r, k] w_i[n, k]           x_q from device q
//   product, reduce-scatter    z[a, r, n] = Σ_q Σ_i Σ_k x_i,q[a, rank, r, k] w_i,q[n, k]
//
// Devices read and write each other's arrays directly, piece by piece, while they multiply the pieces that have
// arrived. See protocol.h for the order.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective_gemm/shared_segments.h"
#include "common/executor.h"
#include "common/status.h"
#include "gemm/gemm.h"

namespace te::collective_gemm {

inline constexpr int kGemmStreams = 2;  // of a gather, whose GEMMs run at the same time

// The devices of a call, as one of them sees it.
struct Group {
  std::string name;  // of the call, for errors
  int64_t run;
  int64_t call;
  int rank;
  std::vector<int> devices;  // places, by rank
  std::chrono::nanoseconds timeout;
  std::shared_ptr<SharedSegments> segments;  // where several processes drive the devices, otherwise null

  int size() const { return static_cast<int>(devices.size()); }
  int device() const { return OrdinalOf(devices[rank]); }
};

// An array of which every device has one part, and will have all parts.
struct Gathered {
  const void* mine;
  void* all;       // piece a of the part of rank q is at (a · size + q) · bytes
  int64_t pieces;  // of a part
  int64_t bytes;   // of a piece
  bool with_mine;  // whether `all` is to hold this device's part too

  const char* Part(int rank, const Group& group, int64_t piece) const {
    if (rank == group.rank) return static_cast<const char*>(mine) + piece * bytes;
    return At(rank, group, piece);
  }
  char* At(int rank, const Group& group, int64_t piece) const {
    return static_cast<char*>(all) + (piece * group.size() + rank) * bytes;
  }
};

// A weight, and the result of the product with it.
struct Product {
  gemm::Problem problem;  // of one piece: m rows; a.data, a.scales and d are filled in for each
  void* y;                // [pieces, size, m, n]
};

struct AllGatherProblem {
  Gathered x;
  Gathered scales;  // of x, one part after another; no bytes where there are none, or one for all of x
  std::vector<Gathered> others;
  std::vector<Product> products;
  void* workspace;  // of as many bytes as products say, for each of kGemmStreams
  bool put;         // devices write to their peers instead of reading from them
};

struct ReduceScatterProblem {
  gemm::Type type;                       // of what is sent and of z
  std::vector<gemm::Problem> products;   // of one piece: m rows; a.data, a.scales and d are filled in
  std::vector<int64_t> scales_of_piece;  // of a, by product: 0 for one scale for all
  int64_t pieces;
  void* received;     // [Parts(size), pieces, m, n]: from every device its sums for this one
  void* outgoing;     // [size - 1, pieces, m, n], or null: products then write to their peers themselves
  float* sums;        // [2, pieces, m, n]: where several products are added up before they are rounded; or null
  const float* bias;  // [n], or null
  void* z;            // [pieces, m, n]
  void* workspace;    // of as many bytes as products say

  int64_t CountOfPart() const { return pieces * products.front().m * products.front().n; }
  int64_t BytesOfPart() const { return CountOfPart() * gemm::SizeOf(type); }
  // Steps that follow each other have different ones.
  float* SumsOf(int step) const { return sums + step % 2 * CountOfPart(); }
  // Otherwise all parts are summed after it.
  bool LastProductAdds(int size) const { return size <= 2 && bias == nullptr && sums == nullptr; }
  int Parts(int size) const { return sums != nullptr ? size - 1 : LastProductAdds(size) ? 1 : size; }
};

// to = Σ parts + own + bias, added up in float32 and rounded once.
struct Summands {
  const void* parts;  // [count of them, pieces, m, n]
  int part_count;
  const float* own;   // [pieces, m, n], or null
  const float* bias;  // [n], or null
  void* to;           // [pieces, m, n]
};

// Part 0 comes from a device's next neighbour; its own, where there is one, is the last.
constexpr int PartFrom(int sender, int owner, int size) { return (sender - owner - 1 + size) % size; }

Status AllGather(const Executor& executor, const Group& group, const AllGatherProblem& problem);
Status ReduceScatter(const Executor& executor, const Group& group, const ReduceScatterProblem& problem);

#ifdef TE_JAX_CUDA
// Creates streams, events and GEMM plans before the first call.
Status PrepareAllGather(const Executor& executor, const Group& group, const AllGatherProblem& problem);
Status PrepareReduceScatter(const Executor& executor, const Group& group, const ReduceScatterProblem& problem);
#endif

}  // namespace te::collective_gemm
