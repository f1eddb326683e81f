// The Python module ladder_value_graph: attention on Values, and a look into its arena.
//
// std::bad_alloc becomes MemoryError (pybind11 sees to that) after the graph has given back its
// chunks: they are owned by objects, and the stack unwinds before Python hears of it.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "value_graph.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace ladder {
namespace {

// what comes with other strides or another dtype is copied into this
using Array = py::array_t<double, py::array::c_style | py::array::forcecast>;
using Dims = std::vector<py::ssize_t>;

Dims dims(const Array& x) { return Dims(x.shape(), x.shape() + x.ndim()); }

// check_inputs (stages/contract.py) explains what is wrong; this keeps anyone else in bounds
void require(bool good, const char* what) {
    if (!good) throw py::value_error(what);
}

// What Python holds. The graph dies with it.
struct AttentionGraph {
    Dims q_dims, k_dims;
    std::unique_ptr<Attention> attention;

    py::tuple backward(const Array& dO) {
        require(dims(dO) == q_dims, "dO: expected the output's shape (B, H, Nq, d)");
        Array dq(q_dims), dk(k_dims), dv(k_dims);
        const double* dO_data = dO.data();
        double *dq_data = dq.mutable_data(), *dk_data = dk.mutable_data(),
               *dv_data = dv.mutable_data();
        {
            const py::gil_scoped_release nogil;
            attention->backward(dO_data, dq_data, dk_data, dv_data);
        }
        return py::make_tuple(dq, dk, dv);
    }
};

py::tuple attend(const Array& q, const Array& k, const Array& v, double scale) {
    AttentionGraph graph{dims(q), dims(k), nullptr};
    const Dims &q_dims = graph.q_dims, &k_dims = graph.k_dims;
    require(q.ndim() == 4 && q.size() > 0, "q: expected shape (B, H, Nq, d), all at least 1");
    require(k.ndim() == 4 && k.size() > 0, "k: expected shape (B, H, Nk, d), all at least 1");
    require(q_dims[0] == k_dims[0] && q_dims[1] == k_dims[1] && q_dims[3] == k_dims[3],
            "k: expected q's B, H and d");
    require(dims(v) == k_dims, "v: expected k's shape");
    const auto size = [](py::ssize_t n) { return static_cast<std::size_t>(n); };
    const Attention::Shape shape{size(q_dims[0] * q_dims[1]), size(q_dims[2]), size(k_dims[2]),
                                 size(q_dims[3])};
    Array o(q_dims);
    const double *q_data = q.data(), *k_data = k.data(), *v_data = v.data();
    double* o_data = o.mutable_data();
    {
        const py::gil_scoped_release nogil;
        graph.attention = std::make_unique<Attention>(shape, q_data, k_data, v_data, scale, o_data);
    }
    return py::make_tuple(o, std::move(graph));
}

// x + x + ... + x, each sum a node on top of the last: d(sum)/dx is the number of nodes, n.
double chain(std::size_t n) {
    require(n >= 1, "n: expected at least 1");
    const py::gil_scoped_release nogil;
    Graph graph;
    Value* x = graph.leaf(1.0);
    Value* sum = x;
    for (std::size_t i = 1; i < n; ++i) sum = graph.add(sum, x);
    sum->grad = 1.0;
    graph.backward();
    return Graph::take_grad(x);
}

py::dict arena_stats() {
    const ArenaStats stats = ChunkPool::shared().stats();
    return py::dict("chunks_live"_a = stats.chunks_live, "chunks_free"_a = stats.chunks_free,
                    "bytes"_a = (stats.chunks_live + stats.chunks_free) * sizeof(Chunk));
}

}  // namespace
}  // namespace ladder

PYBIND11_MODULE(ladder_value_graph, m) {
    using namespace ladder;
    m.doc() = "Attention on a graph of scalar Values in C++ (stage 2 of Attention Ladder).";
    py::class_<AttentionGraph>(m, "AttentionGraph",
                               "The Values of one attend; they are freed with this object.")
        .def("backward", &AttentionGraph::backward, "dO"_a,
             "dO (B, H, Nq, d) float64 -> (dq, dk, dv), in the shapes of q, k, v. May be called\n"
             "again: nothing is left over from the last time. Raises ValueError on another shape.")
        .def_property_readonly(
            "nodes", [](const AttentionGraph& graph) { return graph.attention->nodes(); },
            "How many nodes it holds, leaves included.");
    m.def("attend", &attend, "q"_a, "k"_a, "v"_a, "scale"_a,
          "q (B, H, Nq, d), k and v (B, H, Nk, d), float64 -> (o (B, H, Nq, d), AttentionGraph).\n"
          "Computes without the GIL. Raises ValueError on other shapes, and MemoryError.");
    m.def("chain", &chain, "n"_a,
          "Build a chain of n nodes on one leaf x, run backward, free it -> d(last)/dx: n.\n"
          "Raises ValueError where n is 0, and MemoryError.");
    m.def("arena_stats", &arena_stats,
          "Memory of all graphs in this process: `chunks_live` are held by graphs, `chunks_free`\n"
          "are kept for the next one, `bytes` is the size of both together.");
    m.def("arena_trim", [] { ChunkPool::shared().trim(); },
          "Return the free chunks to the system.");
    m.attr("MAX_FREE_CHUNKS") = ChunkPool::max_free;
    m.attr("CHUNK_BYTES") = sizeof(Chunk);
}
