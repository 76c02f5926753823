// attention_backward_dq: d256_bf16_causal_deterministic.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_backward_dq for sm_90a
//   tile q 128 x kv 64, 12 warps, 2 and 1 stages (chosen by cost model)
//   block_q = 128, block_kv = 64, head_dim = 256, head_dim_v = 256
//   384 threads, about 212 registers each, 1 a multiprocessor
//   shared memory 229440 of 232448 bytes
//          0 ..  65536  dq_tile, 1 x 65536 bytes, 512 bytes a row
//          0 ..  65536  q_tile, 1 x 65536 bytes, 512 bytes a row
//      65536 .. 131072  dout_tile, 1 x 65536 bytes, 512 bytes a row
//     131072 .. 196608  k_tile, 2 x 32768 bytes, 512 bytes a row
//     196608 .. 229376  v_tile, 1 x 32768 bytes, 512 bytes a row
//   warps of s: 8 along rows, 1 along columns
//   warps of p: 8 along rows, 1 along columns
//   warps of dp: 8 along rows, 1 along columns
//   warps of ds: 8 along rows, 1 along columns
//   warps of ds_operand: 8 along rows, 1 along columns
//   warps of dq_acc: 8 along rows, 1 along columns
//   warps of dq_out: 8 along rows, 1 along columns

#include "flashgen/common.cuh"
#include "flashgen/sm90.cuh"

using element = bf16;

constexpr int THREADS = 256;  // 8 warps
constexpr int MIN_BLOCKS = 1;  // blocks a multiprocessor
constexpr int PRODUCER_THREADS = 128;  // of which one loads
constexpr int BLOCK_Q = 128;
constexpr int BLOCK_KV = 64;
constexpr int HEAD_DIM = 256;
constexpr int HEAD_DIM_V = 256;

// shared memory: rows x columns, bytes from row to row
using DqTile = PanelTile<BLOCK_Q, HEAD_DIM>;
constexpr int DQ_TILE_OFFSET = 0;
using QTile = PanelTile<BLOCK_Q, HEAD_DIM>;
constexpr int Q_TILE_OFFSET = 0;
using DoutTile = PanelTile<BLOCK_Q, HEAD_DIM_V>;
constexpr int DOUT_TILE_OFFSET = 65536;
using KTile = PanelTile<BLOCK_KV, HEAD_DIM>;
constexpr int K_TILE_OFFSET = 131072;
using VTile = PanelTile<BLOCK_KV, HEAD_DIM_V>;
constexpr int V_TILE_OFFSET = 196608;
constexpr int K_TILE_FULL_OFFSET = 229376;
constexpr int K_TILE_EMPTY_OFFSET = 229392;
constexpr int V_TILE_FULL_OFFSET = 229408;
constexpr int V_TILE_EMPTY_OFFSET = 229416;
constexpr int Q_TILE_FULL_OFFSET = 229424;
constexpr int DOUT_TILE_FULL_OFFSET = 229432;

// register tiles: rows x columns, warps along each
using S = Fragment<BLOCK_Q, BLOCK_KV, 8, 1>;
using DqAcc = Fragment<BLOCK_Q, HEAD_DIM, 8, 1>;

// acc (+)= a b, 64 x 64 x 16 a warpgroup
__device__ __forceinline__ void wgmma_64x64x16_shared(float (&acc)[2][16], uint32 a, uint32 a_step, uint32 b, uint32 b_step, int accumulate) {
  asm volatile("{ .reg .pred p; .reg .b32 low; .reg .b64 a_desc, b_desc; setp.ne.b32 p, %36, 0;\n"
    "add.u32 low, %32, %33; mov.b64 a_desc, {low, 1073741888};\n"
    "add.u32 low, %34, %35; mov.b64 b_desc, {low, 1073741888};\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, a_desc, b_desc, p, 1, 1, 0, 0; }"
  :
  "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][2]), "+f"(acc[1][3]),
  "+f"(acc[0][4]), "+f"(acc[0][5]), "+f"(acc[1][4]), "+f"(acc[1][5]), "+f"(acc[0][6]), "+f"(acc[0][7]), "+f"(acc[1][6]), "+f"(acc[1][7]),
  "+f"(acc[0][8]), "+f"(acc[0][9]), "+f"(acc[1][8]), "+f"(acc[1][9]), "+f"(acc[0][10]), "+f"(acc[0][11]), "+f"(acc[1][10]), "+f"(acc[1][11]),
  "+f"(acc[0][12]), "+f"(acc[0][13]), "+f"(acc[1][12]), "+f"(acc[1][13]), "+f"(acc[0][14]), "+f"(acc[0][15]), "+f"(acc[1][14]), "+f"(acc[1][15])
  : "r"(a), "r"(a_step), "r"(b), "r"(b_step), "r"(accumulate));
}
// acc (+)= a b, 64 x 256 x 16 a warpgroup
__device__ __forceinline__ void wgmma_64x256x16_registers(float (&acc)[2][64], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b, uint32 b_step, int accumulate) {
  asm volatile("{ .reg .pred p; .reg .b32 low; .reg .b64 b_desc; setp.ne.b32 p, %134, 0;\n"
    "add.u32 low, %132, %133; mov.b64 b_desc, {low, 1073741888};\n"
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, {%128, %129, %130, %131}, b_desc, p, 1, 1, 1; }"
  :
  "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][2]), "+f"(acc[1][3]),
  "+f"(acc[0][4]), "+f"(acc[0][5]), "+f"(acc[1][4]), "+f"(acc[1][5]), "+f"(acc[0][6]), "+f"(acc[0][7]), "+f"(acc[1][6]), "+f"(acc[1][7]),
  "+f"(acc[0][8]), "+f"(acc[0][9]), "+f"(acc[1][8]), "+f"(acc[1][9]), "+f"(acc[0][10]), "+f"(acc[0][11]), "+f"(acc[1][10]), "+f"(acc[1][11]),
  "+f"(acc[0][12]), "+f"(acc[0][13]), "+f"(acc[1][12]), "+f"(acc[1][13]), "+f"(acc[0][14]), "+f"(acc[0][15]), "+f"(acc[1][14]), "+f"(acc[1][15]),
  "+f"(acc[0][16]), "+f"(acc[0][17]), "+f"(acc[1][16]), "+f"(acc[1][17]), "+f"(acc[0][18]), "+f"(acc[0][19]), "+f"(acc[1][18]), "+f"(acc[1][19]),
  "+f"(acc[0][20]), "+f"(acc[0][21]), "+f"(acc[1][20]), "+f"(acc[1][21]), "+f"(acc[0][22]), "+f"(acc[0][23]), "+f"(acc[1][22]), "+f"(acc[1][23]),
  "+f"(acc[0][24]), "+f"(acc[0][25]), "+f"(acc[1][24]), "+f"(acc[1][25]), "+f"(acc[0][26]), "+f"(acc[0][27]), "+f"(acc[1][26]), "+f"(acc[1][27]),
  "+f"(acc[0][28]), "+f"(acc[0][29]), "+f"(acc[1][28]), "+f"(acc[1][29]), "+f"(acc[0][30]), "+f"(acc[0][31]), "+f"(acc[1][30]), "+f"(acc[1][31]),
  "+f"(acc[0][32]), "+f"(acc[0][33]), "+f"(acc[1][32]), "+f"(acc[1][33]), "+f"(acc[0][34]), "+f"(acc[0][35]), "+f"(acc[1][34]), "+f"(acc[1][35]),
  "+f"(acc[0][36]), "+f"(acc[0][37]), "+f"(acc[1][36]), "+f"(acc[1][37]), "+f"(acc[0][38]), "+f"(acc[0][39]), "+f"(acc[1][38]), "+f"(acc[1][39]),
  "+f"(acc[0][40]), "+f"(acc[0][41]), "+f"(acc[1][40]), "+f"(acc[1][41]), "+f"(acc[0][42]), "+f"(acc[0][43]), "+f"(acc[1][42]), "+f"(acc[1][43]),
  "+f"(acc[0][44]), "+f"(acc[0][45]), "+f"(acc[1][44]), "+f"(acc[1][45]), "+f"(acc[0][46]), "+f"(acc[0][47]), "+f"(acc[1][46]), "+f"(acc[1][47]),
  "+f"(acc[0][48]), "+f"(acc[0][49]), "+f"(acc[1][48]), "+f"(acc[1][49]), "+f"(acc[0][50]), "+f"(acc[0][51]), "+f"(acc[1][50]), "+f"(acc[1][51]),
  "+f"(acc[0][52]), "+f"(acc[0][53]), "+f"(acc[1][52]), "+f"(acc[1][53]), "+f"(acc[0][54]), "+f"(acc[0][55]), "+f"(acc[1][54]), "+f"(acc[1][55]),
  "+f"(acc[0][56]), "+f"(acc[0][57]), "+f"(acc[1][56]), "+f"(acc[1][57]), "+f"(acc[0][58]), "+f"(acc[0][59]), "+f"(acc[1][58]), "+f"(acc[1][59]),
  "+f"(acc[0][60]), "+f"(acc[0][61]), "+f"(acc[1][60]), "+f"(acc[1][61]), "+f"(acc[0][62]), "+f"(acc[0][63]), "+f"(acc[1][62]), "+f"(acc[1][63])
  : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(b_step), "r"(accumulate));
}

struct Args {
  TensorMap q;  // batches, heads, seqlen_q, head_dim
  TensorMap k;  // batches, heads, seqlen_k, head_dim
  TensorMap v;  // batches, heads, seqlen_k, head_dim_v
  TensorMap dout;  // batches, heads, seqlen_q, head_dim_v
  Vector<float> lse_log2;  // batches, heads, seqlen_q
  Vector<float> delta;  // batches, heads, seqlen_q
  TensorMap dq;  // batches, heads, seqlen_q, head_dim
  int seqlen_q;
  int seqlen_k;
  int heads;
  int heads_kv;
  int group;
  int batches;
  float scale_log2;
  float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER_THREADS, MIN_BLOCKS) attention_backward_dq(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const SharedAddress dq_tile = {shared + DQ_TILE_OFFSET};
  const SharedAddress q_tile = {shared + Q_TILE_OFFSET};
  const SharedAddress dout_tile = {shared + DOUT_TILE_OFFSET};
  const SharedAddress k_tile = {shared + K_TILE_OFFSET};
  const SharedAddress v_tile = {shared + V_TILE_OFFSET};
  uint64* const k_tile_full = reinterpret_cast<uint64*>(shared + K_TILE_FULL_OFFSET);
  uint64* const k_tile_empty = reinterpret_cast<uint64*>(shared + K_TILE_EMPTY_OFFSET);
  uint64* const v_tile_full = reinterpret_cast<uint64*>(shared + V_TILE_FULL_OFFSET);
  uint64* const v_tile_empty = reinterpret_cast<uint64*>(shared + V_TILE_EMPTY_OFFSET);
  uint64* const q_tile_full = reinterpret_cast<uint64*>(shared + Q_TILE_FULL_OFFSET);
  uint64* const dout_tile_full = reinterpret_cast<uint64*>(shared + DOUT_TILE_FULL_OFFSET);

  const int warpgroup = uniform(threadIdx.x / 128);
  const int q_block_count = (args.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
  const int q_block = q_block_count - 1 - blockIdx.x;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;

  float lse_row[S::ROWS];
  float delta_row[S::ROWS];
  float s[S::ROWS][S::COLS];
  float p[S::ROWS][S::COLS];
  float dp[S::ROWS][S::COLS];
  float ds[S::ROWS][S::COLS];
  uint32 ds_operand[S::ROWS][S::PAIRS];
  float dq_acc[DqAcc::ROWS][DqAcc::COLS];
  uint32 dq_out[DqAcc::ROWS][DqAcc::PAIRS];

  if (threadIdx.x == 0) {
    init_barriers<2>(k_tile_full, 1);
    init_barriers<2>(k_tile_empty, 8);
    init_barriers<1>(v_tile_full, 1);
    init_barriers<1>(v_tile_empty, 8);
    init_barriers<1>(q_tile_full, 1);
    init_barriers<1>(dout_tile_full, 1);
    fence_barrier_init();
  }
  __syncthreads();
  const int head_kv = head / args.group;
  const int q_start = q_block * BLOCK_Q;
  // later blocks are not seen
  const int last_kv_block = min((args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV, max(q_start + (args.seqlen_k - args.seqlen_q) + (BLOCK_Q - 1) + BLOCK_KV, 0) / BLOCK_KV);
  // one thread keeps the stages full
  if (threadIdx.x >= THREADS) {
    give_registers<24>();
    if (threadIdx.x == THREADS) {
      tma_load<QTile>(q_tile, q_tile_full, args.q, q_start, head, batch, leave_cache_first());
      tma_load<DoutTile>(dout_tile, dout_tile_full, args.dout, q_start, head, batch, leave_cache_first());
      #pragma unroll 1  // the loading thread has few registers
      for (int kv_block = 0; kv_block < last_kv_block; ++kv_block) {
        const int kv_start = kv_block * BLOCK_KV;
        wait_barrier(k_tile_empty + kv_block % 2, (kv_block / 2 % 2 + 1) % 2);
        tma_load<KTile>(k_tile + kv_block % 2 * KTile::BYTES, k_tile_full + kv_block % 2, args.k, kv_start, head_kv, batch, keep_in_cache());
        wait_barrier(v_tile_empty, (kv_block % 2 + 1) % 2);
        tma_load<VTile>(v_tile, v_tile_full, args.v, kv_start, head_kv, batch, keep_in_cache());
      }
    }
    return;
  }

  if (threadIdx.x < THREADS) {
    take_registers<240>();
    const uint32 q_tile_operand = uniform(QTile::start(q_tile) + warpgroup * QTile::WARPGROUP_STEP);
    const uint32 dout_tile_operand = uniform(DoutTile::start(dout_tile) + warpgroup * DoutTile::WARPGROUP_STEP);
    const uint32 v_tile_operand = uniform(VTile::start(v_tile));
    wait_barrier(q_tile_full, 0);
    wait_barrier(dout_tile_full, 0);
    load_rows<S>(lse_row, args.lse_log2.at(batch, head, q_start), args.seqlen_q - q_start);
    load_rows<S>(delta_row, args.delta.at(batch, head, q_start), args.seqlen_q - q_start);
    fill(dq_acc, 0.0f);
    for (int kv_block = 0; kv_block < last_kv_block; ++kv_block) {
      const int kv_start = kv_block * BLOCK_KV;
      const uint32 k_tile_operand = uniform(KTile::start(k_tile + kv_block % 2 * KTile::BYTES));
      wait_barrier(k_tile_full + kv_block % 2, kv_block / 2 % 2);
      begin_products();
      #pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) {
        wgmma_64x64x16_shared(s, q_tile_operand, QTile::k_major(k), k_tile_operand, KTile::k_major(k), k > 0);
      }
      commit_products();
      wait_barrier(v_tile_full, kv_block % 2);
      begin_products();
      #pragma unroll
      for (int k = 0; k < HEAD_DIM_V / 16; ++k) {
        wgmma_64x64x16_shared(dp, dout_tile_operand, DoutTile::k_major(k), v_tile_operand, VTile::k_major(k), k > 0);
      }
      commit_products();
      wait_products<1>();
      settle(s);
      // only tiles on a boundary are masked
      if (kv_start + (BLOCK_KV - 1) >= args.seqlen_k || kv_start + (BLOCK_KV - 1) > q_start + (args.seqlen_k - args.seqlen_q)) {
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::COLS; ++j) {
            s[i][j] = S::col_offset(j) < min(args.seqlen_k - kv_start, q_start + S::row(i) + (args.seqlen_k - args.seqlen_q) - kv_start + 1) - S::lane_col() ? s[i][j] : -INF;
          }
        }
      }
      #pragma unroll
      for (int i = 0; i < S::ROWS; ++i) {
        #pragma unroll
        for (int j = 0; j < S::COLS; ++j) {
          p[i][j] = exp2_approx(s[i][j] * args.scale_log2 - lse_row[i]);
        }
      }
      wait_products<0>();
      settle(dp);
      arrive_warp(v_tile_empty);
      #pragma unroll
      for (int i = 0; i < S::ROWS; ++i) {
        #pragma unroll
        for (int j = 0; j < S::COLS; ++j) {
          ds[i][j] = p[i][j] * (dp[i][j] - delta_row[i]);
        }
      }
      #pragma unroll
      for (int i = 0; i < S::ROWS; ++i) {
        #pragma unroll
        for (int j = 0; j < S::PAIRS; ++j) {
          ds_operand[i][j] = pack<element>(ds[i][2 * j], ds[i][2 * j + 1]);
        }
      }
      begin_products();
      #pragma unroll
      for (int k = 0; k < BLOCK_KV / 16; ++k) {
        wgmma_64x256x16_registers(dq_acc, ds_operand[0][2 * k], ds_operand[1][2 * k], ds_operand[0][2 * k + 1], ds_operand[1][2 * k + 1], k_tile_operand, KTile::mn_major(k), 1);
      }
      commit_products();
      wait_products<0>();
      settle(dq_acc);
      arrive_warp(k_tile_empty + kv_block % 2);
    }

    #pragma unroll
    for (int i = 0; i < DqAcc::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < DqAcc::PAIRS; ++j) {
        dq_out[i][j] = pack<element>(dq_acc[i][2 * j] * args.scale, dq_acc[i][2 * j + 1] * args.scale);
      }
    }
    // every warp is done with the tiles that this one lies over
    consumer_barrier<THREADS>();
    store_panels<DqAcc, DqTile>(dq_tile, dq_out);
    fence_stores();
    warpgroup_barrier(warpgroup);
    tma_store<DqTile>(args.dq, q_start, head, batch, dq_tile, warpgroup);
    // shared memory outlives the copies from it
    wait_stored();
  }
}
