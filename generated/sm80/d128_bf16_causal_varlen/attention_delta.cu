// attention_delta: d128_bf16_causal_varlen.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_delta for sm_80
//   tile q 64, 4 warps (chosen by the blocks of attention_backward)
//   block_q = 64, head_dim = 128, head_dim_v = 128
//   128 threads, about 110 registers each, 4 a multiprocessor
//   shared memory 34816 of 166912 bytes
//          0 ..  17408  dout_tile, 1 x 17408 bytes, 272 bytes a row
//      17408 ..  34816  o_tile, 1 x 17408 bytes, 272 bytes a row
//   warps of product: 4 along rows, 1 along columns
//   warps of dq_acc: 4 along rows, 1 along columns

#include "flashgen/common.cuh"
#include "flashgen/sm80.cuh"

using element = bf16;

constexpr int THREADS = 128;  // 4 warps
constexpr int MIN_BLOCKS = 4;  // blocks a multiprocessor
constexpr int BLOCK_Q = 64;
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int TRUE_HEAD_DIM_V = 128;  // before padding

// shared memory: rows x columns, bytes from row to row
using DoutTile = SharedTile<BLOCK_Q, HEAD_DIM_V, 272>;
constexpr int DOUT_TILE_OFFSET = 0;
using OTile = SharedTile<BLOCK_Q, HEAD_DIM_V, 272>;
constexpr int O_TILE_OFFSET = 17408;

// register tiles: rows x columns, warps along each
using Product = Fragment<BLOCK_Q, HEAD_DIM_V, 4, 1>;
using DqAcc = Fragment<BLOCK_Q, HEAD_DIM, 4, 1>;

struct Args {
  Tensor<element> o;  // one, heads, total_q, head_dim_v
  Tensor<element> dout;  // one, heads, total_q, head_dim_v
  Vector<float> lse;  // one, heads, total_q
  Vector<float> dlse;  // one, heads, total_q
  Vector<float> lse_log2;  // one, heads, total_q_padded
  Vector<float> delta;  // one, heads, total_q_padded
  Tensor<float> dq_workspace;  // one, heads, total_q_padded, head_dim
  Array<int, 1> cu_seqlens_q;  // any
  int total_q;
  int total_k;
  int heads;
  int heads_kv;
  int group;
  int batches;
  int padding;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_delta(const __grid_constant__ Args args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const SharedAddress dout_tile = {shared + DOUT_TILE_OFFSET};
  const SharedAddress o_tile = {shared + O_TILE_OFFSET};

  const int row_block = blockIdx.x;
  const int head = blockIdx.y;

  float product[Product::ROWS][Product::COLS];
  float delta_row[Product::ROWS];
  float lse_row[Product::ROWS];
  float dlse_row[Product::ROWS];
  float lse_log2_row[Product::ROWS];

  // the sequence of this block of rows
  const int batch = sequence_of(args.cu_seqlens_q, args.batches, BLOCK_Q, row_block);
  const int q_begin = args.cu_seqlens_q.at(batch);
  const int seqlen_q = args.cu_seqlens_q.at(batch + 1) - q_begin;
  const int q_block = row_block - (q_begin / BLOCK_Q + batch);
  const int workspace_begin = (q_begin / args.padding + batch) * args.padding;
  const int q_start = q_block * BLOCK_Q;
  copy_tile_async<OTile, TRUE_HEAD_DIM_V, THREADS>(o_tile, args.o.at(0, head, q_begin + q_start), args.o.row_stride, seqlen_q - q_start);
  copy_tile_async<DoutTile, TRUE_HEAD_DIM_V, THREADS>(dout_tile, args.dout.at(0, head, q_begin + q_start), args.dout.row_stride, seqlen_q - q_start);
  commit_group();
  zero_window<BLOCK_Q * HEAD_DIM, THREADS>(args.dq_workspace.at(0, head, workspace_begin + q_start));
  load_rows<Product>(lse_row, args.lse.at(0, head, q_begin + q_start), seqlen_q - q_start);
  load_rows<Product>(dlse_row, args.dlse.at(0, head, q_begin + q_start), seqlen_q - q_start);
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
    lse_log2_row[i] = lse_row[i] == -INF ? INF : lse_row[i] * 1.4426950408889634f;
  }
  store_rows<Product>(args.delta.at(0, head, workspace_begin + q_start), delta_row, BLOCK_Q);
  store_rows<Product>(args.lse_log2.at(0, head, workspace_begin + q_start), lse_log2_row, BLOCK_Q);
}
