// Memory that begins at a cache line, so that whole vectors, and rows of matrix registers, are never read from two lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace forerun {

constexpr int64_t kCacheLine = 64;

template <class T>
struct CacheLineAllocator {
    using value_type = T;

    CacheLineAllocator() = default;
    template <class Other>
    CacheLineAllocator(const CacheLineAllocator<Other>&) {}

    T* allocate(size_t count) {
        return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{static_cast<size_t>(kCacheLine)}));
    }
    void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t{static_cast<size_t>(kCacheLine)}); }

    template <class Other>
    bool operator==(const CacheLineAllocator<Other>&) const {
        return true;
    }
};

template <class T>
using Buffer = std::vector<T, CacheLineAllocator<T>>;

}  // namespace forerun
