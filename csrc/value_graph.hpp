// Stage 2: the Value graph of stage 0, compiled.
//
//     Graph   newest chunk            chunk                   first chunk
//             [o . . . . |    ]  -->  [. . . . . . . .]  -->  [q q k k v v . .]  -->  null
//     backward ------------------------------------------------------------->
//
// A node is 48 bytes in a chunk, made by moving one pointer on. A node can only be made from nodes
// that are there already, so *creation order is a topological order*: backward needs no sort and no
// recursion, it walks the chunks from the newest node to the oldest, and a graph is freed by giving
// its chunks back. Neither can overflow the stack, however deep the graph.
#pragma once

#include <cmath>
#include <cstddef>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#ifndef _WIN32
#include <sys/mman.h>
#endif

namespace ladder {

struct Value {
    double data;
    double grad;            // 0 but during backward, and after it in leaves
    Value* parents[2];      // null where there is none: a leaf has no parent, exp has one
    double local_grads[2];  // d data / d parent
};

struct Chunk {
    static constexpr std::size_t nodes_each = 16384;

    Chunk* older;  // a list within the chunks themselves: giving them back can't run out of memory
    Value nodes[nodes_each];
};

// Chunks come from the system itself. malloc would keep many of them for the process: once glibc
// has seen a block of this size freed, it no longer returns such blocks one by one.
// Throws std::bad_alloc. The memory is not touched, so that a small graph costs a few pages only.
inline Chunk* new_chunk() {
#ifdef _WIN32
    return new Chunk;
#else
    void* memory = mmap(nullptr, sizeof(Chunk), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return new (memory) Chunk;
#endif
}

inline void delete_chunk(Chunk* chunk) noexcept {
#ifdef _WIN32
    delete chunk;
#else
    munmap(chunk, sizeof(Chunk));
#endif
}

struct ArenaStats {
    std::size_t chunks_live;  // held by graphs
    std::size_t chunks_free;  // held for the next graph
};

// The chunks that no graph holds. Fresh memory costs a page fault every 4 KiB, several times what
// filling it with nodes costs; so chunks are used again, and a training loop takes none from the
// system after its first step.
//
// The list keeps at most 256 MiB. That holds the graph of N = 256, d = 16 (211 MB), the largest at
// which this stage is worth its time. What one huge graph took beyond it goes back to the system
// with that graph, and trim() returns the rest.
class ChunkPool {
public:
    static constexpr std::size_t max_free = (std::size_t{256} << 20) / sizeof(Chunk);

    // Never destroyed: a graph may outlive the statics of this library when the process ends.
    static ChunkPool& shared() {
        static ChunkPool& pool = *new ChunkPool;
        return pool;
    }

    // Throws std::bad_alloc.
    Chunk* take() {
        const std::lock_guard<std::mutex> lock(mutex_);
        Chunk* chunk = free_;
        if (chunk) {
            free_ = chunk->older;
            --stats_.chunks_free;
        } else {
            chunk = new_chunk();
        }
        ++stats_.chunks_live;
        return chunk;
    }

    void give_back(Chunk* newest) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        while (newest) {
            Chunk* chunk = std::exchange(newest, newest->older);
            --stats_.chunks_live;
            if (stats_.chunks_free < max_free) {
                chunk->older = free_;
                free_ = chunk;
                ++stats_.chunks_free;
            } else {
                delete_chunk(chunk);
            }
        }
    }

    void trim() noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        while (free_) delete_chunk(std::exchange(free_, free_->older));
        stats_.chunks_free = 0;
    }

    ArenaStats stats() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return stats_;
    }

private:
    ChunkPool() = default;

    std::mutex mutex_;
    Chunk* free_ = nullptr;
    ArenaStats stats_{0, 0};
};

// Values, and the arena that they live in: they die with the graph, all at once.
// Each operation makes one node; all of them may throw std::bad_alloc.
class Graph {
public:
    Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph() { ChunkPool::shared().give_back(newest_); }

    Value* leaf(double data) { return make(data, nullptr, 0.0, nullptr, 0.0); }
    Value* add(Value* a, Value* b) { return make(a->data + b->data, a, 1.0, b, 1.0); }
    Value* sub(Value* a, double constant) { return make(a->data - constant, a, 1.0, nullptr, 0.0); }
    Value* mul(Value* a, Value* b) { return make(a->data * b->data, a, b->data, b, a->data); }
    Value* mul(Value* a, double constant) {
        return make(a->data * constant, a, constant, nullptr, 0.0);
    }
    Value* exp(Value* a) {
        const double e = std::exp(a->data);
        return make(e, a, e, nullptr, 0.0);
    }
    Value* reciprocal(Value* a) {
        const double r = 1.0 / a->data;
        return make(r, a, -r * r, nullptr, 0.0);
    }

    // The chain rule, from the newest node to the oldest; the caller has put gradients into the
    // outputs' `grad`. A node's gradient goes back to 0 as it is passed on, so that a second pass
    // starts clean; leaves keep theirs for take_grad.
    void backward() noexcept {
        // exercise backward: nodes newest to oldest, outputs' grad set -> the leaves' grad
        Value* end = next_;
        for (Chunk* chunk = newest_; chunk; chunk = chunk->older) {
            for (Value* node = end; node-- != chunk->nodes;) {
                if (!node->parents[0]) continue;
                const double grad = std::exchange(node->grad, 0.0);
                // step first: what a node passes on to its first parent; local_grads[0], grad
                node->parents[0]->grad += node->local_grads[0] * grad;
                // step second: and to its second parent, where there is one
                if (node->parents[1]) node->parents[1]->grad += node->local_grads[1] * grad;
            }
            if (chunk->older) end = chunk->older->nodes + Chunk::nodes_each;  // all older are full
        }
        // end of backward
    }

    static double take_grad(Value* leaf) noexcept { return std::exchange(leaf->grad, 0.0); }

    std::size_t nodes() const noexcept {
        return chunks_ * Chunk::nodes_each - static_cast<std::size_t>(end_ - next_);
    }

private:
    Value* make(double data, Value* a, double da, Value* b, double db) {
        // exercise make: data, parents a and b, derivatives da and db -> the new node
        // step room: a chunk more where the newest one is full
        if (next_ == end_) grow();
        // step node: the node at next_, which moves on; its grad begins at 0
        return new (next_++) Value{data, 0.0, {a, b}, {da, db}};
        // end of make
    }

    void grow() {
        Chunk* chunk = ChunkPool::shared().take();
        chunk->older = newest_;
        newest_ = chunk;
        next_ = chunk->nodes;
        end_ = next_ + Chunk::nodes_each;
        ++chunks_;
    }

    Chunk* newest_ = nullptr;
    Value* next_ = nullptr;  // where the next node goes
    Value* end_ = nullptr;
    std::size_t chunks_ = 0;
};

// Attention and its graph (attention.cpp). Arrays are contiguous: q, o (heads, Nq, d),
// k, v (heads, Nk, d), where heads = B * H.
class Attention {
public:
    struct Shape {
        std::size_t heads, Nq, Nk, d;
    };

    // Writes o. Throws std::bad_alloc, and holds nothing then.
    Attention(Shape shape, const double* q, const double* k, const double* v, double scale,
              double* o);

    // dO as o; writes dq, dk, dv as q, k, v. May be called again, from any thread.
    void backward(const double* dO, double* dq, double* dk, double* dv);

    std::size_t nodes() const noexcept { return graph_.nodes(); }

private:
    void attend_head(Value* const* q, Value* const* k, Value* const* v, double scale);

    Shape shape_;
    Graph graph_;
    std::vector<Value*> q_, k_, v_, o_;
    std::mutex mutex_;  // two passes at a time through one graph would add up
};

}  // namespace ladder
