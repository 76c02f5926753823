// attention_blocks: d128_bf16_causal_document_int.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_blocks for sm_80
//   tile size 64, 4 warps (chosen by its one shape)
//   tile_blocks = 64, block_size = 64
//   128 threads, about 72 registers each, 1 a multiprocessor
//   shared memory 0 of 166912 bytes
//   warps of shown: 4 along rows, 1 along columns

#include "flashgen/common.cuh"
#include "flashgen/sm80.cuh"

using element = bf16;

constexpr int THREADS = 128;  // 4 warps
constexpr int MIN_BLOCKS = 1;  // blocks a multiprocessor
constexpr int TILE_BLOCKS = 64;
constexpr int BLOCK_SIZE = 64;

// shared memory: rows x columns, bytes from row to row

// register tiles: rows x columns, warps along each
using Shown = Fragment<TILE_BLOCKS, BLOCK_SIZE, 4, 1>;

struct Args {
  Vector<float> visible;  // batches, heads_q_blocks, kv_blocks
  Array<int, 2> mask_ids;  // any, any
  int seqlen_q;
  int seqlen_k;
  int heads;
  int batches;
  int kv_blocks;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_blocks(const __grid_constant__ Args args) {
  extern __shared__ __align__(16) unsigned char shared[];

  const int place = blockIdx.x;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;

  float shown[Shown::ROWS][Shown::COLS];
  float count[Shown::ROWS];

  const int q_blocks = (args.seqlen_q + BLOCK_SIZE - 1) / BLOCK_SIZE;
  const int q_block = place % q_blocks;
  // of keys: a row of the tile for each
  const int first_block = place / q_blocks * TILE_BLOCKS;
  const int q_start = q_block * BLOCK_SIZE;
  fill(count, 0.0f);
  for (int query = 0; query < min(BLOCK_SIZE, args.seqlen_q - q_start); ++query) {
    #pragma unroll
    for (int i = 0; i < Shown::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < Shown::COLS; ++j) {
        shown[i][j] = (first_block + Shown::row(i)) * BLOCK_SIZE + Shown::col(j) < args.seqlen_k & (first_block + Shown::row(i)) * BLOCK_SIZE + Shown::col(j) <= q_start + query + (args.seqlen_k - args.seqlen_q) & args.mask_ids.at(batch, q_start + query) == args.mask_ids.at(batch, (first_block + Shown::row(i)) * BLOCK_SIZE + Shown::col(j)) ? 1.0f : 0.0f;
      }
    }
    reduce_rows<Row_sum>(count, shown);
  }

  // once, not in each step
  combine_lanes<Row_sum>(count);
  store_rows<Shown>(args.visible.at(batch, head * q_blocks + q_block, first_block), count, args.kv_blocks - first_block);
}
