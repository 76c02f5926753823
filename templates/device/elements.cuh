// Device code of the kernels that write single elements of global arrays, at indices that an expression says.
#pragma once

// An array that is written element by element; an index out of range is the last of its axis, as where one is read.
template <class T, int RANK>
struct Target {
  T* data;
  int64 strides[RANK], last[RANK];
  template <class... Index>
  __device__ __forceinline__ T* place(Index... index) const {
    static_assert(sizeof...(Index) == RANK, "an index for each axis");
    int64 offset = 0;
    int axis = 0;
    ((offset += min(uint32(index), uint32(last[axis])) * strides[axis], axis++), ...);
    return data + offset;
  }
};

__device__ __forceinline__ void store_element(float* target, float x) { *target = x; }
template <class T>
__device__ __forceinline__ void store_element(T* target, float x) {
  target->bits = static_cast<unsigned short>(pack<T>(x, 0.0f));
}

// True in one of the threads that hold the same row of a register tile.
template <class Rows>
__device__ __forceinline__ bool speaks_for_rows() {
  return threadIdx.x % 4 == 0 && Rows::first_col() == 0;
}

__device__ __forceinline__ void add_element(float* target, float x) { reduce_add<1>(target, &x); }
// Of integers, of which the sum is the same in any order.
__device__ __forceinline__ void add_element(int64* target, float x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(__float2ll_rn(x)));
}

// Additions to places in global memory. Those of one thread to the same place in a row are one, and at the end those of
// the threads of a warp, if all of them are to one place: tables of few elements have them mostly.
template <class T>
struct RunningSum {
  T* place = nullptr;
  float sum = 0.0f;
  __device__ __forceinline__ void add(T* target, float x) {
    if (x == 0.0f) return;
    if (target != place) {
      if (place != nullptr) add_element(place, sum);
      place = target;
      sum = 0.0f;
    }
    sum += x;
  }
  __device__ __forceinline__ void finish() {
    const uint32 having = __ballot_sync(0xffffffffu, place != nullptr);
    if (having == 0) return;
    const int first = __ffs(int(having)) - 1;
    T* common = reinterpret_cast<T*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(place), first));
    if (__all_sync(0xffffffffu, place == nullptr || place == common)) {
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      if (int(threadIdx.x) % 32 == first) add_element(common, sum);
    } else if (place != nullptr) {
      add_element(place, sum);
    }
  }
};
