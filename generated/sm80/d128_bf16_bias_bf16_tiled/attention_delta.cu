// attention_delta: d128_bf16_bias_bf16.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_delta for sm_80
//   tile q 32, 2 warps (chosen by the blocks of attention_backward)
//   block_q = 32, head_dim = 128, head_dim_v = 128
//   64 threads, about 110 registers each, 9 a multiprocessor
//   shared memory 17408 of 166912 bytes
//          0 ..   8704  dout_tile, 1 x 8704 bytes, 272 bytes a row
//       8704 ..  17408  o_tile, 1 x 8704 bytes, 272 bytes a row
//   warps of product: 2 along rows, 1 along columns
//   warps of dq_acc: 2 along rows, 1 along columns

#include "flashgen/common.cuh"
#include "flashgen/sm80.cuh"

using element = bf16;

constexpr int THREADS = 64;  // 2 warps
constexpr int MIN_BLOCKS = 9;  // blocks a multiprocessor
constexpr int BLOCK_Q = 32;
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int TRUE_HEAD_DIM_V = 128;  // before padding

// shared memory: rows x columns, bytes from row to row
using DoutTile = SharedTile<BLOCK_Q, HEAD_DIM_V, 272>;
constexpr int DOUT_TILE_OFFSET = 0;
using OTile = SharedTile<BLOCK_Q, HEAD_DIM_V, 272>;
constexpr int O_TILE_OFFSET = 8704;

// register tiles: rows x columns, warps along each
using Product = Fragment<BLOCK_Q, HEAD_DIM_V, 2, 1>;
using DqAcc = Fragment<BLOCK_Q, HEAD_DIM, 2, 1>;

struct Args {
  Tensor<element> o;  // batches, heads, seqlen_q, head_dim_v
  Tensor<element> dout;  // batches, heads, seqlen_q, head_dim_v
  Vector<float> lse;  // batches, heads, seqlen_q
  Vector<float> dlse;  // batches, heads, seqlen_q
  Vector<float> lse_log2;  // batches, heads, seqlen_q_padded
  Vector<float> delta;  // batches, heads, seqlen_q_padded
  Tensor<float> dq_workspace;  // batches, heads, seqlen_q_padded, head_dim
  int seqlen_q;
  int seqlen_k;
  int heads;
  int heads_kv;
  int group;
  int batches;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_delta(const __grid_constant__ Args args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const SharedAddress dout_tile = {shared + DOUT_TILE_OFFSET};
  const SharedAddress o_tile = {shared + O_TILE_OFFSET};

  const int q_block = blockIdx.x;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;

  float product[Product::ROWS][Product::COLS];
  float delta_row[Product::ROWS];
  float lse_row[Product::ROWS];
  float dlse_row[Product::ROWS];
  float lse_log2_row[Product::ROWS];

  const int q_start = q_block * BLOCK_Q;
  copy_tile_async<OTile, TRUE_HEAD_DIM_V, THREADS>(o_tile, args.o.at(batch, head, q_start), args.o.row_stride, args.seqlen_q - q_start);
  copy_tile_async<DoutTile, TRUE_HEAD_DIM_V, THREADS>(dout_tile, args.dout.at(batch, head, q_start), args.dout.row_stride, args.seqlen_q - q_start);
  commit_group();
  zero_window<BLOCK_Q * HEAD_DIM, THREADS>(args.dq_workspace.at(batch, head, q_start));
  load_rows<Product>(lse_row, args.lse.at(batch, head, q_start), args.seqlen_q - q_start);
  load_rows<Product>(dlse_row, args.dlse.at(batch, head, q_start), args.seqlen_q - q_start);
  wait_group<0>();
  // the copies have landed
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < Product::ROWS; ++i) {
    #pragma unroll
    for (int j = 0; j < Product::COLS; ++j) {
      product[i][j] = OTile::at<element>(o_tile, Product::row(i), Product::col(j)) * DoutTile::at<element>(dout_tile, Product::row(i), Product::col(j));
    }
  }
  fill(delta_row, 0.0f);
  reduce_rows<Row_sum>(delta_row, product);
  combine_lanes<Row_sum>(delta_row);
  #pragma unroll
  for (int i = 0; i < Product::ROWS; ++i) {
    delta_row[i] = delta_row[i] - dlse_row[i];
  }
  #pragma unroll
  for (int i = 0; i < Product::ROWS; ++i) {
    lse_log2_row[i] = lse_row[i] == -INF || q_start + Product::row(i) >= args.seqlen_q ? INF : lse_row[i] * 1.4426950408889634f;
  }
  store_rows<Product>(args.delta.at(batch, head, q_start), delta_row, BLOCK_Q);
  store_rows<Product>(args.lse_log2.at(batch, head, q_start), lse_log2_row, BLOCK_Q);
}
