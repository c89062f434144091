// inner_ on CUDA: two sums per row, in double.
#include "reduce.cuh"

namespace fastsam {
namespace {

// <x, y> and <y, y>.
template <class W>
struct Pair {
  static constexpr int kVecSize = kVecBytes / sizeof(W), kUnroll = sizeof(W) < 4 ? 1 : 2;
  using Sum = Totals<2>;
  VectorPtr<const W, kVecSize> x, y;

  template <int N>
  struct Loaded {
    AlignedVector<W, N> x, y;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& pair, int i) const {
    x.read(pair.x, i);
    y.read(pair.y, i);
  }
  template <int N>
  __device__ __forceinline__ void add(Sum& sum, const Loaded<N>& pair, int lane) const {
    const double a = widen(pair.x.x[lane]), b = widen(pair.y.x[lane]);
    sum.x[0] += a * b;
    sum.x[1] += b * b;
  }
};

template <class SegmentMetadata>
struct InnerParams {
  SegmentMetadata table;  // lists: x, y
  Sums sums;
};

template <class W, class Params>
__global__ void __launch_bounds__(kThreads) inner_kernel(const Params __grid_constant__ p) {
  const Tile tile = tile_of<true>(p.table, blockIdx.x);
  Totals<2> partial;
  if (p.table.busy() > 0) {
    partial = swept(Pair<W>{at<const W>(p.table, 0, tile), at<const W>(p.table, 1, tile)}, tile.count, tile.thread);
    partial.over_block(tile.warp_per_segment);
  }
  finish(p.sums, p.table, tile, partial);
}

struct Inner : Reduction<InnerArgs> {
  template <class W, class O>
  using Element = Pair<W>;
  template <class SegmentMetadata>
  InnerParams<SegmentMetadata> params(const SegmentMetadata& table, const Part& part) const {
    return {table, sums(part, args.out)};
  }
  template <class W, class O, class Params>
  static auto kernel() {
    return inner_kernel<W, Params>;
  }
};

}  // namespace

int64_t inner_partials_cuda(const Problem& problem) { return 2 * partials_of<Inner>(problem); }

int inner_cuda(const InnerArgs& args, double* partials, unsigned* tickets, void* stream) {
  return launch_chunks(Inner{{args, partials, tickets}}, args.problem, std::array{&args.x, &args.y}, stream);
}

}  // namespace fastsam
