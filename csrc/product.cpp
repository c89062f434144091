// The op product, for stacked clients' small matrices. CPU only; kernels/small_bmm.py describes every argument.
#include "tensor_args.h"

namespace fastsam {
namespace {

// Returns a float32 [rows, m, n]. Dimensions of size 1 are broadcast.
Matrix matrix_of(const Tensor& tensor, int64_t rows, int64_t m, int64_t n, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 3 && tensor.scalar_type() == ScalarType::Float, name, " must be float32 [., ., .]");
  const auto step = [&](int64_t dim, int64_t size) {
    STD_TORCH_CHECK(tensor.size(dim) == size || tensor.size(dim) == 1, name, " must be [", rows, ", ", m, ", ", n,
                    "] or broadcast to it");
    return tensor.size(dim) == size ? tensor.stride(dim) : 0;
  };
  const int64_t row = step(0, rows);
  return Matrix{static_cast<const float*>(tensor.data_ptr()), step(1, m), step(2, n), row};
}

Tensor product(const Tensor a, const Tensor b, const OptionalTensor bias) {
  STD_TORCH_CHECK(a.dim() == 3 && b.dim() == 3, "a and b must be float32 [rows, m, k] and [rows, k, n]");
  ProductArgs args{a.size(0), a.size(1), a.size(2), b.size(2)};
  args.a = matrix_of(a, args.rows, args.m, args.k, "a");
  args.b = matrix_of(b, args.rows, args.k, args.n, "b");
  if (bias.has_value()) args.bias = matrix_of(*bias, args.rows, args.m, args.n, "bias");
  const Tensor out = torch::stable::new_empty(a, {args.rows, args.m, args.n});
  args.out = static_cast<float*>(out.data_ptr());
  product_rows(args);
  return out;
}

}  // namespace
}  // namespace fastsam

STABLE_TORCH_LIBRARY_FRAGMENT(fastsam, m) { m.def("product(Tensor a, Tensor b, Tensor? bias) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(fastsam, CPU, m) { m.impl("product", TORCH_BOX(&fastsam::product)); }
