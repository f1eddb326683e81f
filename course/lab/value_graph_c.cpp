// Stage 2's Attention behind plain C functions: a lab builds a submission's two files with a
// compiler alone, without pybind11. An exception ends the process, which is the submission's own.
#include <cstddef>

#include "value_graph.hpp"

using ladder::Attention;

extern "C" {
void* graph_attend(const double* q, const double* k, const double* v, double scale, double* o,
                   std::size_t heads, std::size_t Nq, std::size_t Nk, std::size_t d) {
    return new Attention({heads, Nq, Nk, d}, q, k, v, scale, o);
}
void graph_backward(void* graph, const double* dO, double* dq, double* dk, double* dv) {
    static_cast<Attention*>(graph)->backward(dO, dq, dk, dv);
}
std::size_t graph_nodes(void* graph) { return static_cast<Attention*>(graph)->nodes(); }
void graph_free(void* graph) { delete static_cast<Attention*>(graph); }
}
